"""What a sender and its transport wait for on a GPU: a written model of CUDA's streams and of NCCL's collectives.

Modelled: a stream runs what it was given in order. A kernel of a collective begins when its stream comes to it, and
ends when all its ranks' have begun. `async_op=True` lets NCCL's stream wait for an event that is recorded on the
caller's current stream at that moment; `Work.wait` lets the current stream wait for the collective, and with a timeout
the CPU (ProcessGroupNCCL). With one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) whatever waits at its head holds up
what was given to other streams of that GPU later. BucketSender and `RelayTransport` are mslime's own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from mslime.weights.bucket_sender import BucketSender, PhaseSeconds
from mslime.weights.relay import RelayTransport
from mslime.weights.transport import Transport
from mslime.weights.weight_plan import Bucket

STUCK_S = 10.0
"""After which something that has not come counts as stuck."""
MOVED = threading.Condition()
HERE = threading.local()


@dataclass
class FakeEvent:
    happened: bool = False

    def ends(self) -> bool:
        self.happened = True
        return True


@dataclass
class FakeCollective:
    ranks: int
    begun: int = 0

    def ends(self) -> bool:
        return self.begun == self.ranks


@dataclass(eq=False)
class FakeStream:
    """A stream of a GPU.

    Args:
        queue: what was given to the GPU and has not begun; by default a hardware queue of its own.
    """

    queue: deque[tuple[FakeStream, Any, str]] = field(default_factory=deque[Any])
    running: deque[Any] = field(default_factory=deque[Any])

    def give(self, what: Any, kind: str) -> None:
        with MOVED:
            self.queue.append((self, what, kind))
            if self not in STREAMS:
                STREAMS.append(self)
            while any(stream._advance() for stream in STREAMS):
                pass
            MOVED.notify_all()

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        self.give(event, "record")
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.give(event, "wait")

    def run(self, collective: FakeCollective) -> None:
        self.give(collective, "kernel")

    def _advance(self) -> bool:
        """Whether anything begins or ends now."""
        moved = False
        while self.running and self.running[0].ends():
            self.running.popleft()
            moved = True
        while self.queue:
            stream, what, kind = self.queue[0]
            if kind != "record" and (stream.running or (kind == "wait" and not what.happened)):
                break
            self.queue.popleft()
            if kind == "kernel":
                what.begun += 1
            if kind != "wait":
                stream.running.append(what)
            moved = True
        return moved


STREAMS: list[FakeStream] = []


def until(what: Any, seconds: float = STUCK_S) -> bool:
    with MOVED:
        return MOVED.wait_for(what, seconds)


@dataclass
class FakeWork:
    end: FakeEvent
    looked_at: bool = False

    def is_completed(self) -> bool:
        self._look()
        return self.end.happened

    def wait(self, timeout: timedelta) -> None:
        HERE.stream.wait_event(self.end)
        self._look()
        if not until(lambda: self.end.happened, timeout.total_seconds()):
            raise RuntimeError("NCCL's timeout")

    def _look(self) -> None:
        with MOVED:
            self.looked_at = True
            MOVED.notify_all()


@dataclass
class FakeFlat:
    """A filled bucket on a GPU.

    Attributes:
        lane: NCCL's stream of the sender's lane.
        send: meets the engine.
        work: of its broadcast, once that was begun.
    """

    lane: FakeStream
    send: FakeCollective
    work: FakeWork | None = None
    is_cuda, device = True, "cuda:0"

    def view(self, dtype: torch.dtype) -> FakeFlat:
        return self


def fake_broadcast(flat: FakeFlat, group: object, group_src: int, async_op: bool) -> FakeWork:
    flat.lane.wait_event(HERE.stream.record_event())
    flat.lane.run(flat.send)
    work = FakeWork(flat.lane.record_event())
    with MOVED:
        flat.work = work
        MOVED.notify_all()
    return work


@contextmanager
def fake_current(stream: FakeStream | None) -> Generator[None]:
    before, HERE.stream = getattr(HERE, "stream", None), stream
    yield
    HERE.stream = before


@pytest.fixture(autouse=True)
def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    STREAMS.clear()
    monkeypatch.setattr(torch.cuda, "stream", fake_current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: HERE.stream)
    monkeypatch.setattr(dist, "broadcast", fake_broadcast)


class HeldRelay(RelayTransport):
    """A fake sender whose thread gets no CPU at the begin of a send before the test says so."""

    def __init__(self, rank: int) -> None:
        super().__init__(cast(Any, SimpleNamespace(senders={0: "0", 1: "1"}, rank=rank, name="x", deadline_s=STUCK_S)))
        self.may_go = threading.Event()
        self._group, self._answers = cast(Any, object()), [Future()]

    def start(self, bucket: Bucket, flat: torch.Tensor) -> Any:
        assert self.may_go.wait(STUCK_S)
        return super().start(bucket, flat)


class FakeRank:
    """A sender: what its main thread does, as the test lets it."""

    def __init__(self, rank: int, one_queue: bool) -> None:
        queues: dict[str, Any] = {"queue": deque()} if one_queue else {}
        self.fill, self.lane, own = (FakeStream(**queues) for _ in range(3))
        self.transport = HeldRelay(rank)
        self.bucket_sender = BucketSender(
            self.transport, None, time.monotonic() + 60, 60, PhaseSeconds(), cast(Any, own)
        )

    def gather(self, *collectives: FakeCollective) -> None:
        for collective in collectives:
            self.fill.run(collective)

    def put(self, index: int, send: FakeCollective) -> FakeFlat:
        flat = FakeFlat(self.lane, send)
        bucket: Any = SimpleNamespace(index=index, describe=lambda: f"bucket {index}")
        with fake_current(self.fill):
            self.bucket_sender.put(bucket, cast(Any, flat))
        return flat


@pytest.mark.parametrize("one_queue", [False, True], ids=["a queue for each stream", "one hardware queue"])
def test_senders_that_gather_together_never_wait_in_a_circle(one_queue: bool) -> None:
    """Rank 0 sends buckets 0 and 2, rank 1 sends 1 and 3; both gather all, and the engine takes one after the other."""
    first, second = ranks = [FakeRank(rank, one_queue) for rank in range(2)]
    gathers, sends, engine = [FakeCollective(2) for _ in range(4)], [FakeCollective(2) for _ in range(4)], FakeStream()
    for send in sends:
        engine.run(send)
    first.transport.may_go.set()
    for rank in ranks:
        rank.gather(gathers[0])
    first.put(0, sends[0])
    assert until(lambda: sends[0].begun == 2)
    for rank in ranks:
        rank.gather(gathers[1])
    second.put(1, sends[1])  # whose thread is late
    for rank in ranks:
        rank.bucket_sender.wait_for_buffer()
        rank.gather(gathers[2])
    flat = first.put(2, sends[2])
    assert until(lambda: flat.work is not None and flat.work.looked_at)
    for rank in ranks:
        rank.gather(gathers[3])
    second.put(3, sends[3])
    second.transport.may_go.set()
    assert [rank.bucket_sender.close() for rank in ranks] == [None, None]
    assert all(send.begun == 2 for send in sends)


@pytest.mark.parametrize("one_queue", [False, True], ids=["a queue for each stream", "one hardware queue"])
def test_a_bucket_is_sent_while_the_next_is_filled_whichever_begins_first(one_queue: bool) -> None:
    rank, engine = FakeRank(0, one_queue), FakeStream()
    fills, sends = [FakeCollective(2) for _ in range(3)], [FakeCollective(2) for _ in range(2)]
    rank.gather(FakeCollective(1))
    rank.put(0, sends[0])
    rank.bucket_sender.wait_for_buffer()
    rank.gather(fills[0])  # takes as long as the test likes
    rank.transport.may_go.set()
    engine.run(sends[0])
    assert until(lambda: sends[0].begun == 2), "a send waits for what is filled after it"
    FakeStream().run(fills[0])
    flat = rank.put(1, sends[1])
    rank.bucket_sender.wait_for_buffer()
    assert until(lambda: flat.work is not None and flat.work.looked_at)
    FakeStream().run(fills[1])
    rank.gather(fills[1], FakeCollective(1))
    assert until(lambda: fills[1].begun == 2), "what is filled waits for a send before it"
    assert sends[1].begun == 1, "the engine has not come for it"
    engine.run(sends[1])
    assert rank.bucket_sender.close() is None


def test_all_that_a_transport_does_is_on_the_couriers_stream() -> None:
    """Also what it sends in the place of a bucket that could not be filled."""
    on, own, fill = list[tuple[str, FakeStream]](), FakeStream(), FakeStream()

    class FakeTransport(Transport):
        def prepare_bucket(self, bucket: Bucket, flat: torch.Tensor) -> None:
            on.append(("prepare", HERE.stream))

        def start(self, bucket: Bucket, flat: torch.Tensor) -> Any:
            on.append(("start", HERE.stream))
            return self

        def wait(self) -> None:
            on.append(("wait", HERE.stream))

        def skip(self, bucket: Bucket) -> None:
            on.append(("skip", HERE.stream))

        def connect(self, engines: Any) -> None: ...

        def disconnect(self) -> None: ...

    bucket_sender = BucketSender(FakeTransport(), None, time.monotonic() + 60, 60, PhaseSeconds(), cast(Any, own))
    bucket: Any = SimpleNamespace(index=0, describe=lambda: "bucket 0")
    with fake_current(fill):
        bucket_sender.put(bucket, cast(Any, FakeFlat(own, FakeCollective(1))))
        bucket_sender.put(bucket, None)
        assert bucket_sender.close() is None
    assert on == [(call, own) for call in ("prepare", "start", "wait", "skip")]
