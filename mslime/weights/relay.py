"""The transport `relay`: each sender sends to one rank of each engine, which passes the buckets on to the others.

With `broadcast` each bucket goes to all ranks of all engines, one bucket at a time, so one sender's network adapter
carries all traffic. Here sender i has a lane to rank i modulo the ranks of each engine, on each of the engine's hosts.
All senders send at the same time, so a host uses as many adapters as it has ranks or senders. Engines order the buckets
by the plan, and get one request for a whole sync (`engine_plugin.relay`).

Once engines on several hosts have recorded their loading, their answers contain each host's slice of every bucket. From
then on a sender sends each host only its slice, packed, on a lane to the hosts with the same index in all engines. All
senders receive the same answers, so they act alike in the next sync.

Engines wait for every bucket of the plan. So a sender that cannot fill one sends zeros (`skip`), and the failed sync
ends soon.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from mslime.config.base import NOT_ARRIVED
from mslime.config.errors import WeightSyncError, sync_error
from mslime.config.keys import EngineInfo
from mslime.convert.safetensors_files import torch_dtype
from mslime.engine_plugin import wire
from mslime.engine_plugin.wire import HostSlice, HostSlices, machine_lane
from mslime.threads import in_thread
from mslime.weights.broadcast import broadcast_each, close_groups, connect_group
from mslime.weights.buckets import copy_each
from mslime.weights.transport import Link, Transport, all_done, ask_all, naming
from mslime.weights.weight_plan import Bucket

ECHO_S = 2.0
"""Seconds to wait for the other engines' answers after an error: the first may be a consequence of another."""


