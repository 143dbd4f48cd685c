"""The engine's side of `relay`, over real process groups: two senders; engines of two ranks, of one, and of four on two
machines.

The ranks run the function called by SGLang's hooks (`Relay.obey`); models are dictionaries.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mslime.config.base import NOT_ARRIVED
from mslime.engine_plugin.copy_plan import ReceivedBucket, RecordedBucket, SyncBuckets
from mslime.engine_plugin.engine_ranks import EngineRankGroup, EngineRanks
from mslime.engine_plugin.relay import Relay
from mslime.engine_plugin.wire import RelaySync
from tests.engines.megatron_ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

SENDERS = (0, 1, 0, 0, 1, 1, 0, 1, 0)
"""Sender of each bucket: not in turns, so lanes have to wait for each other."""
SIZES = (5, 17, 1, 300_000, 9, 2, 120_001, 3, 40)
ENGINES = (((2, 3),), ((4,),), ((5, 6), (7, 8)))
"""Global ranks of each machine of each engine."""
LANES = ((0, 2, 4, 5, 7), (1, 3, 4, 6, 8))
"""Global ranks of each sender's group: itself, and its rank on each machine."""
NAMES, DTYPES, SHAPES = [f"t{i}" for i in range(len(SIZES))], ["float32"] * len(SIZES), [[size] for size in SIZES]


def value(bucket: int, version: int) -> torch.Tensor:
    return torch.arange(SIZES[bucket], dtype=torch.float32) + 1000 * bucket + version


def among(rank: int, members: tuple[int, ...], groups: dict[tuple[int, ...], Any], first: int = 0) -> EngineRankGroup:
    if len(members) == 1:
        return EngineRankGroup(first=first)
    return EngineRankGroup(members.index(rank), len(members), groups[members], groups[members], first)


def nothing_recorded(buckets: Sequence[RecordedBucket]) -> list[None]:
    return [None] * len(buckets)


class Engine:
    """One rank of one."""

    def __init__(self, rank: int, lanes: list[Any], groups: dict[tuple[int, ...], Any]) -> None:
        (machines,) = (machines for machines in ENGINES if any(rank in near for near in machines))
        (machine,) = (number for number, near in enumerate(machines) if rank in near)
        whole = tuple(each for near in machines for each in near)
        first = whole.index(machines[machine][0])
        self.place = EngineRanks(among(rank, whole, groups), among(rank, machines[machine], groups, first), machine)
        self.groups = {f"lane{i}": lanes[i] for i, ranks in enumerate(LANES) if rank in ranks}
        self.relay = Relay(SyncBuckets("cpu"), self.load, "cpu", nothing_recorded)
        self.held: dict[str, torch.Tensor] = {}
        self.order: list[str] = []
        self.refuses = ""

    def load(self, received: ReceivedBucket) -> tuple[bool, str]:
        ((name, tensor),) = received
        self.order.append(name)
        if name == self.refuses:
            return False, f"no {name} today"
        self.held[name] = tensor.clone()
        return True, "loaded"

    def sync(self, version: int, plan_is_known: bool) -> str:
        """Result of a sync."""
        known = ((), ()) if plan_is_known else (tuple((s,) for s in SENDERS), (1,) * len(SENDERS))
        order = RelaySync(f"sync {version}", "plan", ("lane0", "lane1"), *known)
        news = ([], [], []) if plan_is_known else (NAMES, DTYPES, SHAPES)
        said: set[str] = set()
        for _ in range(2):  # the other sender's request is answered without a second sync
            try:
                said.add(self.relay.obey(order, *news, self.groups, self.place).how)
            except RuntimeError as error:
                said.add(str(error))
        (outcome,) = said
        return outcome


def send(rank: int, lane: Any, version: int, until: int = len(SIZES)) -> None:
    dice = random.Random(rank + version)
    for bucket in range(until):
        if SENDERS[bucket] == rank:
            time.sleep(dice.choice([0, 0, 0.05]))
            work = dist.broadcast(value(bucket, version), group=lane, group_src=0, async_op=True)
            work.wait(timedelta(seconds=30))


def work(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    lanes = [dist.new_group(list(ranks), timeout=timedelta(seconds=40)) for ranks in LANES]
    groups = {members: dist.new_group(list(members)) for members in ((2, 3), (5, 6), (7, 8), (5, 6, 7, 8))}
    found: dict[str, Any] = {}
    if rank < 2:
        for version in (1, 2, 3, 4):
            send(rank, lanes[rank], version)
        dist.barrier()
        # Sender 1 is gone in the middle of a sync; the other one sends what it can.
        if rank == 1:
            send(1, lanes[1], 5, until=4)
            dist.destroy_process_group(lanes[1])
        else:
            with pytest.raises(RuntimeError):
                for _ in range(20):
                    send(0, lanes[0], 5)
    else:
        engine = Engine(rank, lanes, groups)
        for version in (1, 2):
            found[f"said {version}"] = engine.sync(version, plan_is_known=version > 1)
            found[f"held {version}"], engine.held = engine.held, {}
        found["order"] = list(engine.order)
        engine.refuses = "t1" if rank in (3, 8) else ""
        found["refused"] = engine.sync(3, plan_is_known=True)
        engine.refuses = ""
        found["again"] = engine.sync(4, plan_is_known=True)
        found["held 4"] = dict(engine.held)
        dist.barrier()
        begin = time.monotonic()
        found["alone"] = engine.sync(5, plan_is_known=True)
        found["seconds"] = time.monotonic() - begin
        another = Relay(SyncBuckets("cpu"), engine.load, "cpu", nothing_recorded)
        for lane in {id(lane): lane for lane in engine.groups.values()}.values():
            dist.destroy_process_group(lane)
        with pytest.raises(RuntimeError, match="does not know the plan"):
            another.obey(RelaySync("s", "other", ("lane0", "lane1")), [], [], [], {}, engine.place)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(work, 9, deadline_s=100)[2:]


def test_all_ranks_load_all_buckets_in_the_order_of_the_plan(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["order"] == NAMES * 2 and {rank["said 1"], rank["said 2"]} == {"loaded"}
        for version in (1, 2, 4):
            held = rank[f"held {version}"]
            assert held.keys() == set(NAMES)
            assert all(torch.equal(held[name], value(i, version)) for i, name in enumerate(NAMES))


def test_a_bucket_that_one_rank_does_not_load_fails_its_engine_and_nobody_else(ranks: list[dict[str, Any]]) -> None:
    said = [*["rank 1: no t1 today"] * 2, "loaded", *["rank 3: no t1 today"] * 4]
    assert [rank["refused"] for rank in ranks] == said
    assert [rank["again"] for rank in ranks] == ["loaded"] * 7


def test_a_sender_that_is_gone_ends_the_sync_at_once_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert NOT_ARRIVED in rank["alone"], rank["alone"]
        assert rank["seconds"] < 20
