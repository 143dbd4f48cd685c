"""Per-token estimates of KL divergence from log-probabilities of the sampled token (Schulman 2020, "Approximating KL
divergence"). With tokens drawn from p, each is an estimate of KL(p || q)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is still far from float32's limit, and no real token is beyond it."""

KLType = Literal["k1", "k2", "k3"]


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """`log_ratio` within +-LOG_RATIO_BOUND; the gradient is zero outside."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def kl_estimate(log_p: Tensor, log_q: Tensor, kind: KLType) -> Tensor:
    """Estimate of KL(p || q) for each token, [n] like the inputs, differentiable in both.

    With d = log p - log q, clamped: k1 = d (unbiased, signed; its gradient has zero mean), k2 = d^2 / 2 (biased, its
    gradient is the divergence's), k3 = e^-d - 1 + d (unbiased, never negative).
    """
    d = clamp_log_ratio(log_p - log_q)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d.square()
    return torch.expm1(-d) + d
