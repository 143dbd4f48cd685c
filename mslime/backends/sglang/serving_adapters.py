"""Adapters that one engine has loaded: which is the newest, and which requests each has.

Every version of the adapters has a name of its own at the engine. A request has one adapter from its first token to its
last, so its tokens are of that version: SGLang's own spans name the version of the weights alone, which never change.
An adapter is unloaded when it is not the newest and its last request has ended.

Where a run trains several adapters, each is an owner of versions, and has a newest one of its own. Where requests name
directories (`mslime serve`), each is an owner of one version, which is loaded when it is first asked for.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mslime.config.errors import EngineError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdapterVersion:
    """One version of the adapters.

    Attributes:
        name: under which engines have it, unique among runs.
        version: of the weights.
        directory: that engines read it from.
        owner: which of a run's several adapters it is a version of; empty in a run of one.
    """

    name: str
    version: int
    directory: Path
    owner: str = ""


class ServingAdapters:
    """The adapters of one engine. Belongs to one event loop.

    Args:
        unload: lets the engine forget the adapter of a name.

    Attributes:
        newest: that new requests have, by owner. Those of an owner without one have the base alone.
    """

    def __init__(self, unload: Callable[[str], Awaitable[None]]) -> None:
        self._unload = unload
        self._loaded: dict[AdapterVersion, set[str]] = {}
        self._unloading = set[asyncio.Task[None]]()
        self._lending = asyncio.Condition()
        self.newest: dict[str, AdapterVersion] = {}

    @property
    def loaded(self) -> tuple[AdapterVersion, ...]:
        """From the oldest to the newest."""
        return tuple(self._loaded)

    def loaded_of(self, owner: str) -> tuple[AdapterVersion, ...]:
        """Those of one owner, from the oldest to the newest."""
        return tuple(adapter for adapter in self._loaded if adapter.owner == owner)

    def requests_of_older(self, owner: str = "") -> list[str]:
        """Ids of requests that have another adapter of this owner than its newest, of the oldest first."""
        newest = self.newest.get(owner)
        return [rid for adapter in self.loaded_of(owner) if adapter != newest for rid in self._loaded[adapter]]

    def requests_by(self, owner: str) -> list[str]:
        """Ids of all requests that have an adapter of this owner."""
        return [rid for adapter in self.loaded_of(owner) for rid in self._loaded[adapter]]

    def requests_of(self, adapter: AdapterVersion) -> list[str]:
        """Ids of requests that have this one."""
        return list(self._loaded.get(adapter, ()))

    def add(self, adapter: AdapterVersion) -> None:
        """The engine has loaded it."""
        self._loaded[adapter] = set()

    def switch(self, adapter: AdapterVersion) -> None:
        """Give it to new requests of its owner; those that nobody uses any more are unloaded."""
        assert adapter in self._loaded, f"{adapter.name} is not loaded"
        self.newest[adapter.owner] = adapter
        for other in self.loaded_of(adapter.owner):
            self._forget_unused(other)

    def drop(self, adapter: AdapterVersion) -> None:
        """It was loaded in vain: no request had it."""
        if adapter in self._loaded:
            self._forget_unused(adapter)

    def of_version(self, version: int, owner: str = "") -> AdapterVersion | None:
        """The loaded one of a version."""
        return next((adapter for adapter in self.loaded_of(owner) if adapter.version == version), None)

    @contextmanager
    def used(self, rid: str, owner: str = "") -> Iterator[AdapterVersion | None]:
        """A request is at the engine inside; with the adapter that is its owner's newest now."""
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
        """A request may use the adapter that lies in a directory inside, under this owner: it is loaded where it is
        not, and stays.

        Args:
            room: adapters that the engine has at most. The one used longest ago of those that no request has is
                unloaded for another; where requests have all of them, this waits.
            load: lets the engine have it, and calls `add`.

        Raises:
            EngineError: it cannot be loaded.
        """
        owner = str(directory)
        async with self._lending:
            while owner not in self.newest and not self._made_room(room):
                await self._lending.wait()
            if owner not in self.newest:
                await self.settled()
                # Never the same name twice: a load that was cancelled may have left one at the engine.
                adapter = AdapterVersion(f"lent-{secrets.token_hex(12)}", 0, directory, owner)
                await load(adapter)
                self.newest[owner] = adapter
            adapter = self.newest[owner]
            requests = self._loaded[adapter] = self._loaded.pop(adapter)  # from here on the one used last
            requests.add(rid)
        try:
            yield owner
        finally:
            requests.discard(rid)
            async with self._lending:
                self._lending.notify_all()

    def _made_room(self, room: int) -> bool:
        if len(self._loaded) < room:
            return True
        idle = next((adapter for adapter, requests in self._loaded.items() if not requests), None)
        if idle is None:
            return False
        self._give_up(idle)
        return True

    def lends(self, directory: Path) -> bool:
        """Whether the adapter of a directory is loaded."""
        return str(directory) in self.newest

    async def take_back(self, directory: Path) -> None:
        """Unload the adapter of a directory, where it is loaded, once its last request has ended."""
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
        """Return when what is being unloaded is gone."""
        while self._unloading:
            await asyncio.gather(*self._unloading)

    def _forget_unused(self, adapter: AdapterVersion) -> None:
        if adapter == self.newest.get(adapter.owner) or self._loaded.get(adapter, True):
            return
        del self._loaded[adapter]
        task = asyncio.create_task(self._unload_one(adapter), name=f"unload {adapter.name}")
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    async def _unload_one(self, adapter: AdapterVersion) -> None:
        try:
            await self._unload(adapter.name)
        except EngineError as error:  # it takes memory, and nothing else: SGLang unloads the oldest by itself
            _log.warning("%s is not unloaded: %s", adapter.name, error.brief)
