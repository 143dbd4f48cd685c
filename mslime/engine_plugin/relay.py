"""Inside an SGLang server: each rank receives a part of the buckets, and passes it on to the other ranks.

In SGLang every rank receives every bucket, one bucket at a time, so one sender's network adapter carries all traffic.
Here a sender connects to one rank on each host of each engine, on a separate lane: sender i to rank i modulo the ranks
of the engine on that host. All these ranks receive at the same time. While one bucket is passed on inside the host,
later ones arrive.

One request starts a whole sync. All ranks process the buckets in the plan's order: the rank whose lane received a
bucket gives it to the others, and each loads it like any other bucket. If loading is recorded, it gives each rank only
its slice, and buckets of several lanes are exchanged at once (`slices`).

A rank requests its next bucket after passing on the last one. It waits only for buckets earlier in the plan or in the
same step, so there is no circular wait. Every sender sends the request to every engine; the first request does the
work, and the others return its outcome.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from mslime.config.base import NOT_ARRIVED, SHARES_AT_MOST
from mslime.engine_plugin.copy_plan import (
    BucketCopies,
    ReceivedBucket,
    RecordedBucket,
    ReleasableBuffer,
    SyncBuckets,
    buckets_of,
    fitting,
)
from mslime.engine_plugin.engine_ranks import EngineRankGroup, EngineRanks, ranks
from mslime.engine_plugin.slices import (
    Arrival,
    ExchangeStep,
    PackedSlice,
    RankSlice,
    Route,
    aligned,
    host_slice_bytes,
    host_slices_of,
    rank_slice_of,
)
from mslime.engine_plugin.wire import (
    RECORDED,
    Answer,
    HostSlice,
    HostSlices,
    JoinRelayGroup,
    Loaded,
    RelaySync,
    encode,
    machine_lane,
)


@dataclass(frozen=True)
class ArrivalSlot:
    """Position of one arrival in a rank's receive buffer.

    Attributes:
        start: its first byte.
        taken: number of earlier arrivals that must be consumed before it may arrive.
    """

    start: int
    size: int
    taken: int


def arrival_slots(sizes: Sequence[int], capacity: int) -> list[ArrivalSlot]:
    """Slots of consecutive arrivals in a ring buffer.

    Args:
        sizes: bytes of each.
        capacity: bytes of the buffer. A larger arrival gets the whole buffer, from its start.
    """
    found: list[ArrivalSlot] = []
    start = first = 0  # `first`: first arrival that still occupies memory of the next one
    for size in sizes:
        if start + size > capacity:
            start = 0
        while any(each.start < start + size and start < each.start + each.size for each in found[first:]):
            first += 1
        found.append(ArrivalSlot(start, size, first))
        start += aligned(size)
    return found


class RelayGroups:
    """One rank's arrivals; as many are in flight as fit into the buffer.

    Args:
        arriving: for each arrival, in the plan's order, the groups of the senders of its equal parts, and its slot.
        memory: [bytes] uint8, buffer for all arrivals in flight.

    Attributes:
        failed: why nothing more arrives; empty without an error.
    """

    def __init__(
        self, arriving: Sequence[tuple[Sequence[dist.ProcessGroup], ArrivalSlot]], memory: torch.Tensor
    ) -> None:
        self._buffer, self._coming, self._taken = memory, deque(arriving), 0
        self._on_the_way: deque[tuple[list[dist.Work], torch.Tensor]] = deque()
        self.failed = ""
        self._ask()

    def take(self, use: Callable[[torch.Tensor], object]) -> None:
        """Let `use` read the next arrival, [bytes] uint8, then request the arrivals that now fit."""
        if self.failed:
            return
        try:
            assert self._on_the_way, "nothing is left to come"
            works, arrived = self._on_the_way.popleft()
            for work in works:
                work.wait()
            use(arrived)
        except RuntimeError as error:
            self.failed = f"{NOT_ARRIVED}: {error}"
        else:
            self._taken += 1
            self._ask()

    def _ask(self) -> None:
        while self._coming and self._coming[0][1].taken <= self._taken:
            groups, place = self._coming.popleft()
            memory = self._buffer[place.start : place.start + place.size]
            parts = memory.view(len(groups), -1)
            try:
                works = [
                    dist.broadcast(part, group=group, group_src=0, async_op=True)
                    for part, group in zip(parts, groups, strict=True)
                ]
            except RuntimeError as error:
                self.failed = f"{NOT_ARRIVED}: {error}"
                return
            self._on_the_way.append(([work for work in works if work is not None], memory))


_RELAYS: dict[int, Relay] = {}
"""Relays by the `id` of SGLang's updater."""


