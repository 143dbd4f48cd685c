"""Advantages from outside: one number per turn, stored as its process reward.

For `algorithm.advantage` of runs whose environments send advantages (Atropos' `advantages`). They are neither compared
within a group nor normalised; the rollout's reward is only logged.
"""

from __future__ import annotations

from mslime.algorithms.advantages import GroupRewards, TurnAdvantages


def advantages(rewards: GroupRewards) -> TurnAdvantages:
    """[K] process reward of each turn."""
    assert rewards.turns is not None, "rollouts of a run have turns"
    return TurnAdvantages(rewards.turns.rewards)
