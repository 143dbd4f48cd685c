"""Protocol between a worker process and its parent, and the worker's side of it.

Frames (four bytes of length, then a pickle) travel on private copies of standard input and output; prints of user code
go to standard error. The first frame is the job; the reply is ("ready", details) or ("error", a ConfigError). Every
later frame is (number, request), and its reply (number, answer).
"""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import struct
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from mslime.config.errors import ConfigError
from mslime.logs import log_process

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
        told, answer = open_job(read_frame(stdin))
    except ConfigError as error:
        send(("error", error))
        return
    send(("ready", told))
    tasks: set[asyncio.Task[None]] = set()

    async def work(number: int, asked: Any) -> None:
        try:
            send((number, await answer(asked)))
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
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + more_bytes, held + more_bytes))


class DataLimit:
    """Limit of memory that a process writes to; address space that its threads only reserve does not count. It may be
    set repeatedly, always relative to the use at construction."""

    def __init__(self) -> None:
        self._held = _data_bytes()

    def set(self, more_bytes: int) -> None:
        """Allow `more_bytes` beyond the use at construction."""
        if sys.platform == "linux":
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (self._held + more_bytes, hard))


def _data_bytes() -> int:
    if sys.platform != "linux":
        return 0
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
