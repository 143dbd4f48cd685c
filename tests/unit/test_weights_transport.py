"""The broadcast transport against an engine that obeys, refuses, stays silent or dies: a named error, never a hang."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.rendezvous import rendezvous

from mslime.config.keys import Endpoint, EngineKeys
from mslime.network import ephemeral_ports
from mslime.weights.buckets import convert, pack
from mslime.weights.commit import Commit
from mslime.weights.errors import WeightSyncError
from mslime.weights.http import EngineHttp, EngineInfo
from mslime.weights.plan import Bucket
from mslime.weights.sync import WeightSender
from mslime.weights.transport import BroadcastTransport, open_store
from tests.fixtures.stand_in_engine import StandInEngine
from tests.unit.weights_world import LAYOUTS, local_params, moe_table, plan_of, whole_tensors

pytestmark = pytest.mark.timeout(120)

TABLE = moe_table()
WHOLE = whole_tensors(TABLE)
PLAN = plan_of(LAYOUTS["one rank"], 4000)


def filled(bucket: Bucket) -> torch.Tensor:
    return convert(bucket, [pack(bucket, local_params(TABLE, LAYOUTS["one rank"], 0, WHOLE), 0)], TABLE)


def transport_to(engines: list[StandInEngine], name: str, deadline_s: float) -> BroadcastTransport:
    return BroadcastTransport(name, "gloo", EngineHttp([e.url for e in engines], deadline_s), deadline_s)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[StandInEngine]]:
    started = [StandInEngine(), StandInEngine()]
    yield started
    for engine in started:
        engine.stop()


@pytest.fixture
def transport(engines: list[StandInEngine]) -> Iterator[BroadcastTransport]:
    """Connected to both engines, with a short deadline."""
    for engine in engines:
        engine.set_mode("obey")
    transport = transport_to(engines, "test", 20)
    transport.connect([EngineInfo(engine.url) for engine in engines])
    yield transport
    transport.disconnect()


def test_every_engine_receives_every_tensor(engines: list[StandInEngine], transport: BroadcastTransport) -> None:
    for bucket in PLAN.buckets:
        transport.start(bucket, filled(bucket)).wait()
    for engine in engines:
        sums = engine.checksums()
        assert sums == {name: float(tensor.double().sum()) for name, tensor in WHOLE.items()}


def test_a_refusal_ends_the_wait_at_once_with_the_engines_words(
    engines: list[StandInEngine], transport: BroadcastTransport
) -> None:
    engines[1].set_mode("refuse")
    begin = time.monotonic()
    with pytest.raises(WeightSyncError, match=rf"(?s)bucket 0.*{engines[1].url}.*no weights today"):
        transport.start(PLAN.buckets[0], filled(PLAN.buckets[0])).wait()
    assert time.monotonic() - begin < 5


def test_a_refusal_ends_the_wait_also_while_the_communicator_is_still_being_made(
    engines: list[StandInEngine], transport: BroadcastTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL makes it inside the first broadcast, and waits there without a deadline for an engine that has refused."""
    never = threading.Event()
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, **__: never.wait(15))
    engines[0].set_mode("refuse")
    engines[1].set_mode("refuse")
    begin = time.monotonic()
    with pytest.raises(WeightSyncError, match="no weights today"):
        transport.start(PLAN.buckets[0], filled(PLAN.buckets[0])).wait()
    transport.disconnect()
    assert time.monotonic() - begin < 10
    never.set()


def test_a_silent_engine_is_given_up_at_the_deadline(engines: list[StandInEngine]) -> None:
    for engine in engines:
        engine.set_mode("obey")
    transport = transport_to(engines, "silent", 2)
    transport.connect([EngineInfo(engine.url) for engine in engines])
    engines[0].set_mode("silent")
    begin = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"bucket 1.*within 2 s"):
        transport.start(PLAN.buckets[1], filled(PLAN.buckets[1])).wait()
    assert time.monotonic() - begin < 10
    transport.disconnect()


