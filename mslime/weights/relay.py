"""The transport `relay`: every sender sends to one rank of each engine, which passes its buckets on to the others.

With `broadcast` each bucket goes to all ranks of all engines, one bucket at a time, so that the network adapter of one
sender carries everything. Here sender i has a lane to the rank i modulo the ranks of each engine, on each of the
engine's machines, and all senders send at the same time: as many adapters of a machine work as there are ranks or
senders. Engines put the buckets into the order of the plan, and are asked once for a whole sync; how they do it, their
plug-in says.

Engines wait for every bucket of the plan. So a sender that cannot fill one sends zeros for it (`skip`), and the sync,
which has failed, is over soon.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from mslime.config.choices import NOT_ARRIVED
from mslime.config.errors import WeightSyncError, sync_error
from mslime.config.keys import AnnouncedBucket, EngineInfo
from mslime.threads import in_thread
from mslime.weights.broadcast import enter_broadcast, meet
from mslime.weights.buckets import wire_dtype
from mslime.weights.plan import Bucket
from mslime.weights.transport import Link
from mslime.weights.waiting import all_done, naming

ECHO_S = 2.0
"""How long the other engines' words are waited for when something breaks: the first may be an echo."""


class RelayTransport:
    """One sender's lanes."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._names = dict(link.senders) or {link.rank: link.name}
        self._numbers = {rank: number for number, rank in enumerate(self._names)}
        self._engines: tuple[EngineInfo, ...] = ()
        self._group: dist.ProcessGroup | None = None
        self._store: Store | None = None
        self._device = torch.device("cpu")
        self._answers: list[Future[None]] = []
        self._known: tuple[Bucket, ...] = ()  # to the engines, under the name `_plan`
        self._syncs, self._plan, self._broken, self._under_way = 0, "", False, False

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Make the lanes: one process group of this rank with one rank of each engine, on each of its machines.

        Raises:
            WeightSyncError: an engine refused, has not the plug-in, or did not come before the deadline.
        """
        assert self._group is None, "connected already"
        self._engines, link = tuple(engines), self._link
        able = [link.receivers.can_relay(engine) for engine in engines]
        all_done(able, "connect", f"{len(engines)} engines", link.deadline_s)
        machines = [engine.machines for engine in engines]
        self._group, self._store = meet(link, engines, machines, lane=self._numbers[link.rank])
        # Of this thread: the one that sends has none of its own.
        self._device = torch.device("cuda", torch.cuda.current_device()) if link.backend == "nccl" else self._device

    def begin(self, version: int, buckets: Sequence[Bucket]) -> None:
        """Ask every engine to take all buckets of all senders. Each sender asks, so that each is answered."""
        receivers, names, news = self._link.receivers, tuple(self._names.values()), list[AnnouncedBucket]()
        self._syncs, self._broken, self._under_way = self._syncs + 1, False, True
        if self._known != tuple(buckets):
            self._known, self._plan = tuple(buckets), _name(buckets)
            news = [self._announced(bucket) for bucket in buckets]
        announcement = receivers.announce_relay(f"{names[0]}-{self._syncs}", names, self._plan, news)
        self._answers = [receivers.receive(engine, announcement) for engine in self._engines]

    def _announced(self, bucket: Bucket) -> AnnouncedBucket:
        names, shapes = zip(*((entry.name, entry.shape) for entry in bucket.entries), strict=True)
        return AnnouncedBucket(self._numbers[bucket.sender], names, bucket.dtype, shapes)

    def complete(self) -> None:
        """Return when every engine has loaded all buckets. Raises WeightSyncError."""
        try:
            all_done(self._answers, "send", f"{len(self._engines)} engines", self._link.deadline_s)
        except WeightSyncError:
            if not _failures(self._answers):  # they are late
                raise
            raise _cause("all buckets", self._answers, "") from None
        self._under_way = False

    def start(self, bucket: Bucket, flat: torch.Tensor) -> PendingLane:
        """Send a bucket to one rank of each engine."""
        assert self._group is not None, "not connected"
        stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
        sent = in_thread(_send, flat, self._group, stream, self._link.deadline_s)
        return PendingLane(self, bucket, sent, self._answers)

    def skip(self, bucket: Bucket) -> None:
        """Send zeros for a bucket that could not be filled."""
        if not self._broken:
            flat = torch.zeros(bucket.hf_numel, dtype=wire_dtype(bucket), device=self._device)
            self.start(bucket, flat).wait()

    def give_up(self) -> None:
        """Nothing arrives any more in this sync."""
        self._broken = True

    def disconnect(self) -> None:
        """Destroy the lanes at both ends. An engine that no longer answers is left alone."""
        link, met = self._link, self._group is not None
        leaving = [link.receivers.leave(engine, link.name) for engine in self._engines] if met else []
        self._close()
        wait(leaving, timeout=link.deadline_s)
        self._store, self._known, self._answers = None, (), []

    def _close(self) -> None:
        """After a sync that failed, this is how engines that wait for what comes on this lane hear of it: over gloo,
        connections are closed when nobody holds the group any more."""
        if self._group is not None:
            if self._under_way:
                self._group.abort()
            dist.destroy_process_group(self._group)
            self._group = None


def _name(buckets: Sequence[Bucket]) -> str:
    """Of a plan: the same for all senders of a run, and for no other buckets."""
    tensors = ((bucket.sender, bucket.dtype, [(e.name, e.shape) for e in bucket.entries]) for bucket in buckets)
    return hashlib.sha256(repr(list(tensors)).encode()).hexdigest()


def _send(flat: torch.Tensor, group: dist.ProcessGroup, stream: torch.cuda.Stream | None, deadline_s: float) -> str:
    """Broadcast, and return when all have it; for a thread. What broke, in words: an error would hold the group."""
    try:
        work = enter_broadcast(flat, group, stream)
        with torch.cuda.stream(stream):  # type: ignore[arg-type]  # takes None, and then does nothing
            work.wait(timedelta(seconds=deadline_s))
    except RuntimeError as error:
        return str(error)
    return ""


@dataclass
class PendingLane:
    """One bucket on its way to one rank of each engine."""

    transport: RelayTransport
    bucket: Bucket
    sent: Future[str]
    answers: Sequence[Future[None]]

    def wait(self) -> None:
        """Return when the bucket has arrived there. It is loaded when the transport's `complete` returns.

        Raises:
            WeightSyncError: an engine gave the sync up, the connection broke, or the deadline passed.
        """
        try:
            self._wait()
        except WeightSyncError:
            self.transport.give_up()
            raise

    def _wait(self) -> None:
        waiting: set[Future[Any]] = {self.sent, *self.answers}
        while not self.sent.done() and not _failures(self.answers):
            _, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        broke = self.sent.result() if self.sent.done() else ""
        if broke or _failures(self.answers):
            raise _cause(self.bucket.describe(), self.answers, broke)


def _failures(answers: Sequence[Future[None]]) -> list[BaseException]:
    return [error for answer in answers if answer.done() and (error := answer.exception()) is not None]


def _cause(where: str, answers: Sequence[Future[None]], broke: str) -> WeightSyncError:
    """What is behind a bucket that did not arrive: not what is the echo of it, which would name the wrong engine."""
    wait(answers, timeout=ECHO_S)
    failures = _failures(answers)
    for error in failures:
        if NOT_ARRIVED not in str(error):
            return naming(where, error)
    return sync_error("send", where, f"the connection with engines broke: {broke or failures[0]}")
