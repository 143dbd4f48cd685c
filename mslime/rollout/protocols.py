"""Interfaces that the rollout package uses, and the records that it returns."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

from mslime.backends.sglang.generating import GenerateRequest, GenerateResult
from mslime.config.errors import EngineError
from mslime.data.sample import Group, Sample


class Engines(Protocol):
    """Engines with load balancing: `backends.sglang.engine_pool.EnginePool`, or scripted replies."""

    @property
    def clients(self) -> Sequence[object]:
        """All engines, dead ones included."""
        ...

    @property
    def dead(self) -> Mapping[str, EngineError]:
        """Engines that died, by name."""
        ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Continue a sequence on one engine. Raises EngineDied if it died meanwhile, EngineError if it refused."""
        ...


def living(engines: Engines) -> int:
    """Engines that are alive."""
    return len(engines.clients) - len(engines.dead)


@dataclass(frozen=True)
class EngineLimits:
    """Limits at which engines end a sequence, besides the model's own length.

    Attributes:
        refused_input: an engine refuses to continue this many tokens, or more (6 fewer than its context holds).
        end_ids: tokens that end a response at the engines.
    """

    refused_input: int = sys.maxsize
    end_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StepBatch:
    """The groups of one training step.

    Attributes:
        version: the trainer's weight version when they were taken.
        metrics: `reward/*`, `rollout/*`, `staleness/*` and `ledger/*` of the step.
    """

    step: int
    version: int
    groups: list[Group]
    metrics: dict[str, float]

    @property
    def samples(self) -> list[Sample]:
        """All samples of all groups, in order."""
        return [s for g in self.groups for s in g.samples]


# Calls to an object's methods, independent of its process: this one here, another one in `run.ray_calls`.

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
P = ParamSpec("P")


class Asked(Protocol[T_co]):
    """`await manager.ask(Manager.report)`: argument and result types are those of the method."""

    async def ask(self, method: Callable[Concatenate[T_co, P], Awaitable[R]], *args: P.args, **options: P.kwargs) -> R:
        """Call the method: return its result or raise its error."""
        ...


class Local(Generic[T]):
    """An object of this process."""

    def __init__(self, it: T) -> None:
        self.it = it

    async def ask(self, method: Callable[Concatenate[T, P], Awaitable[R]], *args: P.args, **options: P.kwargs) -> R:
        return await getattr(self.it, method.__name__)(*args, **options)
