"""The section `checkpoint`: saving, resuming and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from mslime.config.base import Section
from mslime.config.choices import Resume, Task
from mslime.config.errors import ConfigError


class CheckpointConfig(Section):
    """Saving and resuming."""

    save_every: int = Field(
        default=20,
        ge=0,
        description="Steps between checkpoints; there is also one after the last step. 0: only that one.",
    )
    keep: int = Field(default=2, ge=1, description="Newest checkpoints kept.")
    keep_every: int = Field(
        default=0, ge=0, description="Checkpoints of multiples of this many steps are kept for ever; 0: none."
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
        "undamaged one; damaged ones are set aside. never: refuse if there is one.",
    )
    load: Path | None = Field(default=None, description="Start from this mslime checkpoint directory.")
    save_hf: bool = Field(default=True, description="Also export a Hugging Face checkpoint at the end.")


def check_checkpoint(checkpoint: CheckpointConfig, *, sets: list[str], task: Task, eval_every: int) -> None:
    """Refuse a `keep_best` of a held-out set that is never evaluated: it would keep nothing, in silence.

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
            "checkpoint.keep_best", metric, f"names no set of data.eval_sets: {sets}",
            f"write for example eval/{sets[0] if sets else 'NAME'}/accuracy",
        )  # fmt: skip
    losses, minimum = ("nll", "perplexity"), checkpoint.keep_best_is == "min"
    is_loss, supervised = metric.rpartition("/")[2] in losses, task == "sft"
    if is_loss != supervised:
        rule = f"train.task {task} measures no such thing on held-out sets"
        best = f"eval/{name}/nll and checkpoint.keep_best_is: min" if supervised else f"eval/{name}/accuracy"
        raise ConfigError("checkpoint.keep_best", metric, rule, f"write for example {best}")
    if is_loss and not minimum:
        raise ConfigError("checkpoint.keep_best_is", "max", f"the best {metric} is the lowest", "set it to min")
    if eval_every == 0:
        raise ConfigError(
            "checkpoint.keep_best", metric, "needs evaluations, and observe.eval_every is 0", "set observe.eval_every"
        )
