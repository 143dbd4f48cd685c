"""Scoring of finished responses by a served teacher: one prefill each, concurrent with rewards and generation."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Collection
from typing import TYPE_CHECKING, get_args

import numpy as np
from numpy.typing import NDArray

from mslime.backends.sglang.client import EngineDied
from mslime.backends.sglang.generating import ScoreRequest
from mslime.config.base import EngineTag
from mslime.config.errors import EngineError
from mslime.data.sample import Sample

if TYPE_CHECKING:
    from mslime.backends.sglang.engine_pool import EnginePool

TRIES = 4
FIRST_WAIT_S = 0.1  # doubled after each try


class ServedTeacher:
    """Scores samples on the teacher's servers; on shared GPUs only while the servers hold their memory. Belongs to one
    event loop."""

    def __init__(self, engines: EnginePool) -> None:
        self._engines = engines
        self._run, self._numbers = uuid.uuid4().hex[:8], itertools.count()
        self._awake, self._idle, self._scoring = asyncio.Event(), asyncio.Event(), 0
        self._awake.set()
        self._idle.set()

    async def hold_memory(self, tags: Collection[EngineTag]) -> None:
        """Hold these parts on shared GPUs. Without all of them nothing is scored: running requests are finished first,
        and new ones wait. Raises EngineError as the servers do."""
        self._awake.clear()
        await self._idle.wait()
        await self._engines.hold_memory(tags)
        if set(tags) == set(get_args(EngineTag)):
            self._awake.set()

    async def score(self, sample: Sample) -> NDArray[np.float32]:
        """[T] float32: the teacher's log-prob of each trained token of a finished sample, 0 elsewhere.

        Raises:
            EngineError: the server refused, or its answers were inconsistent, four times; or no server is left.
        """
        scores = np.zeros(len(sample), np.float32)
        trained = np.flatnonzero(sample.loss_mask)
        if len(trained):
            # Tokens before the first trained one, and after the last one, need no log-probs.
            first, end = int(trained[0]), int(trained[-1]) + 1
            found = await self._in_turn(sample.tokens[:end], first, f"g{sample.group_id}")
            scores[trained] = found[trained]
        return scores

    async def _in_turn(self, tokens: NDArray[np.int32], start: int, session: str) -> NDArray[np.float32]:
        while not self._awake.is_set():  # its memory may be released again before this continues
            await self._awake.wait()
        self._scoring += 1
        self._idle.clear()
        try:
            return await self._answer(tokens, start, session)
        finally:
            self._scoring -= 1
            if not self._scoring:
                self._idle.set()

    async def _answer(self, tokens: NDArray[np.int32], start: int, session: str) -> NDArray[np.float32]:
        refusals = 0
        while True:  # ends: every death leaves one server less
            request = ScoreRequest(f"{self._run}-{session}-{next(self._numbers)}", tokens, start, session)
            try:
                return await self._engines.score(request)
            except EngineDied:
                if len(self._engines) == 0:
                    raise
            except EngineError:
                refusals += 1
                if refusals == TRIES:
                    raise
                await asyncio.sleep(FIRST_WAIT_S * 2 ** (refusals - 1))
