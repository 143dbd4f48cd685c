"""How the buckets of a plan are handed on within an engine (`rank_slices.steps`), and what a share is."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mslime.config.base import SHARES_AT_MOST
from mslime.engine_plugin.copy_plan import Copies, Homes, RecordedBucket
from mslime.engine_plugin.rank_slices import ElementView, ExchangeStep, RankSlice, rank_slice_of, steps


def share(size: int) -> RankSlice:
    return RankSlice(2, (ElementView(0, (size // 2,), (1,)),))


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[RankSlice | None]]]:
    ranks = draw(st.integers(1, 4))
    buckets = draw(st.integers(0, 12))
    sources = draw(st.lists(st.integers(0, ranks - 1), min_size=buckets, max_size=buckets))
    sizes = draw(st.lists(st.sampled_from([64, 640, 6400]), min_size=buckets, max_size=buckets))
    kinds = ["even", "one", "all", "unknown"]
    shares: list[list[RankSlice | None]] = [[] for _ in range(ranks)]
    for size in sizes:
        kind, owner = draw(st.sampled_from(kinds)), draw(st.integers(0, ranks - 1))
        for rank, mine in enumerate(shares):
            own = {"even": size // ranks, "one": size * (rank == owner), "all": size, "unknown": size}[kind]
            mine.append(None if kind == "unknown" and rank == owner else share(own))
    return sources, sizes, shares


@given(plans())
def test_every_bucket_is_handed_on_once_in_order_and_no_rank_takes_more_than_there_is_room_for(
    plan: tuple[list[int], list[int], list[list[RankSlice | None]]],
) -> None:
    sources, sizes, shares = plan
    found = steps(sources, sizes, shares)
    assert [index for step in found for index in step.buckets] == list(range(len(sizes)))
    for step in found:
        told = [[each[index] for each in shares] for index in step.buckets]
        known = [[mine for mine in of_ranks if mine is not None] for of_ranks in told]
        if not step.shared:
            (index,), (of_ranks,) = step.buckets, known
            several = sum(mine.bytes for mine in of_ranks) > SHARES_AT_MOST * sizes[index]
            assert len(shares) == 1 or len(of_ranks) < len(shares) or several
            continue
        assert all(len(of_ranks) == len(shares) > 1 for of_ranks in known)
        assert len({sources[index] for index in step.buckets}) == len(step.buckets)
        if len(step.buckets) > 1:
            for rank in range(len(shares)):
                assert sum(of_ranks[rank].bytes for of_ranks in known) <= SHARES_AT_MOST * max(sizes)


def test_buckets_of_several_lanes_are_handed_on_at_once_up_to_what_is_larger_or_has_the_same_source() -> None:
    even = [[share(100)] * 6] * 2
    assert steps([0, 1, 0, 0, 1, 0], [200] * 6, even) == [
        ExchangeStep((0, 1), True), ExchangeStep((2,), True), ExchangeStep((3, 4), True), ExchangeStep((5,), True),
    ]  # fmt: skip
    one_takes_all = [[share(200)] * 2, [share(0)] * 2]
    assert steps([0, 1], [200] * 2, one_takes_all) == [ExchangeStep((0,), True), ExchangeStep((1,), True)]
    assert steps([0, 1], [200, 2000], one_takes_all) == [ExchangeStep((0, 1), True)]


def copies(*views: torch.Tensor) -> Copies:
    into = [torch.empty_like(view) for view in views]
    return Copies(into, list(views), Homes(torch.nn.Module(), into))


def test_a_share_is_every_view_and_neighbours_are_one_part() -> None:
    whole = torch.arange(64, dtype=torch.bfloat16)
    flat = whole.view(torch.uint8)
    rows, square = whole[:24], whole[24:60].view(6, 6)
    bucket = RecordedBucket(flat, [("rows", rows), ("square", square)])
    assert rank_slice_of(bucket, copies(rows[4:10], rows[10:12], square[0], square[:, 2:4])) == RankSlice(
        2, (ElementView(4, (8,), (1,)), ElementView(24, (6,), (1,)), ElementView(26, (6, 2), (6, 1)))
    )
    assert rank_slice_of(bucket, copies()) == RankSlice(2, ())
    assert rank_slice_of(bucket, copies(square.T)) == RankSlice(2, (ElementView(24, (6, 6), (1, 6)),))
    # Neighbours that are not in order stay apart: shares are packed in the order of the copies.
    assert rank_slice_of(bucket, copies(rows[10:12], rows[4:10])) == RankSlice(
        2, (ElementView(10, (2,), (1,)), ElementView(4, (6,), (1,)))
    )


def test_a_bucket_of_elements_of_several_sizes_has_no_shares() -> None:
    flat = torch.zeros(16, dtype=torch.uint8)
    bucket = RecordedBucket(flat, [("a", flat[:8].view(torch.float32)), ("b", flat[8:].view(torch.bfloat16))])
    assert rank_slice_of(bucket, copies(flat[:8].view(torch.float32))) is None
