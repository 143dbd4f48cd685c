"""Loss of a micro-batch from its tokens. Dataclasses in and out; no distributed calls.

Index i is one token's prediction. Denominators are inside `weights`, so the loss of a step is the plain sum over all
ranks and micro-batches, in every layout. The policy losses are in `mslime.algorithms.policies`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mslime.algorithms.corrections import Correction, correction_weights
from mslime.algorithms.policies import TokenLoss, token_losses
from mslime.algorithms.statistics import LossStatistics
from mslime.algorithms.token_batch import (
    Reduce,
    SequenceIndex,
    TokenBatch,
    clamp_log_ratio,
    kl_estimate,
    kl_to_reference,
)
from mslime.config.algorithm import AlgorithmConfig
from mslime.config.serve import LossChoice


@dataclass(frozen=True)
class PolicyLossInputs:
    """Tokens of one micro-batch on one rank. All [n] on one device; values outside the mask may be arbitrary but
    finite.

    Attributes:
        log_probs: float32, of the policy being updated; the only input that carries a gradient, with `entropy`.
        behaviour_log_probs: float32, of the policy that sampled the tokens.
        advantages: float32.
        mask: bool, tokens that are trained.
        weights: float32, denominators included; 0 outside the mask.
        sequence_index: int64 in [0, num_sequences); the same numbering on every context-parallel rank.
        num_sequences: sequences of the micro-batch, also those without a token on this rank.
        old_log_probs: float32 of the policy before this update; None: it is the current one (`log_probs`, detached).
        reference_log_probs: float32 of the reference policy; None: no KL term.
        entropy: float32 of the next-token distribution; None: not computed.
        segment_index: int64 in [0, num_segments), each weight-version segment's number; for corrections by segment.
        num_segments: segments of the micro-batch.
        ages: int64, versions between the sampling of the token and this step; for corrections and metrics by age.
        positions: int64 >= 0, distance to the first trained token of the sequence; for metrics by position.
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
    ages: Tensor | None = None
    positions: Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's loss on one rank.

    Attributes:
        loss: 0-d float32; sum it over ranks and micro-batches, never average it.
        statistics: to be summed over ranks and micro-batches for `statistics.finalise`.
    """

    loss: Tensor
    statistics: LossStatistics


def policy_loss(
    inputs: PolicyLossInputs, config: AlgorithmConfig, reduce: Reduce | None = None, weight_scale: float = 1.0
) -> LossOutput:
    """Policy loss with off-policy correction, KL to a reference and entropy bonus.

        loss = sum of weights * (c * L + kl_coef * KL(pi || pi_ref) - entropy_coef * H)

    L is the policy loss `config.loss`, c the (detached) correction weight times `weight_scale`. The correction weighs
    the policy term only; a token that it masks keeps its KL and entropy terms, and denominators keep their counts. With
    `kl_in: reward` the KL is reported, but is not part of the loss.

    Args:
        reduce: sums over the ranks that hold other tokens of the same sequences; None when sequences are whole. It is
            called equally often on every rank.
        weight_scale: 1 / mean correction weight over the step when the correction is normalised, else 1.
    """
    mask = inputs.mask
    batch = _token_batch(inputs, config, reduce)
    correction = correction_weights(batch, config.correction)
    policy = token_losses(batch, config)
    weights = torch.where(mask, inputs.weights, 0.0)
    terms = {"policy": weights * correction.weights * weight_scale * policy.loss}
    total = terms["policy"].sum()
    if inputs.reference_log_probs is not None:
        reference = torch.where(mask, inputs.reference_log_probs, 0.0)
        kl = kl_to_reference(
            batch.log_probs, reference, batch.behaviour_log_probs, config.kl_type, unbiased=config.kl_unbiased
        )
        terms["kl"] = weights * kl
        total = total + (config.kl_coef * terms["kl"].sum() if config.kl_in == "loss" else 0.0)
    if inputs.entropy is not None:
        terms["entropy"] = weights * torch.where(mask, inputs.entropy, 0.0)
        total = total - config.entropy_coef * terms["entropy"].sum()
    statistics = _statistics(batch, total, terms, correction)
    _add_ratios(statistics, batch, policy, inputs)
    return LossOutput(total, statistics)


def sft_loss(log_probs: Tensor, weights: Tensor, mask: Tensor) -> LossOutput:
    """Negative log-likelihood: -sum of weights * log_probs over the mask. All [n]; log_probs carries the gradient."""
    loss = -(torch.where(mask, weights, 0.0) * torch.where(mask, log_probs, 0.0)).sum()
    statistics = LossStatistics.zeros(log_probs.device)
    statistics.add("tokens", mask.sum())
    statistics.add("total", loss)
    statistics.add("nll", loss)
    return LossOutput(loss, statistics)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, mask: Tensor, clip: float | None
) -> LossOutput:
    """Squared error of a critic, with PPO's clipping around its values before the update (arXiv 1707.06347).

        loss = sum of weights / 2 * max((v - R)^2, (v_old + clip(v - v_old, -clip, clip) - R)^2)

    Args:
        values: [n] float32; carries the gradient.
        old_values, returns, weights: [n] float32. mask: [n] bool, tokens that are trained.
        clip: None does not clip.
    """
    values, old, returns = (torch.where(mask, column, 0.0) for column in (values, old_values.detach(), returns))
    error = (values - returns).square()
    cut = torch.zeros_like(mask)
    if clip is not None:
        bounded = (old + (values - old).clamp(-clip, clip) - returns).square()
        error, cut = torch.maximum(error, bounded), bounded > error
    loss = 0.5 * (torch.where(mask, weights, 0.0) * error).sum()
    statistics = LossStatistics.zeros(values.device)
    residual = (returns - values).double()
    for name, summed in {
        "tokens": mask.sum(),
        "total": loss,
        "value": loss,
        "value_tokens": mask.sum(),
        "value_clipped": cut.sum(),
        "return": returns.double().sum(),
        "return_squared": returns.double().square().sum(),
        "residual": residual.sum(),
        "residual_squared": residual.square().sum(),
    }.items():
        statistics.add(name, summed)
    return LossOutput(loss, statistics)


def _token_batch(inputs: PolicyLossInputs, config: AlgorithmConfig, reduce: Reduce | None) -> TokenBatch:
    """Batch with zeros outside the mask and with sequence lengths."""
    mask = inputs.mask

    def masked(column: Tensor) -> Tensor:
        return torch.where(mask, column, 0.0)

    log_probs, behaviour = masked(inputs.log_probs), masked(inputs.behaviour_log_probs)
    old = log_probs.detach() if inputs.old_log_probs is None else masked(inputs.old_log_probs).detach()
    sequences = SequenceIndex(inputs.sequence_index, inputs.num_sequences, reduce)
    segments = None
    if inputs.segment_index is not None:
        segments = replace(sequences, index=inputs.segment_index, count=inputs.num_segments)
    return TokenBatch(
        log_probs=log_probs,
        old_log_probs=old,
        behaviour_log_probs=behaviour,
        anchor=behaviour if config.correction.reference == "rollout" else old,
        advantages=masked(inputs.advantages),
        mask=mask,
        sequences=sequences,
        lengths=sequences.sum(mask.to(log_probs.dtype)).clamp(min=1),
        segments=segments,
        ages=inputs.ages,
    )


def _statistics(batch: TokenBatch, total: Tensor, terms: dict[str, Tensor], correction: Correction) -> LossStatistics:
    statistics = LossStatistics.zeros(batch.log_probs.device)
    count = batch.mask.sum()
    statistics.add("tokens", count)
    statistics.add("total", total)
    for name, values in terms.items():
        statistics.add(name, values.double().sum())
        statistics.add(f"{name}_tokens", count)
    kept = torch.where(batch.mask, correction.weights, 0.0).double()
    statistics.add("correction_tokens", count)
    statistics.add("weight", kept.sum())
    statistics.add("weight_squared", kept.square().sum())
    statistics.add("weight_clipped", correction.clipped.sum())
    statistics.add("weight_masked", correction.masked.sum())
    # Sequences count equally, however their tokens are split: each token counts 1 / length. A sequence has left the
    # loss when all of its tokens have.
    share = batch.mask / batch.lengths.double()
    gone = batch.sequences.sum(correction.masked.to(batch.lengths.dtype)) >= batch.lengths
    statistics.add("sequences", share.sum())
    statistics.add("sequences_masked", (share * gone).sum())
    return statistics


def _add_ratios(statistics: LossStatistics, batch: TokenBatch, policy: TokenLoss, inputs: PolicyLossInputs) -> None:
    """Add statistics: distance of pi from its anchor, share cut off by the loss, mismatch of sampler and trainer,
    entropy.

    mismatch/kl is the mean of k3, an estimate of KL(mu || pi_old) with tokens from mu; kl_k1 is its unbiased, signed
    companion; the histogram of |log rho| gives ratio_p99, the 99th percentile of max(rho, 1 / rho).
    """
    mask = batch.mask  # other tokens count as zeros: after a boolean index the host waits for a GPU to count the rows
    statistics.add_user_metrics({name: torch.where(mask, values, 0) for name, values in policy.metrics.items()})
    statistics.add("clipped_below", (policy.below & mask).sum())
    statistics.add("clipped_above", (policy.above & mask).sum())
    statistics.add("ppo_kl", kl_estimate(batch.anchor.double(), batch.log_probs.detach().double(), "k3").sum())
    statistics.add_ratio_histogram(batch.log_ratio.detach(), mask)
    trainer, behaviour = batch.old_log_probs.double(), batch.behaviour_log_probs.double()
    k3 = kl_estimate(behaviour, trainer, "k3")
    statistics.add("mismatch_tokens", mask.sum())
    statistics.add("mismatch_k1", kl_estimate(behaviour, trainer, "k1").sum())
    statistics.add("mismatch_k3", k3.sum())
    statistics.add_mismatch_histogram((trainer - behaviour).abs(), mask)
    of_tokens = {"tokens": mask, "k3": k3, "clipped": (policy.below | policy.above) & mask}
    if inputs.entropy is not None:
        of_tokens["entropy"] = torch.where(mask, inputs.entropy.detach(), 0.0).double()
        statistics.add("entropy_of_tokens", of_tokens["entropy"].sum())
    if batch.ages is not None:
        statistics.add_by("age", batch.ages, of_tokens)
    if inputs.positions is not None:
        statistics.add_by("position", inputs.positions, of_tokens)


# Losses for clients of `mslime serve`, as the public SDK's documentation defines them: sums over tokens.
#
# With p = exp(log_probs) of the trained policy, q of the policy that sampled, A the advantages, r = p / q and w
# weights:
#
#     cross_entropy         -sum w log p
#     importance_sampling   -sum r A
#     ppo                   -sum min(r A, clip(r, low, high) A)              (https://arxiv.org/abs/1707.06347)
#     cispo                 -sum stop_gradient(clip(r, low, high)) A log p    (https://arxiv.org/abs/2506.13585)
#     dro                   -sum A log p - beta / 2 (log p - log q)^2         (https://arxiv.org/abs/2405.19107)


def client_loss(
    choice: LossChoice, log_probs: Tensor, mask: Tensor, weights: Tensor, advantages: Tensor, sampled: Tensor
) -> LossOutput:
    """The loss of the rows of a micro-batch on one rank.

    Args:
        log_probs: [n] float32, of the targets; carries the gradient.
        mask: [n] bool, rows with a target.
        weights, advantages, sampled: [n] float32; the last are log-probs of the policy that sampled.
    """
    zero = torch.zeros((), device=log_probs.device)
    log_p, log_q = torch.where(mask, log_probs, zero), torch.where(mask, sampled, zero)
    terms = _client_terms(choice, log_p, log_q, torch.where(mask, weights, zero), torch.where(mask, advantages, zero))
    loss = -terms.sum()
    statistics = LossStatistics.zeros(log_probs.device)
    statistics.add("tokens", mask.sum())
    statistics.add("total", loss)
    return LossOutput(loss, statistics)


def _client_terms(choice: LossChoice, log_p: Tensor, log_q: Tensor, weights: Tensor, advantages: Tensor) -> Tensor:
    """[n] terms; the loss is their negative sum."""
    if choice.name == "cross_entropy":
        return weights * log_p
    difference = log_p - log_q
    if choice.name == "dro":
        return advantages * log_p - choice.beta / 2 * difference.square()
    ratio = clamp_log_ratio(difference).exp()  # untrained rows may hold arbitrary client values
    if choice.name == "importance_sampling":
        return ratio * advantages
    clipped = ratio.clamp(choice.low, choice.high)
    if choice.name == "cispo":
        return clipped.detach() * advantages * log_p
    assert choice.name == "ppo", choice.name
    return torch.minimum(ratio * advantages, clipped * advantages)
