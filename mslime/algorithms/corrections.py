"""Off-policy corrections: from the three policies of a token to its weight in the loss.

mu is the policy that sampled the token, pi_old the trainer's before this update, pi the one being updated. Everything
here is detached: a correction is a constant of the update. Sums over a sequence go through `reduce`, so that a sequence
split over context-parallel ranks gives the number it would give whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mslime.algorithms.kl import clamp_log_ratio
from mslime.config.correction import CorrectionConfig

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks that hold other parts of the same sequences; None when sequences are whole."""


@dataclass(frozen=True)
class Rows:
    """Token rows of a micro-batch on one rank, as the corrections see them. All [n] and detached.

    Attributes:
        old_log_probs: float32, log pi_old.
        current_log_probs: float32, log pi.
        behaviour_log_probs: float32, log mu.
        advantages: float32.
        mask: bool, rows that are trained.
        sequence_index: int64 in [0, num_sequences), the same numbering on all ranks that `reduce` spans.
        num_sequences: sequences of the micro-batch, also those with no row here.
        segment_index: int64 in [0, num_segments), for level segment; each segment lies in one sequence.
        num_segments: segments of the micro-batch.
    """

    old_log_probs: Tensor
    current_log_probs: Tensor
    behaviour_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_index: Tensor
    num_sequences: int
    segment_index: Tensor | None = None
    num_segments: int = 0


@dataclass(frozen=True)
class Correction:
    """What the loss multiplies each row by.

    Attributes:
        weights: [n] float32, 0 for rows that left the loss.
        clipped: [n] bool, rows whose weight was bounded.
        masked: [n] bool, rows that were in the mask and left the loss.
    """

    weights: Tensor
    clipped: Tensor
    masked: Tensor


def needs_old_log_probs(config: CorrectionConfig, optimizer_steps_per_rollout: int) -> bool:
    """Whether pi_old must be computed by a pass of its own before the first gradient pass.

    With one optimizer step a rollout, pi_old equals the current policy at its gradient pass. A step-wide mean of the
    weights is known only after all of them are.
    """
    if config.reference == "rollout":
        return False
    return optimizer_steps_per_rollout > 1 or config.normalise


def correction_weights(rows: Rows, config: CorrectionConfig, reduce: Reduce | None = None) -> Correction:
    """Weight of each row under `config`, before any normalisation over the step.

    With reference rollout the loss's own ratio is pi / mu, so the weights are 0 or 1 and rho is pi / mu.
    """
    ones = torch.ones_like(rows.behaviour_log_probs)
    never = torch.zeros_like(rows.mask)
    if config.action == "none":
        return Correction(ones, never, never)
    log_rho = _log_rho(rows, config)
    if config.action in ("truncate", "clip"):
        if config.reference == "rollout":
            return Correction(ones, never, never)
        rho = torch.exp(_over_level(log_rho, rows, config.level, reduce))
        weights = rho.clamp(config.low if config.action == "clip" else None, config.high)
        return Correction(weights, (weights != rho) & rows.mask, never)
    masked = _rejected(log_rho, rows, config, reduce) & rows.mask
    kept, clipped = _kept_weights(rows, config, reduce)
    return Correction(torch.where(masked, 0.0, kept), clipped & ~masked, masked)


def _log_rho(rows: Rows, config: CorrectionConfig) -> Tensor:
    """Clamped log rho [n], 0 outside the mask."""
    current = config.policy == "current" or config.reference == "rollout"
    numerator = rows.current_log_probs if current else rows.old_log_probs
    return torch.where(rows.mask, clamp_log_ratio(numerator - rows.behaviour_log_probs), 0.0)


