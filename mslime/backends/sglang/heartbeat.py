"""Heartbeats of engines: a hanging engine is dead after `deadlines.engine_silence_s`, before its requests time out.

Answers to requests are signs of life. After a while without any, this sends `GET /health`; SGLang 0.5.23 then waits for
output of its scheduler and detokenizer, and generates a token if they are idle. Paused engines would not answer and are
skipped. An unanswered heartbeat stays open: SGLang aborts closed ones and counts the scheduler's abort message as a
sign of life, so an engine with a hanging detokenizer would seem alive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from mslime.backends.sglang.client import EngineDied
from mslime.backends.sglang.slots import EngineSlot

MISSED = 3
"""Missed heartbeats in a row until an engine is dead. One alone may be lost if this machine was suspended."""


class Heartbeats:
    """Sends heartbeats to engines while they generate. Belongs to one event loop.

    Args:
        silence_s: seconds after which a silent engine is dead.
        engines: returns the watched engines; called at each beat.
    """

    def __init__(self, silence_s: float, engines: Callable[[], Iterable[EngineSlot]]) -> None:
        self._silence_s, self._engines = silence_s, engines
        self._beat_s = silence_s / (MISSED + 1)
        self._watching: asyncio.Task[None] | None = None
        self._asked: dict[EngineSlot, set[asyncio.Task[bool]]] = {}

    def start(self) -> None:
        """Start heartbeats: engines generate from now on."""
        now = time.monotonic()
        for engine in self._engines():
            engine.answered, engine.missed = now, 0
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="heartbeats of engines")

    def stop(self) -> None:
        """Stop heartbeats: engines are paused, or left."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        for engine in list(self._asked):
            self._forget(engine)

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            silent = [e for e in self._engines() if e.error is None and began - e.answered >= self._beat_s]
            await asyncio.gather(*(self._ask(engine) for engine in silent))
            await asyncio.sleep(max(0.0, began + self._beat_s - time.monotonic()))

    async def _ask(self, engine: EngineSlot) -> None:
        asked = self._asked.setdefault(engine, set())
        asked.add(asyncio.create_task(engine.client.healthy(self._silence_s)))
        if await _one_is_answered(asked, self._beat_s):
            self._forget(engine)
            engine.answered, engine.missed = time.monotonic(), 0
            return
        engine.missed += 1
        if engine.missed >= MISSED:
            self._forget(engine)
            what = engine.client.error("/health", f"no sign of life for {self._silence_s:g} s", EngineDied)
            engine.kill(what)

    def _forget(self, engine: EngineSlot) -> None:
        """Cancel the unanswered heartbeats of an engine."""
        for task in self._asked.pop(engine, ()):
            task.cancel()


async def _one_is_answered(asked: set[asyncio.Task[bool]], seconds: float) -> bool:
    """Whether one of these heartbeats is answered in that time; finished ones without an answer are removed."""
    ends = time.monotonic() + seconds
    while asked and (left := ends - time.monotonic()) > 0:
        done, _ = await asyncio.wait(asked, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        asked -= done
        if any(task.result() for task in done):
            return True
    return False
