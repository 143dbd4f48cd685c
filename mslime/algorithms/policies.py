"""The policy losses: one function each, and a table of their names.

A loss maps the tokens of a micro-batch to one value each, before correction weights and denominators. r is pi over the
anchor (pi_old, or mu in bypass mode), A the advantage. A loss over sequences takes its ratio's value from all ranks and
its gradient from the tokens of this rank, so no collective is differentiated. With `_carried(s, log r)` each token has
the value s and the gradient s * d(log r). Formulas, papers and defaults: docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mslime.algorithms.token_batch import LOSS_SETTING, TokenBatch, clamp_log_ratio
from mslime.config.algorithm import AlgorithmConfig
from mslime.config.errors import ConfigError
from mslime.extensions import bad_metric_name, calling, load_function


@dataclass(frozen=True)
class TokenLoss:
    """Result of a policy loss for each token.

    Attributes:
        loss: [n] float32; carries the gradient.
        below: [n] bool, the lower side of the trust region took the gradient away, or bounded the weight.
        above: [n] bool, likewise the upper side.
        metrics: further numbers of each token by name, [n]; `user/NAME` is their mean over the trained tokens.
    """

    loss: Tensor
    below: Tensor
    above: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


PolicyLoss = Callable[[TokenBatch, AlgorithmConfig], TokenLoss]


def ppo(batch: TokenBatch, config: AlgorithmConfig) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (arXiv 1707.06347; clip-higher 2503.14476).

    With a dual bound c and A < 0, at most -c A (arXiv 1912.09729).
    """
    return _clipped(torch.exp(batch.log_ratio), batch, config)


def gspo(batch: TokenBatch, config: AlgorithmConfig) -> TokenLoss:
    """PPO's clip on s = exp(mean of log r over the response) (arXiv 2507.18071, the token form of section 4.3)."""
    log_ratio = batch.log_ratio
    return _clipped(_carried(torch.exp(batch.mean(log_ratio)), log_ratio), batch, config)


def gmpo(batch: TokenBatch, config: AlgorithmConfig) -> TokenLoss:
    """-A times the geometric mean over the response of r, each r clipped on the side where A pushes it.

    arXiv 2507.20673: the clip is to [e^-clip_low, e^clip_high].
    """
    log_ratio, positive = batch.log_ratio, batch.advantages > 0
    above, below = positive & (log_ratio > config.clip_high), ~positive & (log_ratio < -config.clip_low)
    kept = torch.where(above, config.clip_high, torch.where(below, -config.clip_low, log_ratio)) * batch.mask
    return TokenLoss(-batch.advantages * _carried(torch.exp(batch.mean(kept)), kept), below, above)


def cispo(batch: TokenBatch, config: AlgorithmConfig) -> TokenLoss:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: no token loses its gradient (MiniMax-M1, 2506.13585)."""
    ratio = torch.exp(batch.log_ratio.detach())
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    return TokenLoss(_weighted(ratio.clamp(low, high), batch), ratio < low, ratio > high)


def sapo(batch: TokenBatch, config: AlgorithmConfig) -> TokenLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A: a soft gate for the clip (arXiv 2511.20347)."""
    tau = torch.full_like(batch.advantages, config.sapo.tau_negative)
    tau = torch.where(batch.advantages > 0, config.sapo.tau_positive, tau)
    gate = 4.0 / tau * torch.sigmoid(tau * (torch.exp(batch.log_ratio) - 1.0))
    return _unclipped(-gate * batch.advantages)


def topr(batch: TokenBatch, config: AlgorithmConfig) -> TokenLoss:
    """-A log pi where A > 0, -min(r, 1) A log pi elsewhere: negatives fade as they get unlikely (arXiv 2503.14286)."""
    ratio = torch.exp(_over(batch, config.topr.level))
    negative = batch.advantages <= 0
    return TokenLoss(
        _weighted(torch.where(negative, ratio.clamp(max=1.0), 1.0), batch),
        torch.zeros_like(batch.mask),
        negative & (ratio > 1.0),
    )


def kimi(batch: TokenBatch, config: AlgorithmConfig) -> TokenLoss:
    """-A log pi + tau / 2 (log r)^2, log r of the whole response or of the token (Kimi k1.5, arXiv 2501.12599).

    A response's square is spread over its tokens: each has the value D log r / 2 and the gradient D d(log r).
    """
    log_ratio, total = batch.log_ratio, _over(batch, config.kimi.level)
    square = total * (log_ratio - 0.5 * log_ratio.detach())
    return _unclipped(-batch.advantages * batch.log_probs + config.kimi.tau * square)


