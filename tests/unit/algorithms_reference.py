"""Slow, obvious float64 NumPy versions of the policy loss and its corrections, one token and one sequence at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mslime.config.algorithm import AlgorithmConfig, CorrectionConfig

from .losses_reference import LOSSES, Response


@dataclass
class Tokens:
    """Columns of a whole step, float64 / int / bool, [n]."""

    log_probs: NDArray[np.float64]
    old: NDArray[np.float64]
    behaviour: NDArray[np.float64]
    reference: NDArray[np.float64]
    entropy: NDArray[np.float64]
    advantages: NDArray[np.float64]
    weights: NDArray[np.float64]
    mask: NDArray[np.bool_]
    sequence: NDArray[np.int64]
    segment: NDArray[np.int64]
    ages: NDArray[np.int64]
    positions: NDArray[np.int64]


def random_tokens(rng: np.random.Generator, lengths: list[int], spread: float, mask_share: float = 0.8) -> Tokens:
    """A step of sequences of these lengths; each has one advantage and weight, and two segments, the first older."""
    n = sum(lengths)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    halves = np.concatenate([np.arange(k) >= k // 2 for k in lengths]) if n else np.zeros(0, bool)
    mask = rng.random(n) < mask_share
    old = -rng.exponential(1.5, n)
    return Tokens(
        log_probs=np.minimum(old + rng.normal(0, spread, n), 0.0),
        old=old,
        behaviour=np.minimum(old + rng.normal(0, spread, n), 0.0),
        reference=np.minimum(old + rng.normal(0, spread, n), 0.0),
        entropy=rng.exponential(1.0, n),
        advantages=rng.normal(0, 1, len(lengths))[sequence] if n else np.zeros(0),
        weights=np.where(mask, rng.uniform(0.01, 0.1, len(lengths))[sequence], 0.0),
        mask=mask,
        sequence=sequence,
        segment=sequence * 2 + halves,
        ages=sequence % 3 + 2 * (1 - halves),
        positions=np.concatenate([np.arange(k) * 50 for k in lengths]),
    )


def correction_weights(t: Tokens, config: CorrectionConfig) -> NDArray[np.float64]:
    """The weight of each token, [n]; 1 outside the mask where nothing is rejected."""
    young = 1.0 if config.max_age is None else np.where(t.ages <= config.max_age, 1.0, config.old_weight)
    return weights_by_ratio(t, config) * young


def weights_by_ratio(t: Tokens, config: CorrectionConfig) -> NDArray[np.float64]:
    bypass = config.reference == "rollout"
    numerator = t.log_probs if config.policy == "current" or bypass else t.old
    n = len(t.mask)
    weights = np.ones(n)
    if config.action == "none" or (bypass and config.action in ("truncate", "clip")):
        return weights
    for i in range(n):
        members = level_members(t, config.level, i)
        log_rho = [clamp(numerator[j] - t.behaviour[j]) for j in members]
        if config.action == "truncate":
            assert config.high is not None
            weights[i] = min(ratio_over(log_rho, config.level), config.high)
        elif config.action == "clip":
            assert config.high is not None and config.low is not None
            weights[i] = min(max(ratio_over(log_rho, config.level), config.low), config.high)
        else:
            weights[i] = kept_weight(t, config, i)
    if config.action in ("mask", "drop"):
        weights[rejected(t, config, numerator)] = 0.0
    return weights


def kept_weight(t: Tokens, config: CorrectionConfig, i: int) -> float:
    if config.kept_weight == "one" or config.reference == "rollout":
        return 1.0
    if config.kept_weight == "token":
        return min(math.exp(clamp(t.old[i] - t.behaviour[i])), config.token_cap)
    return ratio_over([clamp(t.old[j] - t.behaviour[j]) for j in level_members(t, config.level, i)], config.level)


def rejected(t: Tokens, config: CorrectionConfig, numerator: NDArray[np.float64]) -> NDArray[np.bool_]:
    out = np.zeros(len(t.mask), bool)
    for i in np.flatnonzero(t.mask):
        values = [token_metric(numerator[j], t.behaviour[j], config.metric) for j in level_members(t, config.level, i)]
        if config.metric == "ratio":
            value = ratio_over(values, config.level)
        else:
            value = clamp(sum(values) / (len(values) if config.level == "geometric" else 1)) if len(values) else 0.0
        below = config.low is not None and value < config.low
        above = config.high is not None and value > config.high
        out[i] = below or above
        if config.outward_only:
            out[i] &= (math.exp(numerator[i]) - math.exp(t.behaviour[i])) * t.advantages[i] > 0
    if config.action == "drop":
        out = np.array([out[t.sequence == s].any() for s in t.sequence], bool) & t.mask
    if config.negative_advantage_only:
        means = [t.advantages[(t.sequence == s) & t.mask].sum() for s in t.sequence]
        out &= np.array(means) < 0
    return out


def token_metric(log_pi: float, log_mu: float, metric: str) -> float:
    log_rho = clamp(log_pi - log_mu)
    if metric == "ratio":
        return log_rho
    if metric == "k1":
        return -log_rho
    if metric == "k2":
        return log_rho**2 / 2
    if metric == "k3":
        return math.exp(log_rho) - 1 - log_rho
    pi, mu = math.exp(log_mu + log_rho), math.exp(log_mu)
    if metric == "tv":
        return abs(pi - mu)
    return max(bernoulli_kl(pi, mu), bernoulli_kl(mu, pi))


def bernoulli_kl(p: float, q: float) -> float:
    p, q = min(max(p, 1e-9), 1 - 1e-6), min(max(q, 1e-9), 1 - 1e-6)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def level_members(t: Tokens, level: str, i: int) -> NDArray[np.int64]:
    """Masked-in tokens that share token i's ratio."""
    if level == "token":
        return np.array([i])
    group = t.segment if level == "segment" else t.sequence
    return np.flatnonzero((group == group[i]) & t.mask)


