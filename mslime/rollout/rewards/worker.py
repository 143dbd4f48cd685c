"""A process that runs one reward function for its parent: `python -m mslime.rollout.rewards.worker`.

Frames (four bytes of length, then a pickle) arrive on standard input and leave on a private copy of standard output;
what the function prints goes to standard error. The first frame is the job; afterwards every frame is
(number, sample) and is answered by (number, result), or both are lists, of a group. The parent kills a worker that
does not answer.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, BinaryIO

from mslime.config.errors import ConfigError
from mslime.extensions import check_parameters, load_function
from mslime.rollout.rewards.graders.limits import Interrupted, interrupted_after, limit_memory
from mslime.rollout.rewards.result import Job, RewardResult, checked, checked_group

HEADER = struct.Struct("<I")


def encode(message: object) -> bytes:
    """A frame."""
    body = pickle.dumps(message)
    return HEADER.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> Any:
    """The next message; None at the end of the stream."""
    header = stream.read(HEADER.size)
    return pickle.loads(stream.read(HEADER.unpack(header)[0])) if len(header) == HEADER.size else None


async def answer(function: Callable[[Any], Any], asked: Any, job: Job) -> RewardResult | list[RewardResult]:
    """The result of one sample, or those of a group; an error is text, with where it was raised, and one for all."""
    limit = asyncio.timeout(job.limit_s)
    try:
        async with limit:
            with interrupted_after(job.limit_s) if job.interrupt else nullcontext():
                value = function(asked)
            if inspect.isawaitable(value):
                value = await value
    except Interrupted:
        return RewardResult(0.0, f"took longer than {job.limit_s:g} s")
    except Exception as error:  # a user's function may raise anything: reported, never fatal
        if isinstance(error, TimeoutError) and limit.expired():
            return RewardResult(0.0, f"took longer than {job.limit_s:g} s")
        place = traceback.extract_tb(error.__traceback__)[-1]
        return RewardResult(0.0, f"raised {type(error).__name__}: {error} ({place.filename}:{place.lineno})")
    return checked_group(value, [len(s) for s in asked]) if job.per_group else checked(value, len(asked))


async def serve(stdin: BinaryIO, out: BinaryIO) -> None:
    """Answer frames until the parent closes the pipe."""
    job: Job = read_frame(stdin)
    try:
        function = load_function(job.function, job.setting)
        check_parameters(function, job.function, job.setting, "samples" if job.per_group else "sample")
    except ConfigError as error:
        out.write(encode(("error", error)))
        out.flush()
        return
    if job.more_memory is not None:
        limit_memory(job.more_memory)
    out.write(encode(("ready", inspect.iscoroutinefunction(function))))
    out.flush()
    tasks: set[asyncio.Task[None]] = set()

    async def work(number: int, asked: Any) -> None:
        out.write(encode((number, await answer(function, asked, job))))
        out.flush()

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as reader:
        while (message := await loop.run_in_executor(reader, read_frame, stdin)) is not None:
            task = asyncio.create_task(work(*message))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


def main() -> None:
    """Serve on the process's own pipes, with standard output turned over to standard error."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asyncio.run(serve(sys.stdin.buffer, out))
    os._exit(0)  # a function may have left threads behind


if __name__ == "__main__":
    main()
