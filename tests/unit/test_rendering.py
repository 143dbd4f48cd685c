"""A renderer beside an event loop: what is short is done at once, what is long leaves the loop free, one at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mslime.rollout.agents.messages import Tools
from mslime.rollout.agents.renderer import SHORT, Parsed, Rendering

LONG, FEW = list(range(SHORT + 1)), [1, 2, 3]


class FakeRenderer:
    """Says in which thread it was asked; work on `LONG` waits until it is let go."""

    name, stop_ids = "fake", frozenset[int]()

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.begun, self.go = threading.Event(), threading.Event()
        self.at_work = 0

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[int]:
        return self._work(LONG)

    def extend(
        self, before: Sequence[int], sampled: int, new: Sequence[Mapping[str, Any]], tools: Tools
    ) -> list[int] | None:
        return self._work([*before, *(ord(c) for m in new for c in m["content"])])

    def parse(self, sampled: Sequence[int], prompt: Sequence[int], tools: Tools) -> Parsed:
        self._work([*prompt, *sampled])
        return Parsed("said")

    def spell(self, ids: Sequence[int]) -> str:
        return "x" * len(self._work(ids))

    def _work(self, ids: Sequence[int]) -> list[int]:
        self.at_work += 1
        assert self.at_work == 1, "two at once"
        self.threads.append(threading.get_ident())
        if len(ids) > SHORT:
            self.begun.set()
            assert self.go.wait(20)
        self.at_work -= 1
        return list(ids)


@pytest.mark.parametrize(("ids", "text", "at_once"), [
    (FEW, "short", True), (FEW, "x" * SHORT, False), (LONG, "short", False), (LONG[:SHORT - 5], "short", True),
])  # fmt: skip
def test_short_work_is_done_at_once(ids: list[int], text: str, at_once: bool) -> None:
    fake = FakeRenderer()
    fake.go.set()
    rendering = Rendering(fake)
    added, why = asyncio.run(rendering.extend(ids, 1, [{"role": "tool", "content": text}], ()))
    assert added == [ord(c) for c in text] and not why
    assert [thread == threading.get_ident() for thread in fake.threads] == [at_once]
    assert asyncio.run(rendering.parse(ids, FEW, ())) == Parsed("said")
    assert [thread == threading.get_ident() for thread in fake.threads[1:]] == [len(ids) + 3 <= SHORT]
    rendering.close()


async def test_short_work_waits_beside_the_loop_while_long_work_is_under_way() -> None:
    fake = FakeRenderer()
    rendering = Rendering(fake)
    long = asyncio.create_task(rendering.render([], ()))
    await asyncio.to_thread(fake.begun.wait, 20)
    short = asyncio.create_task(rendering.spell(FEW))
    for _ in range(20):
        await asyncio.sleep(0)  # the loop is free
    assert not long.done() and not short.done()
    fake.go.set()
    assert len(await long) == len(LONG) and await short == "xxx"
    assert await rendering.spell(FEW) == "xxx"
    assert [thread == threading.get_ident() for thread in fake.threads] == [False, False, True]
    rendering.close()


async def test_long_work_whose_caller_gave_up_still_keeps_others_out() -> None:
    fake = FakeRenderer()
    rendering = Rendering(fake)
    long = asyncio.create_task(rendering.render([], ()))
    await asyncio.to_thread(fake.begun.wait, 20)
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)
    short = asyncio.create_task(rendering.spell(FEW))
    await asyncio.sleep(0)
    assert fake.at_work == 1 and not short.done()
    fake.go.set()
    assert await short == "xxx"
    rendering.close()
