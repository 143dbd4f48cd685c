"""Whose gradient passes share one: those of clients that wait for the trainer when it becomes free.

Nobody waits to be joined. Requests of one model are done one after the other, so each has one pass in the line at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from mslime_plugins.serve.backend import PassAsk, PassResult, Trainer


@dataclass(eq=False)
class _Waiting:
    ask: PassAsk
    found: asyncio.Future[PassResult]


class GradientPasses:
    """Forward and backward passes of all clients.

    Args:
        turn: at the trainer, which does one thing at a time.
        together: who gets the turn takes along what waits.
    """

    def __init__(self, trainer: Trainer, turn: asyncio.Lock, together: bool) -> None:
        self._trainer, self._turn, self._together = trainer, turn, together
        self._line: list[_Waiting] = []

    async def add(self, ask: PassAsk) -> PassResult:
        """Add gradients to an adapter's, in a pass of its own or in one that others share. Raises what it failed with,
        whatever became of the others. Not to be cancelled: others may be served by it."""
        mine = _Waiting(ask, asyncio.get_running_loop().create_future())
        self._line.append(mine)
        async with self._turn:
            if mine in self._line:  # else another has taken it along
                taken = list(self._line) if self._together else [mine]
                self._line = [each for each in self._line if each not in taken]
                await self._do(taken)
        return await mine.found

    async def _do(self, taken: Sequence[_Waiting]) -> None:
        try:
            outcomes = await self._outcomes([each.ask for each in taken])
        except Exception as error:
            outcomes = [error] * len(taken)
        for each, outcome in zip(taken, outcomes, strict=True):
            if isinstance(outcome, Exception):
                each.found.set_exception(outcome)
            else:
                each.found.set_result(outcome)

    async def _outcomes(self, asks: Sequence[PassAsk]) -> Sequence[PassResult | Exception]:
        if len(asks) > 1:
            return await self._trainer.add_together(asks)
        (ask,) = asks
        return [await self._trainer.pass_over(ask.name, ask.data, ask.loss, backward=True)]
