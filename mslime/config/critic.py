"""Settings of PPO's critic, which `algorithm.advantage: gae` trains beside the policy (docs/algorithms.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from mslime.config.base import Section


class CriticConfig(Section):
    """The value model of `algorithm.advantage: gae`: a Megatron model with a value head, in the policy's layout."""

    path: Path | None = Field(
        default=None,
        description="Hugging Face checkpoint that it starts from, of any supported family with the policy's "
        "vocabulary; the value head starts at 0. Default: model.path.",
    )
    placement: Literal["shared", "separate"] = Field(
        default="shared",
        description="shared: on the policy's GPUs, in the same processes. separate: on as many GPUs of its own.",
    )
    lr: float = Field(default=1e-5, gt=0, description="Peak learning rate of the critic.")
    min_lr: float = Field(default=0.0, ge=0, description="Where the critic's learning rate decays to.")
    lr_warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps; decay and Adam's settings are train's.")
    warmup_steps: int = Field(
        default=0, ge=0, description="Steps at the beginning of the run in which the critic alone is trained."
    )
    value_clip: float | None = Field(
        default=0.2,
        gt=0,
        description="How far a value may move from the one before the update without losing its gradient; null: any.",
    )
