"""A process that runs one reward function for its parent: `python -m mslime.rollout.rewards.reward_worker`.

Requests are samples and answers results; for a group, both are lists. The parent kills a worker that does not answer.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

from mslime.extensions import check_parameters, load_function, raised
from mslime.rollout.rewards.reward_kinds import RewardJob, RewardResult, checked, checked_group
from mslime.rollout.worker_process import limit_memory, run

REPEAT_S = 0.2  # libraries that catch everything are interrupted again


class TimeLimitReached(BaseException):
    """The time limit has passed. Not an Exception, because sympy and its users catch those."""


_inside = False


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise Interrupted inside the block after `seconds`. Does nothing off the main thread, or inside another such
    block.

    A single long operation in C is not interrupted; the process must be killed then. An earlier timer of other code is
    restored, less the time that passed.
    """
    global _inside
    if _inside or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        if _inside:
            raise TimeLimitReached

    began = time.monotonic()
    others, interval = signal.getitimer(signal.ITIMER_REAL)
    previous = signal.signal(signal.SIGALRM, ring)
    _inside = True
    signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_S)
    try:
        yield
    finally:
        _inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if others > 0:
            signal.setitimer(signal.ITIMER_REAL, max(others - (time.monotonic() - began), 1e-3), interval)


async def answer(function: Callable[[Any], Any], request: Any, job: RewardJob) -> RewardResult | list[RewardResult]:
    """The result of one sample, or the results of a group. An error is text with its location; one error covers a whole
    group."""
    limit = asyncio.timeout(job.limit_s)
    try:
        async with limit:
            with interrupted_after(job.limit_s) if job.interrupt else nullcontext():
                value = function(request)
            if inspect.isawaitable(value):
                value = await value
        return checked_group(value, [len(s) for s in request]) if job.per_group else checked(value, len(request))
    except TimeLimitReached:
        return RewardResult(0.0, f"took longer than {job.limit_s:g} s")
    except (Exception, asyncio.CancelledError) as error:  # a user's function may raise anything: reported, never fatal
        if isinstance(error, TimeoutError) and limit.expired():
            return RewardResult(0.0, f"took longer than {job.limit_s:g} s")
        return RewardResult(0.0, raised(error))


def open_job(job: RewardJob) -> tuple[bool, Callable[[Any], Awaitable[Any]]]:
    """(Whether the function is async, handler of requests.) Raises ConfigError if the function cannot be used."""
    function = load_function(job.function, job.setting)
    check_parameters(function, job.function, job.setting, "samples" if job.per_group else "sample")
    if job.more_memory is not None:
        limit_memory(job.more_memory)
    return inspect.iscoroutinefunction(function), lambda request: answer(function, request, job)


if __name__ == "__main__":
    run(open_job)
