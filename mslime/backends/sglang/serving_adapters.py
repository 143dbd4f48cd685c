"""Loaded adapters of one engine: the newest of each owner, and the requests of each.

Every adapter version has its own name at the engine. A request has one adapter from its first token to its last, so its
tokens are of that version; SGLang's own spans show only the version of the weights, which never changes. An older
adapter is unloaded after its last request.

If a run trains several adapters, each is an owner of versions, with its own newest one. If requests name directories
(`mslime serve`), each directory is an owner of one version, loaded at its first use.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mslime.config.errors import EngineError

if TYPE_CHECKING:
    from mslime.backends.sglang.client import EngineClient

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdapterVersion:
    """One version of the adapters.

    Attributes:
        name: at engines, unique among runs.
        version: of the weights.
        directory: from which engines read it.
        owner: its adapter in a run of several; empty in a run of one.
    """

    name: str
    version: int
    directory: Path
    owner: str = ""


class ServingAdapters:
    """The adapters of one engine. Belongs to one event loop.

    Args:
        unload: makes the engine unload the adapter of a name.

    Attributes:
        newest: adapters of new requests, by owner. Requests of an owner without one use the base alone.
    """

    def __init__(self, unload: Callable[[str], Awaitable[None]]) -> None:
        self._unload = unload
        self._loaded: dict[AdapterVersion, set[str]] = {}
        self._unloading = set[asyncio.Task[None]]()
        self._lending = asyncio.Condition()
        self.newest: dict[str, AdapterVersion] = {}

    @property
    def loaded(self) -> tuple[AdapterVersion, ...]:
        """Loaded adapters, from the oldest to the newest."""
        return tuple(self._loaded)

    def loaded_of(self, owner: str) -> tuple[AdapterVersion, ...]:
        """Loaded adapters of one owner, from the oldest to the newest."""
        return tuple(adapter for adapter in self._loaded if adapter.owner == owner)

    def requests_of_older(self, owner: str = "") -> list[str]:
        """Ids of requests with another adapter of this owner than its newest, those of the oldest adapter first."""
        newest = self.newest.get(owner)
        return [rid for adapter in self.loaded_of(owner) if adapter != newest for rid in self._loaded[adapter]]

    def requests_by(self, owner: str) -> list[str]:
        return [rid for adapter in self.loaded_of(owner) for rid in self._loaded[adapter]]

    def requests_of(self, adapter: AdapterVersion) -> list[str]:
        return list(self._loaded.get(adapter, ()))

    def add(self, adapter: AdapterVersion) -> None:
        self._loaded[adapter] = set()

    def switch(self, adapter: AdapterVersion) -> None:
        """Give it to new requests of its owner, and unload unused older ones."""
        assert adapter in self._loaded, f"{adapter.name} is not loaded"
        self.newest[adapter.owner] = adapter
        for other in self.loaded_of(adapter.owner):
            self._forget_unused(other)

    def of_version(self, version: int, owner: str = "") -> AdapterVersion | None:
        """The loaded adapter of a version."""
        return next((adapter for adapter in self.loaded_of(owner) if adapter.version == version), None)

    @contextmanager
    def used(self, rid: str, owner: str = "") -> Iterator[AdapterVersion | None]:
        """Register a request at the engine inside, with its owner's newest adapter."""
        adapter = self.newest.get(owner)
        if adapter is None:
            assert not owner, f"request {rid} came before an adapter of {owner}"
            yield None
            return
        self._loaded[adapter].add(rid)
        try:
            yield adapter
        finally:
            self._loaded[adapter].discard(rid)
            self._forget_unused(adapter)

    @asynccontextmanager
    async def lent(
        self, directory: Path, rid: str, room: int, load: Callable[[AdapterVersion], Awaitable[None]]
    ) -> AsyncIterator[str]:
        """Lend the adapter in a directory to a request inside, under this owner: it is loaded if necessary, and stays.

        Args:
            room: most adapters of the engine. The least recently used adapter without requests is unloaded for another;
                if all are in use, this waits.
            load: loads it into the engine, and calls `add`.

        Raises:
            EngineError: it cannot be loaded.
        """
        owner = str(directory)
        async with self._lending:
            while owner not in self.newest and len(self._loaded) >= room:
                idle = next((adapter for adapter, requests in self._loaded.items() if not requests), None)
                if idle is not None:
                    self._give_up(idle)
                    break
                await self._lending.wait()
            if owner not in self.newest:
                await self.settled()
                # Never reuse a name: a cancelled load may have left an adapter at the engine.
                adapter = AdapterVersion(f"lent-{secrets.token_hex(12)}", 0, directory, owner)
                await load(adapter)
                self.newest[owner] = adapter
            adapter = self.newest[owner]
            requests = self._loaded[adapter] = self._loaded.pop(adapter)  # from here on the most recently used
            requests.add(rid)
        try:
            yield owner
        finally:
            requests.discard(rid)
            async with self._lending:
                self._lending.notify_all()

    def lends(self, directory: Path) -> bool:
        return str(directory) in self.newest

    async def take_back(self, directory: Path) -> None:
        """Unload the adapter of a directory, if loaded, after its last request."""
        owner = str(directory)
        async with self._lending:
            while (adapter := self.newest.get(owner)) is not None and self._loaded[adapter]:
                await self._lending.wait()
            if adapter is not None:
                self._give_up(adapter)
                self._lending.notify_all()
        await self.settled()

    def _give_up(self, adapter: AdapterVersion) -> None:
        del self.newest[adapter.owner]
        self._forget_unused(adapter)

    async def settled(self) -> None:
        """Return when all pending unloads are done."""
        while self._unloading:
            await asyncio.gather(*self._unloading)

    def _forget_unused(self, adapter: AdapterVersion) -> None:
        if adapter == self.newest.get(adapter.owner) or self._loaded.get(adapter, True):
            return
        del self._loaded[adapter]

        async def unload() -> None:
            try:
                await self._unload(adapter.name)
            except EngineError as error:  # it only uses memory: SGLang unloads the oldest by itself
                _log.warning("%s could not be unloaded: %s", adapter.name, error.brief)

        task = asyncio.create_task(unload(), name=f"unload {adapter.name}")
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)


