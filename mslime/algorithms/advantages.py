"""Advantages of whole rollouts from their rewards. NumPy only: the driver can call it without torch.

Groups are formed by group id, in any order of the samples. A rollout counts once in its group, however many training
samples it has. Advantages from log-probs or values are in `advantages_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mslime.config.algorithm import GROUP_RELATIVE, SAME_REWARD, AdvantageName
from mslime.config.base import is_function
from mslime.config.errors import ConfigError, RewardError, UserError
from mslime.extensions import calling, load_function

SETTING = "algorithm.advantage"

STD_EPS = 1e-6
"""Added to a group's standard deviation before the division."""

Steps = Sequence[tuple[int, float]]
"""Process rewards of one sample: (position of the token that ends the step, reward)."""


@dataclass(frozen=True)
class TurnRewards:
    """K turns of R rollouts, those of one rollout after each other, in the order in which they were generated.

    A turn is one response of the model. It counts once, in the sequence in which it was generated. A sequence with
    unknown turns is one turn.

    Attributes:
        rollout: [K] int64 in [0, R), ascending.
        index: [K] int64, 0, 1, ... within the rollout.
        rewards: [K] float64, process rewards of the turn and of the environment's reply; beside the rollout's.
    """

    rollout: NDArray[np.int64]
    index: NDArray[np.int64]
    rewards: NDArray[np.float64]

    def returns(self, gamma: float = 1.0) -> NDArray[np.float64]:
        """[K] sum over k >= 0 of gamma^k times the reward of the k-th turn after this one in the rollout."""
        found = self.rewards.astype(np.float64)
        for k in range(len(found) - 2, -1, -1):
            if self.rollout[k + 1] == self.rollout[k]:
                found[k] += gamma * found[k + 1]
        return found


@dataclass(frozen=True)
class TurnAdvantages:
    """Result of a function of `algorithm.advantage` with one number per turn.

    Attributes:
        values: [K] finite numbers in the order of `GroupRewards.turns`. Every trained token of a turn gets its turn's.
    """

    values: NDArray[np.floating]


@dataclass(frozen=True)
class GroupRewards:
    """R rollouts in G groups.

    Attributes:
        rewards: [R] float64.
        group: [R] int64 in [0, G).
        sizes: [G] float64, rollouts of each group.
        means: [G] float64, mean reward of each group.
        zero_variance: [G] bool, groups whose rewards are all equal.
        of_sample: [S] int64, the rollout of each training sample.
        turns: of the rollouts; always known in a run.
    """

    rewards: NDArray[np.float64]
    group: NDArray[np.int64]
    sizes: NDArray[np.float64]
    means: NDArray[np.float64]
    zero_variance: NDArray[np.bool_]
    of_sample: NDArray[np.int64]
    turns: TurnRewards | None = None

    @property
    def centred(self) -> NDArray[np.float64]:
        """[R] reward minus the group's mean; exactly 0 in a group of equal rewards."""
        return np.where(self.zero_variance[self.group], 0.0, self.rewards - self.means[self.group])


def group_rewards(rewards: ArrayLike, group_ids: ArrayLike, rollout_ids: ArrayLike) -> GroupRewards:
    """One reward for each (group, rollout), from S training samples.

    Args:
        rewards: [S], finite.
        group_ids, rollout_ids: [S] integers; samples that share both are parts of one rollout.

    Raises:
        RewardError: samples of one rollout have different rewards.
    """
    reward = np.asarray(rewards, np.float64)
    assert np.isfinite(reward).all(), "rewards must be finite before advantages are computed"
    keys = np.stack([np.asarray(group_ids, np.int64), np.asarray(rollout_ids, np.int64)])
    pairs, first, inverse = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    of_sample = inverse.reshape(-1)
    per_rollout = reward[first]
    odd = np.flatnonzero(reward != per_rollout[of_sample])
    if len(odd):
        group_id, rollout_id = pairs[:, of_sample[odd[0]]]
        seen = sorted(set(reward[of_sample == of_sample[odd[0]]].tolist()))
        raise RewardError(
            "reward", seen, f"the training samples of rollout {rollout_id} of group {group_id} have "
            "different rewards", "give all samples of a rollout the rollout's reward",
        )  # fmt: skip
    _, group = np.unique(pairs[0], return_inverse=True)
    sizes = np.bincount(group).astype(np.float64)
    lowest, highest = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
    np.minimum.at(lowest, group, per_rollout)
    np.maximum.at(highest, group, per_rollout)
    same = highest - lowest <= SAME_REWARD * np.maximum(np.abs(lowest), np.abs(highest))
    means = np.bincount(group, weights=per_rollout) / sizes
    return GroupRewards(per_rollout, group.astype(np.int64), sizes, means, same, of_sample.astype(np.int64))


