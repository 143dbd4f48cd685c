"""Off-policy corrections: a token's weight in the loss, from its three policies.

All values are detached: a correction is a constant of the update. `mslime.algorithms.token_batch` defines the policies,
and sums over sequences that are split over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from mslime.algorithms.token_batch import TokenBatch, clamp_log_ratio, kl_of
from mslime.config.algorithm import CorrectionConfig
from mslime.config.errors import ConfigError
from mslime.extensions import calling, load_function

SETTING = "algorithm.correction.function"


@dataclass(frozen=True)
class Correction:
    """Factor of each token in the loss.

    Attributes:
        weights: [n] float32, 0 for tokens that left the loss.
        clipped: [n] bool, tokens whose weight was bounded.
        masked: [n] bool, tokens that were in the mask and left the loss.
    """

    weights: Tensor
    clipped: Tensor
    masked: Tensor


def needs_old_log_probs(config: CorrectionConfig, optimizer_steps_per_rollout: int) -> bool:
    """Whether pi_old needs its own pass before the first gradient pass.

    With one optimizer step a rollout, pi_old equals the current policy at its gradient pass. A step-wide mean of the
    weights is known only after all of them are.
    """
    if config.reference == "rollout":
        return False
    return optimizer_steps_per_rollout > 1 or config.normalise


def correction_weights(batch: TokenBatch, config: CorrectionConfig) -> Correction:
    """Weight of each token under `config`, before any normalisation over the step.

    With reference rollout the loss's own ratio is pi / mu, so the weights are 0 or 1 and rho is pi / mu. Tokens of
    segments beyond `max_age` weigh `old_weight` times as much, whatever the action.
    """
    weights, clipped, masked = _by_ratio(batch, config)
    if config.max_age is None:
        return Correction(weights, clipped, masked)
    assert batch.ages is not None, "max_age needs the ages of the segments"
    old = (batch.ages > config.max_age) & batch.mask
    masked = masked | old if config.old_weight == 0 else masked
    return Correction(torch.where(old, config.old_weight * weights, weights), clipped & ~masked, masked)


def _by_ratio(batch: TokenBatch, config: CorrectionConfig) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, clipped, masked) of the action or the function, each [n].

    The presets of `algorithm.correction` are these actions (`config.algorithm.PRESETS`, with their papers): truncate is
    TIS (`tis`, `seq_tis`) and clip a TIS with two bounds; mask is MIS, IcePop, KPop and DPPO's region (`mis`,
    `icepop`, `kpop`, `dppo_tv`); drop rejects whole sequences (`opsm`, `geo_rs`, `k3_rs`, `veto`).
    """
    if config.function is not None:
        return _by_function(batch, config, config.function)
    ones, never = torch.ones_like(batch.behaviour_log_probs), torch.zeros_like(batch.mask)
    weighs = config.action in ("truncate", "clip")
    if config.action == "none" or (weighs and config.reference == "rollout"):
        return ones, never, never
    log_rho = _log_rho(batch, config)
    if weighs:
        rho = torch.exp(_over_level(log_rho, batch, config.level))
        weights = rho.clamp(config.low if config.action == "clip" else None, config.high)
        return weights, (weights != rho) & batch.mask, never
    masked = _rejected(log_rho, batch, config) & batch.mask
    kept, clipped = _kept_weights(batch, config)
    return torch.where(masked, 0.0, kept), clipped & ~masked, masked


