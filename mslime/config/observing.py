"""Settings of what a person sees of a run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from mslime.config.base import Section
from mslime.config.choices import Kept, ProgressMode
from mslime.config.errors import ConfigError

_WANDB_OWN = {
    "project": "use observe.wandb_project",
    "name": "use the run's name",
    "config": "the whole configuration is there already",
    "id": "remove it: a resumed run goes on under its own",
    "resume": "remove it: a resumed run goes on under its own id",
    "dir": "remove it: files are kept in the run's directory",
}


class ObserveConfig(Section):
    """What a person sees."""

    progress: ProgressMode = Field(default="auto", description="auto: live bars on a terminal, plain lines elsewhere.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="Least of mslime's own lines in RUN/logs; info: what each process begins and how long it took.",
    )
    tensorboard: bool = Field(
        default=False, description="Also write TensorBoard events to the run's directory (needs the package)."
    )
    wandb_project: str | None = Field(
        default=None, description="Also log to this Weights & Biases project (needs the package); null: not."
    )
    wandb: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of wandb.init (entity, group, tags, mode ...), written to config.yaml: no "
        "secrets.",
    )
    eval_every: int = Field(
        default=10,
        ge=0,
        description="Steps between evaluations; another one follows the last step. 0: none at all. With "
        "rollout.max_staleness above 0 and separate GPUs, the trainer continues meanwhile.",
    )
    eval_at_start: bool = Field(
        default=True, description="Evaluate before the first step too, whatever eval_every says; logged as step 0."
    )
    save_rollouts: Kept = Field(
        default="some",
        description="Responses to keep in rollouts/. some: a few of each step and evaluation (best, worst, longest "
        "...), at most 1 MiB each. all (or true): every one, whole. none (or false).",
    )
    sample_routes: int = Field(
        default=4,
        ge=0,
        description="MoE layers, evenly spread, whose routes are kept with the saved responses of a step, for the "
        "report and `mslime inspect`: 16 KiB a response. 0: none.",
    )
    save_groups: bool = Field(
        default=False,
        description="Write what every step trains on to groups/step_N.npz, lossless, for `mslime train --replay`.",
    )

    @classmethod
    def prepare(cls, values: dict[str, Any]) -> dict[str, Any]:
        """`save_rollouts` as true or false is all or none."""
        given = values.get("save_rollouts")
        return values | {"save_rollouts": "all" if given else "none"} if isinstance(given, bool) else values

    @field_validator("wandb")
    @classmethod
    def _not_our_own_arguments(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, instead in _WANDB_OWN.items():
            if name in given:
                raise ConfigError(f"observe.wandb.{name}", given[name], "mslime sets this argument itself", instead)
        return given

    @model_validator(mode="after")
    def _wandb_needs_a_project(self) -> ObserveConfig:
        if self.wandb and self.wandb_project is None:
            raise ConfigError("observe.wandb", self.wandb, "is for a Weights & Biases project, and none is named",
                              "set observe.wandb_project too, or remove it")  # fmt: skip
        return self
