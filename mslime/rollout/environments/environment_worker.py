"""A process that holds environments of one class: `python -m mslime.rollout.environments.environment_worker`.

Requests are (method, number of the environment, argument), answers (None, result) or (Failure, reason). `reset` creates
the environment, `close` ends it. The parent kills a process that does not answer.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mslime.extensions import raised
from mslime.rollout.environments.protocol import (
    METHODS,
    EnvironmentJob,
    FailureReason,
    WrongAnswerError,
    checked_observation,
    checked_step,
    load_environment,
)
from mslime.rollout.worker_process import DataLimit, run

STACK_BYTES = 8 * 2**20  # of a thread, unless configured otherwise


class _Episode:
    """One environment, and the thread that runs its synchronous methods, one call at a time.

    Attributes:
        running: the current call.
    """

    def __init__(self, kind: type) -> None:
        self._kind, self._thread = kind, ThreadPoolExecutor(1)
        self._environment: Any = None
        self.running: asyncio.Task[Any] | None = None

    async def make(self, options: dict[str, Any]) -> None:
        """Construct it on the thread of its methods."""

        def construct() -> None:
            self._environment = self._kind(**options)

        if any(self._is_async(method) for method in METHODS):
            construct()
        else:
            await self._on_thread(construct)

    async def call(self, method: str, *arguments: object) -> Any:
        """Result of a method; None if there is no such method, or no environment."""

        def work() -> Any:
            function = getattr(self._environment, method, None)
            return None if function is None else function(*arguments)

        value = work() if self._is_async(method) else await self._on_thread(work)
        return await value if inspect.isawaitable(value) else value

    def leave_thread(self) -> None:
        """Abandon the thread to its running call; further calls get a new one."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._thread = ThreadPoolExecutor(1)

    def end(self) -> None:
        """Release the thread; one that hangs ends with the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _is_async(self, method: str) -> bool:
        return inspect.iscoroutinefunction(getattr(self._kind, method, None))

    async def _on_thread(self, function: Callable[[], Any]) -> Any:
        def call() -> Any:
            try:
                return function()
            except StopIteration as error:  # which no future can hold
                raise RuntimeError("StopIteration") from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


class _Episodes:
    """All environments of this process."""

    def __init__(self, job: EnvironmentJob, kind: type) -> None:
        self._job, self._kind, self._limit = job, kind, DataLimit()
        self._open = dict[int, _Episode]()
        self._methods = {"reset": self._reset, "step": self._step, "close": self._close}

    async def answer(self, request: tuple[str, int, Any]) -> tuple[FailureReason | None, object]:
        """(None, result), or (Failure, reason)."""
        method, number, argument = request
        limit = asyncio.timeout(self._job.limit_of(method))
        try:
            async with limit:
                return None, await self._methods[method](number, argument)
        except Exception as error:  # a user's class may raise anything: reported, never fatal
            if isinstance(error, TimeoutError) and limit.expired():
                if number in self._open:
                    self._open[number].leave_thread()
                return FailureReason.LATE, f"{method} took longer than {self._job.limit_of(method):g} s"
            return self._failure(method, error)

    async def _reset(self, number: int, task: object) -> object:
        """Create the environment and begin the episode."""
        episode = self._open[number] = _Episode(self._kind)
        self._set_limits()

        async def begin() -> object:
            await episode.make(self._job.options)
            return await episode.call("reset", task)

        return checked_observation(await self._run(episode, begin()), "reset")

    async def _step(self, number: int, action: str) -> object:
        episode = self._open[number]
        return checked_step(await self._run(episode, episode.call("step", action)))

    async def _close(self, number: int, argument: None) -> None:
        """End the environment, if it was created, even during an abandoned call."""
        episode = self._open.pop(number, None)
        if episode is None:
            return
        try:
            if episode.running is not None:
                episode.running.cancel()
            await episode.call("close")
        finally:
            episode.end()
            self._set_limits()

    async def _run(self, episode: _Episode, call: Awaitable[Any]) -> Any:
        episode.running = asyncio.ensure_future(call)
        try:
            return await episode.running
        finally:
            episode.running = None

    def _failure(self, method: str, error: Exception) -> tuple[FailureReason, str]:
        if isinstance(error, WrongAnswerError):
            return FailureReason.RAISED, str(error)
        if isinstance(error, MemoryError) or "can't start new thread" in str(error):
            return (
                FailureReason.MEMORY,
                f"{method} needed more memory than the {self._job.memory_mib:g} MiB of its process",
            )
        return FailureReason.RAISED, f"{method} {raised(error)}"

    def _set_limits(self) -> None:
        """Set the process's memory limit, and the stack size for the thread of each environment."""
        if self._job.memory_mib is not None:
            stacks = len(self._open) * (threading.stack_size() or STACK_BYTES)
            self._limit.set(int(self._job.memory_mib * 2**20) + stacks)


def open_job(job: EnvironmentJob) -> tuple[None, Callable[[Any], Awaitable[Any]]]:
    """(No details, handler of requests.) Raises ConfigError if the class cannot be used."""
    episodes = _Episodes(job, load_environment(job.function, job.options))
    return None, episodes.answer


if __name__ == "__main__":
    run(open_job)
