"""What machines and ranks of an engine keep of a bucket, how senders pack it, and how ranks hand it on."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from mslime.config.base import SHARES_AT_MOST
from mslime.engine_plugin.copy_plan import BucketCopies, RecordedBucket
from mslime.engine_plugin.relay import ArrivalSlot, arrival_slots
from mslime.engine_plugin.slices import (
    ElementView,
    ExchangeStep,
    PackedSlice,
    RankSlice,
    host_slice_bytes,
    host_slice_of,
    host_slices_of,
    rank_slice_of,
    steps,
)
from mslime.engine_plugin.wire import HostSlices, Loaded, Slice, decode, encode
from mslime.weights.relay import pack_cut

ROWS, COLUMNS = 12, 10
WHOLE = torch.arange(7 + ROWS * COLUMNS + 4 * 3 * 5 + 9)
"""A vector, a matrix, three stacked ones, and another vector, one after the other."""
MATRIX = WHOLE[7 : 7 + ROWS * COLUMNS].view(ROWS, COLUMNS)
STACK = WHOLE[7 + ROWS * COLUMNS :][: 4 * 3 * 5].view(4, 3, 5)


def part(view: torch.Tensor) -> ElementView:
    return ElementView(int(view.storage_offset()), tuple(view.shape), view.stride())


def share(*views: torch.Tensor) -> RankSlice:
    return RankSlice(8, tuple(map(part, views)))


def spans(most: int) -> st.SearchStrategy[slice]:
    return st.tuples(st.integers(0, most - 1), st.integers(1, most)).map(lambda p: slice(p[0], min(most, p[0] + p[1])))


VIEWS = st.one_of(
    spans(len(WHOLE)).map(lambda span: WHOLE[span]),
    spans(ROWS).map(lambda span: MATRIX[span]),
    spans(COLUMNS).map(lambda span: MATRIX[:, span]),
    spans(COLUMNS).map(lambda span: MATRIX[:, span].T),
    st.tuples(spans(ROWS), spans(COLUMNS)).map(lambda two: MATRIX[two[0], two[1]]),
    spans(3).map(lambda span: STACK[:, span]),
    spans(5).map(lambda span: STACK[..., span].transpose(0, 2)),
    st.integers(0, 4).map(lambda i: STACK[:, :, i]),
    st.integers(0, 11).map(lambda row: MATRIX[row, ::3]),
    st.integers(0, 20).map(lambda at: WHOLE[at : at + 1].expand(3)),
)


@given(st.lists(st.lists(VIEWS, max_size=4), min_size=1, max_size=4))
def test_every_view_of_every_rank_is_found_in_what_a_sender_packs(ranks: list[list[torch.Tensor]]) -> None:
    cut = host_slice_of(share(*views) for views in ranks)
    assert cut is not None
    packed = pack_cut(WHOLE, cut) if cut else WHOLE[:0]
    assert packed.numel() * 8 == host_slice_bytes(cut, 8)
    within = PackedSlice(cut).within
    for view in (view for views in ranks for view in views):
        place = within(part(view))
        assert torch.equal(packed.as_strided(place.shape, place.stride, packed.storage_offset() + place.start), view)


def test_what_several_ranks_keep_is_sent_once_and_neighbours_are_one_piece() -> None:
    vector = WHOLE[:7]
    assert host_slice_of([share(vector, MATRIX[:3]), share(vector, MATRIX[3:6])]) == (Slice(0, 7 + 60),)
    left, right = MATRIX[:, :2], MATRIX[:, 2:5]
    assert host_slice_of([share(left), share(right), share(right.T)]) == (Slice(7, 5, (ROWS,), (COLUMNS,)),)
    assert host_slice_of([share(left), share(MATRIX[:, 3:5])]) == (
        Slice(7, 2, (ROWS,), (COLUMNS,)), Slice(10, 2, (ROWS,), (COLUMNS,)),
    )  # fmt: skip
    # Runs that would reach into the next row are not joined: more would be sent.
    assert len(host_slice_of([share(MATRIX[:-1, 6:]), share(MATRIX[1:, :7])]) or ()) == 2
    assert len(host_slice_of([share(MATRIX[:-1, 6:]), share(MATRIX[1:, :6])]) or ()) == 1
    assert host_slice_of([share()]) == ()
    assert host_slice_of([share(WHOLE.as_strided((4, 6), (3, 1)))]) is None, "its rows overlap"


def test_a_sender_sends_one_run_as_it_lies_also_out_of_a_larger_buffer() -> None:
    bucket = WHOLE[10:50]
    run = pack_cut(bucket, (Slice(3, 20),))
    assert run.data_ptr() == bucket[3:].data_ptr() and torch.equal(run, WHOLE[13:33])
    assert pack_cut(bucket, (Slice(0, 2), Slice(1, 2, (3,), (10,)))).tolist() == [10, 11, 11, 12, 21, 22, 31, 32]


def test_a_bucket_goes_as_a_whole_where_a_share_is_unknown_or_machines_keep_much_of_the_same() -> None:
    halves = [share(MATRIX[:3]), share(MATRIX[3:6]), share(MATRIX[6:9]), share(MATRIX[9:])]
    all_of_it = [share(MATRIX)] * 4
    most = [share(MATRIX[:6]), share(), share(MATRIX[3:]), share()]
    more = [share(MATRIX[:7]), share(), share(MATRIX[2:]), share()]
    one = [share(), share(), share(MATRIX), share()]
    ranks = [list(each) for each in zip(halves, all_of_it, [*halves[:3], None], most, more, one, strict=True)]
    found = host_slices_of([ROWS * COLUMNS * 8] * 6, ranks, machines=2)
    assert SHARES_AT_MOST == 1.25, "15 of 12 rows, and no more"
    assert found.buckets == (
        ((Slice(7, 60),), (Slice(67, 60),)), None, None, ((Slice(7, 60),), (Slice(37, 90),)), None,
        ((), (Slice(7, 120),)),
    )  # fmt: skip


def test_what_machines_keep_survives_the_way_through_an_answer_and_names_itself() -> None:
    cuts = HostSlices.of([None, ((Slice(3, 4, (2, 5), (70, 8)), Slice(0, 1)), ())])
    loaded = Loaded("loaded: \n all", cuts)
    assert decode(encode(loaded)) == loaded
    assert HostSlices.of(cuts.buckets).name == cuts.name != replace(cuts, buckets=(None,)).of([None]).name


@given(st.lists(st.integers(1, 100), max_size=30), st.sampled_from([0, 60, 100, 125, 250]))
def test_no_arrival_lies_on_one_that_may_still_be_there(sizes: list[int], capacity: int) -> None:
    found = arrival_slots(sizes, capacity)
    assert [place.size for place in found] == sizes
    for number, place in enumerate(found):
        assert place.start + place.size <= max(capacity, place.size) and place.start % 16 == 0
        assert 0 <= place.taken <= number
        for other in found[place.taken : number]:
            assert other.start + other.size <= place.start or place.start + place.size <= other.start
    assert [place.taken for place in found] == sorted(place.taken for place in found)


def test_arrivals_come_at_once_as_far_as_there_is_room() -> None:
    assert arrival_slots([60, 60, 60], 128) == [ArrivalSlot(0, 60, 0), ArrivalSlot(64, 60, 0), ArrivalSlot(0, 60, 1)]
    assert arrival_slots([60, 60], 0) == [ArrivalSlot(0, 60, 0), ArrivalSlot(0, 60, 1)], "one at a time"
    assert arrival_slots([20, 20, 100, 20], 128) == [
        ArrivalSlot(0, 20, 0),
        ArrivalSlot(32, 20, 0),
        ArrivalSlot(0, 100, 2),
        ArrivalSlot(0, 20, 3),
    ]


# ----------------------------------------------------------------------------------------------- steps within an engine


def share_of(size: int) -> RankSlice:
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
            mine.append(None if kind == "unknown" and rank == owner else share_of(own))
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
    even = [[share_of(100)] * 6] * 2
    assert steps([0, 1, 0, 0, 1, 0], [200] * 6, even) == [
        ExchangeStep((0, 1), True), ExchangeStep((2,), True), ExchangeStep((3, 4), True), ExchangeStep((5,), True),
    ]  # fmt: skip
    one_takes_all = [[share_of(200)] * 2, [share_of(0)] * 2]
    assert steps([0, 1], [200] * 2, one_takes_all) == [ExchangeStep((0,), True), ExchangeStep((1,), True)]
    assert steps([0, 1], [200, 2000], one_takes_all) == [ExchangeStep((0, 1), True)]


def copies(*views: torch.Tensor) -> BucketCopies:
    into = [torch.empty_like(view) for view in views]
    return BucketCopies(torch.nn.Module(), into, list(views))


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
