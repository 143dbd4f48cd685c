"""A sync that fails, at any of its points: every engine that goes on holds one whole version, and the next sync works.

Real transports, process groups, HTTP, `EnginePool` and `Publisher`; the engines are stand-ins that fail when told to,
and one sender without a model fills the buckets.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mslime.backends.sglang.client import EngineClient, EngineDied
from mslime.backends.sglang.engine_pool import EnginePool
from mslime.backends.sglang.port import SGLangPort
from mslime.backends.sglang.server_process import EngineAddress
from mslime.config.errors import WeightSyncError, sync_error
from mslime.config.keys import Endpoint
from mslime.config.loader import build
from mslime.config.schema import DeadlineConfig
from mslime.engine_plugin import wire
from mslime.run.publish import Publisher
from mslime.run.sharing import SeparateGpus
from mslime.run.trainers import TrainerGroup
from mslime.tensor_sums import whole_sum
from mslime.weights import broadcast, transport_contract
from mslime.weights.bucket_sender import BucketSender, PhaseSeconds
from mslime.weights.buckets import named_tensors
from mslime.weights.transport import Link, Transport, find_transport
from tests.fixtures.remote import fake_process
from tests.fixtures.stand_in_engine import StandInEngine

pytestmark = pytest.mark.timeout(120)

DEADLINE_S = 12.0
"""That a silent engine reaches and nothing else does, on a crowded machine either."""
DEADLINES = DeadlineConfig.model_validate({"weight_sync_s": DEADLINE_S, "engine_control_s": DEADLINE_S})
CONFIG = build({"model": {"path": "."}, "data": {"prompts": ["p.jsonl"]}, "deadlines": {"weight_sync_s": DEADLINE_S}})
BUCKETS = transport_contract._buckets()
GROUPS = (f"failures-{i}" for i in itertools.count())
BEGIN, JOIN, BUCKET = "/begin_weight_update", "/init_weights_update_group", "/update_weights_from_distributed"
COMPARE, LANE = "/weights_checker:WeightChecksums", "/weights_checker:JoinRelayGroup"
END, STAMP = "/end_weight_update", "/update_weight_version"


class Sender:
    """In the place of `TrainerGroup`: one rank, whose buckets have made-up values.

    Attributes:
        spoilt: of the next sends, what goes wrong at the second bucket: it cannot be filled ("fill"), or has another
            value on the wire ("bits").
    """

    def __init__(self, transport: str, directory: Path) -> None:
        self._make, self._directory, self._engine_port = find_transport(transport), directory, SGLangPort(DEADLINES)
        self._transport: Transport = cast(Any, None)
        self.spoilt: list[str] = []

    def connect(self, engines: Sequence[Endpoint], group: str) -> None:
        self._transport = self._make(Link(group, "gloo", DEADLINE_S, self._engine_port, group, 0, self._directory))
        self._engines = [self._engine_port.describe(engine) for engine in engines]
        self._transport.connect(self._engines)

    def disconnect(self, deadline_s: float | None = None) -> None:
        self._transport.disconnect()

    def send_weights(self, version: int, verify: bool, on_progress: Any) -> Any:
        spoilt = self.spoilt.pop(0) if self.spoilt else ""
        self._transport.begin(version, BUCKETS)
        bucket_sender = BucketSender(
            self._transport, None, time.monotonic() + DEADLINE_S, DEADLINE_S, PhaseSeconds(), None
        )
        expected: dict[str, str] = {}
        for bucket in BUCKETS:
            flat = transport_contract._filled(bucket, version)
            expected |= {name: wire.format_sum(*whole_sum(tensor)) for name, tensor in named_tensors(bucket, flat)}
            if bucket.index == 1 and spoilt == "bits":
                flat[-1] += 1
            bucket_sender.put(bucket, None if bucket.index == 1 and spoilt == "fill" else flat)
        failure = bucket_sender.close()
        if spoilt == "fill" and failure is None:
            failure = sync_error("gather", BUCKETS[1].describe(), "a parameter is gone")
        if failure is not None:
            raise failure
        self._transport.complete()
        return SimpleNamespace(expected=expected), {}

    def close(self) -> None:
        self._transport.disconnect()
        self._engine_port.close()


class Rollouts:
    """In the place of `RunEngines`: an engine pool whose loop is a thread's."""

    def __init__(self, engines: dict[str, str]) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.pool = EnginePool([EngineClient(url, name, DEADLINES) for name, url in engines.items()], 4)

    def _do(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(60)

    def begin_update(self) -> Any:
        return self._do(self.pool.begin_update())

    def restart_update(self) -> Any:
        return self._do(self.pool.restart_update())

    def compare(self, expected: Any, strict: bool) -> int:
        return self._do(self.pool.compare(expected, strict))

    def end_update(self) -> None:
        self._do(self.pool.end_update())

    def stamp(self, version: int) -> None:
        self._do(self.pool.stamp(version))

    def mark_dead(self, urls: Any, why: str) -> None:
        async def leave() -> None:
            self.pool.mark_dead(urls, why)

        self._do(leave())

    def close(self) -> None:
        self._do(self.pool.close())
        self._loop.call_soon_threadsafe(self._loop.stop)


@dataclass
class Plane:
    """Two engines, `a` and `b`, that hold version 1."""

    engines: dict[str, StandInEngine]
    sender: Sender
    rollouts: Rollouts
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        addresses = [EngineAddress(name, engine.url) for name, engine in self.engines.items()]
        others: Any = SimpleNamespace(addresses=addresses, size=2, joins=0, lost=lambda gone: None,
                                      note=self.notes.append, weights=None)  # fmt: skip
        sender, rollouts = cast(TrainerGroup, self.sender), fake_process(self.rollouts)
        self._publisher = Publisher(
            CONFIG, rollouts, sender, others, others, SeparateGpus(lambda: None), lambda: None, lambda: next(GROUPS),
            others, others,
        )  # fmt: skip
        self._publisher.connect(next(GROUPS))

    def sync(self, version: int, verify: bool = False) -> int:
        """A whole weight update; how often all was sent again."""
        return self._publisher.send(version, verify).repeats

    @property
    def there(self) -> str:
        """Engines that would get requests."""
        return "".join(name for name in self.engines if name not in self.rollouts.pool.dead)

    def expect(self, version: int) -> None:
        """Those hold this version whole, and say so."""
        for name in self.there:
            transport_contract._compare(BUCKETS, version, [self.engines[name].held()])
            assert self.engines[name].version() == str(version)


@pytest.fixture(scope="module")
def spare() -> Iterator[list[StandInEngine]]:
    """Engines that a test left as they were."""
    found: list[StandInEngine] = []
    yield found
    for engine in found:
        engine.stop()


@pytest.fixture
def plane(request: pytest.FixtureRequest, spare: list[StandInEngine], tmp_path: Path) -> Iterator[Plane]:
    """By the transport that the test names."""
    engines = {name: spare.pop() if spare else StandInEngine() for name in "ab"}
    sender = Sender(request.param, tmp_path)
    rollouts = Rollouts({name: engine.url for name, engine in engines.items()})
    made = Plane(engines, sender, rollouts)
    assert made.sync(1) == 0
    made.expect(1)
    yield made
    sender.close()
    for name, engine in engines.items():
        if name in made.there:
            spare.append(engine)
        else:
            engine.stop()
    rollouts.close()


def fault(path: str, *faults: str, of: str = "b") -> Callable[[Plane], None]:
    """What these engines answer to their next requests of a path."""

    def spoil(plane: Plane) -> None:
        for name in of:
            plane.engines[name].set_faults(path, *faults)

    return spoil


def spoilt(*ways: str) -> Callable[[Plane], None]:
    def spoil(plane: Plane) -> None:
        plane.sender.spoilt = list(ways)

    return spoil


def both(*spoils: Callable[[Plane], None]) -> Callable[[Plane], None]:
    def spoil(plane: Plane) -> None:
        for each in spoils:
            each(plane)

    return spoil


def joining(*faults: str) -> Callable[[Plane], None]:
    """Whichever group it joins."""
    return both(fault(JOIN, *faults), fault(LANE, *faults))


def killed(plane: Plane) -> None:
    plane.engines["b"].stop()


def mode(name: str) -> Callable[[Plane], None]:
    return lambda plane: plane.engines["b"].set_mode(name)


POINTS: dict[str, tuple[Callable[[Plane], None], str, int]] = {
    "it is dead before the update": (killed, "a", 0),
    "it refuses to begin": (fault(BEGIN, "refuse"), "a", 0),
    "it dies when the update begins": (fault(BEGIN, "die"), "a", 0),
    "it says nothing when the update begins": (fault(BEGIN, "silent"), "a", 0),
    "its answer to the beginning is lost": (fault(BEGIN, "lose"), "a", 0),
    "it refuses a bucket": (fault(BUCKET, "refuse"), "ab", 1),
    "it refuses a bucket, and again": (fault(BUCKET, *["refuse"] * 9), "a", 2),
    "it refuses the last bucket": (fault(BUCKET, "", "", "refuse"), "ab", 1),
    "its answer to a bucket is lost": (fault(BUCKET, "lose"), "ab", 1),
    "its answer to the last bucket is lost": (fault(BUCKET, "", "", "lose"), "ab", 1),
    "it dies at a bucket": (fault(BUCKET, "die"), "a", 1),
    "it dies between two buckets": (fault(BUCKET, "", "die"), "a", 1),
    "it dies after the last bucket": (fault(BUCKET, "", "", "die after"), "a", 1),
    "it says nothing at a bucket": (fault(BUCKET, "silent"), "ab", 1),
    "it refuses to join again": (both(fault(BUCKET, "refuse"), joining("refuse", "refuse")), "a", 2),
    "it dies when it joins again": (both(fault(BUCKET, "refuse"), joining("die")), "a", 2),
    "it keeps nothing of what it takes": (mode("discard"), "a", 2),
    "it refuses the comparison": (fault(COMPARE, "refuse"), "a", 0),
    "it dies in the comparison": (fault(COMPARE, "die"), "a", 0),
    "it refuses to end": (fault(END, "refuse"), "a", 0),
    "it dies at the end": (fault(END, "die after"), "a", 0),
    "it refuses the version": (fault(STAMP, "refuse"), "a", 0),
    "it dies at the version": (fault(STAMP, "die"), "a", 0),
    "its answer to the version is lost": (fault(STAMP, "lose"), "ab", 0),
    "the sender cannot fill a bucket": (spoilt("fill"), "ab", 1),
    "the sender cannot fill a bucket, and an engine dies in the second try": (
        both(spoilt("fill"), fault(BUCKET, "", "", "die after")), "a", 2,
    ),
    "another value arrives than was sent": (spoilt("bits"), "ab", 1),
}  # fmt: skip
"""What goes wrong in the second sync, engine `b` being meant; the engines that go on; how often all is sent again."""


EACH_BUCKET = ("last", "between", "second try")
"""In points at later requests of a sync, of which a relay has one."""
CASES = [pytest.param(point, "broadcast", id=point) for point in POINTS] + [
    pytest.param(point, "relay", id=f"{point} (relay)", marks=pytest.mark.nightly)
    for point in POINTS
    if not any(word in point for word in EACH_BUCKET)
]


@pytest.mark.slow
@pytest.mark.parametrize(("point", "plane"), CASES, indirect=["plane"])
def test_engines_that_go_on_hold_one_whole_version(point: str, plane: Plane) -> None:
    spoil, left, repeats = POINTS[point]
    spoil(plane)
    assert (plane.sync(2, verify=True), plane.there) == (repeats, left), plane.notes
    plane.expect(2)
    assert plane.sync(3, verify=True) == 0 and plane.there == left
    plane.expect(3)


@pytest.mark.parametrize("plane", ["broadcast"], indirect=True)
@pytest.mark.parametrize("refusing", ["a", "b"])
def test_an_engine_is_freed_that_waits_for_a_broadcast_begun_after_another_engine_refused_and_left(
    plane: Plane, refusing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter, disconnect, left = broadcast.enter_broadcast, plane.sender.disconnect, threading.Event()

    def late(*args: Any) -> Any:
        left.wait()
        return enter(*args)

    monkeypatch.setattr(broadcast, "enter_broadcast", late)
    monkeypatch.setattr(plane.sender, "disconnect", lambda *args: (disconnect(), left.set()))
    fault(BUCKET, "refuse", of=refusing)(plane)
    assert (plane.sync(2, verify=True), plane.there) == (1, "ab"), plane.notes
    plane.expect(2)


@pytest.mark.parametrize("plane", ["broadcast"], indirect=True)
def test_when_all_die_the_run_is_told_of_what(plane: Plane) -> None:
    fault(BUCKET, "", "die", of="ab")(plane)
    with pytest.raises((EngineDied, WeightSyncError)):
        plane.sync(2)
    assert plane.there == ""
