"""What a worker process and its parent say to each other, and the process's side of it.

Frames (four bytes of length, then a pickle) arrive and leave on private copies of standard input and output; what the
user's code prints goes to standard error. The first frame is the job, which is answered by ("ready", more) or
("error", a ConfigError); afterwards every frame is (number, what is asked) and is answered by (number, answer).
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
    """Stands for an answer that could not be sent."""


Answer = Callable[[Any], Awaitable[Any]]
Open = Callable[[Any], tuple[Any, Answer]]
"""Of the job: (what the parent is told beside `ready`, what answers further frames). Raises ConfigError."""


def encode(message: object) -> bytes:
    """A frame."""
    body = pickle.dumps(message)
    return HEADER.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> Any:
    """The next message; None at the end of the stream."""
    header = stream.read(HEADER.size)
    return pickle.loads(stream.read(HEADER.unpack(header)[0])) if len(header) == HEADER.size else None


async def serve(open_job: Open, stdin: BinaryIO, out: BinaryIO) -> None:
    """Answer frames, several at a time, until the parent closes the pipe."""

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
        except (
            Exception
        ) as error:  # what came of the user's code, and no pickle can hold: said, or the parent would wait
            send((number, NoAnswerError(f"its answer cannot be sent ({type(error).__name__}: {error})")))

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as reader:
        while (message := await loop.run_in_executor(reader, read_frame, stdin)) is not None:
            task = asyncio.create_task(work(*message))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


def run(open_job: Open) -> None:
    """Serve on private copies of the process's pipes. What the user's code prints goes to standard error, and what it
    reads is empty: a child that it forks closes `sys.stdin`, and would wait for ever for a lock that our reader held.

    The program's argument is the least level that it logs.
    """
    log_process(f"worker {os.getpid()}", sys.argv[1] if len(sys.argv) > 1 else "warning")
    source, out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    asyncio.run(serve(open_job, source, out))
    os._exit(0)  # the user's code may have left threads behind


# Memory that a process may take. Linux only: elsewhere there is no limit.


def limit_memory(more_bytes: int) -> None:
    """Let this process map `more_bytes` beyond what it has; what asks for more gets a MemoryError."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + more_bytes, held + more_bytes))


class DataLimit:
    """Likewise for memory that a process writes to, which address space that its threads only reserve is not part of.
    It may be set again: what the process held at first is what counts."""

    def __init__(self) -> None:
        self._held = _data_bytes()

    def set(self, more_bytes: int) -> None:
        """`more_bytes` beyond what the process held at first."""
        if sys.platform == "linux":
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (self._held + more_bytes, hard))


def _data_bytes() -> int:
    if sys.platform != "linux":
        return 0
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
