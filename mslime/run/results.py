"""Data exchanged between the rollout service and the driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from mslime.data.checkpoints import FileSum

if TYPE_CHECKING:
    from mslime.checks.resolve import ResolvedRun
    from mslime.run.ray_calls import PendingCall

Spans = list[tuple[str, str, float, float, int]]


@dataclass
class StepShards:
    """One step's work for the trainer.

    Attributes:
        shards: [ranks][optimizer steps] references to TrainShard.
        metrics: of the rollout.
        outline: small state file of the service after this step, used if the service is lost.
        spans: (lane, name, start, end, step) of engines and service since the last step.
        notes: lines for the user.
        watched: sequences whose log-probs at the trainer are to be passed to `RunRollouts.log_trained`.
    """

    shards: list[list[ray.ObjectRef]]
    metrics: dict[str, float]
    outline: bytes
    spans: Spans = field(default_factory=list)
    notes: list[str] = field(default_factory=list[str])
    watched: tuple[int, ...] = ()


@dataclass(frozen=True)
class SavedState:
    """The service's file in a checkpoint, in a format private to the service.

    Attributes:
        total: expected checksum of the file.
    """

    directory: Path
    name: str
    total: FileSum


@dataclass(frozen=True)
class OfAdapter:
    """One of several adapters on the same engines.

    Attributes:
        run: its own run, as if it were trained alone.
        weight: its share of the engines, relative to the others'.
    """

    run: ResolvedRun
    weight: float


@dataclass(frozen=True)
class Beginning:
    """Initial state of a service.

    Attributes:
        state: written by `save`, when resuming.
        version: weight version that the trainer starts with.
    """

    state: SavedState | None
    version: int


@dataclass(frozen=True)
class Evaluated:
    """Scores on every held-out set.

    Attributes:
        version: weight version that sampled every response; None if nothing was sampled.
        begin, end: Unix seconds.
    """

    metrics: dict[str, float]
    version: int | None
    begin: float
    end: float


@dataclass(frozen=True)
class Evaluation:
    """A running evaluation, of the weights after `step` steps."""

    step: int
    answer: PendingCall[Evaluated]