class RelayedBucket(list[tuple[str, torch.Tensor]]):
    """Empty tensors: the whole sync is already loaded.

    Attributes:
        updater: `id` of the updater that loaded it.
    """

    def __init__(self, updater: int, loaded: Loaded) -> None:
        super().__init__()
        self.updater, self.loaded = updater, loaded


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket of a plan, and the indices of senders of equal parts of it (several only if an engine has one rank)."""

    senders: tuple[int, ...]
    bucket: RecordedBucket

    @property
    def sender(self) -> int:
        """The sender, if there is one."""
        return self.senders[0]


def _largest(plan: Iterable[PlannedBucket]) -> int:
    return max((len(sent.bucket.flat) for sent in plan), default=0)


class Relay:
    """One rank's part in all syncs.

    Args:
        buckets: buffers in which they are assembled.
        load: makes the model load a bucket; returns success and a message.
        device: of the buckets.
        copies: recorded copies of each given bucket; None if the model's loader must load it.
    """

    def __init__(
        self, buckets: SyncBuckets, load: Callable[[ReceivedBucket], tuple[bool, str]], device: Any,
        copies: Callable[[Sequence[RecordedBucket]], Sequence[BucketCopies | None]],
    ) -> None:  # fmt: skip
        self._buckets, self._load, self._device, self._copies = buckets, load, device, copies
        self._plans: dict[str, list[PlannedBucket]] = {}
        self._done: tuple[str, Loaded, str] = ("", Loaded(""), "")
        self._lanes: RelayGroups | None = None
        self._buffer, self._given = ReleasableBuffer(device), ReleasableBuffer(device)
        self._in_place = False  # all buckets are loaded from where they arrive
        self._known: list[BucketCopies | None] = []
        self._shares: list[list[RankSlice | None]] = []
        self._route: Route | None = None
        self._routed = ""  # name of the slices that the route is for
        self._cuts: HostSlices | None = None  # from the ranks' current slices
        # slices last sent to senders, and this rank's copies then
        self._reported: tuple[HostSlices, list[BucketCopies | None]] | None = None

    def obey(
        self, order: RelaySync, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]],
        groups: Mapping[str, dist.ProcessGroup], place: EngineRanks,
    ) -> Loaded:  # fmt: skip
        """Receive, pass on and load a whole sync, once.

        Args:
            names, dtypes, shapes: of the tensors of all buckets; empty if the plan is known.
            groups: process groups that this rank has joined, by name.
            place: this rank among those of the engine, which all get the same call.

        Returns:
            How it was loaded, and the hosts' slices if they are new to senders.

        Raises:
            RuntimeError: a bucket did not arrive, or was not loaded, on this rank or another one.
        """
        if self._done[0] != order.sync:
            loaded, failed = Loaded(""), ""
            try:
                plan = self._begin(order, names, dtypes, shapes, groups, place)
                how = self._relay(plan, *self._way(plan, order, place), place.near)
                loaded = Loaded(how)
            except RuntimeError as error:
                failed = str(error)
            failed = place.whole.first_failure(failed)
            if (
                not failed
                and self._cuts is not None
                and (not self._reported or self._reported[0].name != self._cuts.name)
            ):
                loaded, self._reported = Loaded(loaded.how, self._cuts), (self._cuts, self._known)
            self._done = order.sync, loaded, failed
        _, loaded, failed = self._done
        if failed:
            raise RuntimeError(failed)
        return loaded

    def _begin(
        self, order: RelaySync, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]],
        groups: Mapping[str, dist.ProcessGroup], place: EngineRanks,
    ) -> list[PlannedBucket]:  # fmt: skip
        """Request the first buckets, and exchange the ranks' slices if one has new copies.

        Collective among all ranks. Raises RuntimeError on all of them if one fails.
        """
        failed, plan = "", list[PlannedBucket]()
        copies: list[BucketCopies | None] | None = None
        news: list[RankSlice | None] | None = None
        try:
            plan = self._plan(order, names, dtypes, shapes)
            copies = list(self._copies([sent.bucket for sent in plan]))
            self._in_place = place.near.count == 1 and all(known is not None for known in copies)
            if not self._in_place:
                self._buckets.buffer.reserve(_largest(plan))
            if order.cuts:  # this rank's slice must still be the one that senders use
                if self._reported is None or self._reported[0].name != order.cuts:
                    raise RuntimeError("this engine has not reported the slices of its hosts")
                pairs = zip(self._reported[0].buckets, copies, self._reported[1], strict=True)
                if any(cut is not None and now is not then for cut, now, then in pairs):
                    moved = "the model's parameters were moved since this engine reported the slices of its hosts"
                    raise RuntimeError(moved)
            self._ask(order, plan, groups, place)
            if len(copies) != len(self._known) or not all(map(operator.is_, copies, self._known)):
                pairs = zip(plan, copies, strict=True)
                news = [None if known is None else rank_slice_of(sent.bucket, known) for sent, known in pairs]
        except Exception as error:  # the other ranks wait for this one
            failed = f"{type(error).__name__}: {error}"
        news_of_all = place.whole.gather_or_raise(failed, news)
        assert copies is not None
        if any(each is not None for each in news_of_all):
            old = self._shares or [[]] * len(news_of_all)
            self._known, self._route = copies, None
            self._shares = [before if each is None else each for each, before in zip(news_of_all, old, strict=True)]
            if place.machines > 1:
                cuts = host_slices_of([len(sent.bucket.flat) for sent in plan], self._shares, place.machines)
                self._cuts = cuts if any(each is not None for each in cuts.buckets) else None
        return plan

    def _ask(
        self,
        order: RelaySync,
        plan: Sequence[PlannedBucket],
        groups: Mapping[str, dist.ProcessGroup],
        place: EngineRanks,
    ) -> None:
        """Request the first buckets that this rank receives. Raises RuntimeError and LookupError."""
        if self._lanes is not None:  # lanes of a failed sync: pending receives may still write into their memory
            self._buffer, self._route = ReleasableBuffer(self._device), None
        arriving = list[tuple[list[dist.ProcessGroup], ArrivalSlot]]()
        for sent, cut, at in zip(plan, *self._arriving(plan, order, place), strict=True):
            if at.size and sent.sender % place.near.count == place.near.rank:
                lanes = [order.lanes[sender] for sender in sent.senders]
                names = lanes if cut is None else [machine_lane(lane, place.machine) for lane in lanes]
                arriving.append(([groups[name] for name in names], at))
        memory = max((at.start + at.size for _, at in arriving), default=0)
        self._lanes = RelayGroups(arriving, self._buffer.head(memory))

    def _arriving(
        self, plan: Sequence[PlannedBucket], order: RelaySync, place: EngineRanks
    ) -> tuple[list[HostSlice | None], list[ArrivalSlot]]:
        """Each bucket's slice for this host (None: all of it), and its slot on the receiving rank."""
        cuts: list[HostSlice | None] = [None] * len(plan)
        if order.cuts:
            assert self._reported is not None, "that was checked"
            cuts = [cuts[place.machine] if cuts is not None else None for cuts in self._reported[0].buckets]
        sizes = [
            len(sent.bucket.flat) if cut is None else host_slice_bytes(cut, sent.bucket.named[0][1].itemsize)
            for sent, cut in zip(plan, cuts, strict=True)
        ]
        capacity = int(SHARES_AT_MOST * _largest(plan)) if order.cuts else 0
        if self._in_place:  # one arrives while another one is loaded
            capacity = 2 * aligned(max(sizes, default=0))
        found = [ArrivalSlot(0, 0, 0)] * len(plan)
        for rank in range(place.near.count):
            own = [i for i, sent in enumerate(plan) if sizes[i] and sent.sender % place.near.count == rank]
            for index, at in zip(own, arrival_slots([sizes[i] for i in own], capacity), strict=True):
                found[index] = at
        return cuts, found

    def _way(self, plan: Sequence[PlannedBucket], order: RelaySync, place: EngineRanks) -> tuple[Route | None, str]:
        """The schedule for passing on buckets, with memory allocated, and an error if this rank lacks memory."""
        near = place.near
        try:
            if self._route is None or self._routed != order.cuts:
                cuts, ats = self._arriving(plan, order, place)
                nothing = self._buffer.head(0)
                arrivals = list[Arrival]()
                for sent, cut, at in zip(plan, cuts, ats, strict=True):
                    source = sent.sender % near.count
                    memory = self._buffer.head(at.start + at.size)[at.start :] if source == near.rank else nothing
                    arrivals.append(Arrival(source, at.size, memory, None if cut is None else PackedSlice(cut).within))
                shares = self._shares[near.first : near.first + near.count]
                buckets, taken = [sent.bucket for sent in plan], self._buckets.buffer
                self._route = Route(buckets, arrivals, shares, self._known, near, self._given, taken)
                self._routed = order.cuts
            self._route.reserve()
        except RuntimeError as error:
            return None, f"{type(error).__name__}: {error}"
        return self._route, ""

    def _plan(
        self, order: RelaySync, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]]
    ) -> list[PlannedBucket]:
        if order.senders:
            spans = [slice(*span) for span in pairwise(accumulate(order.tensors, initial=0))]
            buckets = [self._buckets.of(names[span], dtypes[span], shapes[span]) for span in spans]
            self._route, self._cuts, self._reported, self._known, self._shares = None, None, None, [], []
            self._plans = {order.plan: [PlannedBucket(*each) for each in zip(order.senders, buckets, strict=True)]}
        elif order.plan not in self._plans:
            raise RuntimeError("this engine does not know the plan of the buckets")
        return self._plans[order.plan]

    def _relay(self, plan: Sequence[PlannedBucket], route: Route | None, without: str, beside: EngineRankGroup) -> str:
        """Receive and pass on all buckets. A rank that failed to load one still passes on the rest, so no sender waits
        for it.

        Args:
            without: the memory that this rank lacks: then nothing is passed on.
        """
        assert self._lanes is not None
        lanes, reports, failed, unchecked = self._lanes, set[str](), "", 0
        beside.gather_or_raise(without or lanes.failed, None)
        assert route is not None

        def load(received: ReceivedBucket) -> None:
            nonlocal failed
            if failed or lanes.failed:
                return
            try:
                loaded, report = self._load(received)
            except Exception as error:  # the other ranks continue, and get the error at the end
                loaded, report = False, f"{type(error).__name__}: {error}"
            reports.add(report)
            failed = "" if loaded else report

        for step in route.steps:
            if unchecked >= beside.count:
                unchecked = 0
                beside.gather_or_raise(lanes.failed, None)
            unchecked += len(step.buckets)
            self._pass_on(step, plan, route, beside, load)
        if plan and plan[0].bucket.flat.is_cuda:  # an answer means that all work is done
            torch.cuda.current_stream().synchronize()
        beside.gather_or_raise(lanes.failed or failed, None)
        self._lanes = None
        self._buffer.release()
        self._given.release()
        by_shares = sum(len(step.buckets) for step in route.steps if step.shared)
        by_cuts = sum(arrival.within is not None for arrival in route.arrivals)
        parts = [f"each host's part of {by_cuts} of {len(plan)} buckets"] if by_cuts else []
        parts += [f"each rank's share of {by_shares} of {len(plan)} buckets"] if by_shares else []
        return min(reports - {RECORDED}, default=", ".join([RECORDED, *parts]))

    def _pass_on(
        self,
        step: ExchangeStep,
        plan: Sequence[PlannedBucket],
        route: Route,
        beside: EngineRankGroup,
        load: Callable[[ReceivedBucket], None],
    ) -> None:
        """Load the buckets of a step once this rank has them, or its slices."""
        assert self._lanes is not None
        indexes, arrivals = step.buckets, route.arrivals
        mine = [i for i in indexes if arrivals[i].size and arrivals[i].source == beside.rank]
        received = [ReceivedBucket(plan[i].bucket, packed=route.packed.get(i)) for i in indexes]
        if mine and beside.count == 1 and indexes[0] in route.packed:
            self._lanes.take(lambda _: load(received[0]))
            return
        if step.shared:
            exchange = route.exchanges.get(indexes[0])
            if exchange is not None:
                if mine:
                    self._lanes.take(lambda _: exchange.pack())
                exchange.exchange()
        else:
            (index,) = indexes
            size = arrivals[index].size
            arrived = self._buckets.buffer.head(size)
            if mine:
                self._lanes.take(arrived.copy_)
            if size:
                beside.pass_on(arrived, arrivals[index].source)
        for each in received:
            load(each)


