"""One record for every off-policy correction; the maths lives in `mslime.algorithms.corrections`.

rho = pi_train / mu_rollout: the trainer's policy over the policy that sampled the token. A correction either bounds
rho and multiplies it into the loss (truncate, clip), or takes tokens or sequences out of the loss (mask, drop), after
which `kept_weight` says what the remaining tokens weigh.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from mslime.config.base import Section
from mslime.config.errors import ConfigError

PRESETS: dict[str, dict[str, object]] = {
    # Truncated importance sampling, Yao et al. 2025 ("Your Efficient RL Framework Secretly Brings You Off-Policy RL").
    "tis": {"level": "token", "action": "truncate", "high": 2.0},
    # The product over the sequence instead of each token (unbiased before truncation, high variance), same source.
    "seq_tis": {"level": "sequence", "action": "truncate", "high": 2.0},
    # Masked importance sampling: tokens outside the band leave the loss (Liu & Li et al. 2025).
    "mis": {"level": "token", "action": "mask", "low": 0.5, "high": 2.0},
    # The same over whole sequences; the bound is TRL's default.
    "seq_mis": {"level": "sequence", "action": "mask", "high": 3.0},
    # IcePop (Ring team, 2025): keep weights inside [0.5, 5], zero the others.
    "icepop": {"level": "token", "action": "mask", "low": 0.5, "high": 5.0},
    # KPop (Ring team, 2026): mask a token whose binary KL, in either direction, exceeds the bound.
    "kpop": {"level": "token", "action": "mask", "metric": "binary_kl", "high": 2.0, "kept_weight": "token"},
    # Geometric-mean rejection (Liu & Li et al. 2025) over token TIS; the band is SkyRL's.
    "geo_rs": {"level": "geometric", "action": "drop", "low": 0.99, "high": 1.01, "kept_weight": "token"},
    # Rejection by the sequence's mean k3 over token TIS; the bound is verl's.
    "k3_rs": {"level": "geometric", "action": "drop", "metric": "k3", "high": 0.01, "kept_weight": "token"},
    # Off-policy sequence masking, DeepSeek-V3.2 (arXiv 2512.02556, eq. 9), over token TIS. The paper gives no delta;
    # published defaults run from 1e-4 to 0.5, and reports of what works from 0.05 to 0.2.
    "opsm": {
        "level": "geometric",
        "action": "drop",
        "metric": "k1",
        "high": 0.1,
        "policy": "current",
        "negative_advantage_only": True,
        "kept_weight": "token",
    },
    # One token that the trainer finds (nearly) impossible vetoes its sequence; token TIS for the others.
    "veto": {"level": "token", "action": "drop", "low": 1e-4, "kept_weight": "token"},
    # Decoupled PPO (Hilton et al. 2110.00641, AReaL 2505.24298): the weight is pi_old / mu, tokens beyond 5 leave.
    "areal_decoupled": {"level": "token", "action": "mask", "high": 5.0},
    # DPPO's trust region (arXiv 2602.04879) in front of any loss: tokens that the update has already moved by more
    # than 0.2 in probability away from the sampler, in the direction of their advantage, leave the loss.
    "dppo_tv": {
        "level": "token",
        "reference": "rollout",
        "action": "mask",
        "metric": "tv",
        "policy": "current",
        "high": 0.2,
        "outward_only": True,
    },
    # No weights: the loss's own ratio is over the policy that sampled.
    "bypass": {"reference": "rollout", "action": "none"},
    "none": {"action": "none"},
}


class CorrectionConfig(Section):
    """How much a token counts, given how far the sampler's policy was from the trainer's."""

    shorthand: ClassVar[str] = "preset"

    preset: str | None = Field(default="tis", description="Named starting point; fields given beside it win over it.")
    level: Literal["token", "segment", "sequence", "geometric"] = Field(
        default="token",
        description="What one ratio (or divergence) is computed over: a token, the product (sum) over a "
        "weight-version segment or over a sequence, or the geometric (arithmetic) mean over a sequence.",
    )
    reference: Literal["recompute", "rollout"] = Field(
        default="recompute",
        description="The old policy of the clipped ratio: recomputed by the trainer, or the rollout's own "
        "log-probs (then the ratio itself corrects, no weight is applied, and only mask and drop have an effect).",
    )
    action: Literal["truncate", "mask", "clip", "drop", "none"] = Field(
        default="truncate",
        description="truncate: min(rho, high). clip: rho into [low, high]. mask: what is outside the band "
        "leaves the loss. drop: a sequence with anything outside the band leaves the loss.",
    )
    metric: Literal["ratio", "k1", "k2", "k3", "binary_kl", "tv"] = Field(
        default="ratio",
        description="What is compared with the bounds: rho, an estimate of KL(mu || pi), the larger binary KL "
        "of the sampled token, or its absolute difference of probabilities.",
    )
    policy: Literal["old", "current"] = Field(
        default="old",
        description="Numerator of rho: the trainer's policy before this update, or the one being updated.",
    )
    low: float | None = Field(default=None, description="Lower bound; null: none.")
    high: float | None = Field(default=None, description="Upper bound; null: none.")
    kept_weight: Literal["ratio", "one", "token"] = Field(
        default="ratio",
        description="What tokens kept by mask or drop weigh: rho of `level`, 1, or min(token rho, token_cap).",
    )
    token_cap: float = Field(default=2.0, gt=0, description="Cap of the token's rho when kept_weight is token.")
    normalise: bool = Field(default=False, description="Divide weights by their mean over the step.")
    negative_advantage_only: bool = Field(
        default=False, description="mask and drop: only sequences with a negative advantage can leave the loss."
    )
    outward_only: bool = Field(
        default=False,
        description="mask and drop, level token: only tokens that have moved where their advantage pushes them, "
        "(pi - mu) A > 0, can leave the loss.",
    )
    max_age: int | None = Field(
        default=None,
        ge=0,
        description="Tokens of segments sampled by weights more than this many versions old weigh `old_weight` times "
        "as much; null: no bound.",
    )
    old_weight: float = Field(default=0.0, ge=0, lt=1, description="Of tokens beyond max_age; 0 masks them.")

    @classmethod
    def prepare(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The given values on top of the preset's."""
        preset = values.get("preset", "tis")
        if preset is None:
            return values
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ConfigError(
                "algorithm.correction.preset",
                preset,
                f"known presets are {', '.join(PRESETS)}",
                "pick one, or set preset: null and give level, action and bounds",
            )
        return {**PRESETS[preset], **values}

    @model_validator(mode="after")
    def _check_bounds(self) -> CorrectionConfig:
        if self.high is not None and self.high < 0 and self.metric != "k1":  # k1 alone can be negative
            raise ConfigError("algorithm.correction.high", self.high, f"the metric {self.metric} is never negative, so "
                              "nothing would be inside", "give a bound above 0, or null for none")  # fmt: skip
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ConfigError(
                "algorithm.correction.low", self.low, f"must be below high = {self.high}", "swap or widen the bounds"
            )
        if self.action in ("truncate", "clip") and self.high is None:
            raise ConfigError("algorithm.correction.high", None, f"{self.action} needs an upper bound", "set high: 2.0")
        if self.action == "clip" and self.low is None:
            raise ConfigError(
                "algorithm.correction.low", None, "clip needs a lower bound", "set low, or use action: truncate"
            )
        if self.action in ("mask", "drop") and self.low is None and self.high is None:
            raise ConfigError(
                "algorithm.correction.high", None, f"{self.action} needs a bound", "set low, high or both"
            )
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> CorrectionConfig:
        weighs = self.action in ("truncate", "clip")
        if weighs and self.metric != "ratio":
            raise ConfigError(
                "algorithm.correction.metric",
                self.metric,
                f"{self.action} bounds the ratio itself",
                "use metric: ratio, or action: mask or drop",
            )
        for field in ("negative_advantage_only", "outward_only"):
            if weighs and getattr(self, field):
                raise ConfigError(
                    f"algorithm.correction.{field}",
                    True,
                    "applies to mask and drop only",
                    "use action: drop, or leave it false",
                )
        if self.outward_only and self.level != "token":
            raise ConfigError(
                "algorithm.correction.outward_only",
                True,
                f"is about single tokens, and level is {self.level}",
                "use level: token, or leave it false",
            )
        if self.normalise and self.reference == "rollout":
            raise ConfigError(
                "algorithm.correction.normalise",
                True,
                "there are no weights when reference is rollout",
                "set normalise: false, or reference: recompute",
            )
        return self
