"""Calls to an object in another process of the run, typed by the object's class.

A Ray actor that derives from `Host` holds objects by name. A `Remote` is one of them as another process has it:
`engines.call(RunEngines.stamp, 3)` in the driver, `await manager.ask(Manager.report)` in an event loop. `InLoop` is an
object of another thread's event loop, which is called as in the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError

from mslime.config.schema import DeadlineConfig
from mslime.control.calls import call, told

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


@dataclass(frozen=True)
class Verb:
    """How the driver calls a method.

    Attributes:
        what: the work, for errors; may name arguments, as in `step {0}`.
        deadline: which of `deadlines` bounds it.
        more_s: seconds beyond that, for what the other process does around its own wait.
        interruptible: whether the run may end while it is waited for.
    """

    what: str
    deadline: str
    more_s: float
    interruptible: bool


_VERBS: dict[Callable[..., Any], Verb] = {}


def verb(
    what: str, deadline: str = "engine_control_s", *, more_s: float = 30.0, interruptible: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let the driver call the method; see `Verb`."""

    def register(method: Callable[P, R]) -> Callable[P, R]:
        _VERBS[method] = Verb(what, deadline, more_s, interruptible)
        return method

    return register


class Host:
    """Base of a Ray actor whose objects other processes call.

    Attributes:
        objects: by name.
    """

    objects: dict[str, object]

    async def ask(self, name: str, method: str, *args: Any, **options: Any) -> Any:
        """What a method of the object of this name returns."""
        return await getattr(self.objects[name], method)(*args, **options)


@dataclass(frozen=True)
class PendingCall(Generic[R]):
    """A call that is under way.

    Attributes:
        what: the work, for errors.
    """

    ref: ray.ObjectRef = field(repr=False)
    verb: Verb
    what: str

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(ray.wait([self.ref], timeout=0)[0])


class Remote(Generic[T]):
    """An object of another process; `rollout.asked.Asked`.

    Args:
        actor: a handle of a `Host`.
        name: of the object there.
        who: the process, for errors.
        log_path: where it writes.
        deadlines: of the run.
        check: called while an interruptible call is waited for; raises when the run is to end.
    """

    def __init__(
        self, actor: Any, name: str, who: str, log_path: str, deadlines: DeadlineConfig,
        check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._actor, self._name, self._who, self._log = actor, name, who, log_path
        self._deadlines, self.check = deadlines, check
        self._limit_s: float | None = None

    def within(self, limit_s: float | None) -> Remote[T]:
        """The same object, whose calls have so many seconds; None: what their verbs say."""
        other = copy(self)
        other._limit_s = limit_s
        return other

    def begin(
        self, method: Callable[Concatenate[T, P], Awaitable[R]], *args: P.args, **options: P.kwargs
    ) -> PendingCall[R]:
        """Call the method, which is a `verb`, and wait for nothing."""
        ref = self._actor.ask.remote(self._name, method.__name__, *args, **options)
        found = _VERBS[method]
        return PendingCall(ref, found, found.what.format(*args))

    def wait(self, pending: PendingCall[R], on_wait: Callable[[], None] | None = None) -> R:
        """What a call that was begun returns.

        Args:
            on_wait: called a few times a second while it is waited for.

        Raises:
            UserError: as the method raised it. WorkerError: it crashed, its process died, or the deadline was missed.
            TrainerError: Ray failed.
        """
        limit_s = self._limit_s or getattr(self._deadlines, pending.verb.deadline) + pending.verb.more_s
        checked = self.check if pending.verb.interruptible and not pending.done else None
        return call(pending.ref, self._who, pending.what, limit_s, self._log, on_wait or checked)

    def call(self, method: Callable[Concatenate[T, P], Awaitable[R]], *args: P.args, **options: P.kwargs) -> R:
        """What the method, which is a `verb`, returns; see `wait`."""
        return self.wait(self.begin(method, *args, **options))

    async def ask(self, method: Callable[Concatenate[T, P], Awaitable[R]], *args: P.args, **options: P.kwargs) -> R:
        """What the method returns. It is cancelled with the caller. Raises as `wait` does."""
        ref = self._actor.ask.remote(self._name, method.__name__, *args, **options)
        try:
            return await ref
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
        except RayError as error:
            what = f"{self._name}: {method.__name__}"
            raise told(error, self._who, what, self._log) from None


class InLoop(Generic[T]):
    """An object that belongs to an event loop of this process, as other threads have it."""

    def __init__(self, it: T, loop: asyncio.AbstractEventLoop) -> None:
        self._it, self._loop = it, loop

    def call(self, method: Callable[Concatenate[T, P], Awaitable[R]], *args: P.args, **options: P.kwargs) -> R:
        """What the method returns, or what it raises."""

        async def asked() -> R:
            return await method(self._it, *args, **options)

        return asyncio.run_coroutine_threadsafe(asked(), self._loop).result()
