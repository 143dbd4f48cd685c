"""An object that is asked by its methods, wherever it lives: in this process here, in another in `control.remote`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
P = ParamSpec("P")


class Asked(Protocol[T_co]):
    """`await manager.ask(Manager.report)`: the types of arguments and answer are those of the method."""

    async def ask(self, method: Callable[Concatenate[T_co, P], Awaitable[R]], *args: P.args, **options: P.kwargs) -> R:
        """Return what the method returns, or raise what it raises."""
        ...


class Local(Generic[T]):
    """An object of this process."""

    def __init__(self, it: T) -> None:
        self.it = it

    async def ask(self, method: Callable[Concatenate[T, P], Awaitable[R]], *args: P.args, **options: P.kwargs) -> R:
        """See `Asked`."""
        return await getattr(self.it, method.__name__)(*args, **options)
