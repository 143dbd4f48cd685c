"""A user-defined policy loss: `algorithm.loss: examples.extending.loss:spo`."""

from __future__ import annotations

import torch

from mslime.algorithms.policies import TokenLoss
from mslime.algorithms.token_batch import TokenBatch
from mslime.config.algorithm import AlgorithmConfig


def spo(batch: TokenBatch, algorithm: AlgorithmConfig) -> TokenLoss:
    """Simple policy optimization (arXiv 2401.16025): -r A + |A| / (2 eps) (r - 1)^2, a quadratic penalty instead of a
    clip.

    eps is `algorithm.clip_high`. Returns each token's loss; mslime weights the tokens and sums them.
    """
    ratio = torch.exp(batch.log_ratio)
    pull = batch.advantages.abs() / (2 * algorithm.clip_high) * (ratio - 1).square()
    far = (ratio - 1).abs() > algorithm.clip_high
    return TokenLoss(
        loss=-ratio * batch.advantages + pull,
        below=far & (ratio < 1),  # counted in loss/clip_fraction_below
        above=far & (ratio > 1),
        metrics={"spo_pull": pull},  # user/spo_pull is its mean over the trained tokens
    )
