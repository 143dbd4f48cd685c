"""Sections of a run's output: checkpoints, exports, metrics and logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from mslime.config.base import Kept, ProgressMode, Resume, Section, Task
from mslime.config.errors import ConfigError

_WANDB_OWN = {
    "project": "use observe.wandb_project",
    "name": "use the run's name",
    "config": "remove it: the whole configuration is logged already",
    "id": "remove it: a resumed run keeps its own",
    "resume": "remove it: a resumed run keeps its own id",
    "dir": "remove it: files are kept in the run's directory",
}


class ObserveConfig(Section):
    """Output for people: progress, logs, metrics sinks, recorded rollouts, evaluations."""

    progress: ProgressMode = Field(default="auto", description="auto: live bars on a terminal, plain lines elsewhere.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="Minimum level of mslime's own lines in RUN/logs; info: each process's tasks and their durations.",
    )
    tensorboard: bool = Field(
        default=False, description="Also write TensorBoard events to the run's directory (needs the package)."
    )
    wandb_project: str | None = Field(
        default=None, description="Also log to this Weights & Biases project (needs the package); null: off."
    )
    wandb: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of wandb.init (entity, group, tags, mode ...). No secrets: config.yaml shows "
        "them.",
    )
    eval_every: int = Field(
        default=10,
        ge=0,
        description="Steps between evaluations; one always follows the last step. 0: no evaluations. With "
        "rollout.max_staleness above 0 and separate GPUs, the trainer continues during an evaluation.",
    )
    eval_at_start: bool = Field(
        default=True, description="Also evaluate before the first step, regardless of eval_every; logged as step 0."
    )
    save_rollouts: Kept = Field(
        default="some",
        description="Responses to keep in rollouts/. some: a few of each step and evaluation (best, worst, longest "
        "...), at most 1 MiB each. all (or true): every response, complete. none (or false): no responses.",
    )
    sample_routes: int = Field(
        default=4,
        ge=0,
        description="MoE layers, evenly spread, whose routes are kept with the saved responses of a step, for the "
        "report and `mslime inspect`: 16 KiB a response. 0: none.",
    )
    save_groups: bool = Field(
        default=False,
        description="Write the training data of every step to groups/step_N.npz, lossless, for `mslime train "
        "--replay`.",
    )

    @classmethod
    def prepare(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Convert `save_rollouts` true or false to all or none."""
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
            raise ConfigError("observe.wandb", self.wandb, "needs a Weights & Biases project, and "
            "observe.wandb_project is not set",
                              "set observe.wandb_project too, or remove it")  # fmt: skip
        return self

    def evaluation_due(self, step: int, num_steps: int) -> bool:
        """Whether an evaluation follows `step` (0-based): every so many steps and after the last one, or never."""
        return self.eval_every > 0 and (step + 1 == num_steps or _ends_interval(step, self.eval_every))


# The section `checkpoint`: saving, resuming and exports.


class CheckpointConfig(Section):
    """Checkpoints: saving and resuming."""

    save_every: int = Field(
        default=20,
        ge=0,
        description="Steps between checkpoints; there is also one after the last step. 0: only that one.",
    )
    keep: int = Field(default=2, ge=1, description="Newest checkpoints kept.")
    keep_every: int = Field(
        default=0, ge=0, description="Checkpoints at multiples of this many steps are kept forever; 0: none."
    )
    keep_best: str | None = Field(
        default=None,
        description="A metric, such as eval/NAME/accuracy: also keep the checkpoint with its best value. Only "
        "evaluated steps count: make save_every a multiple of observe.eval_every.",
    )
    keep_best_is: Literal["max", "min"] = Field(default="max", description="Which value of keep_best is the best.")
    hf_every: int = Field(
        default=0,
        ge=0,
        description="Steps between exports of Hugging Face checkpoints to RUN/hf_step_N, never removed; 0: none.",
    )
    resume: Resume = Field(
        default="auto",
        description="auto: from the newest checkpoint, if any; a damaged one is refused. older: from the newest "
        "undamaged one; damaged ones are set aside. never: refuse to start if there is one.",
    )
    load: Path | None = Field(default=None, description="Start from this mslime checkpoint directory.")
    save_hf: bool = Field(default=True, description="Also export a Hugging Face checkpoint at the end.")

    def save_due(self, step: int, num_steps: int) -> bool:
        """Whether a checkpoint follows `step` (0-based): every so many steps, and after the last one in any case."""
        return step + 1 == num_steps or _ends_interval(step, self.save_every)

    def export_due(self, step: int) -> bool:
        """Whether a Hugging Face checkpoint is written after `step` (0-based)."""
        return _ends_interval(step, self.hf_every)


def _ends_interval(step: int, every: int) -> bool:
    """Whether `step` (0-based) is the last one of an interval; never if `every` is 0."""
    return every > 0 and (step + 1) % every == 0


def check_checkpoint(checkpoint: CheckpointConfig, *, sets: list[str], task: Task, eval_every: int) -> None:
    """Reject a `keep_best` on a held-out set that is never evaluated: it would silently keep nothing.

    Args:
        sets: names of the held-out sets.
        eval_every: steps between evaluations.

    Raises:
        ConfigError: the first broken rule.
    """
    metric = checkpoint.keep_best
    if metric is None or not metric.startswith("eval/"):
        return
    name = metric.removeprefix("eval/").rpartition("/")[0]
    if name not in sets:
        raise ConfigError(
            "checkpoint.keep_best", metric, f"is not a metric of a set in data.eval_sets: {sets}",
            f"write for example eval/{sets[0] if sets else 'NAME'}/accuracy",
        )  # fmt: skip
    losses, minimum = ("nll", "perplexity"), checkpoint.keep_best_is == "min"
    is_loss, supervised = metric.rpartition("/")[2] in losses, task == "sft"
    if is_loss != supervised:
        rule = f"train.task {task} does not compute this metric on held-out sets"
        best = f"eval/{name}/nll and checkpoint.keep_best_is: min" if supervised else f"eval/{name}/accuracy"
        raise ConfigError("checkpoint.keep_best", metric, rule, f"write for example {best}")
    if is_loss and not minimum:
        raise ConfigError("checkpoint.keep_best_is", "max", f"the best {metric} is the lowest", "set it to min")
    if eval_every == 0:
        raise ConfigError(
            "checkpoint.keep_best", metric, "needs evaluations, and observe.eval_every is 0", "set observe.eval_every"
        )
