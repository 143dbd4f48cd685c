"""The engine's side of `relay` if ranks receive only their shares, over real process groups: two senders, an engine of
three ranks, which hold rows, columns, whole tensors and their own experts.

The ranks run the function called by SGLang's hooks (`Relay.obey`), and load by recorded copies; models are small.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mslime.config.base import NOT_ARRIVED
from mslime.engine_plugin.copy_plan import ReceivedBucket, buckets_of, fitting, load
from mslime.engine_plugin.engine_ranks import EngineRankGroup, EngineRanks
from mslime.engine_plugin.relay import Relay
from mslime.engine_plugin.wire import RelaySync
from tests.engines.megatron_ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

RANKS = 3
BUCKETS = (
    (0, ("rows0", "columns0", "norm0")), (1, ("rows1", "columns1")), (0, ("whole0",)), (1, ("expert0", "expert1")),
    (0, ("expert2", "expert3", "expert4", "expert5")), (1, ("summed0", "rows2")), (1, ("columns2", "norm1")),
    (0, ("rows3",)),
)  # fmt: skip
"""Of each bucket its sender, and its tensors."""
WHOLE = {2, 5}
"""Buckets that go to all ranks as a whole: every rank keeps all of it, or the model loads it by more than copies."""
SHAPES = {"rows": (9, 50), "columns": (40, 9), "norm": (7,), "whole": (30, 10), "expert": (12, 20), "summed": (3, 3)}


LOST = 7
"""The version in which a sender dies."""


def shape(name: str) -> tuple[int, ...]:
    return SHAPES[name[:-1]]


def value(name: str, version: int) -> torch.Tensor:
    start = 1000 * version + sum(map(ord, name))
    return torch.arange(torch.Size(shape(name)).numel(), dtype=torch.float32).add_(start).view(shape(name))


class FakeModel(torch.nn.Module):
    """Tensors of one rank of `ranks`."""

    def __init__(self, rank: int, ranks: int = RANKS) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        for name in (name for _, names in BUCKETS for name in names):
            if (part := self.part(name, torch.zeros(shape(name)))) is not None:
                self.register_parameter(name, torch.nn.Parameter(part.clone()))

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if name.startswith("rows"):
            return tensor.tensor_split(self.ranks)[self.rank]
        if name.startswith("columns"):
            return tensor.tensor_split(self.ranks, 1)[self.rank]
        if name.startswith("expert"):
            return tensor.T if int(name[-1]) % self.ranks == self.rank else None
        return tensor

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in named:
                part = self.part(name, tensor)
                if part is None:
                    continue
                if name.startswith("summed"):
                    getattr(self, name).data.zero_().add_(part)
                else:
                    getattr(self, name).data.copy_(part)


class FakeUpdater:
    """As much of SGLang's updater as loading needs."""

    device = "cpu"

    def __init__(self, rank: int, ranks: int = RANKS) -> None:
        self.model, self.loaded = FakeModel(rank, ranks), 0

    def get_model(self) -> FakeModel:
        return self.model

    def _assert_weight_cache_inactive(self, what: str) -> None: ...

    def load(self, received: ReceivedBucket) -> tuple[bool, str]:
        return load(self._by_the_model, self, received)

    def _by_the_model(self, _: Any, named: list[tuple[str, torch.Tensor]]) -> tuple[bool, str]:
        self.loaded += 1
        self.model.load_weights(named)
        return True, "loaded"


class Engine:
    """One rank of it."""

    def __init__(self, rank: int, lanes: list[Any], group: Any) -> None:
        self.rank, self.updater = rank, FakeUpdater(rank)
        self.rooms: list[Any] = []  # kept, so that another one is another object
        near = EngineRankGroup(rank, RANKS, group, group)
        self.place, self.groups = EngineRanks(near, near), {f"lane{i}": lane for i, lane in enumerate(lanes)}
        self.relay = Relay(
            buckets_of(self.updater), self.updater.load, "cpu", lambda buckets: fitting(self.updater.model, buckets)
        )

    def sync(self, version: int, plan_is_known: bool) -> dict[str, Any]:
        """Result of a sync."""
        names = [name for _, names in BUCKETS for name in names]
        news = ([], [], []) if plan_is_known else (names, ["float32"] * len(names), [shape(name) for name in names])
        senders, counts = tuple((s,) for s, _ in BUCKETS), tuple(len(names) for _, names in BUCKETS)
        known = ((), ()) if plan_is_known else (senders, counts)
        self.updater.loaded = 0
        order = RelaySync(f"sync {version}", "plan", ("lane0", "lane1"), *known)
        try:
            said = self.relay.obey(order, *news, self.groups, self.place).how
        except RuntimeError as error:
            said = str(error)
        buckets_of(self.updater).release()
        self.rooms.append(self.relay._buffer)
        route = self.relay._route
        assert route is not None
        expected = FakeModel(self.rank)
        expected.load_weights((name, value(name, version)) for name in names)
        pairs = zip(self.updater.model.named_parameters(), expected.parameters(), strict=True)
        wrong = [name for (name, held), sent in pairs if not torch.equal(held, sent)]
        return {
            "said": said, "wrong": wrong, "by_the_model": self.updater.loaded,
            "steps": [(step.buckets, step.shared) for step in route.steps],
            "takes": sum(each.takes for each in route.exchanges.values()),
            "gives": sum(each.gives for each in route.exchanges.values()),
            "same_room": len(set(map(id, self.rooms[-2:]))) == 1,
            "memory": self.relay._buffer.bytes + self.relay._given.bytes + buckets_of(self.updater).buffer.bytes,
        }  # fmt: skip


