"""Rollouts that begin outside the run: external programs send requests to its model and submit the results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from mslime.config.schema import RunConfig
from mslime.rollout.ungrouped_requests import Guests
from mslime.rollout.workflow import Engine, Episode, Task


class HostedRollouts(ABC):
    """Rollout function for externally started rollouts. A package adds one through an entry point of the group
    `mslime.environments`; its name then becomes a value of `rollout.function`.

    Args:
        config: of the run.

    Attributes:
        counted: names of its counters in `guests.tracker.counters`; each is the metric `rollout/NAME` of every step.
    """

    counted: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __init__(self, config: RunConfig) -> None: ...

    @abstractmethod
    def attach(self, guests: Guests) -> None:
        """Receive the access to the engines. Called once, before the first rollout."""

    @abstractmethod
    async def __call__(self, task: Task, engine: Engine) -> Episode:
        """Return one submitted rollout; see `rollout.workflow`."""

    @abstractmethod
    async def close(self) -> None:
        """Stop serving. Results that were not submitted are dropped."""