def _over_level(values: Tensor, rows: Rows, level: str, reduce: Reduce | None) -> Tensor:
    """Each row's value over its level: itself, or the sum or mean over its segment or sequence; clamped. [n]."""
    if level == "token":
        return values
    if level == "segment":
        assert rows.segment_index is not None, "level segment needs segment_index"
        return clamp_log_ratio(group_sums(values, rows.segment_index, rows.num_segments, reduce)[rows.segment_index])
    sums = group_sums(values, rows.sequence_index, rows.num_sequences, reduce)
    if level == "geometric":
        counts = group_sums(rows.mask.to(values.dtype), rows.sequence_index, rows.num_sequences, reduce)
        sums = sums / counts.clamp(min=1)
    return clamp_log_ratio(sums[rows.sequence_index])


def group_sums(values: Tensor, index: Tensor, groups: int, reduce: Reduce | None) -> Tensor:
    """Sum of `values` [n] by `index` [n] into [groups], over all ranks of `reduce`; summed in float64."""
    sums = torch.zeros(groups, dtype=torch.float64, device=values.device).index_add_(0, index, values.double())
    return (reduce(sums) if reduce is not None else sums).to(values.dtype)


def _token_metric(log_rho: Tensor, rows: Rows, config: CorrectionConfig) -> Tensor:
    """The metric of each token, [n]. The ratio stays a logarithm until it has been taken over its level."""
    if config.metric == "ratio":
        return log_rho
    if config.metric == "k1":
        return -log_rho
    if config.metric == "k2":
        return 0.5 * log_rho.square()
    if config.metric == "k3":
        return torch.expm1(log_rho) - log_rho
    mu = torch.exp(rows.behaviour_log_probs)
    pi = torch.exp(clamp_log_ratio(log_rho) + rows.behaviour_log_probs)
    divergence = (pi - mu).abs() if config.metric == "tv" else torch.maximum(_binary_kl(pi, mu), _binary_kl(mu, pi))
    return torch.where(rows.mask, divergence, 0.0)


def _binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL between the Bernoulli variables "this token" and "another", [n]; probabilities kept away from 0 and 1."""
    p, q = p.clamp(1e-9, 1 - 1e-6), q.clamp(1e-9, 1 - 1e-6)
    return p * torch.log(p / q) + (1 - p) * (torch.log1p(-p) - torch.log1p(-q))


def _rejected(log_rho: Tensor, rows: Rows, config: CorrectionConfig, reduce: Reduce | None) -> Tensor:
    """Rows outside the band, [n] bool; with drop, all rows of their sequence."""
    value = _over_level(_token_metric(log_rho, rows, config), rows, config.level, reduce)
    if config.metric == "ratio":
        value = torch.exp(value)
    outside = torch.zeros_like(rows.mask)
    if config.low is not None:
        outside = outside | (value < config.low)
    if config.high is not None:
        outside = outside | (value > config.high)
    outside = outside & rows.mask
    if config.action == "drop":
        hits = group_sums(outside.float(), rows.sequence_index, rows.num_sequences, reduce)
        outside = (hits > 0)[rows.sequence_index]
    if config.negative_advantage_only:
        signed = torch.where(rows.mask, rows.advantages, 0.0)
        outside = (
            outside & (group_sums(signed, rows.sequence_index, rows.num_sequences, reduce) < 0)[rows.sequence_index]
        )
    return outside


def _kept_weights(rows: Rows, config: CorrectionConfig, reduce: Reduce | None) -> tuple[Tensor, Tensor]:
    """(weights [n], clipped [n] bool) of the rows that mask and drop keep: always of pi_old over mu."""
    never = torch.zeros_like(rows.mask)
    if config.kept_weight == "one" or config.reference == "rollout":
        return torch.ones_like(rows.behaviour_log_probs), never
    log_rho = torch.where(rows.mask, clamp_log_ratio(rows.old_log_probs - rows.behaviour_log_probs), 0.0)
    if config.kept_weight == "token":
        rho = torch.exp(log_rho)
        weights = rho.clamp(max=config.token_cap)
        return weights, (weights != rho) & rows.mask
    return torch.exp(_over_level(log_rho, rows, config.level, reduce)), never
