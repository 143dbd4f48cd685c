"""Inside an SGLang server: each rank receives a part of the buckets, and passes it on to the other ranks.

A plug-in of SGLang 0.5.23 (entry point group `sglang.srt.plugins`), for the engines that mslime starts. SGLang itself
lets every rank receive every bucket, one bucket at a time, so that one sender's network adapter carries all. Here a
sender meets one rank on each machine of each engine, on a lane of their own: sender i the rank i modulo the ranks that
an engine has there. All of these receive at the same time, each from its own senders, and while one bucket is passed on
inside the machine, those after it arrive.

One request stands for a whole sync. All ranks go through the buckets in the order of the plan: the rank on whose lane a
bucket came gives it to the others, and each loads it like any other bucket. Where loading is recorded it gives each of
the others its share alone, and buckets of several lanes are handed on at once (`shares`). A rank asks for its next
bucket as soon as it has given the last one away; whoever waits here waits for one that lies earlier in the plan, or
that is handed on at the same time, so that nobody waits in a circle. Every sender asks every engine, so that
each hears what became of the sync; the first request does the work, the others are told its outcome.
"""

from __future__ import annotations

import json
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from mslime.backends.sglang.recorded import (
    RECORDED,
    Bucket,
    Buckets,
    Buffer,
    Copies,
    Named,
    Received,
    buckets_of,
    fitting,
    release,
)
from mslime.backends.sglang.shares import Route, Share, Step, share_of
from mslime.backends.sglang.siblings import Ranks, Siblings, ranks
from mslime.config.choices import NOT_ARRIVED

PROBE = "mslime-relay?"
"""What an engine is asked to leave to say whether it has this plug-in."""

_LANE, _SYNC = "mslime-lane:", "mslime-relay:"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_RELAYS: dict[int, Relay] = {}
"""By the `id` of SGLang's updater."""


@dataclass(frozen=True)
class Order:
    """What a sender asks for: all buckets of a sync.

    Attributes:
        sync: names this sync among all; the same from every sender.
        plan: names the buckets: their tensors come with the first request, and are known from then on.
        lanes: names of the process groups of senders, by sender.
        senders: of each bucket, its sender; empty where the plan is known.
        tensors: of each bucket, how many; likewise.
    """

    sync: str
    plan: str
    lanes: tuple[str, ...]
    senders: tuple[int, ...] = ()
    tensors: tuple[int, ...] = ()

    def as_group(self) -> str:
        """What an update names as its group."""
        return _SYNC + json.dumps(asdict(self), separators=(",", ":"))


def parse_order(group: str) -> Order | None:
    """What an update's group asks for; None where it is another group."""
    if not group.startswith(_SYNC):
        return None
    said = json.loads(group.removeprefix(_SYNC))
    return Order(said["sync"], said["plan"], *(tuple(said[name]) for name in ("lanes", "senders", "tensors")))


def lane_to_join(sender: int, name: str) -> str:
    """What an engine is asked to join so that one of its ranks joins the process group `name`."""
    return f"{_LANE}{sender}:{name}"


def parse_lane(group: str) -> tuple[int, str] | None:
    """The sender and the name of a lane; None where it is another group."""
    if not group.startswith(_LANE):
        return None
    sender, _, name = group.removeprefix(_LANE).partition(":")
    return int(sender), name