def ratio_over(log_ratios: list[float], level: str) -> float:
    total = sum(log_ratios)
    return math.exp(clamp(total / max(len(log_ratios), 1) if level == "geometric" else total))


def clamp(x: float) -> float:
    return min(max(x, -20.0), 20.0)


def policy_loss(t: Tokens, config: AlgorithmConfig, fixed: NDArray[np.float64] | None = None) -> dict[str, float]:
    """The loss of the whole step and what it reports; `fixed`: log pi wherever a gradient stops (default: log pi)."""
    fixed = t.log_probs if fixed is None else fixed
    still = replace(t, log_probs=fixed)
    w = correction_weights(still, config.correction)
    anchor = t.behaviour if config.correction.reference == "rollout" else t.old
    policy = kl = entropy = 0.0
    for s in range(int(t.sequence.max()) + 1):
        rows = np.flatnonzero((t.sequence == s) & t.mask)
        if len(rows):
            response = Response(t.log_probs[rows], fixed[rows], anchor[rows], t.advantages[rows])
            policy += float(np.sum(t.weights[rows] * w[rows] * LOSSES[config.loss](response, config)))
    for i in np.flatnonzero(t.mask):
        estimate = kl_to_reference(t.log_probs[i] - t.reference[i], config.kl_type)
        kl += t.weights[i] * estimate * (math.exp(clamp(t.log_probs[i] - t.behaviour[i])) if config.kl_unbiased else 1)
        entropy += t.weights[i] * t.entropy[i]
    count = int(t.mask.sum())
    out = {
        "loss/policy": policy,
        "loss/kl": kl,
        "loss/entropy": entropy,
        "loss/tokens": count,
        "loss/total": policy + (config.kl_coef * kl if config.kl_in == "loss" else 0.0) - config.entropy_coef * entropy,
    }
    return out | metrics(t, w) if count else out


def metrics(t: Tokens, w: NDArray[np.float64]) -> dict[str, float]:
    """Mismatch of sampler and trainer, and what the correction did, over the trained tokens and their sequences."""
    gap = np.clip((t.old - t.behaviour)[t.mask], -20, 20)
    k3 = np.exp(gap) - 1 - gap
    trained = [s for s in np.unique(t.sequence) if t.mask[t.sequence == s].any()]
    gone = [(w[(t.sequence == s) & t.mask] == 0).all() for s in trained]
    out = {
        "mismatch/kl": float(k3.mean()),
        "mismatch/kl_k1": float(-gap.mean()),
        "mismatch/abs_max": float(np.abs(t.old - t.behaviour)[t.mask].max()),
        "correction/mean_weight": float(w[t.mask].mean()),
        "correction/masked_fraction": float((w[t.mask] == 0).mean()),
        "correction/masked_sequences": float(np.mean(gone)),
    }
    entropy = t.entropy[t.mask]
    out["entropy/mean"] = float(entropy.mean())
    out["loss/sequences"] = len(trained)
    for age in np.unique(t.ages[t.mask]):
        of_age = t.ages[t.mask] == age
        out[f"loss/tokens_age_{age}"] = int(of_age.sum())
        out[f"mismatch/kl_age_{age}"] = float(k3[of_age].mean())
        out[f"entropy/age_{age}"] = float(entropy[of_age].mean())
    for first, beyond in ((0, 64), (64, 256), (256, 1024)):
        inside = (t.positions[t.mask] >= first) & (t.positions[t.mask] < beyond)
        if inside.any():
            out[f"loss/tokens_position_{first}"] = int(inside.sum())
            out[f"mismatch/kl_position_{first}"] = float(k3[inside].mean())
            out[f"entropy/position_{first}"] = float(entropy[inside].mean())
    return out


def kl_to_reference(log_ratio: float, kind: str) -> float:
    d = clamp(log_ratio)
    k3 = math.exp(-d) - 1 + d
    return {"k1": d, "k2": d * d / 2, "k3": k3, "low_var": min(k3, 10.0)}[kind]