class RelayTransport(Transport):
    """One sender's lanes."""

    any_order = True  # engines order the buckets by the plan

    def __init__(self, link: Link) -> None:
        self._link = link
        self._names = dict(link.senders) or {link.rank: link.name}
        self._numbers = {rank: number for number, rank in enumerate(self._names)}
        self._engines: tuple[EngineInfo, ...] = ()
        self._group: dist.ProcessGroup | None = None
        self._machines: list[dist.ProcessGroup] = []  # lanes to one host of each engine
        self._stores: list[Store] = []
        self._entered: Future[None] | None = None  # of the newest bucket's broadcasts
        self._device = torch.device("cpu")
        self._answers: list[Future[wire.Loaded]] = []
        self._reported: dict[str, HostSlices] = {}  # slices by engines' URLs
        self._cuts: HostSlices | None = None  # slices used in this sync
        self._known: tuple[Bucket, ...] = ()  # buckets that engines know under the name `_plan`
        self._syncs, self._plan, self._broken, self._under_way = 0, "", False, False

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Create the lanes: a process group of this rank with one rank on each host of each engine. With several hosts,
        there is also one group for the first host of each engine, one for the second, and so on.

        Raises:
            WeightSyncError: an engine refused, lacks the plug-in, or did not join before the deadline.
        """
        assert self._group is None, "connected already"
        self._engines, link = tuple(engines), self._link
        ask_all(link.engine_port, engines, wire.Ping(), link.deadline_s)
        machines, number = [engine.machines for engine in engines], self._numbers[link.rank]
        self._group, store = connect_group(link, engines, machines, sender=number)
        self._stores.append(store)
        for machine in range(machines[0]) if set(machines) == {machines[0]} != {1} else ():
            named = replace(link, name=machine_lane(link.name, machine))
            group, store = connect_group(named, engines, [1] * len(engines), sender=number, machine=machine)
            self._machines.append(group)
            self._stores.append(store)
        # This thread's device: the sending thread has no device set.
        self._device = torch.device("cuda", torch.cuda.current_device()) if link.backend == "nccl" else self._device

    def begin(self, version: int, buckets: Sequence[Bucket]) -> None:
        """Request every engine to receive all buckets of all senders. Each sender sends the request, so each gets the
        answer."""
        names, news = tuple(self._names.values()), list[Bucket]()
        self._syncs, self._broken, self._under_way = self._syncs + 1, False, True
        if self._known != tuple(buckets):
            self._known, self._plan = tuple(buckets), _name(buckets)
            news = list(buckets)
            self._reported.clear()
        self._cuts = self._agreed()
        cuts = self._cuts.name if self._cuts is not None else ""
        senders = tuple(tuple(self._numbers[rank] for rank in self._sent_by(bucket)) for bucket in news)
        tensors = tuple(len(bucket.names) for bucket in news)
        sync = wire.RelaySync(f"{names[0]}-{self._syncs}", self._plan, names, senders, tensors, cuts)
        update = wire.update_request(news, load=sync)
        self._answers = [self._link.engine_port.load(engine, update) for engine in self._engines]

    def comes_in_parts(self, bucket: Bucket) -> bool:
        return bucket.comes_in_parts(self._numbers, (engine.ranks for engine in self._engines))

    def _sent_by(self, bucket: Bucket) -> tuple[int, ...]:
        return bucket.members if self.comes_in_parts(bucket) else (bucket.sender,)

    def _agreed(self) -> HostSlices | None:
        """The slices of hosts with the same index in all engines; None if engines differ, or did not all report
        them."""
        reported = [self._reported.get(engine.url) for engine in self._engines]
        same = len({cuts.name for cuts in reported if cuts is not None}) == 1 and None not in reported
        return reported[0] if same and self._machines else None

    def complete(self) -> None:
        """Return when every engine has loaded all buckets. Raises WeightSyncError."""
        try:
            all_done(self._answers, "send", f"{len(self._engines)} engines", self._link.deadline_s)
        except WeightSyncError:
            if not _failures(self._answers):  # they are late
                raise
            raise _cause("all buckets", self._answers, "") from None
        for engine, answer in zip(self._engines, self._answers, strict=True):
            if (cuts := answer.result().cuts) is not None:
                self._reported[engine.url] = cuts
        self._under_way = False

    def start(self, bucket: Bucket, flat: torch.Tensor) -> PendingLane:
        """Send a bucket to one rank of each engine, on each of its hosts: all of it, the host's slice, or this rank's
        part."""
        assert self._group is not None, "not connected"
        stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
        cuts = self._cuts.buckets[bucket.index] if self._cuts is not None else None
        parcels = [(flat, self._group)]
        if cuts is not None:
            parcels = [(pack_cut(flat, cut), lane) for cut, lane in zip(cuts, self._machines, strict=True) if cut]
        self._entered = entered = Future[None]()
        sent = in_thread(broadcast_each, parcels, stream, self._link.deadline_s, entered)
        return PendingLane(self, bucket, sent, self._answers)

    def skip(self, bucket: Bucket) -> None:
        """Send zeros for a bucket that could not be filled."""
        if not self._broken:
            numel = bucket.hf_numel // len(self._sent_by(bucket))
            flat = torch.zeros(numel, dtype=torch_dtype(bucket.dtype), device=self._device)
            self.start(bucket, flat).wait()

    def give_up(self) -> None:
        """Stop: nothing more arrives in this sync."""
        self._broken = True

    def disconnect(self) -> None:
        """Destroy the lanes at both ends. An engine that no longer answers is left alone."""
        link, names = self._link, [self._link.name] if self._group is not None else []
        names += [machine_lane(link.name, machine) for machine in range(len(self._machines))]
        leaving = [link.engine_port.ask(engine, wire.LeaveGroup(name)) for engine in self._engines for name in names]
        groups = [*([self._group] if self._group is not None else []), *self._machines]
        entered = self._entered
        self._group, self._machines, self._entered = None, [], None
        close_groups(groups, broken=self._under_way, entered=entered)
        wait(leaving, timeout=link.deadline_s)
        self._stores, self._known, self._answers, self._cuts = [], (), [], None
        self._reported.clear()


def _name(buckets: Sequence[Bucket]) -> str:
    """Name of a plan: the same for all senders of a run, and for no other buckets."""
    tensors = ((bucket.sender, bucket.dtypes, [(e.name, e.shape) for e in bucket.entries]) for bucket in buckets)
    return hashlib.sha256(repr(list(tensors)).encode()).hexdigest()


def pack_cut(flat: torch.Tensor, cut: HostSlice) -> torch.Tensor:
    """A host's slice of a bucket, its pieces one after the other; a view if it is one run.

    Args:
        flat: [bucket.hf_numel].
    """
    if len(cut) == 1 and not cut[0].sizes:
        return flat[cut[0].start : cut[0].start + cut[0].width]
    packed = flat.new_empty(sum(piece.numel for piece in cut))
    into, out_of, begin = list[torch.Tensor](), list[torch.Tensor](), 0
    for piece in cut:
        shape, stride = (*piece.sizes, piece.width), (*piece.strides, 1)
        into.append(packed[begin : begin + piece.numel].view(shape))
        out_of.append(flat.as_strided(shape, stride, int(flat.storage_offset()) + piece.start))
        begin += piece.numel
    copy_each(into, out_of)
    return packed


@dataclass
class PendingLane:
    """One bucket in flight to one rank of each engine."""

    transport: RelayTransport
    bucket: Bucket
    sent: Future[str]
    answers: Sequence[Future[wire.Loaded]]

    def wait(self) -> None:
        """Return when the bucket has arrived there. It is loaded when the transport's `complete` returns.

        Raises:
            WeightSyncError: an engine aborted the sync, the connection broke, or the deadline passed.
        """
        waiting: set[Future[Any]] = {self.sent, *self.answers}
        while not self.sent.done() and not _failures(self.answers):
            _, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        broke = self.sent.result() if self.sent.done() else ""
        if broke or _failures(self.answers):
            self.transport.give_up()
            raise _cause(self.bucket.describe(), self.answers, broke)


def _failures(answers: Sequence[Future[wire.Loaded]]) -> list[BaseException]:
    return [error for answer in answers if answer.done() and (error := answer.exception()) is not None]


def _cause(where: str, answers: Sequence[Future[wire.Loaded]], broke: str) -> WeightSyncError:
    """The error behind a bucket that did not arrive, instead of a follow-up error, which would name the wrong engine.
    If several engines do not answer, all are named: one may be late only because of another."""
    wait(answers, timeout=ECHO_S)
    failures = _failures(answers)
    causes = [error for error in failures if NOT_ARRIVED not in str(error)]
    if causes:
        first, *others = (naming(where, error) for error in causes)
        also = "".join(f"; also {other.value}" for other in others)
        return sync_error("send", f"{first.value}{also}", first.rule)
    return sync_error("send", where, f"the connection with engines broke: {broke or failures[0]}")
