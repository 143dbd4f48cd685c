"""A rollout service's engines: their clients and checks."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from mslime.config.model_facts import checkpoint_dtype
from mslime.config.resolved import engine_spec
from mslime.logs import hide

if TYPE_CHECKING:
    from mslime.backends.sglang.client import EngineClient
    from mslime.backends.sglang.engine_pool import EnginePool
    from mslime.backends.sglang.handshake import Needs
    from mslime.backends.sglang.server_process import EngineAddress
    from mslime.checks.resolve import ResolvedRun
    from mslime.config.errors import EngineError
    from mslime.config.model_facts import ModelFacts

_log = logging.getLogger(__name__)
GREET_S = 15.0
"""Seconds for a new engine's first control calls, which take milliseconds on the other engines."""


class EngineSide:
    """Engines are connected before a service is opened, and released after it was closed.

    Attributes:
        pool: the engines, once connected.
    """

    pool: EnginePool
    _needs: Needs

    def __init__(self, run: ResolvedRun) -> None:
        self._run, self._config = run, run.config

    async def meet_engines(self, addresses: Sequence[EngineAddress]) -> int:
        """Connect to the engines and check their capabilities; returns how many tokens they refuse to continue."""
        from mslime.backends.sglang.engine_pool import EnginePool
        from mslime.backends.sglang.handshake import Needs, handshake

        run, r = self._run, self._config.rollout
        _log.info("process %d: meeting %s", os.getpid(), ", ".join(a.url for a in addresses))
        clients, spec = self._clients(addresses, run.model), engine_spec(self._config, run.adapted_modules)
        self._needs = Needs(
            bool(run.replayed_layers), architectures=(run.family.architecture,),
            dtype=spec.dtype(run.hf_config), checkpoint_dtype=checkpoint_dtype(run.hf_config),
            memory=spec.gives_back, lora=spec.lora,
            truncation={"top_p": r.top_p, "top_k": r.top_k, "min_p": r.min_p} if r.truncated else {},
        )  # fmt: skip
        refused_input = min(await asyncio.gather(*(handshake(client, self._needs) for client in clients)))
        self.pool = EnginePool(clients, r.concurrency, self._config.deadlines.engine_silence_s)
        return refused_input

    async def admit(self, address: EngineAddress) -> None:
        """Check a new, restarted or recovered engine, and let it take part from the next weight update on. Raises
        EngineError that names a missing capability, EngineDied if it does not answer."""
        from mslime.backends.sglang.client import EngineDied
        from mslime.backends.sglang.handshake import handshake
        from mslime.config.base import ENGINE_TAGS
        from mslime.run.attached import make_clean

        hide(address.keys.api, address.keys.admin)
        limits = self._config.deadlines
        (client,) = self._clients([address], self._run.model)
        try:
            async with asyncio.timeout(limit_s := limits.engine_start_s):
                if not await client.answers():
                    raise client.error("/ready", "nobody answers", EngineDied)
                # A hanging engine must not delay the sync for long
                client.deadlines = limits.controls_within(GREET_S)
                await make_clean(client)
                client.deadlines = limits
                if self._needs.memory:  # it may have been declared dead while its memory was released
                    await client.hold_memory(ENGINE_TAGS)
                await handshake(client, self._needs)
                await client.pause(self._config.rollout.pause_mode)
        except BaseException as error:
            await client.close()
            if isinstance(error, TimeoutError):
                raise client.error("handshake", f"not over within {limit_s:g} s", EngineDied) from None
            raise
        await self.pool.admit(client)

    async def mark_dead(self, urls: Collection[str], why: str) -> None:
        """See `EnginePool.mark_dead`."""
        self.pool.mark_dead(urls, why)

    async def dead(self) -> dict[str, EngineError]:
        """Dead engines by name, with the cause; see `EnginePool.missing`."""
        return self.pool.missing

    async def no_engine_alive(self) -> bool:
        """See `EnginePool.no_engine_alive`."""
        return self.pool.no_engine_alive

    def _clients(self, addresses: Sequence[EngineAddress], model: ModelFacts) -> list[EngineClient]:
        from mslime.backends.sglang.pair import client_of

        return [client_of(address, self._config.deadlines, model) for address in addresses]

    async def close(self) -> None:
        """Close connections."""
        await self.pool.close()
