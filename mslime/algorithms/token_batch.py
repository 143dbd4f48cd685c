"""Tokens of a micro-batch as losses and corrections see them, and sums over the sequences that they belong to.

mu is the policy that sampled a token, pi_old the trainer's before this update, pi the one being updated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mslime.algorithms.kl import clamp_log_ratio

LOSS_SETTING = "algorithm.loss"
Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks that hold other tokens of the same sequences, possibly in place."""


@dataclass(frozen=True)
class SequenceIndex:
    """Which tokens belong together: the sequences of a micro-batch, or their weight-version segments.

    Attributes:
        index: [n] int64 in [0, count), the same numbering on all ranks that `reduce` spans.
        count: sequences of the micro-batch, also those with no token here.
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
        anchor: float32, what the loss's ratio is over: `old_log_probs`, or `behaviour_log_probs` in bypass mode.
        advantages: float32.
        mask: bool, tokens that are trained.
        sequences: the sequences of the tokens.
        lengths: float32, trained tokens of the token's sequence over all ranks, at least 1.
        segments: their weight-version segments, each within one sequence; None: not known.
        ages: int64, versions between the sampling of the token and this step; None: not known.
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