# One engine's part in a sync of adapters: load the newest one and phase out older ones.
#
# Nothing is paused. The newest adapter is loaded beside those in use, and new requests switch to it at one moment.
# Running requests keep theirs: they are interrupted and continue under the new one, or finish under their own.


ABORT_EVERY_S, LOOK_EVERY_S = 0.25, 0.01
"""A request can reach the engine after an abort sent for it, so the abort is repeated."""


async def load_version(
    client: EngineClient, adapter: AdapterVersion, alive: int, others: Collection[AdapterVersion] = ()
) -> str:
    """Load an adapter into an engine; returns the engine's URL.

    Args:
        alive: how many of this owner it serves at once, including this one. Requests with the oldest are interrupted
            until a slot is free.
        others: the newest of other owners, which a joining engine also loads, because it may get requests for each.

    Raises:
        EngineError: it refuses, or its requests do not end. EngineDied: it died meanwhile.
    """
    if adapter in client.adapters.loaded:
        return client.url
    while len(loaded := client.adapters.loaded_of(adapter.owner)) >= alive:
        oldest = loaded[0]
        requests = partial(client.adapters.requests_of, oldest)
        if not await _stopped(client, requests, client.deadlines.engine_control_s):
            raise client.error("/abort_request", f"requests with {oldest.name} did not stop in time")
    await client.adapters.settled()
    joins = not client.adapters.newest
    if joins:
        for other in others:
            await client.load_adapter(other)
    await client.load_adapter(adapter)
    if joins:  # it was paused at its admission
        await client.resume()
        for other in others:
            client.adapters.switch(other)
    return client.url


async def interrupt_older(client: EngineClient, patience_s: float, owner: str = "") -> None:
    """Interrupt requests with an older adapter of this owner than its newest, so they return their tokens so far. A
    request that does not return within `patience_s` ends under its own adapter."""
    requests = partial(client.adapters.requests_of_older, owner)
    if not owner and requests():
        await client.abort()  # one call for all; the few newer requests continue like the others
        await asyncio.sleep(LOOK_EVERY_S)
    await _stopped(client, requests, patience_s)


async def _stopped(client: EngineClient, requests: Callable[[], list[str]], patience_s: float) -> bool:
    """Whether none of these requests runs any more within so many seconds; aborts are repeated."""
    end = next_abort = time.monotonic()
    end += patience_s
    while rids := requests():
        now = time.monotonic()
        if now > end:
            return False
        if now >= next_abort:
            await asyncio.gather(*(client.abort(rid) for rid in rids))
            next_abort = time.monotonic() + ABORT_EVERY_S
        await asyncio.sleep(LOOK_EVERY_S)
    return True
