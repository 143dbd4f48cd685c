"""The checkpoints of one run: its initial one, retention of those that it writes, and their export."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from mslime.config.errors import CheckpointError, ConfigError
from mslime.config.lora import LORA_KEY
from mslime.config.model_facts import export_dtype
from mslime.config.output import CheckpointConfig
from mslime.convert.families import read_hf_config
from mslime.convert.torch_dist import ModelPlacement
from mslime.data.checkpoints import (
    NAME,
    ChosenCheckpoint,
    check_checkpoint,
    choose,
    critic_directory,
    newest,
    prune,
    read_manifest,
    retained,
    rollouts_file,
    step_directory,
)
from mslime.observe.metrics import FILE_NAME, read_metrics
from mslime.observe.progress import ConversionBars
from mslime.offline.jobs import ConversionJob, refuse_existing, run_job
from mslime.offline.lora_checkpoints import export_adapter
from mslime.offline.to_hf import ToHf, side_files
from mslime.run.run_rollouts import SavedState
from mslime.run.stop import StopSignals


class RunCheckpoints:
    """The initial checkpoint of a run, from its directory or `checkpoint.load`, and the checkpoints that it writes.

    Args:
        settings: `checkpoint`.
        has_critic: its checkpoints lie beside the policy's.

    Attributes:
        loaded: the checkpoint that the run begins with, if any.
        own: whether that is the run's own, which then continues, and not another run's (`checkpoint.load`).
        extra: metadata in `loaded` of the run that wrote it.
        first_step: steps done before this session.
    """

    def __init__(self, run_dir: Path, settings: CheckpointConfig, has_critic: bool) -> None:
        """Raises CheckpointError: the checkpoint to begin with is damaged, or of another kind."""
        self._run_dir, self._settings, self._has_critic = run_dir, settings, has_critic
        self._root = run_dir / "checkpoints"
        self._chosen = self._choose()
        self.loaded = self._chosen.directory
        self._manifest = read_manifest(self.loaded) if self.loaded else None
        self.extra: Mapping[str, Any] = self._manifest.extra if self._manifest else {}
        self.own = self.loaded is not None and self.loaded.parent == self._root
        self.first_step: int = self._next_step() if self.own else 0
        self._scores: dict[int, float] = {}  # of `checkpoint.keep_best`, larger is better

    @property
    def config(self) -> dict[str, Any] | None:
        """Configuration of the earlier session of this run; None without one, or if its checkpoint lacks it."""
        return self.extra.get("config") if self.own else None

    @property
    def last_row(self) -> dict[str, Any] | None:
        """Metrics of the last step before this session; None likewise."""
        return self.extra.get("row") if self.own else None

    @property
    def rollouts(self) -> SavedState | None:
        """State of the earlier session's rollout service; None likewise."""
        if not self.own or self.loaded is None or self._manifest is None:
            return None
        name = rollouts_file(self._manifest)
        return None if name is None else SavedState(self.loaded, name, self._manifest.files[name])

    def notes(self) -> Iterator[str]:
        """Messages to the user about the choice."""
        for directory, error in self._chosen.passed_over:
            yield f"skipped a damaged checkpoint, renamed to {directory}: {error}"
        if self._manifest is not None and not self._manifest.summed:
            yield f"{self.loaded} has no checksums (older format): only the sizes of its files are compared"

    def directory(self, step: int) -> Path:
        """Directory of the checkpoint after `step` steps."""
        return step_directory(self._root, step)

    def read_scores(self) -> None:
        """Read the scores of steps before this session, for `checkpoint.keep_best`."""
        for row in read_metrics(self._run_dir / FILE_NAME) if self._settings.keep_best else ():
            self.score(row["step"], row)

    def score(self, step: int, row: Mapping[str, Any]) -> None:
        """Record the score of a step's weights, if this row of metrics has the metric of `checkpoint.keep_best`."""
        settings = self._settings
        value = row.get(settings.keep_best) if settings.keep_best else None
        if isinstance(value, int | float):
            self._scores[step] = value if settings.keep_best_is == "max" else -value

    def prune(self) -> None:
        """Remove the checkpoints, of policy and critic, that `checkpoint` does not keep."""

        def keep(saved: Sequence[int]) -> set[int]:
            return retained(saved, self._settings.keep, self._settings.keep_every, self._scores)

        prune(self._root, keep)
        if self._has_critic:
            prune(critic_directory(self.directory(0)).parent, keep)

    def _choose(self) -> ChosenCheckpoint:
        """The run's own checkpoint if there is one, else `checkpoint.load`, else none."""
        own, load = choose(self._root, self._settings.resume), self._settings.load
        if own.directory is not None or load is None:
            return own
        if not load.is_dir():
            raise CheckpointError(
                "checkpoint.load", str(load), "no such directory", "specify a checkpoints/step_N directory"
            )
        return ChosenCheckpoint(load)

    def _next_step(self) -> int:
        step = self.extra.get("next_step")
        if type(step) is not int or step < 0:
            raise CheckpointError(
                str(self.loaded), f"next_step {step!r}",
                "a run's checkpoint must contain the step at which the run continues",
                "set it as checkpoint.load of another run, or move it away",
            )  # fmt: skip
        return step


