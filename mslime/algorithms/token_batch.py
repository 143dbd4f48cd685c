"""Tokens of a micro-batch for losses and corrections, sums over sequences, and estimates of KL divergence.

mu is the policy that sampled a token, pi_old the trainer's before this update, pi the one being updated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mslime.config.base import KLType

# Per-token estimates of KL divergence from log-probabilities of the sampled token (Schulman 2020, "Approximating KL
# divergence"). With tokens drawn from p, k1 and k3 are unbiased estimates of KL(p || q).

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is still far from float32's limit, and no real token is beyond it."""

LOW_VAR_BOUND = 10.0
"""low_var bounds k3 here: otherwise one token that the reference finds impossible would dominate the step."""


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
    """`kl_estimate` from a clamped d = log p - log q."""
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


LOSS_SETTING = "algorithm.loss"
Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks that hold other tokens of the same sequences, possibly in place."""


@dataclass(frozen=True)
class SequenceIndex:
    """Grouping of tokens: the sequences of a micro-batch, or their weight-version segments.

    Attributes:
        index: [n] int64 in [0, count), the same numbering on all ranks that `reduce` spans.
        count: sequences of the micro-batch, also those without a token on this rank.
        reduce: None when sequences are whole; called equally often on every rank, and never differentiated.
    """

    index: Tensor
    count: int
    reduce: Reduce | None = None

    def sum(self, values: Tensor) -> Tensor:
        """[n] -> [n]: for each token the sum over its sequence, over all ranks; summed in float64, detached."""
        values = values.detach()
        sums = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        sums.index_add_(0, self.index, values.double())
        return (self.reduce(sums) if self.reduce is not None else sums).to(values.dtype)[self.index]


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of a micro-batch on one rank; all [n], and zero outside the mask.

    Attributes:
        log_probs: float32, log pi; carries the gradient.
        old_log_probs: float32, log pi_old.
        behaviour_log_probs: float32, log mu.
        anchor: float32, denominator of the loss's ratio: `old_log_probs`, or `behaviour_log_probs` in bypass mode.
        advantages: float32.
        mask: bool, tokens that are trained.
        sequences: the sequences of the tokens.
        lengths: float32, trained tokens of the token's sequence over all ranks, at least 1.
        segments: their weight-version segments, each within one sequence; None: unknown.
        ages: int64, versions between the sampling of the token and this step; None: unknown.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    behaviour_log_probs: Tensor
    anchor: Tensor
    advantages: Tensor
    mask: Tensor
    sequences: SequenceIndex
    lengths: Tensor
    segments: SequenceIndex | None = None
    ages: Tensor | None = None

    @property
    def log_ratio(self) -> Tensor:
        """log of pi over the anchor, clamped; carries the gradient."""
        return clamp_log_ratio(self.log_probs - self.anchor)

    def mean(self, values: Tensor) -> Tensor:
        """[n] -> [n]: the mean over the token's sequence of values that are 0 outside the mask; detached."""
        return self.sequences.sum(values) / self.lengths
