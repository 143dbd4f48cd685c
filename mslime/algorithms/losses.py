"""Policy and supervised losses over flat token rows. A dataclass in, a dataclass out; no distributed calls.

Each row is one token's prediction. Denominators are inside `weights`, so the loss of a step is the plain sum over all
ranks and micro-batches, in every layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mslime.algorithms.corrections import Correction, Reduce, Rows, correction_weights
from mslime.algorithms.kl import clamp_log_ratio, kl_estimate
from mslime.algorithms.statistics import LossStatistics
from mslime.config.schema import AlgorithmConfig

KL_TOKEN_BOUND = 10.0
"""A token's KL to the reference is cut off here, lest one token that the reference finds impossible own the step."""


@dataclass(frozen=True)
class PolicyLossInputs:
    """Token rows of one micro-batch on one rank. All [n] on one device; rows outside the mask may hold anything finite.

    Attributes:
        log_probs: float32, of the policy being updated; the only input that carries a gradient, with `entropy`.
        behaviour_log_probs: float32, of the policy that sampled the tokens.
        advantages: float32.
        mask: bool, tokens that are trained.
        weights: float32, denominators included; 0 outside the mask.
        sequence_index: int64 in [0, num_sequences); the same numbering on every context-parallel rank.
        num_sequences: sequences of the micro-batch, also those without a row on this rank.
        old_log_probs: float32 of the policy before this update; None: it is the current one (`log_probs`, detached).
        reference_log_probs: float32 of the reference policy; None: no KL term.
        entropy: float32 of the next-token distribution; None: not computed.
        segment_index: int64 in [0, num_segments), each weight-version segment's number; for corrections by segment.
        num_segments: segments of the micro-batch.
    """

    log_probs: Tensor
    behaviour_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    sequence_index: Tensor
    num_sequences: int
    old_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None
    entropy: Tensor | None = None
    segment_index: Tensor | None = None
    num_segments: int = 0


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's loss on one rank.

    Attributes:
        loss: 0-d float32; sum it over ranks and micro-batches, never average it.
        statistics: what to add up over ranks and micro-batches for `statistics.finalise`.
    """

    loss: Tensor
    statistics: LossStatistics


def policy_loss(
    inputs: PolicyLossInputs, config: AlgorithmConfig, reduce: Reduce | None = None, weight_scale: float = 1.0
) -> LossOutput:
    """Clipped policy-gradient loss with off-policy correction, KL to a reference and entropy bonus.

        loss = sum of weights * (c * PPO(r, A) + kl_coef * KL(pi || pi_ref) - entropy_coef * H)

    r = pi / pi_old, PPO as in `clipped_policy_loss`, c the (detached) correction weight times `weight_scale`. The
    correction weighs the policy term only; a token that it masks keeps its KL and entropy terms, and denominators keep
    their counts.

    Args:
        reduce: sums over the ranks that hold other rows of the same sequences; None when sequences are whole. It is
            called only for corrections over sequences or segments, equally often on every rank.
        weight_scale: 1 / mean correction weight over the step when the correction is normalised, else 1.
    """
    mask = inputs.mask
    log_probs = torch.where(mask, inputs.log_probs, 0.0)
    behaviour = torch.where(mask, inputs.behaviour_log_probs, 0.0)
    old = _old_log_probs(inputs, config, behaviour)
    correction = correction_weights(_rows(inputs, old, behaviour), config.correction, reduce)
    policy, clipped = clipped_policy_loss(log_probs - old, inputs.advantages, config)
    weights = torch.where(mask, inputs.weights, 0.0)
    terms = {"policy": weights * correction.weights * weight_scale * torch.where(mask, policy, 0.0)}
    total = terms["policy"].sum()
    if inputs.reference_log_probs is not None:
        reference = torch.where(mask, inputs.reference_log_probs, 0.0)
        terms["kl"] = weights * kl_estimate(log_probs, reference, config.kl_type).clamp(max=KL_TOKEN_BOUND)
        total = total + config.kl_coef * terms["kl"].sum()
    if inputs.entropy is not None:
        terms["entropy"] = weights * torch.where(mask, inputs.entropy, 0.0)
        total = total - config.entropy_coef * terms["entropy"].sum()
    statistics = _statistics(inputs, total, terms, correction)
    statistics.add("clipped_ratio", (clipped & mask).sum())
    statistics.add("ppo_kl", kl_estimate(old.double(), log_probs.detach().double(), "k3").sum())
    _add_mismatch(statistics, _trainer_side(inputs, log_probs)[mask], behaviour[mask])
    return LossOutput(total, statistics)


def clipped_policy_loss(log_ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """(loss [n], clipped [n] bool) of PPO with clip-higher (arXiv 1707.06347, 2503.14476) and dual clip (1912.09729).

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); with a dual bound c and A < 0, at most -c A. `clipped`
    marks tokens whose gradient a bound took away.
    """
    ratio = torch.exp(clamp_log_ratio(log_ratio))
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if config.clip_dual is not None:
        ceiling = -config.clip_dual * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(over, ceiling, loss), clipped | over
    return loss, clipped


def sft_loss(log_probs: Tensor, weights: Tensor, mask: Tensor) -> LossOutput:
    """Negative log-likelihood: -sum of weights * log_probs over the mask. All [n]; log_probs carries the gradient."""
    loss = -(torch.where(mask, weights, 0.0) * torch.where(mask, log_probs, 0.0)).sum()
    statistics = LossStatistics.zeros(log_probs.device)
    statistics.add("tokens", mask.sum())
    statistics.add("total", loss)
    statistics.add("nll", loss)
    return LossOutput(loss, statistics)


def _old_log_probs(inputs: PolicyLossInputs, config: AlgorithmConfig, behaviour: Tensor) -> Tensor:
    """log pi_old [n], the denominator of the clipped ratio, detached and 0 outside the mask."""
    if config.correction.reference == "rollout":
        return behaviour
    return _trainer_side(inputs, torch.where(inputs.mask, inputs.log_probs, 0.0))


def _trainer_side(inputs: PolicyLossInputs, log_probs: Tensor) -> Tensor:
    """The trainer's own log-probs before this update [n], whatever the ratio's reference is; 0 outside the mask."""
    if inputs.old_log_probs is None:
        return log_probs.detach()
    return torch.where(inputs.mask, inputs.old_log_probs, 0.0).detach()


def _rows(inputs: PolicyLossInputs, old: Tensor, behaviour: Tensor) -> Rows:
    current = torch.where(inputs.mask, inputs.log_probs, 0.0).detach()
    return Rows(
        old,
        current,
        behaviour,
        inputs.advantages,
        inputs.mask,
        inputs.sequence_index,
        inputs.num_sequences,
        inputs.segment_index,
        inputs.num_segments,
    )


def _statistics(
    inputs: PolicyLossInputs, total: Tensor, terms: dict[str, Tensor], correction: Correction
) -> LossStatistics:
    statistics = LossStatistics.zeros(inputs.log_probs.device)
    count = inputs.mask.sum()
    statistics.add("tokens", count)
    statistics.add("total", total)
    for name, values in terms.items():
        statistics.add(name, values.double().sum())
        statistics.add(f"{name}_tokens", count)
    kept = torch.where(inputs.mask, correction.weights, 0.0).double()
    statistics.add("correction_tokens", count)
    statistics.add("weight", kept.sum())
    statistics.add("weight_squared", kept.square().sum())
    statistics.add("weight_clipped", correction.clipped.sum())
    statistics.add("weight_masked", correction.masked.sum())
    return statistics


def _add_mismatch(statistics: LossStatistics, trainer: Tensor, behaviour: Tensor) -> None:
    """How far the sampler was from the trainer, from the log-probs [m] of both on the trained tokens.

    mismatch/kl is the mean of k3, an estimate of KL(mu || pi_old) with tokens from mu; kl_k1 is its unbiased, signed
    companion; the histogram of |log rho| gives ratio_p99, the 99th percentile of max(rho, 1 / rho).
    """
    behaviour, trainer = behaviour.double(), trainer.double()
    statistics.add("mismatch_tokens", torch.tensor(float(behaviour.numel())))
    statistics.add("mismatch_k1", kl_estimate(behaviour, trainer, "k1").sum())
    statistics.add("mismatch_k3", kl_estimate(behaviour, trainer, "k3").sum())
    statistics.add_mismatch_histogram((trainer - behaviour).abs())
