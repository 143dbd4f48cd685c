"""Environments in worker processes: each process holds many, and is replaced if one of them hangs or ends it."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any, cast

from mslime.config.errors import ConfigError
from mslime.rollout.environments.protocol import EnvironmentJob, EnvironmentTask, FailureReason, Observation, Step
from mslime.rollout.worker_process import WorkerLostError, WorkerProcess

MODULE = "mslime.rollout.environments.environment_worker"


class EnvironmentFailedError(Exception):
    """An environment failed by its own fault; the message names its class."""


class EnvironmentLostError(Exception):
    """An environment failed, possibly because of another one in its process.

    Attributes:
        suspect: it was in a call when its process ended.
    """

    def __init__(self, message: str, suspect: bool = True) -> None:
        super().__init__(message)
        self.suspect = suspect


class _Home(WorkerProcess):
    """A process of environments.

    Attributes:
        residents: environments in it.
        retired: one of them hangs, so it accepts no more.
    """

    def __init__(self, process: asyncio.subprocess.Process, details: Any) -> None:
        super().__init__(process, details)
        self.residents, self.retired = 0, False


class OpenEnvironment:
    """Handle of one environment; must be closed.

    Args:
        alone: it is alone in its process, and holds one of the limited slots for that until it is closed.

    Attributes:
        seconds: total time of its calls.
    """

    def __init__(
        self, home: _Home, number: int, job: EnvironmentJob, alone: asyncio.Semaphore | None,
        closings: set[asyncio.Task[None]],
    ) -> None:  # fmt: skip
        self._home, self._number, self._job, self._alone = home, number, job, alone
        self._closings, self.seconds = closings, 0.0
        home.residents += 1

    async def reset(self, task: EnvironmentTask) -> Observation:
        """Begin the episode. Raises EnvironmentFailedError, EnvironmentLostError."""
        return await self._ask("reset", task)

    async def step(self, action: str) -> Step:
        """Take one action. Raises EnvironmentFailedError, EnvironmentLostError."""
        return await self._ask("step", action)

    async def close(self) -> None:
        """End it, and its process if it hangs and no other environment is in it. Errors are only logged, because the
        episode is over. If cancelled, it continues in the background; the pool waits for it."""
        closing = asyncio.create_task(self._close())
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)
        await asyncio.shield(closing)

    async def _close(self) -> None:
        try:
            if self._home.alive:
                await self._ask("close", None)
        except (EnvironmentFailedError, EnvironmentLostError) as error:
            print(f"an environment was not closed: {error}", flush=True)
        finally:
            self._home.residents -= 1
            if not self._home.residents and (self._home.retired or self._alone is not None):
                await self._home.kill()
            if self._alone is not None:
                self._alone.release()

    async def _ask(self, method: str, argument: object) -> Any:
        began, suspect = time.monotonic(), self._home.alive
        try:
            failure, answer = await self._home.ask((method, self._number, argument), self._job.limit_of(method))
        except TimeoutError:
            await self._home.kill()
            cause = f"{method} took longer than {self._job.limit_of(method):g} s and blocked its process"
            raise self._lost(cause) from None
        except WorkerLostError as error:
            raise self._lost(f"{method} returned no answer: {error}", suspect) from error
        finally:
            self.seconds += time.monotonic() - began
        if failure is None:
            return answer
        self._home.retired |= failure is FailureReason.LATE
        raise self._lost(answer) if failure is FailureReason.MEMORY else self._failed(answer)

    def _lost(self, why: str, suspect: bool = True) -> Exception:
        lost = self._alone is None
        return EnvironmentLostError(f"{self._job.function}: {why}", suspect) if lost else self._failed(why)

    def _failed(self, why: str) -> Exception:
        return EnvironmentFailedError(f"{self._job.function}: {why}")


class EnvironmentPool:
    """Keeps `workers` processes for one class. Belongs to one event loop; close it there."""

    def __init__(self, job: EnvironmentJob, workers: int) -> None:
        self._job, self._size = job, workers
        self._homes, self._all = list[_Home](), list[_Home]()
        self._closings = set[asyncio.Task[None]]()
        self._numbers, self._refilling = itertools.count(), asyncio.Lock()
        self._alone, self._works = asyncio.Semaphore(workers), False

    async def open(self, alone: bool = False) -> OpenEnvironment:
        """Reserve a place for an environment in the process with the fewest; `reset` creates the environment.

        Args:
            alone: in its own process, so no other environment can break it. Their number at a time is limited to that
                of the shared processes.

        Raises:
            ConfigError: the class cannot be imported.
            EnvironmentFailedError: a process did not start, although others did before.
        """
        if not alone:
            return OpenEnvironment(await self._shared(), next(self._numbers), self._job, None, self._closings)
        await self._alone.acquire()
        try:
            home = await self._start()
        except BaseException:
            self._alone.release()
            raise
        return OpenEnvironment(home, next(self._numbers), self._job, self._alone, self._closings)

    def failed(self, why: str) -> EnvironmentFailedError:
        """An error that names the class."""
        return EnvironmentFailedError(f"{self._job.function}: {why}")

    async def close(self) -> None:
        """End all processes, after the environments that are being closed."""
        await asyncio.gather(*self._closings, return_exceptions=True)
        for home in self._all:
            await home.kill()
        self._homes.clear()
        self._all.clear()

    async def _shared(self) -> _Home:
        async with self._refilling:
            self._homes = [h for h in self._homes if h.alive and not h.retired]
            self._all = [h for h in self._all if h.alive]
            missing = range(self._size - len(self._homes))
            started = await asyncio.gather(*(self._start() for _ in missing), return_exceptions=True)
            self._homes += [home for home in started if isinstance(home, _Home)]
            errors = [error for error in started if isinstance(error, BaseException)]
            if errors and (not self._homes or not isinstance(errors[0], EnvironmentFailedError)):
                raise errors[0]  # another failed start is tolerated while other processes live
        return min(self._homes, key=lambda home: home.residents)

    async def _start(self) -> _Home:
        try:
            home = await _Home.start(MODULE, self._job)
        except ConfigError as error:
            if self._works:  # the class can be imported: the machine is overloaded
                raise self.failed(error.rule) from error
            raise
        self._works = True
        self._all.append(home)
        return cast("_Home", home)
