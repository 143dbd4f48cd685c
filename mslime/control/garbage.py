"""When Python searches a process for circles of objects that nobody holds any more.

By default it searches all of the process whenever the objects that live long have become a quarter more. With thousands
of requests under way that is several times in a step, each for some tenths of a second, in which no answer is read: 45%
of a rollout manager's CPU (benchmarks/results/rollout.md). Rollouts make no circles of their own, users'
functions, clients and agents do: the search is made once a minute all the same.
"""

from __future__ import annotations

import asyncio
import gc
import logging

log = logging.getLogger(__name__)

YOUNG, MIDDLE = 20_000, 20
"""New objects before the newest are searched, and such searches before those that outlived them are (700 and 10)."""
NEVER = 1 << 30
EVERY_S = 60.0


def search_seldom(every_s: float = EVERY_S) -> None:
    """Leave what the process holds now out of all searches, search new objects seldom, and all others when the running
    loop has run for so long, again and again. Called once, when a process has its modules and services."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)
    _search_later(asyncio.get_running_loop(), every_s)
    log.info("%d objects are left out of searches for garbage, others are searched every %g s",
             gc.get_freeze_count(), every_s)  # fmt: skip


def _search_later(loop: asyncio.AbstractEventLoop, every_s: float) -> None:
    loop.call_later(every_s, _search, loop, every_s)


def _search(loop: asyncio.AbstractEventLoop, every_s: float) -> None:
    gc.collect()
    _search_later(loop, every_s)
