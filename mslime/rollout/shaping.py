"""What is taken off a training reward for length and for repetition. Evaluations are not shaped."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mslime.config.reward import RewardConfig
from mslime.data.sample import Sample


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), between -1 and 0.

    0 up to limit - buffer tokens, then falling in proportion, -1 at the limit and beyond.

    Args:
        length: tokens of the response. limit: L_max. buffer: L_cache, between 1 and the limit.
    """
    assert 0 < buffer <= limit
    return -min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def repeated_share(tokens: NDArray[np.int32], n: int) -> float:
    """Share of a response's n-grams that occurred before in it: 1 - distinct / all. 0 for less than n tokens."""
    if len(tokens) < n:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(tokens, np.int32), n)
    rows = np.ascontiguousarray(grams).view(np.dtype((np.void, 4 * n)))
    return 1.0 - len(np.unique(rows)) / len(rows)


def shaped(sample: Sample, reward: float, config: RewardConfig, limit: int) -> float:
    """The reward with penalties, which are also noted in `sample.scores`.

    Args:
        limit: `rollout.max_response_tokens`.
    """
    overlong, repetition = config.overlong, config.repetition
    if overlong.buffer_tokens:
        penalty = overlong.factor * overlong_penalty(sample.response_length, limit, overlong.buffer_tokens)
        sample.scores["reward/overlong/mean"] = penalty
        reward += penalty
    if repetition.ngram:
        penalty = -repetition.factor * repeated_share(sample.response_tokens, repetition.ngram)
        sample.scores["reward/repetition/mean"] = penalty
        reward += penalty
    return reward
