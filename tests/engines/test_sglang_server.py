"""Starting, supervising and updating a real SGLang server, and handling its death."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import httpx
import psutil
import pytest

from mslime.backends.sglang.client import EngineClient, EngineDied
from mslime.backends.sglang.engine_pool import EnginePool
from mslime.backends.sglang.generating import GenerateRequest
from mslime.backends.sglang.guard import shared_memory_of
from mslime.backends.sglang.handshake import DECLARED, EngineNeeds, handshake
from mslime.backends.sglang.server_process import ServerProcess, SupervisedProcess
from mslime.config.errors import EngineError
from mslime.config.resolved import engine_spec
from tests.engines.conftest import SharedServer, cpu_run, serve
from tests.fixtures.engine_calls import load
from tests.fixtures.model_facts import model_facts
from tests.fixtures.processes import alive

ALL_NEEDS = EngineNeeds(
    routes=True, architectures=("Qwen3MoeForCausalLM",), truncation={"top_p": 0.9, "top_k": 4096, "min_p": 0.01}
)


async def test_the_handshake_passes_on_the_real_server_and_names_another_model(sglang_server: SharedServer) -> None:
    async with sglang_server.client() as client:
        await handshake(client, ALL_NEEDS)
        assert await client.ready()
        with pytest.raises(EngineError, match="the model LlamaForCausalLM"):
            await handshake(client, EngineNeeds(True, ("LlamaForCausalLM",)))


@pytest.mark.nightly
async def test_an_engine_killed_in_mid_generation_fails_its_requests_and_leaves_no_process(
    tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    server = serve(tiny_qwen3_moe, tmp_path)
    pids = server.process.pids
    scheduler = next(p for p in pids if "scheduler" in psutil.Process(p).name())
    try:
        pool = EnginePool([server.client()], 8)
        requests = [GenerateRequest(f"k{i}", [1, 2, i], 1900, ignore_eos=True) for i in range(4)]
        running = [asyncio.create_task(pool.generate(r)) for r in requests]
        while await load(pool.clients[0], "running") < 4:
            await asyncio.sleep(0.02)
        os.kill(scheduler, signal.SIGKILL)
        started = time.monotonic()
        failures = await asyncio.gather(*running, return_exceptions=True)
        assert time.monotonic() - started < 30, "SGLang waits 5 s before it gives up; we must not add to that"
        with pytest.raises(EngineDied):
            await pool.generate(GenerateRequest("after", [1], 1))
        await pool.close()
        for failure in failures:
            assert isinstance(failure, EngineDied)
            assert "engine0" in str(failure) and str(server.address.log_path) in str(failure)
        deadline = time.monotonic() + 30
        while server.process.alive and time.monotonic() < deadline:
            time.sleep(0.1)
        with pytest.raises(EngineError, match=r"engine0.*ended"):
            server.process.check()
    finally:
        server.process.stop()
    assert not list(filter(alive, pids))


def test_an_engine_that_dies_at_start_says_why(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_qwen3_moe, broken)
    config = json.loads((broken / "config.json").read_text())
    config["architectures"] = ["NoSuchModel"]
    (broken / "config.json").write_text(json.dumps(config))
    process = ServerProcess(engine_spec(cpu_run(broken)), 3, tmp_path)
    with pytest.raises(EngineError, match="NoSuchModel") as caught:
        process.start()
    assert caught.value.field == "engine3" and str(tmp_path / "engine3.log") in caught.value.hint
    assert not process.alive


def test_an_engine_that_misses_its_start_deadline_is_stopped(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    process = ServerProcess(engine_spec(cpu_run(tiny_qwen3_moe, deadlines={"engine_start_s": 0.5})), 0, tmp_path)
    with pytest.raises(EngineError, match="engine_start_s"):
        process.start()
    assert not process.alive and process.pids[1:] == []


@pytest.mark.nightly  # two starts of a server
def test_a_port_that_is_taken_between_choice_and_bind_is_replaced_at_once(
    tiny_qwen3_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang logs that it cannot bind, and lives on. At last the guard is killed, and nothing of the server is left."""
    taken: list[socket.socket] = []
    launch = ServerProcess._launch

    def launch_after_a_rival(self: ServerProcess, port: int, identity: str, bootstrap: int) -> SupervisedProcess:
        if not taken:
            rival = socket.socket()
            rival.bind(("127.0.0.1", port))
            rival.listen()
            taken.append(rival)
        return launch(self, port, identity, bootstrap)

    monkeypatch.setattr(ServerProcess, "_launch", launch_after_a_rival)
    process = ServerProcess(engine_spec(cpu_run(tiny_qwen3_moe, deadlines={"engine_start_s": 150})), 0, tmp_path)
    address = process.start()
    try:
        log = process.log_path.read_text()
        assert "Errno 98" in log and f":{taken[0].getsockname()[1]}" not in address.url
        assert process.keys.api not in log and "redacted" in log, "SGLang prints its settings"
        pids = process.pids
        assert len(pids) >= 4
        mine = [c for p in pids for c in psutil.Process(p).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert {c.laddr.ip for c in mine} == {"127.0.0.1"}, "its rendezvous too listens on loopback alone"
        files = shared_memory_of(pids)
        assert {path.name[:4] for path in files} == {"sgla"}, "semaphores of forked processes have no names"
        os.kill(pids[0], signal.SIGKILL)
        deadline = time.monotonic() + 30
        while (left := list(filter(alive, pids))) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == []
        while [path for path in files if path.exists()] and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [path for path in files if path.exists()]
    finally:
        process.stop()
        taken[0].close()


def test_a_request_without_the_key_is_refused(sglang_server: SharedServer) -> None:
    routes = [("GET", p) for p in ("/model_info", "/server_info", "/openapi.json", "/v1/models")]
    routes += [("POST", d.route) for d in DECLARED] + [("POST", "/set_internal_state"), ("POST", "/flush_cache")]
    for method, route in routes:
        for headers in ({}, {"Authorization": "Bearer guessed"}, {"Origin": "http://evil.example"}):
            answer = httpx.request(method, sglang_server.url + route, json={}, headers=headers, timeout=30)
            assert answer.status_code == 401, (route, headers)
    command = [word for p in sglang_server.process.pids for word in psutil.Process(p).cmdline()]
    assert not [word for word in command if sglang_server.process.keys.api in word]


def test_a_server_that_we_start_sends_experts_in_one_byte_each(sglang_server: SharedServer) -> None:
    """The plug-in is active; all comparisons with replayed routes check that the experts are right."""
    ask = {"input_ids": [9, 8, 7], "sampling_params": {"max_new_tokens": 4}, "return_routed_experts": True}
    keys = {"Authorization": f"Bearer {sglang_server.process.keys.api}"}
    answer = httpx.post(f"{sglang_server.url}/generate", json=ask, headers=keys, timeout=60).json()
    text = answer["meta_info"]["routed_experts"]
    layers, top_k, rows = sglang_server.model.num_layers, sglang_server.model.top_k, 3 + 4 - 1
    assert text.startswith("u1:") and len(base64.b64decode(text[3:])) == rows * layers * top_k


def test_what_a_server_starts_on_a_cpu_is_forked_and_imports_nothing_again(sglang_server: SharedServer) -> None:
    below = [psutil.Process(pid) for pid in sglang_server.process.pids[1:]]
    assert {p.name() for p in below} == {"python", "sglang::scheduler", "sglang::detokenizer"}
    assert not [p for p in below if "multiprocessing" in " ".join(p.cmdline())]


async def test_an_attached_server_needs_no_process(sglang_server: SharedServer) -> None:
    model, keys = model_facts(320, num_layers=4, top_k=2), sglang_server.address.keys
    async with EngineClient(sglang_server.url, "attached", model=model, keys=keys) as client:
        assert len((await client.generate(GenerateRequest("attached", [1], 3, ignore_eos=True))).output_ids) == 3
