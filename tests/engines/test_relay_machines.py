"""The engine's side of `relay` if senders send each machine only its share, over real process groups: two senders; an
engine of two machines of two ranks, and one of three machines of one rank.

The ranks run the function called by SGLang's hooks (`Relay.obey`), and load by recorded copies. Senders pack as the
transport does, from the engines' answers.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mslime.engine_plugin.copy_plan import buckets_of, fitting
from mslime.engine_plugin.engine_ranks import EngineRankGroup, EngineRanks
from mslime.engine_plugin.relay import Relay
from mslime.engine_plugin.wire import HostSlices, Loaded, RelaySync, machine_lane
from mslime.weights.relay import pack_cut
from tests.engines.megatron_ranks import run_ranks
from tests.engines.test_relay_shares import BUCKETS, FakeModel, FakeUpdater, shape, value

pytestmark = pytest.mark.timeout(150)

ENGINES = (((2, 3), (4, 5)), ((6,), (7,), (8,)))
"""Global ranks of each machine of each engine."""
NAMES = [name for _, names in BUCKETS for name in names]
WHOLE = {2, 5}
"""Buckets that go to all machines as a whole: every rank keeps all of it, or the model loads it by more than copies."""
CONNECTIONS, MOVED = ((1, 2, 3, 4), (6, 7)), 5
"""Versions of each connection; the one for which an engine's parameters have moved, which senders do not send."""

Lanes = dict[str, Any]


def make_lanes(connection: int) -> list[dict[int, Lanes]]:
    """Of each engine, by sender: the groups by name. Every rank makes all of them."""
    found: list[dict[int, Lanes]] = []
    for number, machines in enumerate(ENGINES):
        of_senders: dict[int, Lanes] = {}
        for sender in (0, 1):
            ranks = [near[sender % len(near)] for near in machines]
            name = f"{connection}-{number}-lane{sender}"
            groups = {name: [sender, *ranks]}
            groups |= {machine_lane(name, m): [sender, rank] for m, rank in enumerate(ranks)}
            of_senders[sender] = {key: dist.new_group(members) for key, members in groups.items()}
        found.append(of_senders)
    return found


class Engine:
    """One rank of one."""

    def __init__(self, rank: int, groups: dict[tuple[int, ...], Any]) -> None:
        (self.number,) = (n for n, machines in enumerate(ENGINES) if any(rank in near for near in machines))
        machines = ENGINES[self.number]
        (machine,) = (m for m, near in enumerate(machines) if rank in near)
        whole, near = tuple(each for near in machines for each in near), machines[machine]
        self.rank, self.ranks = whole.index(rank), len(whole)
        among = groups.get(near)
        beside = EngineRankGroup(near.index(rank), len(near), among, among, whole.index(near[0]))
        self.place = EngineRanks(EngineRankGroup(self.rank, len(whole), groups[whole], groups[whole]), beside, machine)
        self.updater = FakeUpdater(self.rank, self.ranks)
        self.relay = Relay(
            buckets_of(self.updater), self.updater.load, "cpu", lambda buckets: fitting(self.updater.model, buckets)
        )

    def sync(self, version: int, lanes: list[dict[int, Lanes]], new: bool, cuts: str) -> dict[str, Any]:
        """Result of a sync."""
        senders, counts = tuple((s,) for s, _ in BUCKETS), tuple(len(names) for _, names in BUCKETS)
        names = tuple(next(iter(of_sender)) for of_sender in lanes[self.number].values())
        order = RelaySync(f"{version}", "plan", names, senders if new else (), counts if new else (), cuts)
        news = (NAMES, ["float32"] * len(NAMES), [shape(name) for name in NAMES]) if new else ([], [], [])
        groups = {name: group for of_sender in lanes[self.number].values() for name, group in of_sender.items()}
        try:
            loaded = self.relay.obey(order, *news, groups, self.place)
        except RuntimeError as error:
            loaded = Loaded(str(error))
        buckets_of(self.updater).release()
        expected = FakeModel(self.rank, self.ranks)
        expected.load_weights((name, value(name, version)) for name in NAMES)
        pairs = zip(self.updater.model.named_parameters(), expected.parameters(), strict=True)
        route = self.relay._route
        return {
            "said": loaded.how, "cuts": loaded.cuts,
            "wrong": [name for (name, held), sent in pairs if not torch.equal(held, sent)],
            "steps": [(step.buckets, step.shared) for step in route.steps] if route is not None else [],
            "arrive": [arrival.size for arrival in route.arrivals] if route is not None else [],
            "memory": self.relay._buffer.bytes + self.relay._given.bytes + buckets_of(self.updater).buffer.bytes,
        }  # fmt: skip


def send(sender: int, version: int, lanes: list[dict[int, Lanes]], cuts: list[HostSlices | None]) -> None:
    for index, (_, names) in ((i, each) for i, each in enumerate(BUCKETS) if each[0] == sender):
        flat, works = torch.cat([value(name, version).flatten() for name in names]), list[Any]()
        for of_engine, each in zip(lanes, cuts, strict=True):
            name = next(iter(of_engine[sender]))
            kept = each.buckets[index] if each is not None else None
            parcels = [(name, flat)]
            if kept is not None:
                parcels = [(machine_lane(name, m), pack_cut(flat, cut)) for m, cut in enumerate(kept) if cut]
            works += [dist.broadcast(part, group=of_engine[sender][lane], group_src=0, async_op=True)
                      for lane, part in parcels]  # fmt: skip
        for work in works:
            work.wait(timedelta(seconds=60))


