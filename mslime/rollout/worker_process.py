"""User code in worker processes, which can be killed and replaced: the protocol, and both of its sides.

Frames (four bytes of length, then a pickle) travel on private copies of standard input and output; prints of user code
go to standard error. The first frame is the job; the reply is ("ready", details) or ("error", a ConfigError). Every
later frame is (number, request), and its reply (number, answer).
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from mslime.config.errors import ConfigError
from mslime.logs import OURS, log_process

if TYPE_CHECKING:
    from mslime.rollout.environments.protocol import EnvironmentJob
    from mslime.rollout.rewards.reward_kinds import RewardJob


HEADER = struct.Struct("<I")


class NoAnswerError(Exception):
    """Replaces an answer that could not be sent."""


Answer = Callable[[Any], Awaitable[Any]]
Open = Callable[[Any], tuple[Any, Answer]]
"""Opens a job: returns (details to send with `ready`, handler of requests). Raises ConfigError."""


def encode(message: object) -> bytes:
    """Encode a message as a frame."""
    body = pickle.dumps(message)
    return HEADER.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> Any:
    """The next message; None at the end of the stream."""
    header = stream.read(HEADER.size)
    return pickle.loads(stream.read(HEADER.unpack(header)[0])) if len(header) == HEADER.size else None


async def serve(open_job: Open, stdin: BinaryIO, out: BinaryIO) -> None:
    """Handle frames concurrently until the parent closes the pipe."""

    def send(message: object) -> None:
        out.write(encode(message))
        out.flush()

    try:
        details, answer = open_job(read_frame(stdin))
    except ConfigError as error:
        send(("error", error))
        return
    send(("ready", details))
    tasks: set[asyncio.Task[None]] = set()

    async def work(number: int, request: Any) -> None:
        try:
            send((number, await answer(request)))
        except Exception as error:  # any pickling error of the user's result: sent, or the parent would wait
            send((number, NoAnswerError(f"its answer cannot be sent ({type(error).__name__}: {error})")))

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as reader:
        while (message := await loop.run_in_executor(reader, read_frame, stdin)) is not None:
            task = asyncio.create_task(work(*message))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


def run(open_job: Open) -> None:
    """Serve on private copies of the process's pipes. Prints of user code go to standard error, and its standard input
    is empty: a forked child closes `sys.stdin`, and would wait forever for a lock held by the reader thread.

    The program's argument is the lowest level that it logs.
    """
    log_process(f"worker {os.getpid()}", sys.argv[1] if len(sys.argv) > 1 else "warning")
    source, out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    asyncio.run(serve(open_job, source, out))
    os._exit(0)  # user code may have left threads behind


# Memory limits of a process. Linux only: other systems have no limit.


def limit_memory(more_bytes: int) -> None:
    """Let this process map `more_bytes` beyond its present use; larger allocations raise MemoryError."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            in_use = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + more_bytes, in_use + more_bytes))


class DataLimit:
    """Limit of memory that a process writes to; address space that its threads only reserve does not count. It may be
    set repeatedly, always relative to the use at construction."""

    def __init__(self) -> None:
        if sys.platform == "linux":
            with open("/proc/self/status") as file:
                self._in_use = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))

    def set(self, more_bytes: int) -> None:
        """Allow `more_bytes` beyond the use at construction."""
        if sys.platform == "linux":
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (self._in_use + more_bytes, hard))


START_SECONDS = 120.0  # importing a user's module may load a model
GRACE_SECONDS = 2.0  # between a worker's own time limit and its end
END_SECONDS = 2.0  # for a killed process's pipes to close; processes that left its session may hold them open


class WorkerLostError(Exception):
    """A worker process ended with unanswered requests."""


class WorkerProcess:
    """One process that handles several requests at once.

    Attributes:
        details: details that it sent when it was ready.
    """

    def __init__(self, process: asyncio.subprocess.Process, details: Any) -> None:
        self._process, self.details = process, details
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
            module: its program, which calls `run`.
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
                kind, details = await _read_message(process.stdout)
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            await _end(process)
            reason = "ended" if isinstance(error, asyncio.IncompleteReadError) else f"took over {START_SECONDS:g} s"
            rule = f"the process that imports it {reason}"
            hint = "fix the code that the module runs on import"
            raise ConfigError(job.setting, job.function, rule, hint) from error
        except BaseException:
            await _end(process)
            raise
        if kind == "error":
            await process.wait()
            raise details
        return cls(process, details)

    async def ask(self, request: object, limit_s: float) -> Any:
        """Send a request and return the answer. Raises WorkerLostError if the process ends, TimeoutError if it
        hangs."""
        if not self.alive:
            raise WorkerLostError("its process had ended")
        assert self._process.stdin is not None
        number, self._count = self._count, self._count + 1
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(encode((number, request)))
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
        self._fail_all(WorkerLostError("its process was killed"))

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
            reason = f"its process wrote an invalid answer ({type(error).__name__})"
        self._fail_all(WorkerLostError(reason))

    def _fail_all(self, error: WorkerLostError) -> None:
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
