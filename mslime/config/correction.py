"""One record for every off-policy correction; the maths lives in `mslime.algorithms.corrections`.

rho = pi_train_old / mu_rollout: the trainer's policy before this update over the policy that sampled the token.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from mslime.config.base import Section
from mslime.config.errors import ConfigError

PRESETS: dict[str, dict[str, object]] = {
    # Truncated importance sampling, Yao et al. 2025 ("Your Efficient RL Framework Secretly Brings You Off-Policy RL").
    "tis": {"level": "token", "action": "truncate", "high": 2.0},
    # The product over the sequence instead of each token (unbiased, high variance), same source.
    "seq_tis": {"level": "sequence", "action": "truncate", "high": 2.0},
    # Masked importance sampling: tokens outside the band leave the loss (Liu & Li et al. 2025).
    "mis": {"level": "token", "action": "mask", "low": 0.5, "high": 2.0},
    # IcePop (Ring team, 2025): keep weights inside [0.5, 5], zero the others.
    "icepop": {"level": "token", "action": "mask", "low": 0.5, "high": 5.0},
    # Off-policy sequence masking, DeepSeek-V3.2 (arXiv 2512.02556, eq. 9).
    "opsm": {
        "level": "geometric",
        "action": "drop",
        "metric": "k1",
        "high": 2.0,
        "negative_advantage_only": True,
        "normalise": False,
    },
    "none": {"action": "none"},
}


class CorrectionConfig(Section):
    """How much a token counts, given how far the sampler's policy was from the trainer's."""

    preset: str | None = Field("tis", description="Named starting point; fields given beside it win over it.")
    level: Literal["token", "segment", "sequence", "geometric"] = Field(
        "token",
        description="What one ratio is computed over: a token, a weight-version segment, the product over a "
        "sequence, or its geometric mean.",
    )
    reference: Literal["recompute", "rollout"] = Field(
        "recompute",
        description="The old policy of the clipped ratio: recomputed by the trainer, or the rollout's own "
        "log-probs (then the ratio itself corrects and no weight is applied).",
    )
    action: Literal["truncate", "mask", "clip", "drop", "none"] = Field(
        "truncate",
        description="truncate: min(w, high). clip: into [low, high]. mask: outside the band weigh 0. drop: "
        "whole sequences outside the band leave the loss.",
    )
    metric: Literal["ratio", "k1", "k2", "k3", "binary_kl", "tv"] = Field(
        "ratio", description="What is compared with the bounds."
    )
    low: float = Field(0.0, description="Lower bound.")
    high: float = Field(2.0, description="Upper bound.")
    normalise: bool = Field(False, description="Divide weights by their mean over the step.")
    negative_advantage_only: bool = Field(
        False, description="Apply to sequences with a negative advantage only (OPSM)."
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: dict[str, object]) -> dict[str, object]:
        preset = values.get("preset", "tis")
        if preset is None:
            return values
        if preset not in PRESETS:
            raise ConfigError(
                "algorithm.correction.preset",
                preset,
                f"known presets are {', '.join(PRESETS)}",
                "pick one, or set preset: null and give level, action and bounds",
            )
        return {**PRESETS[str(preset)], **values}

    @model_validator(mode="after")
    def _check_bounds(self) -> CorrectionConfig:
        if self.low >= self.high:
            raise ConfigError(
                "algorithm.correction.low", self.low, f"must be below high = {self.high}", "swap or widen the bounds"
            )
        return self
