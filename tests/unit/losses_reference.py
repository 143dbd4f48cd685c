"""The policy losses of one response in float64, each a few lines written from its paper, one response at a time.

Each takes a `Response` and gives every token's loss, [T]. Papers stop gradients by writing the gradient of an
objective; here what is constant for the gradient is computed from `fixed`, which a numeric derivative leaves alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mslime.config.algorithm import AlgorithmConfig

Column = NDArray[np.float64]


@dataclass
class Response:
    """The trained tokens of one response, [T]: log pi, log pi where a paper stops the gradient, log anchor, A."""

    log_pi: Column
    fixed: Column
    anchor: Column
    advantages: Column

    @property
    def r(self) -> Column:
        return np.exp(np.clip(self.log_pi - self.anchor, -20, 20))

    @property
    def fixed_r(self) -> Column:
        return np.exp(np.clip(self.fixed - self.anchor, -20, 20))


def ppo(x: Response, config: AlgorithmConfig) -> list[float]:
    return [clipped(r, a, config) for r, a in zip(x.r, x.advantages, strict=True)]


def clipped(r: float, a: float, config: AlgorithmConfig) -> float:
    """Dual-clip PPO's objective of arXiv 1912.09729: max(min(r A, clip(r) A), c A) for A < 0."""
    objective = min(r * a, min(max(r, 1 - config.clip_low), 1 + config.clip_high) * a)
    if config.clip_dual is not None and a < 0:
        objective = max(objective, config.clip_dual * a)
    return -objective


def gspo(x: Response, config: AlgorithmConfig) -> list[float]:
    """Equations 5 to 7 of arXiv 2507.18071; the response's one objective stands at each of its tokens."""
    s = math.prod(x.r ** (1 / len(x.r)))
    return [clipped(s, a, config) for a in x.advantages]


def gmpo(x: Response, config: AlgorithmConfig) -> list[float]:
    """Equation 4 of arXiv 2507.20673: the product of |min(r A, clip(r) A)|^(1 / T), which is |A| times that of ratios
    clipped on one side, times the sign of A."""
    low, high = math.exp(-config.clip_low), math.exp(config.clip_high)
    kept = [min(r, high) if a > 0 else max(r, low) for r, a in zip(x.r, x.advantages, strict=True)]
    mean = math.prod(k ** (1 / len(kept)) for k in kept)
    return [-mean * a for a in x.advantages]


def cispo(x: Response, config: AlgorithmConfig) -> list[float]:
    """Equations 4 and 5 of arXiv 2506.13585: the clipped weight is a constant of the gradient."""
    weights = np.clip(x.fixed_r, 1 - config.clip_low, 1 + config.clip_high)
    return list(-weights * x.advantages * x.log_pi)


def sapo(x: Response, config: AlgorithmConfig) -> list[float]:
    """The gate of arXiv 2511.20347, 4 / tau sigmoid(tau (r - 1)), in the place of the ratio."""
    out = []
    for r, a in zip(x.r, x.advantages, strict=True):
        tau = config.sapo.tau_positive if a > 0 else config.sapo.tau_negative
        out.append(-4 / tau / (1 + math.exp(-tau * (r - 1))) * a)
    return out


def topr(x: Response, config: AlgorithmConfig) -> list[float]:
    """The update of TOPR, arXiv 2503.14286: positives as they are, negatives tapered by min(pi / mu, 1)."""
    whole = math.exp(np.clip(np.sum(np.clip(x.fixed - x.anchor, -20, 20)), -20, 20))
    ratios = x.fixed_r if config.topr.level == "token" else np.full(len(x.r), whole)
    tapered = np.where(x.advantages > 0, 1.0, np.minimum(ratios, 1.0))
    return list(-tapered * x.advantages * x.log_pi)


def kimi(x: Response, config: AlgorithmConfig) -> list[float]:
    """The surrogate of arXiv 2501.12599, section 2.3.2: A log pi(y) - tau / 2 (log pi(y) / pi_old(y))^2.

    Of a response's square D^2 each token has its share D d, so that the sum over them is the paper's.
    """
    d = np.clip(x.log_pi - x.anchor, -20, 20)
    squares = d**2 if config.kimi.level == "token" else np.clip(d.sum(), -20, 20) * d
    return list(-x.advantages * x.log_pi + config.kimi.tau / 2 * squares)


def dppo_tv(x: Response, config: AlgorithmConfig) -> list[float]:
    """Equation 12 of arXiv 2602.04879 with the binary total variation, and the capped weight of its implementation."""
    out = []
    for log_pi, fixed, anchor, a in zip(x.log_pi, x.fixed, x.anchor, x.advantages, strict=True):
        moved = math.exp(fixed) - math.exp(anchor)
        inside = moved <= config.clip_high if a > 0 else moved >= -config.clip_low
        weight = min(math.exp(min(fixed - anchor, 20)), config.dppo.ratio_cap)
        out.append(-weight * a * log_pi if inside else 0.0)
    return out


def ipo(x: Response, config: AlgorithmConfig) -> list[float]:
    """The masked policy gradient and squared log-ratio of prime-rl, on the importance ratio itself."""
    out = []
    for r, log_pi, anchor, a in zip(x.r, x.log_pi, x.anchor, x.advantages, strict=True):
        moved = math.exp(log_pi) - math.exp(anchor)
        inside = -config.clip_low <= moved <= config.clip_high
        out.append(config.ipo.kl_tau * np.clip(log_pi - anchor, -20, 20) ** 2 - (r * a if inside else 0.0))
    return out


def reinforce(x: Response, config: AlgorithmConfig) -> list[float]:
    return list(-x.fixed_r * x.advantages * x.log_pi)


LOSSES: dict[str, Callable[[Response, AlgorithmConfig], list[float]]] = {
    f.__name__: f for f in (ppo, gspo, gmpo, cispo, sapo, topr, kimi, dppo_tv, ipo, reinforce)
}