def join(updater: Any, request: JoinRelayGroup) -> Answer:
    """Join a sender's group if this rank receives from it. Raises RuntimeError on every rank of the engine if one
    fails."""
    place, group, joined, message = ranks(), request.group, True, ""
    receives = request.sender % place.near.count == place.near.rank and request.machine in (None, place.machine)
    if receives:  # one rank on each host joins, or the one on this host; SGLang adds the rank within the engine
        own = group.rank + (place.machine if request.machine is None else 0) - updater.tp_rank
        joined, message = updater.init_weights_update_group(
            group.host, group.port, own, group.world_size, group.name, group.backend
        )
    place.whole.gather_or_raise("" if joined else message, None)
    return Answer()


def receive(
    updater: Any, sync: RelaySync, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]]
) -> RelayedBucket:
    """Receive, pass on and load a whole sync. Raises RuntimeError on every rank of the engine if one fails."""
    if id(updater) not in _RELAYS:
        _RELAYS[id(updater)] = Relay(
            buckets_of(updater), updater.load_weights_from_distributed, updater.device,
            lambda buckets: fitting(updater.get_model(), buckets),
        )  # fmt: skip
    loaded = _RELAYS[id(updater)].obey(sync, names, dtypes, shapes, updater._model_update_group, ranks())
    return RelayedBucket(id(updater), loaded)


def load(updater: Any, relayed: RelayedBucket) -> tuple[bool, str]:
    """SGLang's answer for a sync that was loaded on reception."""
    if relayed.updater != id(updater):
        return False, "weights.transport relay does not support draft models: set weights.transport: broadcast"
    return True, encode(relayed.loaded)
