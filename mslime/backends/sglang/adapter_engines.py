"""The engines of a run as one of its several adapters has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mslime.backends.sglang.client import EngineClient
from mslime.backends.sglang.engine_pool import EnginePool
from mslime.backends.sglang.generating import GenerateRequest, GenerateResult
from mslime.config.base import PauseMode
from mslime.config.errors import EngineError

_SHARED = "engines that adapters share are never held for one of them"


class AdapterEngines:
    """A view on a pool: its requests have the adapter, and it interrupts no others. `rollout.protocols.Engines`."""

    def __init__(self, pool: EnginePool, adapter: str) -> None:
        self._pool, self._adapter = pool, adapter

    @property
    def clients(self) -> Sequence[EngineClient]:
        """All engines, dead ones included."""
        return self._pool.clients

    @property
    def dead(self) -> Mapping[str, EngineError]:
        """Engines that died, by name."""
        return self._pool.dead

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """See `EnginePool.generate`. Sessions of two adapters are two."""
        session = f"{self._adapter}/{request.session_id}" if request.session_id else ""
        return await self._pool.generate(replace(request, adapter=self._adapter, session_id=session))

    async def abort(self) -> None:
        """Make every running request of the adapter return what it has."""
        await self._pool.abort_of(self._adapter)

    def give_up(self, since: float) -> None:
        """See `EnginePool.give_up`."""
        self._pool.give_up(since)

    async def pause(self, mode: PauseMode) -> None:
        """Never called."""
        raise AssertionError(_SHARED)

    async def resume(self) -> None:
        """Never called."""
        raise AssertionError(_SHARED)

    async def flush_cache(self) -> None:
        """Never called."""
        raise AssertionError(_SHARED)

    async def switch(self, version: int, interrupt: bool) -> None:
        """See `EnginePool.switch`."""
        await self._pool.switch(version, interrupt, self._adapter)
