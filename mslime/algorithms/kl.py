"""Per-token estimates of KL divergence from log-probabilities of the sampled token (Schulman 2020, "Approximating KL
divergence"). With tokens drawn from p, k1 and k3 are unbiased estimates of KL(p || q)."""

from __future__ import annotations

import torch
from torch import Tensor

from mslime.config.choices import KLType

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is still far from float32's limit, and no real token is beyond it."""

LOW_VAR_BOUND = 10.0
"""low_var cuts k3 off here, lest one token that the reference finds impossible own the step."""


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """`log_ratio` within +-LOG_RATIO_BOUND; the gradient is zero outside."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def kl_estimate(log_p: Tensor, log_q: Tensor, kind: KLType) -> Tensor:
    """Estimate of KL(p || q) for each token, [n] like the inputs, differentiable in both.

    With d = log p - log q, clamped: k1 = d (signed; its gradient has zero mean), k2 = d^2 / 2 (biased, its
    gradient is the divergence's), k3 = e^-d - 1 + d (never negative), low_var = min(k3, LOW_VAR_BOUND).
    """
    return kl_of(clamp_log_ratio(log_p - log_q), kind)


def kl_of(d: Tensor, kind: KLType) -> Tensor:
    """`kl_estimate` from d = log p - log q, which is clamped already."""
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d.square()
    k3 = torch.expm1(-d) + d
    return k3 if kind == "k3" else k3.clamp(max=LOW_VAR_BOUND)


def kl_to_reference(log_pi: Tensor, log_ref: Tensor, log_mu: Tensor, kind: KLType, *, unbiased: bool) -> Tensor:
    """The KL term of a loss, [n]: an estimate of KL(pi || ref) from tokens that mu sampled; differentiable in log_pi.

    Args:
        unbiased: times pi / mu (DeepSeek-V3.2, arXiv 2512.02556, section 3.1): then both the estimate and its gradient
            are unbiased although mu drew the tokens.
    """
    estimate = kl_estimate(log_pi, log_ref, kind)
    return torch.exp(clamp_log_ratio(log_pi - log_mu)) * estimate if unbiased else estimate