@pytest.mark.parametrize(("mode", "says"), [("refuse", "no joining today"), ("silent", "within 2 s")])
def test_an_engine_that_does_not_join_is_named(engines: list[StandInEngine], mode: str, says: str) -> None:
    engines[0].set_mode("obey")
    engines[1].set_mode(mode)
    transport = transport_to(engines, f"join-{mode}", 2)
    begin = time.monotonic()
    with pytest.raises(WeightSyncError, match=rf"(?s)weights\.connect.*{says}"):
        transport.connect([EngineInfo(engine.url) for engine in engines])
    assert time.monotonic() - begin < 10
    transport.disconnect()


def test_an_engine_that_dies_in_the_middle_is_named() -> None:
    engine = StandInEngine()
    transport = transport_to([engine], "dies", 20)
    transport.connect([EngineInfo(engine.url)])
    engine.set_mode("die")
    begin = time.monotonic()
    with pytest.raises(WeightSyncError, match=rf"(?s){engine.url}"):
        transport.start(PLAN.buckets[0], filled(PLAN.buckets[0])).wait()
    assert time.monotonic() - begin < 15
    transport.disconnect()
    engine.stop()


@pytest.mark.parametrize("sizes", [{"dp_size": 2}, {"pp_size": 4}])
def test_an_engine_with_several_stages_or_replicas_is_refused(sizes: dict[str, int]) -> None:
    with answering({"tp_size": 2, "ep_size": 2, "pp_size": 1, "dp_size": 1, **sizes}) as (url, _):
        http = EngineHttp([url], 5)
        (name, size), *_ = sizes.items()
        with pytest.raises(WeightSyncError, match=f"{name} = {size}"):
            http.describe(Endpoint(url))
        http.close()


@contextmanager
def answering(answer: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, str | None, int]]]]:
    """A server that answers everything with `answer`; and (path, authorization, client's port) of what it was asked."""
    asked: list[tuple[str, str | None, int]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append((self.path, self.headers.get("authorization"), self.client_address[1]))
            self.rfile.read(int(self.headers.get("content-length", 0)))
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_all_calls_of_a_sync_share_a_connection_and_carry_the_key_that_each_path_needs() -> None:
    with answering({"success": True}) as (url, asked):
        commit = Commit((EngineInfo(url, keys=EngineKeys("the-api", "the-admin")),), 5)
        commit.begin()
        commit.end()
        commit.stamp(3)
        http = EngineHttp([url], 5)
        with pytest.raises(KeyError):
            http.describe(Endpoint(url, EngineKeys("the-api", "the-admin")))
        commit.close()
        http.close()
    assert len({port for _, _, port in asked[:3]}) == 1, asked
    assert {key for _, key, _ in asked[:3]} == {"Bearer the-admin"} and asked[3][1] == "Bearer the-api"


def test_plain_http_makes_no_tls_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a TLS context for http")

    monkeypatch.setattr("ssl.create_default_context", refuse)
    EngineHttp(["http://127.0.0.1:1"], 5).close()


def test_a_store_listens_on_its_own_address_only() -> None:
    store = open_store("127.0.0.1", 1, timedelta(seconds=5))
    mine = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert {c.laddr.ip for c in mine if c.laddr.port == store.port} == {"127.0.0.1"}
    first, last = ephemeral_ports()
    assert not first <= store.port <= last


def test_the_rendezvous_of_this_process_uses_the_store_that_is_open_already() -> None:
    store = open_store("127.0.0.1", 1, timedelta(seconds=5), multi_tenant=True)
    store.set("said", "here")
    met = next(rendezvous(f"tcp://127.0.0.1:{store.port}", 0, 1))[0]
    assert met.get("said") == b"here"


def test_session_calls_name_an_engine_that_cannot_be_reached() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(WeightSyncError, match=r"(?s)weights\.begin.*cannot be reached"):
        Commit((EngineInfo(closed),), 5).begin()


def test_memory_that_torch_keeps_is_given_back_once_before_the_first_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's buffers, which the first sync makes, lie outside of torch's memory."""
    freed: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(len(freed)))

    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        raise RuntimeError(f"freed {len(freed)} times")

    sender = object.__new__(WeightSender)  # its plan would need the trainer's groups
    sender._params, sender._sent = parameters, False
    sender.engines = (EngineInfo("http://nowhere"),)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="freed 1 times"):
            sender.send(1)
