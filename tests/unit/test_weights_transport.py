"""The broadcast transport against an engine that obeys, refuses, stays silent or dies: a named error, never a hang."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from mslime.weights.buckets import convert, pack
from mslime.weights.commit import Commit
from mslime.weights.errors import WeightSyncError
from mslime.weights.plan import Bucket
from mslime.weights.transport import BroadcastTransport, EngineInfo, describe_engine
from tests.fixtures.stand_in_engine import StandInEngine
from tests.unit.weights_world import LAYOUTS, local_params, moe_table, plan_of, whole_tensors

pytestmark = pytest.mark.timeout(120)

TABLE = moe_table()
WHOLE = whole_tensors(TABLE)
PLAN = plan_of(LAYOUTS["one rank"], 4000)


def filled(bucket: Bucket) -> torch.Tensor:
    return convert(bucket, [pack(bucket, local_params(TABLE, LAYOUTS["one rank"], 0, WHOLE), 0)], TABLE)


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
    transport = BroadcastTransport("test", "gloo", deadline_s=20)
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
    transport = BroadcastTransport("silent", "gloo", deadline_s=2)
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
    transport = BroadcastTransport(f"join-{mode}", "gloo", deadline_s=2)
    begin = time.monotonic()
    with pytest.raises(WeightSyncError, match=rf"(?s)weights\.connect.*{says}"):
        transport.connect([EngineInfo(engine.url) for engine in engines])
    assert time.monotonic() - begin < 10
    transport.disconnect()


def test_an_engine_that_dies_in_the_middle_is_named() -> None:
    engine = StandInEngine()
    transport = BroadcastTransport("dies", "gloo", deadline_s=20)
    transport.connect([EngineInfo(engine.url)])
    engine.set_mode("die")
    begin = time.monotonic()
    with pytest.raises(WeightSyncError, match=rf"(?s){engine.url}"):
        transport.start(PLAN.buckets[0], filled(PLAN.buckets[0])).wait()
    assert time.monotonic() - begin < 15
    transport.disconnect()
    engine.stop()


def test_an_engine_with_several_stages_or_replicas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    def server_info(url: str, **_: object) -> httpx.Response:
        answer = {"tp_size": 2, "ep_size": 2, "pp_size": 1, "dp_size": 2}
        return httpx.Response(200, json=answer, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", server_info)
    with pytest.raises(WeightSyncError, match="dp_size = 2"):
        describe_engine("http://127.0.0.1:1", 1)


def test_session_calls_name_an_engine_that_cannot_be_reached() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(WeightSyncError, match=r"(?s)weights\.begin.*cannot be reached"):
        Commit((EngineInfo(closed),), 5).begin()
