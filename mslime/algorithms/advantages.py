"""Advantages from rewards. NumPy only, so that the driver can call it without torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mslime.config.errors import UserError

RewardGroup = Sequence[float] | NDArray[np.float32] | NDArray[np.float64]


def grpo_advantages(groups: Sequence[RewardGroup], normalise_std: bool, eps: float = 1e-6) -> list[NDArray[np.float32]]:
    """Rewards relative to the mean of their group (GRPO, arXiv 2402.03300, section 4.1.2).

    Args:
        groups: G groups of rewards; [G, n] or ragged.
        normalise_std: divide by the group's sample standard deviation (n - 1) plus `eps`; False is Dr. GRPO
            (arXiv 2503.20783).
        eps: keeps a group of equal rewards at zero.

    Returns:
        One float32 array a group, of the group's length.

    Raises:
        UserError: a group has fewer than two rewards.
    """
    return [_one_group(np.asarray(group, dtype=np.float64), normalise_std, eps) for group in groups]


def _one_group(rewards: NDArray[np.float64], normalise_std: bool, eps: float) -> NDArray[np.float32]:
    if rewards.size < 2:
        raise UserError(
            "rollout.group_size",
            int(rewards.size),
            "GRPO compares responses to one prompt: a group of one has zero advantage and teaches nothing",
            "set rollout.group_size to 2 or more (8 is usual)",
        )
    assert np.isfinite(rewards).all(), "rewards must be finite before advantages are computed"
    centred = rewards - rewards.mean()
    scale = rewards.std(ddof=1) + eps if normalise_std else 1.0
    return (centred / scale).astype(np.float32)
