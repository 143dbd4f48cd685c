"""What trainer ranks say to each other over a real gloo group: exchanges, and gathers into place."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mslime.config.errors import WeightSyncError
from mslime.weights import groups, transport_contract
from mslime.weights.buckets import gather
from tests.fixtures.forked import forking, preload

pytestmark = pytest.mark.timeout(120)
RANKS = 3
preload(__name__)


def rank_main(rank: int, store: str, work: Callable[[int], Any], pipe: Connection) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=20)
    )
    dist.barrier()  # nobody leaves while others still meet
    pipe.send(work(rank))
    dist.destroy_process_group()


def on_ranks(work: Callable[[int], Any], directory: Path) -> list[Any]:
    """What `work` returns on each rank."""
    context, found = forking(), list[Any]()
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    store = str(directory / "store")
    ranks = [context.Process(target=rank_main, args=(rank, store, work, pipes[rank][1])) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for mine, _ in pipes:
        assert mine.poll(60)
        found.append(mine.recv())
    for rank in ranks:
        rank.join()
    return found


def exchanged(sizes: tuple[int, ...], rank: int) -> tuple[list[Any], int]:
    """What a rank hears when each says so many bytes, and how many collectives that took."""
    collectives, gathered = list[int](), groups._gathered

    def counted(mine: bytes, size: int, group: dist.ProcessGroup) -> list[bytes]:
        collectives.append(size)
        return gathered(mine, size, group)

    groups._gathered = counted
    said = {"rank": rank, "words": bytes([rank + 1]) * sizes[rank], "nothing": None}
    group = dist.group.WORLD
    assert group is not None
    return groups.exchange(said, group), len(collectives)


def filling_up_to(size: int) -> int:
    """Bytes of words with which what a rank says takes so many in all."""
    frame = len(pickle.dumps({"rank": 1, "words": b"x" * 1000, "nothing": None}, pickle.HIGHEST_PROTOCOL)) - 1000
    return size - groups.LENGTH_BYTES - frame


@pytest.mark.parametrize(
    ("sizes", "collectives"),
    [
        ((0, filling_up_to(2048), 3), 1),
        ((0, filling_up_to(2049), 3), 2),
        ((0, 5, 70), 1),
        ((0, 5, 1900), 1),
        ((3, 100_000, 0), 2),
        ((2048, 2049, 2000), 2),
        ((4096, 0, 10_000), 2),
    ],
    ids=str,
)
def test_every_rank_hears_what_all_say_in_one_collective_where_that_is_little(
    sizes: tuple[int, ...], collectives: int, tmp_path: Path
) -> None:
    everyone = [{"rank": rank, "words": bytes([rank + 1]) * size, "nothing": None} for rank, size in enumerate(sizes)]
    assert on_ranks(partial(exchanged, sizes), tmp_path) == [(everyone, collectives)] * RANKS


def gathered_on(sender: int, rank: int) -> Any:
    bucket = replace(transport_contract._buckets()[0], sender=sender, members=tuple(range(RANKS)))
    flat = torch.arange(1000, dtype=torch.bfloat16) + rank
    found = [gather(bucket, flat, dist.group.WORLD, rank) for _ in range(3)][-1]
    if found is None:
        return None
    neighbours = [part.data_ptr() - found[0].data_ptr() for part in found] == [0, flat.nbytes, 2 * flat.nbytes]
    return [part.float().tolist() for part in found], neighbours


@pytest.mark.parametrize("sender", range(RANKS))
def test_all_members_parts_lie_in_their_order_on_the_sender(sender: int, tmp_path: Path) -> None:
    parts = [(torch.arange(1000, dtype=torch.bfloat16) + rank).float().tolist() for rank in range(RANKS)]
    expected = [(parts, True) if rank == sender else None for rank in range(RANKS)]
    assert on_ranks(partial(gathered_on, sender), tmp_path) == expected


def left_by(gone: int, rank: int) -> str:
    """What a sender says when a member leaves before it gave its part; large enough to be still on its way."""
    bucket = replace(transport_contract._buckets()[0], sender=0, members=tuple(range(RANKS)))
    if rank == gone:
        return ""
    try:
        gather(bucket, torch.zeros(1 << 22), dist.group.WORLD, rank)
    except WeightSyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_is_gone_is_noticed_by_those_that_wait_for_it(gone: int, tmp_path: Path) -> None:
    said = on_ranks(partial(left_by, gone), tmp_path)
    waiting = [0] if gone else [1, 2]
    assert all("a trainer rank is gone or late" in said[rank] for rank in waiting), said
