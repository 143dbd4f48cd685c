"""An advantage of your own: `algorithm.advantage: examples.extending.advantage:above_median`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mslime.algorithms.advantages import GroupRewards


def above_median(rewards: GroupRewards) -> NDArray[np.float64]:
    """Each rollout's reward minus the median of its group, which one very good rollout does not move."""
    medians = np.asarray([np.median(rewards.rewards[rewards.group == g]) for g in range(len(rewards.sizes))])
    return rewards.rewards - medians[rewards.group]
