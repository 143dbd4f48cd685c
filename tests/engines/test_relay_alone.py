"""The engine's side of `relay` for engines of one rank, over real process groups: two senders.

Once loading is recorded, buckets are loaded directly from their receive buffers while the next one arrives. A bucket
may come in parts, one from each sender.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mslime.engine_plugin.copy_plan import ReceivedBucket, buckets_of, fitting
from mslime.engine_plugin.engine_ranks import EngineRanks
from mslime.engine_plugin.relay import Relay
from mslime.engine_plugin.wire import RelaySync
from tests.engines import test_relay_shares as shares
from tests.engines.megatron_ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

BUCKETS = shares.BUCKETS
SIZES = [sum(4 * torch.Size(shares.shape(name)).numel() for name in names) for _, names in BUCKETS]


class Engine:
    """The one rank of it.

    Attributes:
        beside: of each bucket that was loaded in the last sync, how many were on their way meanwhile.
        rooms: likewise, the bytes of what has arrived and is arriving, and of the buffer for one bucket.
    """

    def __init__(self, lanes: list[Any], without: set[str], parts: bool) -> None:
        self.updater = shares.FakeUpdater(0, 1)
        self.without, self.parts = without, parts
        self.beside, self.rooms = list[int](), list[tuple[int, int]]()
        self.groups = {f"lane{i}": lane for i, lane in enumerate(lanes)}
        self.relay = Relay(
            buckets_of(self.updater), self.load, "cpu", lambda buckets: fitting(self.updater.model, buckets)
        )

    def load(self, received: ReceivedBucket) -> tuple[bool, str]:
        assert self.relay._lanes is not None
        self.beside.append(len(self.relay._lanes._on_the_way))
        self.rooms.append((self.relay._buffer.bytes, buckets_of(self.updater).buffer.bytes))
        return self.updater.load(received)

    def sync(self, version: int, new: bool) -> dict[str, Any]:
        """Result of a sync."""
        self.beside, self.rooms, self.updater.loaded = [], [], 0
        buckets = [(sender, [n for n in names if n not in self.without]) for sender, names in BUCKETS]
        names = [name for _, named in buckets for name in named]
        news = (names, ["float32"] * len(names), [shares.shape(name) for name in names]) if new else ([], [], [])
        known = (
            (tuple(senders_of(s, names, self.parts) for s, names in buckets), tuple(len(named) for _, named in buckets))
            if new
            else ((), ())
        )
        order = RelaySync(f"{version}", "plan", ("lane0", "lane1"), *known)
        said = self.relay.obey(order, *news, self.groups, EngineRanks()).how
        buckets_of(self.updater).release()
        expected = shares.FakeModel(0, 1)
        expected.load_weights((name, shares.value(name, version)) for name in names)
        held = dict(self.updater.model.named_parameters())
        wrong = [name for name, sent in expected.named_parameters() if not torch.equal(held[name], sent)]
        return {
            "said": said, "wrong": wrong, "beside": self.beside, "rooms": set(self.rooms),
            "by_the_model": self.updater.loaded, "left": self.relay._buffer.bytes,
        }  # fmt: skip


def senders_of(sender: int, names: list[str], parts: bool) -> tuple[int, ...]:
    """In parts those send whose halves are whole elements, its sender first."""
    numel = sum(torch.Size(shares.shape(name)).numel() for name in names)
    return (sender, 1 - sender) if parts and numel % 2 == 0 else (sender,)


def send(rank: int, lane: Any, version: int, without: set[str], parts: bool) -> None:
    for sender, all_names in BUCKETS:
        names = [name for name in all_names if name not in without]
        flat = torch.cat([shares.value(name, version).flatten() for name in names])
        senders = senders_of(sender, names, parts)
        if rank in senders:
            dist.broadcast(flat.chunk(len(senders))[senders.index(rank)], group=lane, group_src=0)


def work(rank: int, world_size: int, init_method: str) -> dict[str, list[dict[str, Any]]]:
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    found: dict[str, list[dict[str, Any]]] = {}
    for what, without in (("all recorded", {"summed0"}), ("one is not", set[str]())) * 2:
        parts = what in found
        what += " in parts" * parts
        lanes = [dist.new_group([sender, 2]) for sender in (0, 1)]
        engine = Engine(lanes, without, parts) if rank == 2 else None
        found[what] = []
        for version in (1, 2, 3):
            if engine is None:
                send(rank, lanes[rank], version, without, parts)
            else:
                found[what].append(engine.sync(version, version == 1))
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def syncs() -> dict[str, list[dict[str, Any]]]:
    return run_ranks(work, 3, deadline_s=100)[2]


def test_every_version_is_loaded_whole(syncs: dict[str, list[dict[str, Any]]]) -> None:
    for found in syncs.values():
        assert [sync["wrong"] for sync in found] == [[], [], []]
        assert [sync["left"] for sync in found] == [0, 0, 0]
    for parts in ("", " in parts"):
        assert [sync["by_the_model"] for sync in syncs[f"all recorded{parts}"]] == [len(BUCKETS), 0, 0]
        assert [sync["by_the_model"] for sync in syncs[f"one is not{parts}"]] == [len(BUCKETS), 1, 1]


def test_several_buckets_come_in_parts() -> None:
    assert sum(len(senders_of(sender, [n for n in names if n != "summed0"], True)) > 1 for sender, names in BUCKETS) > 3


@pytest.mark.parametrize("parts", ["", " in parts"])
def test_the_next_bucket_arrives_while_one_is_loaded_once_all_are_recorded(
    parts: str, syncs: dict[str, list[dict[str, Any]]]
) -> None:
    first, *others = syncs[f"all recorded{parts}"]
    assert set(first["beside"]) <= {0, 1}  # it is asked for when the one before is in the buffer
    for sync in others:
        # Those that lie in the room's first and second half; more where several small ones fit.
        assert min(sync["beside"][:-1]) >= 1 and sync["beside"][-1] == 0


@pytest.mark.parametrize("parts", ["", " in parts"])
def test_memory_is_that_of_two_buckets(parts: str, syncs: dict[str, list[dict[str, Any]]]) -> None:
    largest = max(SIZES)
    ((room, buffer),) = syncs[f"all recorded{parts}"][1]["rooms"]
    assert largest < room <= 2 * (largest + 16) and buffer == 0
    for sync in (syncs[f"all recorded{parts}"][0], *syncs[f"one is not{parts}"]):
        ((room, buffer),) = sync["rooms"]
        assert room == buffer == largest