def install() -> None:
    """Called by SGLang in each of its processes. Where it fails, SGLang logs it, and a sender is told by `PROBE`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_UPDATER}.init_weights_update_group", _join, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.destroy_weights_update_group", _leave, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.receive_weights_from_distributed", _receive, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.load_weights_from_distributed", _load, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.end_weight_update", release, HookType.AROUND)


class Relayed(list[tuple[str, torch.Tensor]]):
    """Nothing is left to load: a whole sync has been.

    Attributes:
        updater: `id` of the one that loaded it.
        message: what is said of that.
    """

    def __init__(self, updater: int, message: str) -> None:
        super().__init__()
        self.updater, self.message = updater, message


@dataclass(frozen=True)
class Sent:
    """A bucket of a plan, and the number of its sender."""

    sender: int
    bucket: Bucket


class Lanes:
    """What one rank receives, one bucket after the other: the next is on its way as soon as the last is taken.

    Args:
        sent: the rank's buckets, in the order of the plan.
        groups: of the senders.
        room: [bytes] uint8, for the largest of them.

    Attributes:
        failed: why nothing comes any more; empty while all is well.
    """

    def __init__(self, sent: Sequence[Sent], groups: Mapping[int, dist.ProcessGroup], room: torch.Tensor) -> None:
        self._room = room
        self._coming, self._groups = deque(sent), groups
        self._work: dist.Work | None = None
        self.failed = ""
        self._ask()

    def take(self, use: Callable[[torch.Tensor], object]) -> None:
        """Let `use` read the next of the buckets, [bytes] uint8, and ask for the one after it."""
        if self.failed:
            return
        try:
            assert self._work is not None, "no bucket is left"
            self._work.wait()
            use(self._room)
        except RuntimeError as error:
            self.failed = f"{NOT_ARRIVED}: {error}"
        else:
            self._ask()

    def _ask(self) -> None:
        self._work = None
        if self._coming:
            sent = self._coming.popleft()
            room = self._room[: sent.bucket.flat.numel()]
            try:
                self._work = dist.broadcast(room, group=self._groups[sent.sender], group_src=0, async_op=True)
            except RuntimeError as error:
                self.failed = f"{NOT_ARRIVED}: {error}"


class Relay:
    """One rank's part in all syncs.

    Args:
        buckets: where they are put together.
        load: makes the model load a bucket; whether it did, and what is said of it.
        device: of the buckets.
        copies: of each of some buckets, those by which the model would load it; None where it has to do it itself.
    """

    def __init__(
        self, buckets: Buckets, load: Callable[[Received], tuple[bool, str]], device: Any,
        copies: Callable[[Sequence[Bucket]], Sequence[Copies | None]],
    ) -> None:  # fmt: skip
        self._buckets, self._load, self._device, self._copies = buckets, load, device, copies
        self._plans: dict[str, list[Sent]] = {}
        self._done: tuple[str, str, str] = ("", "", "")
        self._lanes: Lanes | None = None
        self._room, self._given = Buffer(device), Buffer(device)
        self._known: list[Copies | None] = []
        self._route: Route | None = None

    def obey(
        self, order: Order, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]],
        groups: Mapping[str, dist.ProcessGroup], place: Ranks,
    ) -> str:  # fmt: skip
        """Receive, pass on and load a whole sync, once.

        Args:
            names, dtypes, shapes: of the tensors of all buckets; empty where the plan is known.
            groups: that this rank has joined, by name.
            place: among the ranks of this engine, which are all told to do the same.

        Returns:
            What is said of it.

        Raises:
            RuntimeError: a bucket did not arrive, or was not loaded, on this rank or another one.
        """
        if self._done[0] != order.sync:
            message, failed = "", ""
            try:
                plan = self._begin(order, names, dtypes, shapes, groups, place.near)
                message = self._relay(plan, self._way(plan, place.near), place.near)
            except RuntimeError as error:
                failed = str(error)
            failed = place.whole.first_failure(failed)
            self._done = order.sync, message, failed
        _, message, failed = self._done
        if failed:
            raise RuntimeError(failed)
        return message

    def _begin(
        self, order: Order, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]],
        groups: Mapping[str, dist.ProcessGroup], beside: Siblings,
    ) -> list[Sent]:  # fmt: skip
        """Collective among the ranks beside this one. Raises RuntimeError on all of them when one cannot."""
        failed, plan = "", list[Sent]()
        try:
            plan = self._plan(order, names, dtypes, shapes)
            mine = [sent for sent in plan if sent.sender % beside.count == beside.rank]
            by_sender = {sent.sender: groups[order.lanes[sent.sender]] for sent in mine}
            self._buckets.buffer.make_room(max((sent.bucket.flat.numel() for sent in plan), default=0))
            if self._lanes is not None:  # of a sync that failed: what is on its way may be written into their memory
                self._room, self._route = Buffer(self._device), None
            largest = max((sent.bucket.flat.numel() for sent in mine), default=0)
            self._lanes = Lanes(mine, by_sender, self._room.head(largest))
        except (RuntimeError, LookupError) as error:
            failed = f"{type(error).__name__}: {error}"
        if failed := beside.first_failure(failed):
            raise RuntimeError(failed)
        return plan

    def _way(self, plan: Sequence[Sent], beside: Siblings) -> Route:
        """How buckets are handed on: another way where one of the ranks has other copies than before.

        Collective like `_begin`, and raises likewise.
        """
        buckets, failed = [sent.bucket for sent in plan], ""
        copies, shares = list[Copies | None](), list[Share | None]()
        try:
            copies += self._copies(buckets) if beside.count > 1 else [None] * len(buckets)
            pairs = zip(buckets, copies, strict=True)
            shares += [None if known is None else share_of(bucket, known) for bucket, known in pairs]
        except Exception as error:  # the other ranks wait for this one
            failed = f"{type(error).__name__}: {error}"
        if failed := beside.first_failure(failed):
            raise RuntimeError(failed)
        same = self._route is not None and all(map(operator.is_, copies, self._known))
        try:
            if not all(beside.gathered(same)):
                sources = [sent.sender % beside.count for sent in plan]
                self._known, told = copies, beside.gathered(shares)
                room, given, taken = self._room, self._given, self._buckets.buffer
                self._route = Route(buckets, sources, told, copies, beside, room, given, taken)
            assert self._route is not None
            self._route.make_room()
        except RuntimeError as error:
            failed = f"{type(error).__name__}: {error}"
        if failed := beside.first_failure(failed):
            raise RuntimeError(failed)
        assert self._route is not None
        return self._route

    def _plan(
        self, order: Order, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]]
    ) -> list[Sent]:
        if order.senders:
            spans = [slice(*span) for span in pairwise(accumulate(order.tensors, initial=0))]
            buckets = [self._buckets.of(names[span], dtypes[span], shapes[span]) for span in spans]
            self._route = None
            self._plans = {order.plan: [Sent(*each) for each in zip(order.senders, buckets, strict=True)]}
        elif order.plan not in self._plans:
            raise RuntimeError("this engine does not know the plan of the buckets")
        return self._plans[order.plan]

    def _relay(self, plan: Sequence[Sent], route: Route, beside: Siblings) -> str:
        """A rank that could not load a bucket still passes on those that come, so that no sender waits for it."""
        assert self._lanes is not None
        lanes, said, failed, unheard = self._lanes, set[str](), "", beside.count
        for step in route.steps:
            if unheard >= beside.count:
                unheard = 0
                if broken := beside.first_failure(lanes.failed):
                    raise RuntimeError(broken)
            unheard += len(step.buckets)
            for received in self._handed_on(step, plan, route, beside):
                if not failed and not lanes.failed:
                    loaded, words = self._loaded(received)
                    said.add(words)
                    failed = "" if loaded else words
        if plan and plan[0].bucket.flat.is_cuda:  # an answer says that all is done
            torch.cuda.current_stream().synchronize()
        if failed := beside.first_failure(lanes.failed or failed):
            raise RuntimeError(failed)
        self._lanes = None
        self._room.release()
        self._given.release()
        by_shares = sum(len(step.buckets) for step in route.steps if step.shared)
        recorded = f"{RECORDED}, of {by_shares} of {len(plan)} buckets each rank's share" if by_shares else RECORDED
        return min(said - {RECORDED}, default=recorded)

    def _handed_on(self, step: Step, plan: Sequence[Sent], route: Route, beside: Siblings) -> list[Received]:
        """The buckets of a step, when this rank has them, or its shares."""
        assert self._lanes is not None
        sents = [plan[index] for index in step.buckets]
        mine = [sent for sent in sents if sent.sender % beside.count == beside.rank]
        if step.shared:
            exchange = route.exchanges[step.buckets[0]]
            if mine:
                self._lanes.take(lambda _: exchange.pack())
            exchange.exchange()
            pairs = zip(sents, exchange.arrived, strict=True)
            return [Received(sent.bucket, packed=packed) for sent, packed in pairs]
        (sent,) = sents
        flat = sent.bucket.flat
        if mine:
            self._lanes.take(lambda arrived: flat.copy_(arrived[: len(flat)]))
        beside.pass_on(flat, sent.sender % beside.count)
        return [Received(sent.bucket)]

    def _loaded(self, received: Received) -> tuple[bool, str]:
        try:
            return self._load(received)
        except Exception as error:  # the other ranks go on, and hear of it at the end
            return False, f"{type(error).__name__}: {error}"


def _join(
    original: Callable[..., tuple[bool, str]], self: Any, master_address: Any, master_port: Any, rank_offset: int,
    world_size: int, group_name: str, backend: str = "nccl",
) -> tuple[bool, str]:  # fmt: skip
    lane = parse_lane(group_name)
    if lane is None:
        return original(self, master_address, master_port, rank_offset, world_size, group_name, backend)
    (sender, name), place = lane, ranks()
    joined, said = True, "done"
    if sender % place.near.count == place.near.rank:
        # One of each machine joins. SGLang adds the rank within the engine.
        own = rank_offset + place.machine - self.tp_rank
        joined, said = original(self, master_address, master_port, own, world_size, name, backend)
    failed = place.whole.first_failure("" if joined else said)
    return not failed, failed or said


def _leave(original: Callable[..., tuple[bool, str]], self: Any, group_name: str) -> tuple[bool, str]:
    return (True, "done") if group_name == PROBE else original(self, group_name)


def _receive(
    original: Callable[..., Named], self: Any, *, names: Any, dtypes: Any, shapes: Any, group_name: str,
    load_format: str | None = None,
) -> Named:  # fmt: skip
    order = parse_order(group_name)
    if order is None:
        return original(self, names=names, dtypes=dtypes, shapes=shapes, group_name=group_name, load_format=load_format)
    if id(self) not in _RELAYS:
        _RELAYS[id(self)] = Relay(
            buckets_of(self), self.load_weights_from_distributed, self.device,
            lambda buckets: fitting(self.get_model(), buckets),
        )  # fmt: skip
    said = _RELAYS[id(self)].obey(order, names, dtypes, shapes, self._model_update_group, ranks())
    return Relayed(id(self), said)


def _load(original: Callable[..., tuple[bool, str]], self: Any, named_tensors: Named) -> tuple[bool, str]:
    if not isinstance(named_tensors, Relayed):
        return original(self, named_tensors)
    if named_tensors.updater != id(self):
        return False, "weights.transport relay loads no draft model: set weights.transport broadcast"
    return True, named_tensors.message
