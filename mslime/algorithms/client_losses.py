"""Losses for clients of `mslime serve`, as the public SDK's documentation defines them: sums over tokens.

With p = exp(log_probs) of the trained policy, q of the policy that sampled, A the advantages, r = p / q and w weights:

    cross_entropy         -sum w log p
    importance_sampling   -sum r A
    ppo                   -sum min(r A, clip(r, low, high) A)              (https://arxiv.org/abs/1707.06347)
    cispo                 -sum stop_gradient(clip(r, low, high)) A log p    (https://arxiv.org/abs/2506.13585)
    dro                   -sum A log p - beta / 2 (log p - log q)^2         (https://arxiv.org/abs/2405.19107)
"""

from __future__ import annotations

import torch
from torch import Tensor

from mslime.algorithms.losses import LossOutput
from mslime.algorithms.statistics import LossStatistics
from mslime.algorithms.token_batch import clamp_log_ratio
from mslime.config.serve import LossChoice


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
    terms = _terms(choice, log_p, log_q, torch.where(mask, weights, zero), torch.where(mask, advantages, zero))
    loss = -terms.sum()
    statistics = LossStatistics.zeros(log_probs.device)
    statistics.add("tokens", mask.sum())
    statistics.add("total", loss)
    return LossOutput(loss, statistics)


def _terms(choice: LossChoice, log_p: Tensor, log_q: Tensor, weights: Tensor, advantages: Tensor) -> Tensor:
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
