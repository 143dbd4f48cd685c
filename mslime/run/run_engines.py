"""The engines of a run: those of one rollout manager (`EngineSide`), and all of them (`RunEngines`)."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from mslime.backends.sglang.engine_pool import EnginePool, UpdateMembers, all_or_first_failure
from mslime.config.errors import ConfigError
from mslime.config.model_facts import checkpoint_dtype
from mslime.config.resolved import engine_spec
from mslime.logs import hide, phase
from mslime.run.ray_calls import verb

if TYPE_CHECKING:
    from mslime.backends.sglang.client import EngineClient
    from mslime.backends.sglang.generating import ProbeRequest
    from mslime.backends.sglang.handshake import EngineNeeds
    from mslime.backends.sglang.port import Sums
    from mslime.backends.sglang.server_process import EngineAddress
    from mslime.backends.sglang.serving_adapters import AdapterVersion
    from mslime.checks.resolve import ResolvedRun
    from mslime.config.base import EngineTag
    from mslime.config.errors import EngineError
    from mslime.data.probe import ProbeScores
    from mslime.run.rollout_process import ManagerEngines, ScoringSide

_log = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")
SYNC = "weight_sync_s"
ADMIT_S = 15.0
"""Seconds for a new engine's first control calls, which take milliseconds on the other engines."""


