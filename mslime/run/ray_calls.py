"""Calls into other processes of a run, typed by the object's class: with a deadline, progress, and the first failure.

A rank that dies leaves its peers stuck in a collective, so a wait never needs all results: the first failed call ends
it, and the user sees the traceback and log path of that rank.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from mslime.config.errors import TrainerError, UserError, WeightSyncError, WorkerError
from mslime.config.schema import DeadlineConfig

POLL_SECONDS = 0.25
DEATH_SECONDS = 5.0
"""Seconds in which Ray notices the end of a process."""


def gather(
    refs: Mapping[str, ray.ObjectRef],
    task: str,
    deadline_s: float,
    log_paths: Mapping[str, str],
    on_wait: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Results of all calls by name.

    Args:
        refs: running calls by the name of the worker, for example `trainer rank 3`.
        task: the work, for messages.
        deadline_s: seconds after which workers without an answer are declared stuck.
        log_paths: each worker's log.
        on_wait: called a few times a second, for progress.

    Raises:
        UserError: as raised by the worker, for a user's mistake.
        WorkerError: a worker crashed, died, or missed the deadline. TrainerError: Ray failed.
    """
    names = {ref: name for name, ref in refs.items()}
    pending, results = list(refs.values()), {}
    end = time.monotonic() + deadline_s
    while pending:
        done, pending = _wait(pending, task)
        for ref in done:
            try:
                results[names[ref]] = _value(ref, names[ref], task, log_paths)
            except WeightSyncError as error:
                raise _death_among(pending, names, task, log_paths) or error from None
        if on_wait is not None:
            on_wait()
        if pending and time.monotonic() > end:
            stuck = sorted(names[ref] for ref in pending)
            logs = ", ".join(log_paths.get(n, "?") for n in stuck)
            raise WorkerError(
                task,
                ", ".join(stuck),
                f"no answer within {deadline_s:.0f} s",
                f"read {logs}; `py-spy dump` shows where a live rank waits; raise the deadline if it was slow",
            )
    return {name: results[name] for name in refs}


def _death_among(
    pending: list[ray.ObjectRef], names: Mapping[ray.ObjectRef, str], task: str, log_paths: Mapping[str, str]
) -> WorkerError | None:
    """The death behind a sync that failed on a rank which only lost its peer: Ray may report it a moment later."""
    done, _ = _wait(pending, task, len(pending), DEATH_SECONDS) if pending else ([], [])
    for ref in done:
        try:
            _value(ref, names[ref], task, log_paths)
        except WorkerError as death:
            return death
        except UserError:
            continue
    return None


def _wait(
    pending: list[ray.ObjectRef], task: str, number: int = 1, seconds: float = POLL_SECONDS
) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
    try:
        return ray.wait(pending, num_returns=number, timeout=seconds)
    except RayError as error:
        raise _ray_failed(task, "Ray", error) from None


def call(
    ref: ray.ObjectRef,
    worker: str,
    task: str,
    deadline_s: float,
    log_path: str = "?",
    on_wait: Callable[[], None] | None = None,
) -> Any:
    """The result of one call; see `gather`."""
    return gather({worker: ref}, task, deadline_s, {worker: log_path}, on_wait)[worker]


def _value(ref: ray.ObjectRef, worker: str, task: str, log_paths: Mapping[str, str]) -> Any:
    log = log_paths.get(worker, "?")
    try:
        return ray.get(ref)
    except RayError as error:
        raise to_user_error(error, worker, task, log) from None


def to_user_error(error: RayError, worker: str, task: str, log: str) -> Exception:
    """Convert a failed call to the error to show: the worker's own if it is a user's mistake, else that `worker`
    crashed or died, or that Ray failed."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, UserError):
            return error.cause
        # Not `error.traceback_str`: Ray forwards it to the cause, and an AttributeError of that kind hides it.
        return WorkerError(task, worker, f"crashed with\n{error}", f"read the full log in {log}")
    if isinstance(error, RayActorError):
        return WorkerError(
            task,
            worker,
            f"the process died ({str(error).splitlines()[0]})",
            f"read the end of {log}; a death without a traceback is often the kernel's out-of-memory killer",
        )
    return _ray_failed(task, worker, error)


def _ray_failed(task: str, worker: str, error: RayError) -> TrainerError:
    reason = str(error).strip().splitlines() or [""]
    return TrainerError(
        task, worker, f"Ray failed: {type(error).__name__}: {reason[0]}",
        "Ray's logs are in /tmp/ray/session_latest/logs; the kernel's out-of-memory killer may have ended its raylet",
    )  # fmt: skip


# Calls to an object in another process of the run, typed by the object's class.
#
# A Ray actor that derives from `HandleActor` holds objects by name. A `RemoteHandle` is the handle of such an object in
# another process: `engines.call(RunEngines.stamp, 3)` in the driver, `await manager.ask(Manager.report)` in an event
# loop. `LoopHandle` is a handle of an object in another thread's event loop, called as in the driver.

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


@dataclass(frozen=True)
class Verb:
    """Properties of a method's calls from the driver.

    Attributes:
        task: the work, for errors; may name arguments, as in `step {0}`.
        deadline: field of `deadlines` that bounds it.
        more_s: seconds beyond that, for the other process's work around its own wait.
        interruptible: whether the run may end while it waits for the call.
    """

    task: str
    deadline: str
    more_s: float
    interruptible: bool


_VERBS: dict[Callable[..., Any], Verb] = {}


def verb(
    task: str, deadline: str = "engine_control_s", *, more_s: float = 30.0, interruptible: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make the method callable by the driver; see `Verb`."""

    def register(method: Callable[P, R]) -> Callable[P, R]:
        _VERBS[method] = Verb(task, deadline, more_s, interruptible)
        return method

    return register


