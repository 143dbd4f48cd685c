"""The numbers of a rollout step: who has a vote in which mean."""

from __future__ import annotations

import pytest

from mslime.data.sample import Group, Sample
from mslime.rollout.statistics import batch_metrics
from tests.fixtures.supports import supports_of


def sample(index: int, reward: float, tokens: int, rollout_id: int | None = None) -> Sample:
    made = Sample.from_prompt(0, index, [1, 2])
    made.extend([3] * tokens, log_probs=[-1.0] * tokens, versions=[(1, 0, tokens)], engine="e")
    made.reward, made.rollout_id = reward, rollout_id
    return made


def test_a_rollout_of_several_samples_has_one_vote_in_the_reward_and_each_of_them_in_the_lengths() -> None:
    fan_out = [sample(i, 1.0, 4, rollout_id=9) for i in range(3)]
    alone = sample(9, 0.0, 12)  # its index is not the rollout id of the others
    metrics = batch_metrics([Group(0, [*fan_out, alone])], 2)
    assert metrics["reward/mean"] == metrics["reward/std"] == 0.5
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 1.0)
    assert metrics["rollout/responses"] == 4 and metrics["rollout/response_len_mean"] == pytest.approx(6.0)
    assert metrics["staleness/mean"] == 1.0 and metrics["reward/zero_variance_groups"] == 0


def test_rollouts_of_different_groups_are_different() -> None:
    groups = [Group(g, [sample(0, float(g), 1)]) for g in range(2)]
    for group in groups:
        group.samples[0].group_id = group.group_id
    assert batch_metrics(groups, 1)["reward/mean"] == 0.5


def test_sizes_of_supports_count_tokens_that_have_one() -> None:
    drawn = Sample.from_prompt(0, 0, [1, 2])
    drawn.extend([3, 4], log_probs=[-1.0, -1.0], versions=[(0, 0, 2)], supports=supports_of([[3, 5, 6], [4]]))
    free = sample(1, 0.0, 4)
    drawn.reward = 1.0
    metrics = batch_metrics([Group(0, [drawn, free])], 0)
    assert (metrics["rollout/support_tokens"], metrics["rollout/support_mean"]) == (2, 2)
    assert metrics["rollout/support_max"] == 3
    drawn.mask_span(2, 3)
    assert batch_metrics([Group(0, [drawn, free])], 0)["rollout/support_max"] == 1, "of tokens that are trained"
    assert not any(name.startswith("rollout/support") for name in batch_metrics([Group(0, [free])], 0))