def rollout_advantages(
    grouped: GroupRewards, advantage: AdvantageName | str, normalise_std: bool = True
) -> NDArray[np.float32]:
    """Advantage of each training sample's rollout, [S] float32.

    0 for advantages from token rewards (reinforce_pp, gae) and for none.

    Raises:
        UserError: a group has a single rollout, and the advantage compares within the group.
        RewardError: a negative reward, and the advantage is maxrl.
        ConfigError: a function of the user's raised, or did not return [R] finite numbers.
    """
    if advantage in GROUP_RELATIVE and (grouped.sizes < 2).any():
        raise UserError(
            "rollout.group_size", 1, f"{advantage} compares responses to one prompt: a group of one has no signal",
            "set rollout.group_size to 2 or more (8 is usual)",
        )  # fmt: skip
    if advantage == "grpo":
        values = grpo(grouped, normalise_std)
    elif is_function(advantage):
        found = function_advantages(grouped, advantage)
        assert not isinstance(found, TurnAdvantages), "of turns, not of rollouts"
        values = found
    else:
        values = ESTIMATORS[advantage](grouped) if advantage in ESTIMATORS else np.zeros(len(grouped.rewards))
    return values[grouped.of_sample].astype(np.float32)


def function_advantages(grouped: GroupRewards, spec: str) -> NDArray[np.float64] | TurnAdvantages:
    """[R] advantages of rollouts, or [K] of turns, from a user's function.

    Raises:
        ConfigError: it raised, or returned an invalid value.
    """
    with calling(spec, SETTING):
        found = load_function(spec, SETTING)(grouped)
        of_turns = isinstance(found, TurnAdvantages)
        values = np.asarray(found.values if of_turns else found, np.float64)
    turns = 0 if grouped.turns is None else len(grouped.turns.rewards)
    wanted, label = (turns, "turns") if of_turns else (len(grouped.rewards), "rollouts")
    if values.shape != (wanted,) or not np.isfinite(values).all():
        field = "turns.rewards" if of_turns else "rewards"
        raise ConfigError(
            SETTING, spec, f"returned an array of shape {values.shape} for {wanted} {label}, or non-finite values",
            f"return one finite number for each of GroupRewards.{field}, in their order",
        )  # fmt: skip
    return TurnAdvantages(values) if of_turns else values


def grpo(grouped: GroupRewards, normalise_std: bool) -> NDArray[np.float64]:
    """(r - mean) / (std + STD_EPS), [R], with the sample standard deviation (n - 1) of the group (GRPO, arXiv
    2402.03300, section 4.1.2); without the division, Dr. GRPO (arXiv 2503.20783)."""
    centred = grouped.centred
    if not normalise_std:
        return centred
    variance = np.bincount(grouped.group, weights=centred**2) / (grouped.sizes - 1)
    return centred / (np.sqrt(variance)[grouped.group] + STD_EPS)


def rloo(grouped: GroupRewards) -> NDArray[np.float64]:
    """r minus the mean of the group's other rewards = n / (n - 1) (r - mean), [R] (arXiv 2402.14740)."""
    return grouped.centred * (grouped.sizes / (grouped.sizes - 1))[grouped.group]


def reinforce_pp_baseline(grouped: GroupRewards) -> NDArray[np.float64]:
    """r - mean, [R], before whitening over the batch (REINFORCE++ with baseline, arXiv 2501.03262)."""
    return grouped.centred


def maxrl(grouped: GroupRewards) -> NDArray[np.float64]:
    """(r - mean) / mean, [R]; 0 in a group without a success (MaxRL, arXiv 2602.02710).

    With rewards of 0 and 1 the mean is the pass rate p, and 1 / p turns the gradient of p into that of log p.
    """
    if (grouped.rewards < 0).any():
        raise RewardError(
            "reward", float(grouped.rewards.min()), "must not be negative: maxrl divides by the group's mean reward",
            "use rewards of 0 and 1 (or other non-negative ones), or another algorithm.advantage",
        )  # fmt: skip
    means = grouped.means[grouped.group]
    return np.divide(grouped.centred, means, out=np.zeros_like(means), where=means > 0)


ESTIMATORS: dict[str, Callable[[GroupRewards], NDArray[np.float64]]] = {
    "rloo": rloo,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "maxrl": maxrl,
}
"""Group-relative advantages without their own settings."""


def process_advantages(
    steps: Sequence[Steps], lengths: Sequence[int], group_ids: ArrayLike, normalise_std: bool = True
) -> list[NDArray[np.float32]]:
    """GRPO with process supervision (arXiv 2402.03300, section 4.1.3), [T] float32 per sample.

    Each step's reward is normalised by mean and sample standard deviation of all steps of its group; a token's
    advantage is the sum over the steps that end at it or later.
    """
    ids = np.repeat(np.asarray(group_ids, np.int64), [len(s) for s in steps])
    rewards = np.asarray([reward for sample in steps for _, reward in sample], np.float64)
    _, group = np.unique(ids, return_inverse=True)
    counts = np.maximum(np.bincount(group, minlength=1), 1).astype(np.float64)
    centred = rewards - (np.bincount(group, weights=rewards, minlength=1) / counts)[group]
    if normalise_std:
        variance = np.bincount(group, weights=centred**2, minlength=1) / np.maximum(counts - 1, 1)
        centred = centred / (np.sqrt(variance)[group] + STD_EPS)
    result: list[NDArray[np.float32]] = []
    start = 0
    for sample, length in zip(steps, lengths, strict=True):
        per_token = np.zeros(length)
        np.add.at(per_token, [position for position, _ in sample], centred[start : start + len(sample)])
        start += len(sample)
        result.append(per_token[::-1].cumsum()[::-1].astype(np.float32))
    return result