# A training checkpoint written as a Hugging Face checkpoint.
#
# Joins the offline conversions to megatron-core, which alone defines the location of a model's parameters.


def newest_of(run_dir: Path) -> Path:
    """The newest checkpoint of a run. Raises ConfigError if it has none."""
    found = newest(run_dir / "checkpoints")
    if found is None:
        raise ConfigError("--checkpoint", str(run_dir), "contains no checkpoint", "specify one with --checkpoint")
    return found


def export(checkpoint: Path, model: Path, out: Path, *, quiet: bool) -> None:
    """Export a training checkpoint as the trainer itself would: a Hugging Face checkpoint, or an adapter.

    Args:
        model: the Hugging Face checkpoint that training began with.
        out: directory to write; must not exist.
        quiet: show no progress.

    Raises:
        UserError: the checkpoint is damaged, or `out` exists.
    """
    refuse_existing(out)
    if (lora := _adapters(checkpoint)) is not None:
        check_checkpoint(checkpoint)
        tensors = export_adapter(checkpoint, lora, model, out)
        Console(stderr=True).print(f"{out}: an adapter of {tensors} tensors, in peft's format")
        return
    job = export_job(checkpoint, model, dtype=export_dtype(read_hf_config(model)))
    with StopSignals(), ConversionBars(Console(stderr=True), quiet) as bars:
        run_job(job, out, workers=min(os.cpu_count() or 1, 8), progress=bars)


def export_job(
    checkpoint: Path, source: Path | None, *, dtype: str | None = None, max_shard_bytes: int = 5 << 30
) -> ConversionJob:
    """Megatron -> Hugging Face, for `run_job`.

    Args:
        source: Hugging Face directory of the model; None if the checkpoint includes its config.json.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
    """
    if _adapters(checkpoint) is not None:
        raise CheckpointError(
            str(checkpoint), "adapters", "contains adapters without their base model",
            "write the adapter with `mslime convert run`, and merge it with `mslime convert merge-lora`",
        )  # fmt: skip
    directory = side_files(checkpoint, source)
    config = read_hf_config(directory)
    return ToHf(
        checkpoint, directory, config, placement(config, directory), dtype=dtype, max_shard_bytes=max_shard_bytes
    )


def _adapters(checkpoint: Path) -> Mapping[str, object] | None:
    """Metadata of a training checkpoint's adapters; None if it holds a model."""
    if not (checkpoint / NAME).is_file():
        return None  # a converted checkpoint
    return read_manifest(checkpoint, check_files=False).extra.get(LORA_KEY)


def placement(config: Mapping[str, object], directory: Path) -> ModelPlacement:
    """Megatron-core's location of this model's parameters; imports it, builds a model on the meta device."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's, about how it is trained
        from mslime.backends.megatron.checkpoint_files import model_placement

        return model_placement(config, directory)
