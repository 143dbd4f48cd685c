"""The slicer: every token lands on exactly one row over the ranks, and columns move to the row that predicts them."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from mslime.backends.megatron.step.batches import (
    PADDING,
    RowLayout,
    SequenceSlicer,
    _gather,
    build_micro_batch,
    zigzag_positions,
)
from mslime.data.shard import TrainShard

LAYOUTS = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4)]


def layouts_of(cp: int, sp: int) -> list[RowLayout]:
    return [RowLayout(cp, c, sp, s) for c in range(cp) for s in range(sp)]


def shard_of(lengths: list[int], micro_batches: tuple[tuple[int, ...], ...]) -> TrainShard:
    n = sum(lengths)
    column = np.arange(n, dtype=np.float32)
    mask = np.ones(n, np.bool_)
    mask[np.cumsum([0, *lengths[:-1]])] = False
    return TrainShard(
        tokens=np.arange(100, 100 + n, dtype=np.int32), lengths=np.array(lengths, np.int64),
        sequence_ids=np.arange(len(lengths), dtype=np.int64) + 7, loss_mask=mask, weights=(column + 0.5) * mask,
        advantages=column + 0.25, behaviour_log_probs=-column, micro_batches=micro_batches,
        old_log_probs=-column - 0.125,
    )  # fmt: skip


@pytest.mark.parametrize(("cp", "sp"), LAYOUTS)
def test_every_token_is_a_layer_row_on_exactly_one_rank(cp: int, sp: int) -> None:
    spans = [(3, 4), (4, 11), (20, 25)]
    seen = np.concatenate([SequenceSlicer.build(spans, layout).layer_rows for layout in layouts_of(cp, sp)])
    tokens = np.concatenate([np.arange(a, b) for a, b in spans])
    assert sorted(seen[seen != PADDING]) == sorted(tokens)


@pytest.mark.parametrize(("cp", "sp"), LAYOUTS)
def test_every_token_but_the_first_is_predicted_once_by_the_row_of_the_token_before(cp: int, sp: int) -> None:
    spans = [(3, 4), (4, 11), (20, 25)]
    targets = []
    for rank in range(cp):
        slicer = SequenceSlicer.build(spans, RowLayout(cp, rank, sp, 0))
        predicting = slicer.targets != PADDING
        assert (slicer.targets[predicting] == slicer.rows[predicting] + 1).all()
        targets.append(slicer.targets[predicting])
    assert sorted(np.concatenate(targets)) == [t for a, b in spans for t in range(a + 1, b)]


@pytest.mark.parametrize(("cp", "sp"), LAYOUTS)
def test_padded_rows_divide_evenly_over_the_ranks(cp: int, sp: int) -> None:
    slicers = [SequenceSlicer.build([(0, 5), (5, 6)], layout) for layout in layouts_of(cp, sp)]
    lengths = slicers[0].padded_lengths
    assert all(s.padded_lengths == lengths and len(s) * cp == sum(lengths) and len(s) % sp == 0 for s in slicers)
    assert cp == 1 or all(n % (2 * cp) == 0 for n in lengths)


def test_zigzag_gives_each_rank_an_early_and_a_late_chunk() -> None:
    assert zigzag_positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, 2, 1).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(("cp", "sp"), LAYOUTS)
def test_predictions_scattered_back_over_the_ranks_give_the_column_again(cp: int, sp: int) -> None:
    shard = shard_of([1, 7, 5], ((1,), (0, 2)))
    column = torch.zeros(13)
    for index in range(2):
        for rank in range(cp):
            batch = build_micro_batch(shard, index, RowLayout(cp, rank, sp, 0), packed=True, device=torch.device("cpu"))
            assert batch.old_log_probs is not None
            batch.slicer.scatter_targets(batch.old_log_probs, column)
    firsts = np.cumsum([0, 1, 7])
    expected = torch.from_numpy(np.where(np.isin(np.arange(13), firsts), 0, shard.old_log_probs).astype(np.float32))
    assert torch.equal(column, expected)


@pytest.mark.parametrize(("cp", "sp"), LAYOUTS)
def test_what_the_layers_hold_scattered_back_over_the_ranks_gives_the_column_again(cp: int, sp: int) -> None:
    routes = np.arange(12 * 2 * 3).reshape(12, 2, 3)
    out = torch.zeros(12, 2, 3, dtype=torch.int64)
    for layout in layouts_of(cp, sp):
        slicer = SequenceSlicer.build([(0, 7), (7, 12)], layout)
        known = slicer.layer_rows != PADDING
        out[slicer.layer_rows[known]] = torch.from_numpy(slicer.at_layer_rows(routes)[known])
    assert torch.equal(out, torch.from_numpy(routes))


@pytest.mark.parametrize("cp", [1, 2])
def test_columns_sit_at_the_row_that_predicts_their_token(cp: int) -> None:
    shard = shard_of([3, 4], ((0, 1),))
    total = 0.0
    for rank in range(cp):
        batch = build_micro_batch(shard, 0, RowLayout(cp, rank, 1, 0), packed=True, device=torch.device("cpu"))
        for row, target in enumerate(batch.slicer.targets):
            if target == PADDING:
                assert batch.weights[row] == 0 and not batch.loss_mask[row]
                continue
            assert batch.labels[row] == shard.tokens[target] == batch.tokens[0, row] + 1
            assert batch.weights[row] == shard.weights[target]
            assert batch.advantages[row] == shard.advantages[target]
            assert batch.behaviour_log_probs[row] == shard.behaviour_log_probs[target]
            assert batch.sequence_index[row] == (0 if target < 3 else 1)
        total += float(batch.weights.sum())
    assert total == shard.weights.sum()


@pytest.mark.parametrize("cp", [1, 2])
def test_segments_ages_and_positions_sit_at_the_row_that_predicts_their_token(cp: int) -> None:
    lengths = [3, 4, 5]
    shard = replace(
        shard_of(lengths, ((1,), (2, 0))),
        segment_index=np.array([0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 2], np.int32),
        segment_ages=np.arange(12, dtype=np.int32),
    )
    shard.loss_mask[7:9] = False
    numbers = {8: 0, 9: 1, 10: 1, 11: 2, 1: 3, 2: 4}
    positions = {8: 0, 9: 0, 10: 1, 11: 2, 1: 0, 2: 1}
    for rank in range(cp):
        batch = build_micro_batch(shard, 1, RowLayout(cp, rank, 1, 0), packed=True, device=torch.device("cpu"))
        assert batch.segment_index is not None and batch.ages is not None and batch.num_segments == 5
        for row, target in enumerate(batch.slicer.targets):
            if target != PADDING:
                assert batch.segment_index[row] == numbers[target]
                assert batch.positions[row] == positions[target]
                assert batch.ages[row] == target


def test_a_shard_that_does_not_know_its_segments_has_none() -> None:
    batch = build_micro_batch(shard_of([3], ((0,),)), 0, RowLayout(), packed=True, device=torch.device("cpu"))
    assert batch.segment_index is None and batch.ages is None and batch.num_segments == 0


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("cp", "sp"), LAYOUTS)
def test_an_empty_micro_batch_is_padding_that_weighs_nothing(packed: bool, cp: int, sp: int) -> None:
    shard = shard_of([3], ((0,), ()))
    batch = build_micro_batch(shard, 1, RowLayout(cp, 0, sp, 0), packed=packed, device=torch.device("cpu"))
    assert batch.tokens.shape[1] == max(2 * cp if cp > 1 else 1, 1) * sp // cp
    assert not batch.loss_mask.any() and batch.weights.sum() == 0
    assert (batch.slicer.rows == PADDING).all() and batch.num_sequences == 1


def test_two_sequences_in_an_unpacked_micro_batch_are_refused() -> None:
    with pytest.raises(AssertionError, match="2 sequences"):
        build_micro_batch(shard_of([2, 2], ((0, 1),)), 0, RowLayout(), packed=False, device=torch.device("cpu"))


@pytest.mark.parametrize("tail", [(), (2, 3)])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.float32, np.bool_])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_rows_are_gathered_as_one_by_one_and_padding_is_zero(
    length: int, dtype: type[np.generic], tail: tuple[int, ...]
) -> None:
    random = np.random.default_rng(length)
    column = (random.integers(1, 100, (length, *tail))).astype(dtype)
    for index in (random.integers(-1, length, 12), np.full(3, PADDING), np.zeros(0, np.int64)):
        got = _gather(column, index)
        wanted = [np.zeros(tail, dtype) if i == PADDING else column[i] for i in index]
        assert got.dtype == dtype and got.flags.owndata and got.shape == (len(index), *tail)
        np.testing.assert_array_equal(got, np.array(wanted, dtype).reshape(got.shape))


def test_a_row_outside_the_shard_is_an_error() -> None:
    for length in (0, 4):
        with pytest.raises((IndexError, AssertionError)):
            _gather(np.ones(length), np.array([length]))


def test_a_gather_makes_no_second_copy() -> None:
    """The routes of a micro-batch are its largest column."""
    column, index = np.ones((4096, 8, 8), np.uint8), np.arange(-1, 2047)
    tracemalloc.start()
    got = _gather(column, index)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1.5 * got.nbytes


def test_a_micro_batch_makes_no_array_as_long_as_its_shard() -> None:
    """There are as many micro-batches as the shard is long."""
    shard = shard_of([50] * 400, tuple((i, i + 200) for i in range(200)))
    zeros = np.zeros(20000, np.int32)
    shard = replace(shard, segment_index=zeros, segment_ages=zeros)
    build_micro_batch(shard, 1, RowLayout(), packed=True, device=torch.device("cpu"))
    tracemalloc.start()
    build_micro_batch(shard, 0, RowLayout(), packed=True, device=torch.device("cpu"))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20000 * 4, "four bytes for each token of the shard"