def heard(engine: Engine | None, found: list[dict[str, Any]], cuts: list[HostSlices | None]) -> None:
    """Answers of the first rank of each engine, which all senders receive; changes `cuts`."""
    for number, machines in enumerate(ENGINES):
        news = [found[-1]["cuts"] if engine is not None and engine.number == number else None]
        dist.broadcast_object_list(news, src=machines[0][0])
        cuts[number] = news[0] or cuts[number]


def work(rank: int, world_size: int, init_method: str) -> list[dict[str, Any]]:
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    all_lanes = [make_lanes(connection) for connection in range(len(CONNECTIONS))]
    groups = {members: dist.new_group(list(members)) for members in ((2, 3), (4, 5), (2, 3, 4, 5), (6, 7, 8))}
    engine, found = Engine(rank, groups) if rank > 1 else None, list[dict[str, Any]]()
    for versions, lanes in zip(CONNECTIONS, all_lanes, strict=True):
        cuts: list[HostSlices | None] = [None, None]
        for version in versions:
            if engine is None:
                send(rank, version, lanes, cuts)
            else:
                of_mine = cuts[engine.number]
                found.append(engine.sync(version, lanes, version == versions[0], of_mine.name if of_mine else ""))
            heard(engine, found, cuts)
        if versions is CONNECTIONS[0] and engine is not None:
            if rank == 4:  # its parameters are elsewhere now
                rows = engine.updater.model.get_parameter("rows0")
                rows.data = rows.data.clone()
            if engine.number == 0:
                of_mine = cuts[0]
                assert of_mine is not None
                found.append(engine.sync(MOVED, lanes, False, of_mine.name))
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[list[dict[str, Any]]]:
    return run_ranks(work, 9, deadline_s=120)[2:]


def test_every_rank_has_its_part_of_every_version(ranks: list[list[dict[str, Any]]]) -> None:
    for number, rank in enumerate(ranks):
        versions = [1, 2, 3, 4, *([MOVED] if number < 4 else []), 6, 7]
        assert [
            (v, sync["wrong"]) for v, sync in zip(versions, rank, strict=True) if v != MOVED and sync["wrong"]
        ] == []
        assert [sync["memory"] for v, sync in zip(versions, rank, strict=True) if v != MOVED] == [0] * 6


def test_machines_receive_what_they_keep_once_loading_is_recorded(ranks: list[list[dict[str, Any]]]) -> None:
    sizes = [4 * sum(torch.Size(shape(name)).numel() for name in names) for _, names in BUCKETS]
    for rank in ranks:
        assert rank[0]["arrive"] == rank[1]["arrive"] == sizes
        assert all(rank[2]["arrive"][index] == sizes[index] for index in WHOLE)
        assert all(rank[2]["arrive"][index] < sizes[index] for index in (0, 1, 4, 6, 7))
    for machines in (ranks[0], ranks[2]), (ranks[4], ranks[5], ranks[6]):
        together = [sum(each[2]["arrive"][index] for each in machines) for index in range(len(sizes))]
        # All that is sent more than once, beside what goes as a whole, is the norm of 7 elements.
        extra = [(len(machines) - 1) * 28 if "norm" in "".join(names) else 0 for _, names in BUCKETS]
        assert [sent for index, sent in enumerate(together) if index not in WHOLE] == [
            size + more for index, (size, more) in enumerate(zip(sizes, extra, strict=True)) if index not in WHOLE
        ]
        # An expert's machine receives it, and no other: that of experts 0 and 1 nothing of it elsewhere.
        assert min(each[2]["arrive"][3] for each in machines) == 0


def test_ranks_of_a_machine_give_each_other_shares_of_what_the_machine_received(
    ranks: list[list[dict[str, Any]]],
) -> None:
    for rank in ranks[:4]:
        assert [index for buckets, _ in rank[2]["steps"] for index in buckets] == list(range(len(BUCKETS)))
        assert {index for buckets, shared in rank[2]["steps"] if not shared for index in buckets} == WHOLE
        assert "each host's part of 6 of 8 buckets, each rank's share of 6 of 8 buckets" in rank[3]["said"] or (
            "own loader" in rank[3]["said"]
        )
    for rank in ranks[4:]:
        assert all(not shared for _, shared in rank[2]["steps"])


def test_an_engine_says_what_its_machines_keep_when_that_is_news(ranks: list[list[dict[str, Any]]]) -> None:
    for rank in ranks[:4]:
        assert [sync["cuts"] is not None for sync in rank] == [False, True, False, False, False, True, True]
        first, again, all_again = (rank[index]["cuts"] for index in (1, 5, 6))
        assert first is not None and again is not None and all_again is not None
        assert again.buckets[0] is None and again.buckets[1:] == first.buckets[1:], "one rank records it again"
        assert all_again == first
    for rank in ranks[4:]:
        assert [sync["cuts"] is not None for sync in rank] == [False, True, False, False, True, False]


def test_an_engine_whose_parameters_were_moved_refuses_before_anything_is_loaded(
    ranks: list[list[dict[str, Any]]],
) -> None:
    for rank in ranks[:4]:
        assert rank[4]["said"].startswith("rank 2: RuntimeError: the model's parameters were moved"), rank[4]["said"]
