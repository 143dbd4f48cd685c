"""A user-defined off-policy correction: `algorithm.correction: examples.extending.correction:fading`."""

from __future__ import annotations

import torch
from torch import Tensor

from mslime.algorithms.token_batch import TokenBatch


def fading(log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """(weight, mask) of each token: rho up to 1, 1 / rho beyond; tokens that differ by more than e^3 leave the loss.

    `log_ratio` is log pi_old - log mu: the trainer's policy over the one that sampled.
    """
    return torch.exp(-log_ratio.abs()), log_ratio.abs() < 3.0
