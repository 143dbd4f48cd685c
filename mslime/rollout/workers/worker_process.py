"""A worker process as its parent sees it: started, asked, and killed when it does not answer. Its side is `frames`."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from mslime.config.errors import ConfigError
from mslime.logs import OURS
from mslime.rollout.workers.frames import HEADER, NoAnswerError, encode

if TYPE_CHECKING:
    from mslime.rollout.environments.protocol import EnvironmentJob
    from mslime.rollout.rewards.result import RewardJob

START_SECONDS = 120.0  # importing a user's module may load a model
GRACE_SECONDS = 2.0  # between a worker's own time limit and its end
END_SECONDS = 2.0  # for a killed process's pipes to close, which what left its session may hold open


class WorkerLostError(Exception):
    """A worker process ended with questions unanswered."""


class WorkerProcess:
    """One process, which may be asked several things at once.

    Attributes:
        told: what it said of its job when it was ready.
    """

    def __init__(self, process: asyncio.subprocess.Process, told: Any) -> None:
        self._process, self.told = process, told
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self._reader = asyncio.create_task(self._read())

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.returncode is None and not self._reader.done()

    @classmethod
    async def start(cls, module: str, job: RewardJob | EnvironmentJob) -> Self:
        """Start a process and wait until it has opened its job. Raises ConfigError when it cannot.

        Args:
            module: its program, which calls `frames.run`.
        """
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, logging.getLevelName(logging.getLogger(OURS[0]).getEffectiveLevel()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(encode(job))
        try:
            async with asyncio.timeout(START_SECONDS):
                kind, told = await _read_message(process.stdout)
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            await _end(process)
            reason = "ended" if isinstance(error, asyncio.IncompleteReadError) else "did not return"
            rule = f"the process that imports it {reason} within {START_SECONDS:g} s"
            way_out = "mend what the module does when it is imported"
            raise ConfigError(job.setting, job.function, rule, way_out) from error
        except BaseException:
            await _end(process)
            raise
        if kind == "error":
            await process.wait()
            raise told
        return cls(process, told)

    async def ask(self, asked: object, limit_s: float) -> Any:
        """The answer. Raises WorkerLostError when the process ends, TimeoutError when it is stuck."""
        if not self.alive:
            raise WorkerLostError("its process had ended")
        assert self._process.stdin is not None
        number, self._count = self._count, self._count + 1
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(encode((number, asked)))
            async with asyncio.timeout(limit_s + GRACE_SECONDS):  # Python 3.11's wait_for may swallow a cancellation
                return await future
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WorkerLostError("its process had ended") from error
        finally:
            del self._waiting[number]

    async def kill(self) -> None:
        """End the process, and what it started, at once."""
        await _end(self._process)
        await asyncio.wait({self._reader}, timeout=END_SECONDS)
        self._reader.cancel()
        self._tell(WorkerLostError("its process was killed"))

    async def _read(self) -> None:
        """Hand answers to those who wait; when the process ends, or speaks nonsense, tell all of them."""
        assert self._process.stdout is not None
        try:
            while True:
                number, answer = await _read_message(self._process.stdout)
                if number in self._waiting and not self._waiting[number].done():
                    if isinstance(answer, NoAnswerError):
                        self._waiting[number].set_exception(WorkerLostError(str(answer)))
                    else:
                        self._waiting[number].set_result(answer)
        except asyncio.IncompleteReadError:
            reason = _describe_exit(await self._process.wait())
            end_process(self._process)
        except Exception as error:  # the user's code wrote to the pipe: whatever unpickling raises
            end_process(self._process)
            reason = f"its process wrote something that is no answer ({type(error).__name__})"
        self._tell(WorkerLostError(reason))

    def _tell(self, error: WorkerLostError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


def end_process(process: asyncio.subprocess.Process) -> None:
    """SIGKILL to the process's group, which outlives it where it started others. Not by `Process.kill`: that one polls,
    so it may reap the child before asyncio's watcher, which then prints `Unknown child process` and makes the exit code
    up."""
    with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
        os.killpg(process.pid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process) -> None:
    end_process(process)
    with suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):  # asyncio may wait for the pipes too
            await process.wait()


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    return f"its process was ended by {signal.Signals(-code).name}"


async def _read_message(stream: asyncio.StreamReader) -> Any:
    header = await stream.readexactly(HEADER.size)
    return pickle.loads(await stream.readexactly(HEADER.unpack(header)[0]))
