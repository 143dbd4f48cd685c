"""Rollouts that begin outside of the run: programs of others ask its model and hand in what became of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from mslime.config.schema import RunConfig
from mslime.rollout.ungrouped_requests import Guests
from mslime.rollout.workflow import Engine, Episode, Task


class HostedRollouts(ABC):
    """A rollout function of such a run. A package adds one by an entry point of the group `mslime.environments`, whose
    name is then a value of `rollout.function`.

    Args:
        config: of the run.

    Attributes:
        counted: names of what it counts in `guests.tracker.counters`; each is the metric `rollout/NAME` of every step.
    """

    counted: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __init__(self, config: RunConfig) -> None: ...

    @abstractmethod
    def attach(self, guests: Guests) -> None:
        """Receive the way to the engines. Called once, before the first rollout."""

    @abstractmethod
    async def __call__(self, task: Task, engine: Engine) -> Episode:
        """One rollout that was handed in; see `rollout.workflow`."""

    @abstractmethod
    async def close(self) -> None:
        """Stop serving. What was not handed in is dropped."""
