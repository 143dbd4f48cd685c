"""The Python API: the commands as functions that take and return values.

They raise `UserError` for a mistake, print nothing unless `observe.progress` asks for it, and work in any thread. Each
function imports the heavy packages that it needs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from mslime.config.errors import ConfigError
from mslime.config.errors import UserError as UserError
from mslime.config.schema import RunConfig
from mslime.run.stop import Stopped as Stopped

if TYPE_CHECKING:
    from mslime.checks.resolve import ResolvedRun
    from mslime.run.debug import EvalScores

Source = RunConfig | Mapping[str, Any] | str | os.PathLike[str]
"""A run: a configuration, the path of a YAML file, or a mapping with the content of such a file."""


@dataclass(frozen=True)
class TrainResult:
    """Result of a training run.

    Attributes:
        run_dir: directory with everything that the run wrote.
        steps: done over the whole life of the run, resumed parts included.
        metrics: row of the last step in metrics.jsonl; None stands for a non-finite value.
        checkpoint: the newest, from which the run would continue.
        hf: the trained model as a Hugging Face checkpoint, with `checkpoint.save_hf`.
        adapters: the results of several adapters, by name. Then `steps` is their total, and the other fields are
            empty.
    """

    run_dir: Path
    steps: int
    metrics: Mapping[str, float | None]
    checkpoint: Path | None
    hf: Path | None
    adapters: Mapping[str, TrainResult] = field(default_factory=dict[str, "TrainResult"])


def load_config(source: Source | None = None, *settings: str, **sections: Any) -> RunConfig:
    """Load and validate a configuration.

    Args:
        source: path of a YAML file, or a mapping; None if the other arguments suffice.
        settings: `"train.lr=1e-6"`, parsed like the flag of the command; they override everything else.
        sections: `train={"lr": 1e-6}, name="run-2"`, merged into the source.

    Raises:
        ConfigError: a file that is missing or broken, an unknown setting, or a value that breaks a rule.
    """
    from mslime.config.loader import build, merge

    return build(merge(values_of(source), _given(settings, sections)))


def check(source: Source) -> ResolvedRun:
    """Check a run before a GPU is claimed, as `mslime check`. Raises UserError for the first mistake.

    Returns:
        The complete configuration, facts from the checkpoint, and notes on prompts and reward.
    """
    from mslime.checks.resolve import resolve

    return resolve(_config(source))


def train(source: Source, *, stop: Event | None = None) -> TrainResult:
    """Run the training, or continue it from its newest checkpoint, as `mslime train`. One run at a time in a process.

    In the main thread it handles signals, and restores the earlier handlers at the end. No process of the run is left
    when this returns or raises.

    Args:
        stop: once set, by another thread or a callback, the run is saved and ended as by SIGTERM.

    Raises:
        UserError: a mistake, or a failed part of the run.
        Stopped: a signal or `stop` ended it; a KeyboardInterrupt whose text describes what was saved.
    """
    from mslime.run.run import run

    config = _config(source)
    run(config, quiet="progress" not in config.observe.model_fields_set, asked=stop.is_set if stop else None)
    if config.adapters:
        found = {name: _result(own.run_dir) for name, own in config.adapter_runs.items()}
        return TrainResult(config.run_dir, sum(each.steps for each in found.values()), {}, None, None, found)
    return _result(config.run_dir)


def evaluate(source: Source, *, checkpoint: str | int | os.PathLike[str] | None = None) -> EvalScores:
    """Score a model on the held-out sets of `data.eval_sets`, as `mslime eval`: engines only, no trainer.

    Args:
        checkpoint: a training checkpoint: its directory, its step, or `"newest"` of the run; None: the weights of
            `model.path`.

    Returns:
        `weights`, `step`, `metrics` (`eval/<set>/...`) and `path` of the file with the same content.

    Raises:
        UserError: a mistake, or a failed part.
        Stopped: a signal ended it.
    """
    from mslime.run.debug import evaluated

    config = _config(source)
    if "progress" not in config.observe.model_fields_set:
        config = config.model_copy(update={"observe": config.observe.model_copy(update={"progress": "off"})})
    return evaluated(config, None if checkpoint is None else str(checkpoint))


def _result(run_dir: Path) -> TrainResult:
    from mslime.data.checkpoints import newest
    from mslime.observe.metrics import FILE_NAME, read_metrics
    from mslime.observe.names import by_step

    rows, hf = read_metrics(run_dir / FILE_NAME), run_dir / "hf"
    last = dict(by_step(rows)[-1]) if rows else {"step": 0}
    return TrainResult(run_dir, last.pop("step"), last, newest(run_dir / "checkpoints"), hf if hf.is_dir() else None)


def _config(source: Source) -> RunConfig:
    return source if isinstance(source, RunConfig) else load_config(source)


def values_of(source: Source | None) -> dict[str, Any]:
    """Settings of a source, not yet validated. Raises ConfigError for an unreadable file."""
    from mslime.config.loader import read_yaml

    if source is None:
        return {}
    if isinstance(source, RunConfig):
        return source.given()
    if isinstance(source, Mapping):
        return dict(source)
    return read_yaml(Path(source))


def _given(settings: tuple[str, ...], sections: Mapping[str, Any]) -> dict[str, Any]:
    from mslime.config.loader import merge, parse_flags

    for setting in settings:
        if "=" not in setting:
            raise ConfigError("settings", setting, "must be NAME=VALUE", 'for example "train.lr=1e-6"')
    return merge(dict(sections), parse_flags([f"--{setting}" for setting in settings]))