def _by_function(batch: TokenBatch, config: CorrectionConfig, spec: str) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, clipped, masked) from a user's function, each [n]; its weights are constants of the update.

    Raises:
        ConfigError: the function raised, or did not return weights and mask.
    """
    with calling(spec, SETTING):
        found: object = load_function(spec, SETTING)(_log_rho(batch, config), batch)
    pair = cast("tuple[object, ...]", found) if isinstance(found, tuple) else ()
    match pair:
        case (Tensor() as weights, Tensor() as kept) if weights.shape == kept.shape == batch.mask.shape:
            masked = ~kept.bool() & batch.mask
            return (
                torch.where(batch.mask & ~masked, weights.detach().to(batch.log_probs.dtype), 0.0),
                torch.zeros_like(batch.mask),
                masked,
            )
        case _:
            raise ConfigError(
                SETTING, spec, f"must return (weights, mask), two tensors of {len(batch.mask)} tokens like log_ratio",
                "see docs/extending.md for an example",
            )  # fmt: skip


def _log_rho(batch: TokenBatch, config: CorrectionConfig) -> Tensor:
    """Clamped log rho [n], 0 outside the mask."""
    current = config.policy == "current" or config.reference == "rollout"
    numerator = batch.log_probs.detach() if current else batch.old_log_probs
    return clamp_log_ratio(numerator - batch.behaviour_log_probs)


def _over_level(values: Tensor, batch: TokenBatch, level: str) -> Tensor:
    """Each token's value over its level: itself, or the sum or mean over its segment or sequence; clamped. [n]."""
    if level == "token":
        return values
    if level == "segment":
        assert batch.segments is not None, "level segment needs the segments"
        return clamp_log_ratio(batch.segments.sum(values))
    return clamp_log_ratio(batch.mean(values) if level == "geometric" else batch.sequences.sum(values))


def _token_metric(log_rho: Tensor, batch: TokenBatch, config: CorrectionConfig) -> Tensor:
    """The metric of each token, [n]. The ratio stays a logarithm until it has been taken over its level."""
    if config.metric == "ratio":
        return log_rho
    if config.metric in ("k1", "k2", "k3"):
        return kl_of(-log_rho, config.metric)
    mu = torch.exp(batch.behaviour_log_probs)
    pi = torch.exp(clamp_log_ratio(log_rho) + batch.behaviour_log_probs)
    divergence = (pi - mu).abs() if config.metric == "tv" else torch.maximum(_binary_kl(pi, mu), _binary_kl(mu, pi))
    return torch.where(batch.mask, divergence, 0.0)


def _binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL between the Bernoulli variables "this token" and "another", [n]; probabilities kept away from 0 and 1."""
    p, q = p.clamp(1e-9, 1 - 1e-6), q.clamp(1e-9, 1 - 1e-6)
    return p * torch.log(p / q) + (1 - p) * (torch.log1p(-p) - torch.log1p(-q))


def _rejected(log_rho: Tensor, batch: TokenBatch, config: CorrectionConfig) -> Tensor:
    """Tokens outside the band, [n] bool; with drop, all tokens of their sequence."""
    value = _over_level(_token_metric(log_rho, batch, config), batch, config.level)
    if config.metric == "ratio":
        value = torch.exp(value)
    outside = torch.zeros_like(batch.mask)
    if config.low is not None:
        outside = outside | (value < config.low)
    if config.high is not None:
        outside = outside | (value > config.high)
    outside = outside & batch.mask
    if config.outward_only:
        outside = outside & (log_rho * batch.advantages > 0)
    if config.action == "drop":
        outside = batch.sequences.sum(outside.float()) > 0
    if config.negative_advantage_only:
        outside = outside & (batch.sequences.sum(batch.advantages) < 0)
    return outside


def _kept_weights(batch: TokenBatch, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """(weights [n], clipped [n] bool) of the tokens that mask and drop keep: always of pi_old over mu."""
    never = torch.zeros_like(batch.mask)
    if config.kept_weight == "one" or config.reference == "rollout":
        return torch.ones_like(batch.behaviour_log_probs), never
    log_rho = clamp_log_ratio(batch.old_log_probs - batch.behaviour_log_probs)
    if config.kept_weight == "token":
        rho = torch.exp(log_rho)
        weights = rho.clamp(max=config.token_cap)
        return weights, (weights != rho) & batch.mask
    return torch.exp(_over_level(log_rho, batch, config.level)), never