class EngineSide:
    """Engines are connected before a service is opened, and released after it was closed.

    Attributes:
        pool: the engines, once connected.
    """

    pool: EnginePool
    _needs: EngineNeeds

    def __init__(self, run: ResolvedRun) -> None:
        self._run, self._config = run, run.config

    async def connect_engines(self, addresses: Sequence[EngineAddress]) -> int:
        """Connect to the engines and check their capabilities; returns how many tokens they refuse to continue."""
        from mslime.backends.sglang.handshake import EngineNeeds, handshake

        run, r = self._run, self._config.rollout
        _log.info("process %d: connecting to %s", os.getpid(), ", ".join(a.url for a in addresses))
        clients, spec = self._clients(addresses), engine_spec(self._config, run.adapted_modules)
        self._needs = EngineNeeds(
            run.sends_routes, architectures=(run.family.architecture,),
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
        (client,) = self._clients([address])
        try:
            async with asyncio.timeout(limit_s := limits.engine_start_s):
                if not await client.answers():
                    raise client.error("/ready", "does not respond", EngineDied)
                # A hanging engine must not delay the sync for long
                client.deadlines = limits.controls_within(ADMIT_S)
                await make_clean(client)
                client.deadlines = limits
                if self._needs.memory:  # it may have been declared dead while its memory was released
                    await client.hold_memory(ENGINE_TAGS)
                await handshake(client, self._needs)
                await client.pause(self._config.rollout.pause_mode)
        except BaseException as error:
            await client.close()
            if isinstance(error, TimeoutError):
                raise client.error("handshake", f"did not finish within {limit_s:g} s", EngineDied) from None
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

    def _clients(self, addresses: Sequence[EngineAddress]) -> list[EngineClient]:
        from mslime.backends.sglang.pair import client_of

        return [client_of(address, self._config.deadlines, self._run.model) for address in addresses]

    async def close(self) -> None:
        """Close connections."""
        await self.pool.close()


class RunEngines:
    """Calls the engines of all managers. Lives in the process of the rollout service; the driver calls it.

    Args:
        members: the managers' engines.
        teachers: owner of a teacher's servers, if these share the trainer's GPUs.
    """

    def __init__(self, members: Sequence[ManagerEngines], teachers: ScoringSide | None = None) -> None:
        self._members, self._teachers = list(members), teachers

    # ------------------------------------------------------------------------------------------------ membership

    @verb("admit engine", "engine_start_s", interruptible=True)
    async def admit(self, address: EngineAddress) -> None:
        """See `EngineSide.admit`: at the engine's former manager, or at the one with the fewest engines."""
        with phase(_log, f"connecting to {address.name} at {address.url}"):
            known = [member for member in self._members if address.name in member.names]
            member = known[0] if known else min(self._members, key=lambda each: len(each.engines))
            await member.side.ask(EngineSide.admit, address)
        if known:
            member.engines[member.names.index(address.name)] = address
        else:
            member.engines.append(address)

    @verb("remove engine")
    async def retire(self, name: str) -> None:
        """Remove an engine at the next weight update. Raises ConfigError if its manager is one of several and has no
        other engine: its groups would have none."""
        with phase(_log, f"{name} leaves"):
            for member in self._members:
                if len(self._members) > 1 and name not in member.names:
                    continue
                if len(self._members) > 1 and len(member.engines) == 1:
                    raise ConfigError("drain", name, "is the only engine of its rollout manager", "drain another")
                await member.pool.ask(EnginePool.retire, name)
                member.engines[:] = [address for address in member.engines if address.name != name]

    @verb("mark engines dead")
    async def mark_dead(self, urls: Collection[str], why: str) -> None:
        """Declare these engines dead; see `EnginePool.mark_dead`."""
        await _all(member.side.ask(EngineSide.mark_dead, urls, why) for member in self._members)

    @verb("engines")
    async def dead(self) -> dict[str, str]:
        """Causes of death of the dead engines, by name."""
        found = await _all(member.side.ask(EngineSide.dead) for member in self._members)
        return {name: error.brief for each in found for name, error in each.items()}

    @verb("engines")
    async def no_engine_alive(self) -> bool:
        """Whether a manager has no live engine."""
        return any(await _all(member.side.ask(EngineSide.no_engine_alive) for member in self._members))

    # --------------------------------------------------------------------------------------------- their memory

    @verb("weight sync: memory", SYNC)
    async def hold_memory(self, tags: Collection[EngineTag]) -> None:
        """Make the paused engines hold these parts of their memory; see `EnginePool.hold_memory`."""
        with phase(_log, f"engines hold {', '.join(sorted(tags)) or 'nothing'}"):
            await self._each(EnginePool.hold_memory, tags)

    @verb("weight sync: memory", SYNC)
    async def hold_teachers(self, tags: Collection[EngineTag]) -> list[str]:
        """Make the teacher's servers hold these parts of their memory; returns names of dead ones. See
        `ServedTeacher`."""
        assert self._teachers is not None, "one manager has the teacher of shared GPUs"
        with phase(_log, f"teachers hold {', '.join(sorted(tags)) or 'nothing'}"):
            return await self._teachers.hold_teachers(tags)

    # ------------------------------------------------------------------------------------------- a weight update

    @verb("weight sync: begin", SYNC)
    async def begin_update(self) -> UpdateMembers:
        """Begin a weight update of the paused engines of all managers at once; see `EnginePool`, also for the next
        methods. A manager whose engines are all dead raises: its groups would have none."""
        return await self._serving(EnginePool.begin_update)

    @verb("weight sync: begin again", SYNC)
    async def restart_update(self) -> UpdateMembers:
        """`begin_update` after an aborted update."""
        return await self._serving(EnginePool.restart_update)

    @verb("weight sync: load adapter", SYNC)
    async def load_adapter(self, adapter: AdapterVersion, alive: int) -> UpdateMembers:
        """Load an adapter into the engines while they generate."""
        with phase(_log, f"loading {adapter.name}"):
            return await self._serving(EnginePool.load_adapter, adapter, alive)

    @verb("weight sync: compare", SYNC)
    async def compare(self, expected: Sums, strict: bool, adapter: int | None = None, owner: str = "") -> int:
        """Compare tensors in all engines with those that the trainer sent; returns their number.

        Args:
            adapter: version of the adapters, if only these are compared. owner: the adapter's name, if there are
                several.
        """
        with phase(_log, f"comparing the engines' weights with the trainer's{f' for {owner}' if owner else ''}"):
            return sum(await self._each(EnginePool.compare, expected, strict, adapter, owner))

    @verb("weight sync: end", SYNC)
    async def end_update(self) -> None:
        """Finish a weight update after the last bucket."""
        await self._each(EnginePool.end_update)

    @verb("weight version")
    async def stamp(self, version: int) -> None:
        """Set the version that the engines report."""
        await self._each(EnginePool.stamp, version)

    async def probe(self, request: ProbeRequest) -> Mapping[str, ProbeScores]:
        """The answers of all engines, by URL; see `EnginePool.probe`."""
        return {url: found for each in await self._each(EnginePool.probe, request) for url, found in each.items()}

    async def _serving(
        self, method: Callable[Concatenate[EnginePool, P], Awaitable[UpdateMembers]], *args: P.args, **options: P.kwargs
    ) -> UpdateMembers:
        found = await self._each(method, *args, **options)
        gone = {name: why for each in found for name, why in each.gone.items()}
        for name, why in gone.items():
            _log.warning("%s is gone: %s", name, why)
        urls = tuple(url for each in found for url in each.urls)
        return UpdateMembers(urls, gone, frozenset().union(*(each.adapters for each in found)))

    async def _each(
        self, method: Callable[Concatenate[EnginePool, P], Awaitable[T]], *args: P.args, **options: P.kwargs
    ) -> list[T]:
        return await _all(member.pool.ask(method, *args, **options) for member in self._members)


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of calls after all have ended. Raises the first failure among them."""
    return all_or_first_failure(await asyncio.gather(*calls, return_exceptions=True))
