"""The engine client: what it asks, what it accepts, and how it fails."""

from __future__ import annotations

import asyncio
import base64
import re
import signal
import socket
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mslime.backends.sglang.client as client_module
from mslime.backends.sglang.client import CONNECT_S, EngineClient, EngineDied, blocking
from mslime.backends.sglang.generating import (
    GenerateRequest,
    decode_routes,
    parse_generation,
    parse_version,
)
from mslime.config.errors import EngineError
from mslime.config.schema import DeadlineConfig
from mslime.engine_plugin.wire import Loaded, TakeIpc, encode
from tests.fixtures.model_facts import model_facts
from tests.unit.fake_engine import LAYERS, TOP_K, VOCABULARY, FakeEngine

MODEL = model_facts(VOCABULARY, num_layers=LAYERS, top_k=TOP_K)


def client(url: str, **deadlines: float) -> EngineClient:
    limits = DeadlineConfig.model_validate({"engine_request_s": 10, "engine_control_s": 10, **deadlines})
    return EngineClient(url, "engine0", limits, MODEL, Path("/logs/engine0.log"))


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


def generate(request: GenerateRequest, **spoilt: Any) -> Any:
    """One request to a fake engine with some attributes set."""

    async def work() -> Any:
        async with FakeEngine() as engine:
            vars(engine).update(spoilt)
            async with client(engine.url, engine_request_s=1.0) as asking:
                return await asking.generate(request)

    return run(work())


def test_versions_are_integers_and_the_engine_s_own_weights_are_version_zero() -> None:
    assert [parse_version(str(v)) for v in (0, 7, 10**9)] == [0, 7, 10**9]
    assert parse_version("default") == 0


@pytest.mark.parametrize(("tag", "sent"), [("", np.int32), ("u1:", np.uint8), ("u2:", np.uint16)])
def test_routes_are_held_in_the_narrowest_type_of_the_model_s_experts_and_say_what_they_were_sent_as(
    tag: str, sent: type
) -> None:
    routes = np.arange(30).reshape(5, 3, 2)
    text = tag + base64.b64encode(routes.astype(sent).tobytes()).decode()
    for encoded in (text, memoryview(text.encode())):
        for experts, dtype in ((0, sent), (30, np.uint8), (256, np.uint8), (257, np.uint16)):
            decoded = decode_routes(encoded, 5, replace(MODEL, num_experts=experts))
            assert decoded.dtype == dtype
            np.testing.assert_array_equal(decoded, routes)
            assert experts or (decoded.base is not None and not decoded.flags.writeable), "a copy"
    with pytest.raises(AssertionError, match="expert id 29 of 29"):
        decode_routes(text, 5, replace(MODEL, num_experts=29))
    with pytest.raises(AssertionError, match="30 route entries, expected 4 x 3 x 2 = 24"):
        decode_routes(text, 4, MODEL)
    if tag:
        with pytest.raises(AssertionError, match="route entries, expected"):  # without it it is not taken for int32
            decode_routes(text[3:], 5, MODEL)
        with pytest.raises(ValueError):
            decode_routes("u4:" + text[3:], 5, MODEL)


def test_a_greedy_request_is_not_restricted() -> None:
    assert not GenerateRequest("a", [1], 1, temperature=0.0, top_p=0.5, top_k=3, min_p=0.1).restricted


