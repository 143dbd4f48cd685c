"""Clients' requests to sample, on the engines of a server, some of which may have died."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from mslime.backends.sglang.client import EngineDied
from mslime.backends.sglang.generating import GenerateRequest, GenerateResult
from mslime.backends.sglang.pool import EnginePool, all_or_first_failure
from mslime.config.errors import EngineError

LOOK_S = 0.2


class PooledEngines:
    """A pool of engines that requests wait for when all are dead.

    Args:
        room: adapters that each engine has loaded at once.
        may_come: whether there may be an engine again where none is left.
    """

    def __init__(self, pool: EnginePool, room: int, may_come: Callable[[], bool]) -> None:
        self._pool, self._room, self._may_come = pool, room, may_come

    async def sample(self, adapter: Path | None, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """All continuations of a prompt, under an adapter or the base. A request whose engine dies goes to another one.

        Raises:
            EngineError: no engine can, after all of them have ended.
        """
        where = None if adapter is None else adapter.absolute()
        found = await asyncio.gather(*(self._one(where, each) for each in requests), return_exceptions=True)
        return all_or_first_failure(found)

    async def forget(self, adapter: Path) -> None:
        """No request will name this adapter any more."""
        await self._pool.take_back(adapter.absolute())

    async def _one(self, adapter: Path | None, request: GenerateRequest) -> GenerateResult:
        while True:
            try:
                found = await self._pool.generate_from(adapter, request, self._room)
            except EngineDied as error:
                await self._another(error)
                continue
            if found.finish == "abort":
                raise EngineError(found.engine, request.rid, "the engine aborted the request", "sample again")
            return found

    async def _another(self, error: EngineDied) -> None:
        """Return when an engine is there. Raises EngineError where none will come."""
        while not len(self._pool):
            if not self._may_come():
                raise EngineError(
                    "engines", 0, "none is left: they died, see the console", "start the server again"
                ) from error
            await asyncio.sleep(LOOK_S)
