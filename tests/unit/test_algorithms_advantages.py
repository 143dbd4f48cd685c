"""Advantages of rollouts, against loops written from the papers in float64."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.algorithms.advantages import STD_EPS, group_rewards, process_advantages, rollout_advantages
from mslime.config.algorithm import GROUP_RELATIVE, AdvantageName
from mslime.config.errors import RewardError, UserError

Row = tuple[int, int, float]
"""(group id, rollout id, reward) of one training sample."""


def reference(rows: list[Row], advantage: str, normalise_std: bool) -> list[float]:
    """One rollout of one group at a time."""
    out: list[float] = []
    for group, rollout, reward in rows:
        votes = {r: value for g, r, value in rows if g == group}
        rewards = list(votes.values())
        mean = sum(rewards) / len(rewards)
        others = [value for r, value in votes.items() if r != rollout]
        if max(rewards) == min(rewards):
            out.append(0.0)
        elif advantage == "grpo":
            std = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
            out.append((reward - mean) / (std + STD_EPS) if normalise_std else reward - mean)
        elif advantage == "rloo":
            out.append(reward - sum(others) / len(others))
        elif advantage == "reinforce_pp_baseline":
            out.append(reward - mean)
        else:
            out.append((reward - mean) / mean if mean > 0 else 0.0)
    return out


def advantages(rows: list[Row], advantage: AdvantageName, normalise_std: bool = True) -> np.ndarray:
    groups, rollouts, rewards = zip(*rows, strict=True)
    return rollout_advantages(group_rewards(rewards, groups, rollouts), advantage, normalise_std)


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Groups of 2 to 6 rollouts, each of 1 to 3 training samples, in any order."""
    found: list[Row] = []
    for group in draw(st.lists(st.integers(-5, 5), min_size=1, max_size=4, unique=True)):
        for rollout in range(draw(st.integers(2, 6))):
            reward = draw(st.sampled_from([0.0, 1.0, 0.5, 0.1, 3.25]))
            found += [(group, rollout, reward)] * draw(st.integers(1, 3))
    return draw(st.permutations(found))


@settings(max_examples=150, deadline=None)
@given(rows(), st.sampled_from(GROUP_RELATIVE), st.booleans())
def test_every_estimator_is_its_papers_formula_with_one_vote_a_rollout(
    drawn: list[Row], advantage: AdvantageName, normalise_std: bool
) -> None:
    found = advantages(drawn, advantage, normalise_std)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, reference(drawn, advantage, normalise_std), rtol=1e-5, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(rows(), st.sampled_from(GROUP_RELATIVE), st.randoms(use_true_random=False))
def test_the_order_of_samples_and_how_many_a_rollout_became_change_nothing(drawn, advantage, random) -> None:
    by_rollout = {(g, r): value for (g, r, _), value in zip(drawn, advantages(drawn, advantage), strict=True)}
    other = [row for row in drawn for _ in range(random.randint(1, 3))]
    random.shuffle(other)
    for (g, r, _), value in zip(other, advantages(other, advantage), strict=True):
        assert value == pytest.approx(by_rollout[g, r], abs=1e-6)


def test_a_group_of_equal_rewards_teaches_nothing_and_says_so() -> None:
    for value in (0.0, 0.1, 1e6, 1 / 3):
        for advantage in GROUP_RELATIVE:
            assert (advantages([(0, i, value) for i in range(7)], advantage) == 0).all()
    grouped = group_rewards([0.1, 0.1, 0.1, 1.0, 0.0], [4, 4, 4, 2, 2], [0, 1, 2, 0, 1])
    assert grouped.zero_variance.tolist() == [False, True]


def test_parts_of_a_rollout_with_different_rewards_are_an_error_that_names_them() -> None:
    with pytest.raises(RewardError, match=r"(?s)\[0.0, 1.0\].*rollout 3 of group 7.*hint"):
        group_rewards([1.0, 0.0, 0.5], [7, 7, 7], [3, 3, 4])


@pytest.mark.parametrize("advantage", GROUP_RELATIVE)
def test_a_group_of_one_rollout_is_refused_however_many_samples_it_became(advantage: AdvantageName) -> None:
    with pytest.raises(UserError, match=r"(?s)rollout.group_size = 1.*hint"):
        advantages([(0, 0, 1.0), (0, 0, 1.0), (1, 0, 1.0), (1, 1, 0.0)], advantage)


def test_token_level_advantages_leave_rollouts_at_zero_and_allow_groups_of_one() -> None:
    for advantage in ("reinforce_pp", "gae", "none"):
        assert (advantages([(0, 0, 1.0), (1, 0, 2.0)], advantage) == 0).all()


def test_maxrl_refuses_negative_rewards_and_weighs_hard_prompts_by_one_over_their_pass_rate() -> None:
    hard = advantages([(0, i, float(i == 0)) for i in range(8)], "maxrl")
    assert hard[0] == pytest.approx(7.0) and hard[1:] == pytest.approx(-1.0)
    with pytest.raises(RewardError, match="maxrl"):
        advantages([(0, 0, -1.0), (0, 1, 1.0)], "maxrl")


def test_process_rewards_are_normalised_over_the_steps_of_a_group_and_summed_from_the_token_on() -> None:
    steps = [[(2, 1.0), (4, 0.0)], [(1, 0.5)], [], [(0, 7.0)]]
    groups, lengths = [0, 0, 0, 1], [5, 3, 2, 1]
    found = process_advantages(steps, lengths, groups)
    all_rewards = np.array([1.0, 0.0, 0.5])
    scaled = {r: (r - all_rewards.mean()) / (all_rewards.std(ddof=1) + STD_EPS) for r in all_rewards}
    for i in range(3):
        for t in range(lengths[i]):
            expected = sum(scaled[r] for at, r in steps[i] if at >= t)
            assert found[i][t] == pytest.approx(expected, abs=1e-6)
    assert found[3].tolist() == [0.0]  # a single step is its group's mean
    plain = process_advantages(steps, lengths, groups, normalise_std=False)
    assert plain[0].tolist() == [0.0, 0.0, 0.0, -0.5, -0.5]


def test_advantages_do_not_import_torch() -> None:
    code = "import sys, mslime.run.assemble; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("base", [0.9, 7.3, 70.1, 1e-4])
def test_rounding_is_no_signal_and_a_small_difference_is(base: float) -> None:
    """One float32 step apart, as one sum in another order is."""
    other = float(np.nextafter(np.float32(base), np.float32(np.inf)))
    equal = group_rewards([float(np.float32(base))] * 3 + [other], [0] * 4, range(4))
    np.testing.assert_array_equal(rollout_advantages(equal, "grpo"), 0.0)
    differ = group_rewards([base, 1.001 * base] * 2, [0] * 4, range(4))
    assert np.abs(rollout_advantages(differ, "rloo")).min() > 0.0 and not differ.zero_variance[0]
