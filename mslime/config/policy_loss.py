"""Settings of the policy losses: their names, the numbers that only one of them has, and what each starts from.

The maths lives in `mslime.algorithms.policies`, the formulas and papers in docs/algorithms.md.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mslime.config.base import Section

LossName = Literal["ppo", "gspo", "gmpo", "cispo", "sapo", "topr", "kimi", "dppo_tv", "ipo", "reinforce"]

LOSS_DEFAULTS: dict[str, dict[str, object]] = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.28},  # DAPO's clip-higher
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "loss_aggregation": "sequence"},  # of a response's mean ratio
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4, "loss_aggregation": "sequence"},  # of the log-ratio
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},  # weights in [0, 5]
    "sapo": {"loss_aggregation": "sequence"},
    # The trust region of these two is around the policy that sampled, so there is no recomputed one to correct for.
    "dppo_tv": {"clip_low": 0.2, "clip_high": 0.2, "correction": {"preset": "bypass"}},
    "ipo": {"clip_low": 0.1, "clip_high": 0.1, "correction": {"preset": "bypass"}},
}
"""What `algorithm` starts from under a loss; fields that are given win."""


def with_loss_defaults(values: dict[str, object]) -> dict[str, object]:
    """The values given for `algorithm`, on top of the defaults of their loss."""
    defaults = LOSS_DEFAULTS.get(str(values.get("loss", "ppo")), {})
    merged = {**defaults, **values}
    base, given = defaults.get("correction"), values.get("correction")
    if isinstance(given, str):
        given = merged["correction"] = {"preset": given}
    if isinstance(base, dict) and isinstance(given, dict):
        merged["correction"] = {**base, **given}
    return merged


class SAPOConfig(Section):
    """Temperatures of SAPO's soft gate (arXiv 2511.20347)."""

    tau_positive: float = Field(default=1.0, gt=0, description="For tokens with a positive advantage.")
    tau_negative: float = Field(default=1.05, gt=0, description="For the others: higher, so that they fade sooner.")


class TOPRConfig(Section):
    """TOPR (arXiv 2503.14286)."""

    level: Literal["token", "sequence"] = Field(
        default="sequence", description="What the tapered ratio is over: the whole response (the paper's), or a token."
    )


class KimiConfig(Section):
    """The quadratic trust region of Kimi k1.5 (arXiv 2501.12599)."""

    tau: float = Field(default=0.1, ge=0, description="Strength of the penalty tau / 2 * log-ratio^2.")
    level: Literal["token", "sequence"] = Field(
        default="sequence", description="What the log-ratio is over: the whole response (the paper's), or a token."
    )


class DPPOConfig(Section):
    """DPPO with a binary total-variation trust region (arXiv 2602.04879); its bounds are clip_low and clip_high."""

    ratio_cap: float = Field(default=20.0, gt=0, description="Cap of the importance ratio inside the trust region.")


class IPOConfig(Section):
    """IPO-style masking as in prime-rl; its bounds are clip_low and clip_high."""

    kl_tau: float = Field(default=1e-3, ge=0, description="Strength of the penalty on the squared log-ratio.")
