"""A process that runs one reward function for its parent: `python -m mslime.rollout.rewards.reward_worker`.

Requests are samples and answers results; for a group, both are lists. The parent kills a worker that does not answer.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

from mslime.extensions import check_parameters, load_function, raised
from mslime.rollout.rewards.interrupt import Interrupted, interrupted_after
from mslime.rollout.rewards.result import RewardJob, RewardResult, checked, checked_group
from mslime.rollout.workers.frames import limit_memory, run


async def answer(function: Callable[[Any], Any], asked: Any, job: RewardJob) -> RewardResult | list[RewardResult]:
    """The result of one sample, or those of a group. An error is text with its location; one error covers a whole
    group."""
    limit = asyncio.timeout(job.limit_s)
    try:
        async with limit:
            with interrupted_after(job.limit_s) if job.interrupt else nullcontext():
                value = function(asked)
            if inspect.isawaitable(value):
                value = await value
        return checked_group(value, [len(s) for s in asked]) if job.per_group else checked(value, len(asked))
    except Interrupted:
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
    return inspect.iscoroutinefunction(function), lambda asked: answer(function, asked, job)


if __name__ == "__main__":
    run(open_job)
