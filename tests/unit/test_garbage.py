"""When Python searches for garbage in processes that hold thousands of requests."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from mslime.run.started import search_seldom


class Held:
    """Refers to itself where it is told to."""

    def __init__(self) -> None:
        self.other: Held | None = None


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Also without what other tests left: Python searches everything only when a quarter of it is new."""
    before = gc.get_threshold()
    gc.freeze()
    gc.collect()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def searches_of_everything() -> int:
    return gc.get_stats()[2]["collections"]


def grown() -> int:
    """Searches of the whole process while it gets 300,000 objects more."""
    before = searches_of_everything()
    held = [Held() for _ in range(300_000)]
    assert len(held) == 300_000
    return searches_of_everything() - before


async def test_a_process_that_fills_with_rollouts_is_not_searched_again_and_again() -> None:
    gc.set_threshold(700, 10, 10)
    assert grown() > 0, "as Python does it"

    search_seldom()
    assert gc.get_freeze_count() > 10_000 and grown() == 0


async def test_old_circles_of_users_are_freed_all_the_same() -> None:
    search_seldom(every_s=0.02)
    held = Held()
    held.other = held
    gc.collect()  # it is among the old objects now
    freed = weakref.ref(held)
    del held
    await asyncio.sleep(0)
    assert freed() is not None
    while freed() is not None:
        await asyncio.sleep(0.02)
    before = searches_of_everything()
    while searches_of_everything() < before + 2:
        await asyncio.sleep(0.02)
