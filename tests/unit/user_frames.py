"""A worker process that answers with what it is asked, or with what no pickle can hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from mslime.rollout.worker_process import run


async def answer(asked: str) -> Any:
    return (lambda: None) if asked == "lambda" else asked


def open_job(job: Any) -> tuple[None, Callable[[Any], Awaitable[Any]]]:
    return None, answer


if __name__ == "__main__":
    run(open_job)