def send(rank: int, lane: Any, version: int, until: int = len(BUCKETS)) -> None:
    for sender, names in BUCKETS[:until]:
        if sender == rank:
            flat = torch.cat([value(name, version).flatten() for name in names])
            dist.broadcast(flat, group=lane, group_src=0, async_op=True).wait(timedelta(seconds=30))


def work(rank: int, world_size: int, init_method: str) -> list[dict[str, Any]]:
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    lanes, later = ([dist.new_group([0, 2]), dist.new_group([1, 3])] for _ in range(2))
    group = dist.new_group([2, 3, 4])
    if rank < 2:
        for version in (1, 2, 3, 4, 5, 6):
            send(rank, lanes[rank], version)
        dist.barrier()
        # Sender 1 is gone in the middle of a sync, and the other one sends nothing more, but stays.
        send(rank, lanes[rank], LOST, until=4 if rank == 1 else 5)
        if rank == 1:
            dist.destroy_process_group(lanes.pop())  # connections are closed when nobody holds it
        dist.barrier()
        send(rank, later[rank], 8)
        return []
    engine = Engine(rank - 2, lanes, group)
    found = [engine.sync(1, plan_is_known=False), *(engine.sync(version, plan_is_known=True) for version in (2, 3))]
    if engine.rank == 1:  # its parameters are elsewhere now
        rows = engine.updater.model.get_parameter("rows0")
        rows.data = rows.data.clone()
    found += [engine.sync(version, plan_is_known=True) for version in (4, 5, 6)]
    dist.barrier()
    found.append(engine.sync(LOST, plan_is_known=True))
    dist.barrier()
    engine.groups = {f"lane{i}": lane for i, lane in enumerate(later)}
    found.append(engine.sync(8, plan_is_known=True))
    return found


@pytest.fixture(scope="module")
def ranks() -> list[list[dict[str, Any]]]:
    return run_ranks(work, 2 + RANKS, deadline_s=100)[2:]


def test_every_rank_has_its_part_of_every_version(ranks: list[list[dict[str, Any]]]) -> None:
    whole = [sync for rank in ranks for number, sync in enumerate(rank, 1) if number != LOST]
    assert [sync["wrong"] for sync in whole] == [[]] * (7 * RANKS)


def test_ranks_take_shares_once_loading_is_recorded(ranks: list[list[dict[str, Any]]]) -> None:
    whole = [((index,), False) for index in range(len(BUCKETS))]
    shared = [((0, 1), True), ((2,), False), ((3, 4), True), ((5,), False), ((6, 7), True)]
    for rank in ranks:
        assert [sync["steps"] for sync in rank[:3]] == [whole, shared, shared]
        assert rank[1]["by_the_model"] == rank[2]["by_the_model"] == 1  # what it sums


def test_a_bucket_whose_parameters_were_moved_goes_to_all_as_a_whole_once(ranks: list[list[dict[str, Any]]]) -> None:
    moved = [((0,), False), ((1,), True), ((2,), False), ((3, 4), True), ((5,), False), ((6, 7), True)]
    for rank in ranks:
        assert [sync["steps"] for sync in rank[3:6]] == [moved, rank[1]["steps"], rank[1]["steps"]]
    assert [rank[3]["by_the_model"] for rank in ranks] == [1, 2, 1], "and what it sums"


def test_a_sender_that_is_gone_ends_the_sync_on_all_ranks_and_the_next_is_shared_again(
    ranks: list[list[dict[str, Any]]],
) -> None:
    for rank in ranks:
        assert NOT_ARRIVED in rank[LOST - 1]["said"] and rank[LOST - 1]["wrong"]
        assert rank[LOST]["steps"] == rank[1]["steps"]
        # What was on its way when it broke may still be written where it was to be received.
        assert [sync["same_room"] for sync in rank] == [True] * LOST + [False]


def test_shares_of_all_ranks_are_what_they_hold_and_memory_is_given_back(ranks: list[list[dict[str, Any]]]) -> None:
    held = 0
    for number, rank in enumerate(ranks):
        model = FakeModel(number)
        shared = {name for index, (_, names) in enumerate(BUCKETS) if index not in WHOLE for name in names}
        own = sum(param.nbytes for name, param in model.named_parameters() if name in shared)
        assert own <= rank[1]["takes"] < own + 16 * len(BUCKETS)
        held += rank[1]["takes"]
        assert [sync["memory"] for number, sync in enumerate(rank, 1) if number != LOST] == [0] * 7
    assert sum(rank[1]["gives"] for rank in ranks) == held
    assert ranks[2][1]["gives"] == 0  # nobody sends to it