class HandleActor:
    """Base of a Ray actor whose objects other processes call.

    Attributes:
        objects: by name.
    """

    objects: dict[str, object]

    async def ask(self, name: str, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the object of this name and return its result."""
        return await getattr(self.objects[name], method)(*args, **options)


@dataclass(frozen=True)
class PendingCall(Generic[R]):
    """A running call.

    Attributes:
        task: the work, for errors.
    """

    ref: ray.ObjectRef = field(repr=False)
    verb: Verb
    task: str

    @property
    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return bool(ray.wait([self.ref], timeout=0)[0])


class RemoteHandle(Generic[T]):
    """Handle of an object in another process; `rollout.service.Asked`.

    Args:
        actor: a handle of a `HandleActor`.
        name: of the object there.
        worker: the process, for errors.
        log_path: log of the process.
        deadlines: of the run.
        check: called while waiting for an interruptible call; raises when the run is to end.
    """

    def __init__(
        self, actor: Any, name: str, worker: str, log_path: str, deadlines: DeadlineConfig,
        check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._actor, self._name, self._worker, self._log = actor, name, worker, log_path
        self._deadlines, self.check = deadlines, check
        self._limit_s: float | None = None

    def within(self, limit_s: float | None) -> RemoteHandle[T]:
        """The same object with a deadline of so many seconds for its calls; None: the deadlines of their verbs."""
        other = copy(self)
        other._limit_s = limit_s
        return other

    def begin(
        self, method: Callable[Concatenate[T, P], Awaitable[R]], *args: P.args, **options: P.kwargs
    ) -> PendingCall[R]:
        """Start a call of the method, which is a `verb`, without waiting for it."""
        ref = self._actor.ask.remote(self._name, method.__name__, *args, **options)
        found = _VERBS[method]
        return PendingCall(ref, found, found.task.format(*args))

    def wait(self, pending: PendingCall[R], on_wait: Callable[[], None] | None = None) -> R:
        """Wait for a started call and return its result.

        Args:
            on_wait: called a few times a second meanwhile.

        Raises:
            UserError: as the method raised it. WorkerError: it crashed, its process died, or the deadline was missed.
            TrainerError: Ray failed.
        """
        limit_s = self._limit_s or getattr(self._deadlines, pending.verb.deadline) + pending.verb.more_s
        checked = self.check if pending.verb.interruptible and not pending.done else None
        return call(pending.ref, self._worker, pending.task, limit_s, self._log, on_wait or checked)

    def call(self, method: Callable[Concatenate[T, P], Awaitable[R]], *args: P.args, **options: P.kwargs) -> R:
        """Call the method, which is a `verb`, and return its result; see `wait`."""
        return self.wait(self.begin(method, *args, **options))

    async def ask(self, method: Callable[Concatenate[T, P], Awaitable[R]], *args: P.args, **options: P.kwargs) -> R:
        """Call the method and return its result. The call is cancelled with the caller. Raises as `wait` does."""
        ref = self._actor.ask.remote(self._name, method.__name__, *args, **options)
        try:
            return await ref
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
        except RayError as error:
            task = f"{self._name}: {method.__name__}"
            raise to_user_error(error, self._worker, task, self._log) from None


class LoopHandle(Generic[T]):
    """Handle, for other threads, of an object that belongs to an event loop of this process."""

    def __init__(self, it: T, loop: asyncio.AbstractEventLoop) -> None:
        self._it, self._loop = it, loop

    def call(self, method: Callable[Concatenate[T, P], Awaitable[R]], *args: P.args, **options: P.kwargs) -> R:
        """Call the method; returns its result, or raises its error."""

        async def result() -> R:
            return await method(self._it, *args, **options)

        return asyncio.run_coroutine_threadsafe(result(), self._loop).result()
