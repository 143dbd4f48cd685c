"""The parent's side of a worker process: start, call, and kill it if it does not answer. The other side is `frames`."""

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
END_SECONDS = 2.0  # for a killed process's pipes to close; processes that left its session may hold them open


class WorkerLostError(Exception):
    """A worker process ended with unanswered requests."""


class WorkerProcess:
    """One process that handles several requests at once.

    Attributes:
        told: details that it sent when it was ready.
    """

    def __init__(self, process: asyncio.subprocess.Process, told: Any) -> None:
        self._process, self.told = process, told
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self._reader = asyncio.create_task(self._read())

    @property
    def alive(self) -> bool:
        """Whether it accepts requests."""
        return self._process.returncode is None and not self._reader.done()

    @classmethod
    async def start(cls, module: str, job: RewardJob | EnvironmentJob) -> Self:
        """Start a process and wait until it has opened its job. Raises ConfigError if it cannot.

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
        """Send a request and return the answer. Raises WorkerLostError if the process ends, TimeoutError if it
        hangs."""
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
        """End the process and its children at once."""
        await _end(self._process)
        await asyncio.wait({self._reader}, timeout=END_SECONDS)
        self._reader.cancel()
        self._tell(WorkerLostError("its process was killed"))

    async def _read(self) -> None:
        """Pass answers to their callers; if the process ends or sends invalid data, all callers get an error."""
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
        except Exception as error:  # user code wrote to the pipe: unpickling may raise anything
            end_process(self._process)
            reason = f"its process wrote something that is no answer ({type(error).__name__})"
        self._tell(WorkerLostError(reason))

    def _tell(self, error: WorkerLostError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


def end_process(process: asyncio.subprocess.Process) -> None:
    """Send SIGKILL to the process's group, which outlives the process if it has children. `Process.kill` would poll and
    might reap the child before asyncio's watcher, which then prints `Unknown child process` and reports a made-up exit
    code."""
    with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group of zombies
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
