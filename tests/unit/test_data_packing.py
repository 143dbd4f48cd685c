"""Shards: denominators that no layout changes, budgets, and every sequence exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.config.layout import ParallelLayout
from mslime.data.packing import build_shards
from mslime.data.routes import Routes
from mslime.data.sample import Sample
from mslime.data.shard import token_weights


def make_sample(group: int, index: int, prompt: int, response: int, masked: int = 0, *, routes: bool = False) -> Sample:
    """A sample whose tokens, log-probs and routes are recognisable; its first `masked` response tokens are stale."""
    sample = Sample.from_prompt(group, index, list(range(1, prompt + 1)))
    if routes:
        sample.routes = Routes.empty((1, 3), 2, 8)
    n = prompt + response
    new = np.arange((n - 1) * 4).reshape(n - 1, 2, 2) % 8 if routes else None  # rows cover every token but the newest
    versions = [(0, 0, masked), (1, masked, response)] if masked else [(1, 0, response)]
    log_probs = -np.arange(1, response + 1, dtype=np.float32) / 100
    sample.extend(np.arange(response) + 100, log_probs=log_probs, versions=versions, engine="e", routes=new)
    if masked:
        sample.mask_before(1)
    return sample


@st.composite
def rollouts(draw: st.DrawFn) -> list[Sample]:
    groups = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    samples = []
    for group, size in enumerate(groups):
        for index in range(size):
            response = draw(st.integers(1, 60))
            samples.append(
                make_sample(group, index, draw(st.integers(1, 20)), response, draw(st.integers(0, response)))
            )
            samples[-1].rollout_id = draw(st.sampled_from([None, None, 0, 1]))
    return samples


layouts = st.builds(ParallelLayout, dp=st.integers(1, 4), cp=st.integers(1, 2))


@settings(max_examples=150, deadline=None)
@given(rollouts(), layouts, st.integers(4, 100), st.sampled_from(["token", "sequence", "rollout", "group"]),
       st.booleans(), st.integers(1, 3), st.sampled_from([None, 32.0]))  # fmt: skip
def test_every_sequence_once_within_the_budget_with_equal_micro_batch_counts(
    samples, layout, budget, aggregation, packed, multiple_of, quadratic
):
    advantages = np.arange(len(samples)) + 1.0
    (shards,) = build_shards(samples, advantages, layout, budget, loss_aggregation=aggregation, packed=packed,
                             multiple_of=multiple_of, quadratic_tokens=quadratic)  # fmt: skip
    assert len(shards) == layout.dp
    ids = np.concatenate([s.sequence_ids for s in shards])
    assert sorted(ids) == list(range(len(samples)))
    counts = {len(s.micro_batches) for s in shards}
    assert len(counts) == 1 and counts.pop() % multiple_of == 0
    for shard in shards:
        for micro_batch in shard.micro_batches:
            tokens = sum(int(shard.lengths[i]) for i in micro_batch)
            assert tokens <= budget * layout.cp or len(micro_batch) == 1
            assert packed or len(micro_batch) <= 1
        for sequence_id, (start, end) in zip(shard.sequence_ids, shard.spans(), strict=True):
            sample = samples[sequence_id]
            assert np.array_equal(shard.tokens[start:end], sample.tokens)
            assert np.array_equal(shard.loss_mask[start:end], sample.loss_mask)
            assert np.array_equal(shard.behaviour_log_probs[start:end], sample.log_probs)
            assert np.array_equal(shard.advantages[start:end], np.where(sample.loss_mask, advantages[sequence_id], 0))


def reference_weights(samples: list[Sample], aggregation: str) -> list[np.ndarray]:
    """The definitions of the five aggregations, one loop at a time, in float64."""
    groups: dict[int, int] = {}
    for s in samples:
        groups[s.group_id] = groups.get(s.group_id, 0) + s.trainable_tokens
    total = sum(s.trainable_tokens for s in samples)
    live = [s for s in samples if s.trainable_tokens]
    live_groups = [g for g, n in groups.items() if n]

    def parts(s: Sample) -> list[Sample]:
        """The samples of the same rollout."""
        if s.rollout_id is None:
            return [s]
        return [o for o in samples if (o.group_id, o.rollout_id) == (s.group_id, s.rollout_id)]

    rollouts_alive = len({min(id(o) for o in parts(s)) for s in live})
    result = []
    for s in samples:
        w = np.zeros(len(s))
        for t in range(len(s)):
            if s.loss_mask[t]:
                if aggregation == "token":
                    w[t] = 1 / total
                elif aggregation == "sequence":
                    w[t] = 1 / len(live) / s.trainable_tokens
                elif aggregation == "rollout":
                    w[t] = 1 / rollouts_alive / sum(o.trainable_tokens for o in parts(s))
                elif aggregation == "constant":
                    w[t] = 1 / rollouts_alive / 60
                else:
                    w[t] = 1 / len(live_groups) / groups[s.group_id]
        result.append(w)
    return result


@settings(max_examples=100, deadline=None)
@given(rollouts(), st.sampled_from(["token", "sequence", "rollout", "group", "constant"]))
def test_weights_follow_their_definition_and_sum_to_one_in_every_layout(samples, aggregation):
    expected = reference_weights(samples, aggregation)
    trainable = sum(s.trainable_tokens for s in samples)
    for layout in (ParallelLayout(), ParallelLayout(dp=2), ParallelLayout(dp=4, cp=2), ParallelLayout(tp=2, pp=2)):
        for packed in (True, False):
            (shards,) = build_shards(
                samples, [1.0] * len(samples), layout, 64, loss_aggregation=aggregation, packed=packed,
                max_response_tokens=60,
            )  # fmt: skip
            total = sum(float(s.weights.astype(np.float64).sum()) for s in shards)
            assert aggregation == "constant" or total == pytest.approx(float(trainable > 0), abs=1e-5)
            for shard in shards:
                for sequence_id, (start, end) in zip(shard.sequence_ids, shard.spans(), strict=True):
                    np.testing.assert_allclose(shard.weights[start:end], expected[sequence_id], rtol=1e-6)


def test_optimizer_steps_split_whole_groups_and_weigh_each_step_by_itself():
    samples = [make_sample(g, i, 3, 5 + g) for g in range(5) for i in range(3)]
    steps = build_shards(samples, [0.5] * 15, ParallelLayout(dp=2), 40, steps=2)
    seen = [{int(i) for shard in step for i in shard.sequence_ids} for step in steps]
    assert seen == [set(range(9)), set(range(9, 15))]
    for step in steps:
        assert sum(float(s.weights.sum()) for s in step) == pytest.approx(1, abs=1e-6)


def test_per_token_advantages_reach_their_tokens():
    samples = [make_sample(0, 0, 2, 4), make_sample(0, 1, 3, 2)]
    advantages = [np.arange(6, dtype=np.float32), np.arange(5, dtype=np.float32) * 10]
    ((shard,),) = build_shards(samples, advantages, ParallelLayout(), 100)
    by_id = dict(zip(shard.sequence_ids.tolist(), shard.spans(), strict=True))
    assert shard.advantages[slice(*by_id[0])].tolist() == [0, 0, 2, 3, 4, 5]
    assert shard.advantages[slice(*by_id[1])].tolist() == [0, 0, 0, 30, 40]


def test_routes_have_one_row_per_token_and_the_newest_token_is_not_replayed():
    samples = [make_sample(0, 0, 2, 4, routes=True), make_sample(0, 1, 3, 5, routes=True)]
    (shards,) = build_shards(samples, [1.0, 2.0], ParallelLayout(dp=2), 100)
    for shard in shards:
        assert shard.routes is not None
        (sample,) = [samples[i] for i in shard.sequence_ids]
        assert sample.routes is not None and len(shard.routes) == len(sample)
        assert np.array_equal(shard.routes.experts[:-1], sample.routes.experts)
        assert shard.routes.mask.tolist() == [True] * (len(sample) - 1) + [False]
        assert shard.routes.layer_ids == (1, 3)


def test_balance_of_tokens_and_of_equal_micro_batch_indices():
    rng = np.random.default_rng(0)
    samples = [make_sample(i // 8, i % 8, 16, int(n)) for i, n in enumerate(rng.lognormal(5, 0.7, 256).clip(1, 900))]
    (shards,) = build_shards(samples, [1.0] * 256, ParallelLayout(dp=4), 2048)
    totals = [int(s.lengths.sum()) for s in shards]
    assert max(totals) / min(totals) < 1.02
    loads = np.array([[sum(s.lengths[i] for i in mb) for mb in s.micro_batches] for s in shards])
    assert (loads.max(0) / loads.min(0)).max() < 1.1
    ideal = -(-int(loads.sum()) // (2048 * 4))
    assert loads.shape[1] <= ideal + 1


def test_attention_cost_moves_long_sequences_apart():
    samples = [make_sample(0, i, 1, n) for i, n in enumerate([799, 399, 399, *[99] * 8])]
    (by_tokens,) = build_shards(samples, [1.0] * 11, ParallelLayout(dp=2), 1800)
    (by_work,) = build_shards(samples, [1.0] * 11, ParallelLayout(dp=2), 1800, quadratic_tokens=100)

    def spread(shards: list) -> float:
        work = [float((s.lengths * (1 + s.lengths / 100)).sum()) for s in shards]
        return max(work) / min(work)

    assert spread(by_work) < spread(by_tokens)


def test_a_step_without_a_trainable_token_weighs_nothing():
    samples = [make_sample(0, 0, 2, 4, masked=4), make_sample(0, 1, 2, 3, masked=3)]
    for aggregation in ("token", "sequence", "rollout", "group", "constant"):
        assert all((w == 0).all() for w in token_weights(samples, aggregation, 10))


def test_a_rollout_that_became_three_samples_weighs_what_it_would_weigh_whole():
    whole, other = make_sample(0, 0, 4, 12), make_sample(0, 1, 4, 6)
    parts = [make_sample(0, 10 + i, 4, n) for i, n in enumerate([2, 4, 6])]
    for part in parts:
        part.rollout_id = 0
    for aggregation in ("token", "rollout", "group", "constant"):
        alone = token_weights([whole, other], aggregation, 20)
        cut = token_weights([*parts, other], aggregation, 20)
        assert sum(float(w.sum()) for w in cut[:3]) == pytest.approx(float(alone[0].sum()), rel=1e-6)
        np.testing.assert_allclose(cut[3], alone[1], rtol=1e-6)
    by_sequence = token_weights([*parts, other], "sequence")
    assert [float(w.sum()) for w in by_sequence] == pytest.approx([0.25] * 4)


def test_rewards_lie_on_the_last_trained_token_and_where_steps_end():
    samples = [make_sample(0, 0, 2, 4), make_sample(0, 1, 3, 3)]
    samples[0].extend([9, 9])
    samples[0].reward, samples[1].reward = 2.0, 1.0
    samples[0].process_rewards = [(3, 0.5), (5, 0.25)]
    ((shard,),) = build_shards(samples, [0.0, 0.0], ParallelLayout(), 100)
    by_id = dict(zip(shard.sequence_ids.tolist(), shard.spans(), strict=True))
    assert shard.rewards is not None
    assert shard.rewards[slice(*by_id[0])].tolist() == [0, 0, 0, 0.5, 0, 2.25, 0, 0]
    assert shard.rewards[slice(*by_id[1])].tolist() == [0, 0, 0, 0, 0, 1]
    samples[1].reward = None
    ((unscored,),) = build_shards(samples, [0.0, 0.0], ParallelLayout(), 100)
    assert unscored.rewards is None


def test_weight_versions_are_numbered_within_a_sequence_and_aged_from_the_one_trained():
    sample = Sample.from_prompt(0, 0, [1, 2])
    sample.extend([3, 4, 5], log_probs=[-1.0] * 3, versions=[(4, 0, 1), (6, 1, 3)], engine="a")
    sample.extend([6])
    sample.extend([7, 8], log_probs=[-1.0] * 2, versions=[(6, 0, 1), (7, 1, 2)], engine="b")
    ((shard,),) = build_shards([sample], [1.0], ParallelLayout(), 100, version=7)
    assert shard.segment_index is not None and shard.segment_ages is not None
    assert shard.segment_index.tolist() == [0, 0, 0, 1, 1, 0, 1, 2]
    assert shard.segment_ages.tolist() == [0, 0, 3, 1, 1, 0, 1, 0]
    ((undated,),) = build_shards([sample], [1.0], ParallelLayout(), 100)
    assert undated.segment_ages is None


def test_parts_of_a_rollout_stay_in_one_optimizer_step():
    samples = [make_sample(g, i, 3, 4) for i in range(3) for g in range(6)]
    for sample in samples:
        sample.rollout_id = sample.index // 2
    for steps in build_shards(samples, [1.0] * 18, ParallelLayout(dp=2), 40, steps=3):
        members = {int(i) for shard in steps for i in shard.sequence_ids}
        groups = {samples[i].group_id for i in members}
        assert members == {i for i, s in enumerate(samples) if s.group_id in groups}


def micro_batch_tokens(shards: list) -> list[list[int]]:
    return [[sum(int(s.lengths[i]) for i in mb) for mb in s.micro_batches] for s in shards]


def test_a_tight_budget_is_kept_where_balancing_alone_would_break_it():
    """Longest-first into the least loaded of two bins ends with 8 and 10 tokens; 9 and 9 fit."""
    samples = [make_sample(0, i, 1, n - 1) for i, n in enumerate([5, 4, 3, 3, 3])]
    (shards,) = build_shards(samples, [1.0] * 5, ParallelLayout(), 9)
    assert micro_batch_tokens(shards) == [[9, 9]]


def test_unpacked_sequences_are_dealt_back_and_forth():
    samples = [make_sample(0, i, 1, n - 1) for i, n in enumerate([7, 10, 8, 9])]
    (shards,) = build_shards(samples, [1.0] * 4, ParallelLayout(dp=2), 9, packed=False)
    assert micro_batch_tokens(shards) == [[10, 7], [9, 8]]
