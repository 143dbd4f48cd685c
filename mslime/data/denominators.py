"""What a token of one optimizer step weighs in the loss: its denominator, over the whole step and before any split."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from mslime.config.advantage import LossAggregation
from mslime.data.sample import Sample


def token_weights(
    samples: Sequence[Sample], aggregation: LossAggregation, max_response_tokens: int | None = None
) -> list[NDArray[np.float32]]:
    """Weight of every token in the loss of one optimizer step, [T] float32 per sample, 0 outside the mask.

    With n trained tokens in a sequence (rollout, group, step), and counting only those with n > 0:

        token: 1 / n of the step. sequence: 1 / (sequences x n of the sequence). rollout: 1 / (rollouts x n of the
        rollout), however many sequences it became. group: 1 / (groups x n of the group).
        constant: 1 / (rollouts x max_response_tokens) (Dr. GRPO, arXiv 2503.20783).

    All but the last sum to 1, or to 0 when nothing is trained.
    """
    counts = np.asarray([s.trainable_tokens for s in samples], np.float64)
    if aggregation == "token":
        denominators = np.full(len(samples), counts.sum())
    elif aggregation == "sequence":
        denominators = counts * np.count_nonzero(counts)
    else:
        units = [s.group_id for s in samples] if aggregation == "group" else [s.rollout for s in samples]
        unit = _numbered(units)
        per_unit = np.bincount(unit, weights=counts)
        live = np.count_nonzero(per_unit)
        if aggregation == "constant":
            assert max_response_tokens is not None, "a constant denominator needs max_response_tokens"
            denominators = np.full(len(samples), float(live * max_response_tokens))
        else:
            denominators = per_unit[unit] * live
    return [(s.loss_mask / max(d, 1.0)).astype(np.float32) for s, d in zip(samples, denominators, strict=True)]


def _numbered(keys: Sequence[Hashable]) -> NDArray[np.int64]:
    """Keys as 0, 1, ... in the order of their first appearance."""
    numbers: dict[Hashable, int] = {}
    return np.asarray([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
