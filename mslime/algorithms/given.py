"""Advantages that somebody else decided: a number for each turn, which came with the rollout as its process reward.

For `algorithm.advantage` of runs whose environments give advantages (Atropos' `advantages`). Nothing is compared within
a group and nothing is normalised; the rollout's reward is for the log alone.
"""

from __future__ import annotations

from mslime.algorithms.advantages import GroupRewards, TurnAdvantages


def advantages(rewards: GroupRewards) -> TurnAdvantages:
    """[K] the process reward of each turn."""
    assert rewards.turns is not None, "rollouts of a run have turns"
    return TurnAdvantages(rewards.turns.rewards)
