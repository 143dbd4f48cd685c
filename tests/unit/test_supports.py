"""Supports: ragged rows that are joined, picked and checked as lists of lists would be."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.backends.megatron.step.batches import PADDING, RowLayout, build_micro_batch
from mslime.config.layout import ParallelLayout
from mslime.data.packing import build_shards
from mslime.data.routes import Supports
from mslime.data.sample import Sample, check_invariants
from mslime.run import assemble
from tests.fixtures.supports import rows_of, supports_of

ROWS = st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=8)


@settings(deadline=None)
@given(ROWS, ROWS, st.data())
def test_joined_first_and_taken_rows_are_those_of_lists(a: list[list[int]], b: list[list[int]], data: st.DataObject):
    whole = Supports.joined([supports_of(a), supports_of(b)])
    assert rows_of(whole) == a + b == rows_of(supports_of(a).append(supports_of(b)))
    assert whole.ids.dtype == np.int32 and whole.offsets.dtype == np.int64
    assert whole.sizes.tolist() == [len(row) for row in a + b]
    n = data.draw(st.integers(0, len(whole)))
    assert rows_of(whole.first(n)) == (a + b)[:n]
    index = data.draw(st.lists(st.integers(PADDING, len(whole) - 1), max_size=12))
    taken = whole.take(np.asarray(index, np.int64))
    assert rows_of(taken) == [[] if i == PADDING else (a + b)[i] for i in index]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), ROWS), max_size=12))
def test_supports_that_grow_from_any_earlier_ones_are_those_of_lists(steps: list[tuple[int, list[list[int]]]]):
    grown: list[tuple[Supports, list[list[int]]]] = [(Supports.empty(), [])]
    for place, new in steps:  # two continuations of the same supports do not share what comes behind them
        before, rows = grown[place % len(grown)]
        grown.append((before.append(supports_of(new)), rows + new))
    assert [rows_of(supports) for supports, _ in grown] == [rows for _, rows in grown]


def test_a_rollout_of_many_turns_is_copied_a_few_times_and_pickled_without_its_room() -> None:
    supports, places = Supports.empty(), set[int]()
    for _ in range(500):
        supports = supports.append(supports_of([[1, 2], [3]]))
        places.add(supports.ids.__array_interface__["data"][0])
    assert len(places) <= 18, "the memory grows by halves"
    for other in (pickle.loads(pickle.dumps(supports)), copy.deepcopy(supports)):
        assert rows_of(other) == [[1, 2], [3]] * 500 and other._buffer is None
    assert len(pickle.dumps(supports)) < supports.ids.nbytes + supports.offsets.nbytes + 1000


@settings(deadline=None)
@given(ROWS, st.data())
def test_a_row_holds_its_token_once_or_is_empty(rows: list[list[int]], data: st.DataObject):
    tokens = [data.draw(st.sampled_from([*row, 7])) for row in rows]
    held = supports_of(rows).hold(np.asarray(tokens, np.int32))
    assert held.tolist() == [not row or row.count(t) == 1 for row, t in zip(rows, tokens, strict=True)]
    assert supports_of(rows).repeats() == any(len(set(row)) < len(row) for row in rows)


def test_the_largest_ids_of_neighbouring_rows_are_no_repetition() -> None:
    assert not supports_of([[2**31 - 1], [0], [2**31 - 1]]).repeats()


def drawn(group: int, index: int, response: int, *, restricted: bool = True) -> Sample:
    """Tokens 10, 11, ... of two versions, each drawn from itself and up to three more; the last one from everything."""
    sample = Sample.from_prompt(group, index, [1, 2, 3])
    ids = np.arange(10, 10 + response)
    kept = supports_of([[t + 50, t, t + 60, t + 70][: 2 + t % 3] for t in ids.tolist()[:-1]] + [[]])
    spans = [(0, 0, response // 2), (1, response // 2, response)]
    sample.extend(ids, log_probs=-np.ones(response, np.float32), versions=[s for s in spans if s[1] < s[2]],
                  supports=kept if restricted else None)  # fmt: skip
    check_invariants(sample)
    return sample


def test_a_token_outside_its_support_breaks_the_sample_and_the_prompt_has_none() -> None:
    sample = drawn(0, 0, 4)
    assert sample.supports is not None
    sample.supports = supports_of([*rows_of(sample.supports)[:4], [1, 2], *rows_of(sample.supports)[5:]])
    with pytest.raises(AssertionError, match="token 4 is not, or not once"):
        check_invariants(sample)
    sample.supports = supports_of([[1], *rows_of(drawn(0, 0, 4).supports)[1:]])
    with pytest.raises(AssertionError, match="prompt has a support"):
        check_invariants(sample)


def test_environment_tokens_and_unrestricted_draws_get_empty_rows() -> None:
    sample = drawn(0, 0, 2)
    sample.extend([4, 5])
    sample.extend([6], log_probs=[-1.0], versions=[(1, 0, 1)])
    sample.extend([7], log_probs=[-1.0], versions=[(1, 0, 1)], supports=supports_of([[7, 8]]))
    check_invariants(sample)
    assert sample.supports is not None and sample.supports.sizes.tolist() == [0, 0, 0, 3, 0, 0, 0, 0, 2]
    sample.restart()
    assert sample.supports is None


def test_a_cut_or_branched_sample_keeps_the_supports_that_are_left_and_trains_each_once() -> None:
    sample = drawn(0, 0, 6)
    rows = rows_of(sample.supports)
    assert rows is not None
    branch = sample.branch(7, 6)
    branch.extend([99], log_probs=[-1.0], versions=[(1, 0, 1)], supports=supports_of([[99, 5]]))
    sample.cut(7)
    for made, expected in ((sample, rows[:7]), (branch, [*rows[:6], [99, 5]])):
        check_invariants(made)
        assert rows_of(made.supports) == expected
    (shards,) = build_shards([sample, branch], [1.0, 1.0], ParallelLayout(), token_budget=50)
    sent = rows_of(shards[0].supports)
    assert sent is not None
    spans = dict(zip(shards[0].sequence_ids.tolist(), shards[0].spans(), strict=True))
    assert sent[slice(*spans[0])] == rows[:7] and sent[slice(*spans[1])] == [*[[]] * 6, [99, 5]]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_every_predicted_token_has_its_support_on_the_row_that_predicts_it(cp: int) -> None:
    samples = [drawn(0, 0, 5), drawn(0, 1, 9, restricted=False), drawn(1, 0, 1), drawn(1, 1, 12)]
    (shards,) = build_shards(samples, [1.0] * 4, ParallelLayout(cp=cp, dp=2), token_budget=20 // cp)
    seen = 0
    for shard in shards:
        assert shard.supports is not None and len(shard.supports) == len(shard.tokens)
        for index in range(len(shard.micro_batches)):
            for rank in range(cp):
                layout = RowLayout(cp, rank, 1, 0)
                batch = build_micro_batch(shard, index, layout, packed=True, device=torch.device("cpu"))
                if batch.support is None:
                    assert not any(len(shard.supports.row(t)) for t in batch.slicer.targets.tolist() if t != PADDING)
                    continue
                batch.support.check(batch.labels)
                offsets, ids = batch.support.offsets.tolist(), batch.support.ids
                assert ids.dtype == torch.int32 and len(offsets) == len(batch.labels) + 1
                for row, target in enumerate(batch.slicer.targets.tolist()):
                    found = ids[offsets[row] : offsets[row + 1]].tolist()
                    assert found == ([] if target == PADDING else shard.supports.row(target).tolist())
                    seen += bool(found)
    assert seen == sum(int((s.supports.sizes > 0).sum()) for s in samples if s.supports is not None)


def test_a_step_of_unrestricted_draws_carries_no_supports() -> None:
    samples = [drawn(g, 0, 6, restricted=False) for g in range(2)]
    (shards,) = build_shards(samples, [1.0, -1.0], ParallelLayout(), token_budget=20)
    assert shards[0].supports is None
    batch = build_micro_batch(shards[0], 0, RowLayout(), packed=True, device=torch.device("cpu"))
    assert batch.support is None


def test_only_the_stage_with_the_logits_is_sent_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [drawn(g, 0, 6) for g in range(2)]
    layout = ParallelLayout(pp=2)
    per_step = build_shards(samples, [1.0, -1.0], layout, token_budget=20)
    monkeypatch.setattr(assemble.ray, "put", lambda shard: shard)
    first, last = (shards[0] for shards in assemble.references(per_step, layout, [(), ()]))
    assert first.supports is None and rows_of(last.supports) == rows_of(per_step[0][0].supports)
    with pytest.raises(AssertionError, match="one row per token"):
        replace(last, supports=Supports.empty(3))
