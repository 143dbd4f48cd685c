"""User-defined advantages: `algorithm.advantage: examples.extending.advantage:above_median`, or `...:by_turn`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mslime.algorithms.advantages import GroupRewards, TurnAdvantages


def above_median(rewards: GroupRewards) -> NDArray[np.float64]:
    """Each rollout's reward minus the median of its group, which is robust to one very good rollout."""
    medians = np.asarray([np.median(rewards.rewards[rewards.group == g]) for g in range(len(rewards.sizes))])
    return rewards.rewards - medians[rewards.group]


def by_turn(rewards: GroupRewards) -> TurnAdvantages:
    """Each turn's return minus the mean of its group's turns of the same number, plus the rollout's own advantage.

    A turn's return is the rewards of its step and of later ones, discounted by 0.9 a turn, similar to turn-level GRPO
    (arXiv 2505.11821).
    """
    turns = rewards.turns
    assert turns is not None
    returns = turns.returns(gamma=0.9)
    _, alike = np.unique(np.stack([rewards.group[turns.rollout], turns.index]), axis=1, return_inverse=True)
    alike = alike.reshape(-1)
    means = np.bincount(alike, weights=returns) / np.bincount(alike)
    return TurnAdvantages(returns - means[alike] + rewards.centred[turns.rollout])
