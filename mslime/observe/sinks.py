"""Destinations of metrics besides `metrics.jsonl`. A sink's package is imported only if the run uses the sink."""

from __future__ import annotations

import importlib
import inspect
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from mslime.config.errors import UserError, nearest
from mslime.config.output import ObserveConfig


class TensorBoardSink:
    """Event files in RUN/tensorboard, with plain scalars, which scripts can read too."""

    def __init__(self, run_dir: Path) -> None:
        writers = _package("tensorboard.summary.writer.event_file_writer", "observe.tensorboard", True)
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer: Any = writers.EventFileWriter(str(run_dir / "tensorboard"))
        self._begun = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step and flush: a crash must not lose the last minutes."""
        if not self._begun:  # invalidates events of this and later steps from an earlier attempt
            log = self._events.SessionLog
            self._add(step, session_log=log(status=log.START))
            self._begun = True
        value = self._summaries.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in metrics.items()]
        self._add(step, summary=self._summaries.Summary(value=values))
        self._writer.flush()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run, continued under the same id when the mslime run resumes."""

    def __init__(
        self, run_dir: Path, project: str, run_name: str, run_config: Mapping[str, Any], further: Mapping[str, Any]
    ) -> None:
        """
        Args:
            further: arguments of wandb.init.

        Raises:
            UserError: the package is not installed, or does not accept an argument.
        """
        wandb: Any = _package("wandb", "observe.wandb_project", project)
        _refuse_unknown(wandb.init, further)
        identity = run_dir / "wandb_id"
        if not identity.exists():
            run_dir.mkdir(parents=True, exist_ok=True)
            identity.write_text(uuid.uuid4().hex)
        self._run: Any = wandb.init(
            project=project,
            name=run_name,
            id=identity.read_text(),
            resume="allow",
            dir=str(run_dir),
            config=dict(run_config),
            **further,
        )
        # W&B's own counter never goes back: it would ignore rows of steps that are repeated after a lost trainer.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """End the W&B run."""
        self._run.finish()


Sink: TypeAlias = TensorBoardSink | WandbSink


def open_sinks(run_dir: Path, observe: ObserveConfig, run_name: str, run_config: Mapping[str, Any]) -> list[Sink]:
    """The sinks that `observe` selects. Raises UserError if a sink's package is not installed."""
    sinks: list[Sink] = []
    if observe.tensorboard:
        sinks.append(TensorBoardSink(run_dir))
    if observe.wandb_project is not None:
        sinks.append(WandbSink(run_dir, observe.wandb_project, run_name, run_config, observe.wandb))
    return sinks


def _refuse_unknown(init: Callable[..., Any], further: Mapping[str, Any]) -> None:
    takes = inspect.signature(init).parameters
    for name in further:
        if name not in takes and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values()):
            raise UserError(
                f"observe.wandb.{name}", further[name], "the installed wandb.init has no such argument",
                nearest(name, takes) or f"its arguments: {', '.join(takes)}",
            )  # fmt: skip


def _package(module: str, field: str, value: object) -> ModuleType:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UserError(field, value, f"the package {package} is not installed", f"pip install {package}") from error