def dppo_tv(batch: TokenBatch, config: AlgorithmConfig) -> TokenLoss:
    """-M sg(min(r, cap)) A log pi; M = 0 where A has pushed the token's probability beyond the bound (2602.04879)."""
    change, positive = _probability_change(batch), batch.advantages > 0
    above, below = positive & (change > config.clip_high), ~positive & (change < -config.clip_low)
    ratio = torch.exp(batch.log_ratio.detach()).clamp(max=config.dppo.ratio_cap)
    return TokenLoss(_weighted(torch.where(above | below, 0.0, ratio), batch), below, above)


def ipo(batch: TokenBatch, config: AlgorithmConfig) -> TokenLoss:
    """-M r A + kl_tau (log r)^2; M = 0 where the token's probability moved beyond a bound, whatever A (prime-rl)."""
    change, log_ratio = _probability_change(batch), batch.log_ratio
    below, above = change < -config.clip_low, change > config.clip_high
    policy = torch.where(below | above, 0.0, torch.exp(log_ratio)) * batch.advantages
    return TokenLoss(config.ipo.kl_tau * log_ratio.square() - policy, below, above)


def reinforce(batch: TokenBatch, config: AlgorithmConfig) -> TokenLoss:
    """-sg(r) A log pi: the policy gradient with its importance weight, and no trust region (Williams 1992)."""
    return _unclipped(_weighted(torch.exp(batch.log_ratio), batch))


LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "topr": topr,
    "kimi": kimi,
    "dppo_tv": dppo_tv,
    "ipo": ipo,
    "reinforce": reinforce,
}


def token_losses(batch: TokenBatch, config: AlgorithmConfig) -> TokenLoss:
    """Each token's loss by `config.loss`: a built-in loss, or a user's function.

    Raises:
        ConfigError: the user's function raised, or did not return [n] tensors.
    """
    if config.loss in LOSSES:
        return LOSSES[config.loss](batch, config)
    with calling(config.loss, LOSS_SETTING):
        found = load_function(config.loss, LOSS_SETTING)(batch, config)
    return _checked(found, batch, config.loss)


def _checked(found: object, batch: TokenBatch, spec: str) -> TokenLoss:
    """Validated result of a user's loss: a TokenLoss, or the losses alone. Values outside the mask are dropped."""
    result = _unclipped(found) if isinstance(found, Tensor) else found
    if not isinstance(result, TokenLoss):
        raise ConfigError(
            LOSS_SETTING, spec, f"returned {type(found).__name__} instead of a TokenLoss or a tensor of losses",
            "see docs/extending.md for an example",
        )  # fmt: skip
    for name in result.metrics:
        if (wrong := bad_metric_name(name)) is not None:
            raise ConfigError(LOSS_SETTING, spec, wrong, "rename the metric")
    own: list[tuple[str, object]] = [("loss", result.loss), ("below", result.below), ("above", result.above)]
    for name, column in [*own, *result.metrics.items()]:
        if not isinstance(column, Tensor):
            raise ConfigError(LOSS_SETTING, spec, f"returned {name} = {column!r:.80} instead of a tensor",
                              "return one number for each token: mslime weights and sums them")  # fmt: skip
        if column.shape != batch.mask.shape:
            raise ConfigError(
                LOSS_SETTING, spec, f"returned {name} of shape {tuple(column.shape)} for {len(batch.mask)} tokens",
                "return one number for each token: mslime weights and sums them",
            )  # fmt: skip
    return replace(result, loss=torch.where(batch.mask, result.loss, 0.0))


def _clipped(ratio: Tensor, batch: TokenBatch, config: AlgorithmConfig) -> TokenLoss:
    advantages = batch.advantages
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages
    loss, cut = torch.maximum(plain, bounded), bounded > plain
    below, above = cut & (advantages < 0), cut & (advantages > 0)
    if config.clip_dual is not None:
        ceiling = -config.clip_dual * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss, above = torch.where(over, ceiling, loss), above | over
    return TokenLoss(loss, below, above)


def _carried(value: Tensor, log: Tensor) -> Tensor:
    """`value` [n], with the gradient value * d(log)."""
    return value * (1.0 + log - log.detach())


def _weighted(weight: Tensor, batch: TokenBatch) -> Tensor:
    """-weight A log pi, [n]; the weight is a constant."""
    return -weight.detach() * batch.advantages * batch.log_probs


def _unclipped(loss: Tensor) -> TokenLoss:
    never = torch.zeros_like(loss, dtype=torch.bool)
    return TokenLoss(loss, never, never)


def _over(batch: TokenBatch, level: str) -> Tensor:
    """log r of each token, or of its whole response: [n], clamped and detached."""
    log_ratio = batch.log_ratio.detach()
    return log_ratio if level == "token" else clamp_log_ratio(batch.sequences.sum(log_ratio))


def _probability_change(batch: TokenBatch) -> Tensor:
    """pi - anchor of the sampled token, [n], detached."""
    return torch.exp(batch.log_probs.detach()) - torch.exp(batch.anchor)
