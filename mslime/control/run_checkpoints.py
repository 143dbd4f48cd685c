"""The checkpoints of one run: the one that it begins with, and which of those it writes are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mslime.config.errors import CheckpointError
from mslime.config.schema import RunConfig
from mslime.control.results import SavedState
from mslime.data.checkpoints import Chosen, choose, critic_directory, prune, retained, rollouts_file, step_directory
from mslime.data.manifest import read_manifest
from mslime.observe.metrics import FILE_NAME, read_metrics


class RunCheckpoints:
    """What a run finds in its directory, or is told to load, and what it leaves there.

    Attributes:
        loaded: the checkpoint that the run begins with, if any.
        own: whether that is the run's own, which then continues, and not another run's (`checkpoint.load`).
        extra: what `loaded` says of the run that wrote it.
        first_step: steps done before this session.
    """

    def __init__(self, config: RunConfig) -> None:
        """Raises CheckpointError: the checkpoint to begin with is damaged, or of another kind."""
        self._config, self._root = config, config.run_dir / "checkpoints"
        self._chosen = self._choose()
        self.loaded = self._chosen.directory
        self._manifest = read_manifest(self.loaded) if self.loaded else None
        self.extra: Mapping[str, Any] = self._manifest.extra if self._manifest else {}
        self.own = self.loaded is not None and self.loaded.parent == self._root
        self.first_step: int = self._next_step() if self.own else 0
        self._scores: dict[int, float] = {}  # of `checkpoint.keep_best`, larger is better

    @property
    def config(self) -> dict[str, Any] | None:
        """The configuration of the earlier session of this run, if there was one and it says."""
        return self.extra.get("config") if self.own else None

    @property
    def last_row(self) -> dict[str, Any] | None:
        """The metrics of the last step before this session, likewise."""
        return self.extra.get("row") if self.own else None

    @property
    def rollouts(self) -> SavedState | None:
        """What the rollout service of the earlier session wrote, likewise."""
        if not self.own or self.loaded is None or self._manifest is None:
            return None
        name = rollouts_file(self._manifest)
        return None if name is None else SavedState(self.loaded, name, self._manifest.files[name])

    def notes(self) -> Iterator[str]:
        """What a person should know of the choice."""
        for directory, error in self._chosen.passed_over:
            yield f"passed over a damaged checkpoint, now {directory}: {error}"
        if self._manifest is not None and not self._manifest.summed:
            yield f"{self.loaded} is from before checksums: only sizes of its files are compared"

    def directory(self, step: int) -> Path:
        """Where the checkpoint after `step` steps is written."""
        return step_directory(self._root, step)

    def read_scores(self) -> None:
        """Of the steps before this session, for `checkpoint.keep_best`."""
        for row in read_metrics(self._config.run_dir / FILE_NAME) if self._config.checkpoint.keep_best else ():
            self.score(row["step"], row)

    def score(self, step: int, row: Mapping[str, Any]) -> None:
        """Note what a row of metrics says of a step's weights, if it holds the metric of `checkpoint.keep_best`."""
        settings = self._config.checkpoint
        value = row.get(settings.keep_best) if settings.keep_best else None
        if isinstance(value, int | float):
            self._scores[step] = value if settings.keep_best_is == "max" else -value

    def prune(self) -> None:
        """Remove the checkpoints, of policy and critic, that `checkpoint` does not keep."""
        settings = self._config.checkpoint

        def keep(saved: Sequence[int]) -> set[int]:
            return retained(saved, settings.keep, settings.keep_every, self._scores)

        prune(self._root, keep)
        if self._config.has_critic:
            prune(critic_directory(self.directory(0)).parent, keep)

    def _choose(self) -> Chosen:
        """The run's own checkpoint when there is one, else `checkpoint.load`, else none."""
        own, load = choose(self._root, self._config.checkpoint.resume), self._config.checkpoint.load
        if own.directory is not None or load is None:
            return own
        if not load.is_dir():
            raise CheckpointError(
                "checkpoint.load", str(load), "no such directory", "name a checkpoints/step_N directory"
            )
        return Chosen(load)

    def _next_step(self) -> int:
        step = self.extra.get("next_step")
        if type(step) is not int or step < 0:
            raise CheckpointError(
                str(self.loaded), f"next_step {step!r}", "a run's checkpoint must hold the step at which it continues",
                "name it as checkpoint.load of another run, or move it away",
            )  # fmt: skip
        return step