@pytest.mark.parametrize("draw", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_every_restricted_draw_asks_for_its_sampling_mask(draw: dict[str, Any]) -> None:
    body = GenerateRequest("a", [1], 1, **{"top_k": 9, **draw}).payload()
    assert body["return_sampling_mask"] and draw.items() <= body["sampling_params"].items()
    assert not GenerateRequest("a", [1], 1).payload()["return_sampling_mask"]


@pytest.mark.parametrize("draw", [{"top_p": 0.9}, {"min_p": 0.1}])
def test_a_restricted_draw_without_top_k_is_refused_with_a_way_out(draw: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="finite top_k") as caught:
        GenerateRequest("a", [1], 1, **draw).payload()
    assert caught.value.field == "rollout.top_k"


def test_an_aborted_request_without_routes_gives_up_its_tokens() -> None:
    request = GenerateRequest("a", [1, 2], 3, want_routes=True)
    answer = FakeEngine().answer(request.payload())
    answer["meta_info"]["finish_reason"] = {"type": "abort"}
    assert len(parse_generation(request, answer, "engine0", MODEL).output_ids) == 3
    del answer["meta_info"]["routed_experts"]
    result = parse_generation(request, answer, "engine0", MODEL)
    assert (len(result.output_ids), result.versions, result.finish) == (0, (), "abort")


def test_an_engine_that_does_not_answer_in_time_is_dead() -> None:
    with pytest.raises(EngineDied, match=r"no answer within 1 s") as caught:
        generate(GenerateRequest("a", [1], 1), delay_s=20.0)
    assert "/logs/engine0.log" in str(caught.value)


async def test_a_step_of_a_weight_update_may_take_its_whole_deadline_to_connect() -> None:
    """The engine may be busy with the bucket before; all other calls give up a connection early."""
    seen: dict[str, float] = {}

    class FakeConnections(EngineClient):
        async def _call(self, method: str, path: str, body: Any, timeout_s: float, *rest: Any, **more: Any) -> Any:
            seen[path] = more.get("connect_s", CONNECT_S)
            return {"success": True, "message": encode(Loaded(""))}

    made = FakeConnections("http://e", "e", DeadlineConfig(weight_sync_s=77, engine_control_s=55))
    await made.join_group("127.0.0.1", 1, 1, 2, "g", "gloo")
    await made.receive_bucket(b"{}")
    await made.ask(TakeIpc({"GPU-a": "ipc://@a"}), Loaded)
    await made.leave_group("g")
    await made.pause("abort")
    assert seen == {
        "/init_weights_update_group": 77, "/update_weights_from_distributed": 77, "/destroy_weights_update_group": 77,
        "/weights_checker": 77, "/pause_generation": CONNECT_S,
    }  # fmt: skip


def test_a_broken_connection_names_the_engine_and_its_log() -> None:
    with pytest.raises(EngineDied, match="connection broke") as caught:
        generate(GenerateRequest("a", [1], 1), drop_connections=True)
    assert caught.value.field == "engine0" and "/logs/engine0.log" in caught.value.hint


async def test_idle_connections_are_given_up_before_the_server_closes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    (package,) = find_spec("sglang").submodule_search_locations  # read, not imported: that takes seconds
    setting = re.search(r"SGLANG_TIMEOUT_KEEP_ALIVE = EnvInt\((\d+)\)", (Path(package) / "srt/environ.py").read_text())
    assert setting is not None and int(setting[1]) / 2 >= client_module.KEEPALIVE_S
    monkeypatch.setattr(client_module, "KEEPALIVE_S", 0.1)
    connections: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        while (await reader.readline()).startswith(b"POST"):
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(2)  # {}
            connections[-1] += 1
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 0\r\n\r\n")

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as asking:
        for idle in (0.0, 0.0, 0.4):
            await asyncio.sleep(idle)
            await asking.begin_weight_update()
    assert connections == [2, 1]


async def test_a_refusal_carries_the_engine_s_own_words() -> None:
    with pytest.raises(EngineError, match="HTTP 500: told to fail") as caught:
        async with FakeEngine() as engine, client(engine.url) as asking:
            engine.broken.add("/begin_weight_update")
            await asking.begin_weight_update()
    assert not isinstance(caught.value, EngineDied)


async def test_only_calls_that_may_be_repeated_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{probe.getsockname()[1]}"
    calls: list[str] = []
    original = EngineClient._call

    async def counted(self: EngineClient, method: str, path: str, *rest: Any) -> Any:
        calls.append(path)
        return await original(self, method, path, *rest)

    monkeypatch.setattr(EngineClient, "_call", counted)

    async with client(closed) as asking:
        for attempt in (asking.generate(GenerateRequest("a", [1], 1)), asking.begin_weight_update()):
            with pytest.raises(EngineDied):
                await attempt
        with pytest.raises(EngineDied):
            await asking.abort("a")
    assert calls == ["/generate", "/begin_weight_update"] + ["/abort_request"] * 3


async def test_a_stamp_leaves_running_requests_alone() -> None:
    async with FakeEngine() as engine, client(engine.url) as asking:
        await asking.stamp(12)
        assert engine.seen[-1] == ("/update_weight_version", {"new_version": "12", "abort_all_requests": False})
        assert await asking.version() == 12


async def test_a_version_that_is_not_ours_is_an_error() -> None:
    with pytest.raises(EngineError, match="somebody-else"):
        async with FakeEngine() as engine, client(engine.url) as asking:
            engine.model["weight_version"] = "somebody-else"
            await asking.version()


def test_a_signal_interrupts_a_blocking_call_at_once() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            blocking(asyncio.sleep(3600))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_blocking_call_works_within_somebody_elses_event_loop() -> None:
    """A notebook has one, and runs are started from notebooks."""

    async def answer() -> int:
        await asyncio.sleep(0)
        return 7

    async def notebook() -> int:
        return blocking(answer())

    assert asyncio.run(notebook()) == blocking(answer()) == 7
