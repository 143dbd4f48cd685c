"""SGLang servers as a trainer rank sees them: what receives its weights. Blocking calls, and futures of calls.

A rank's own work is synchronous, and SGLang answers a request about weights only when they have arrived, which takes a
broadcast by the rank that waits for the answer. So requests run on an event loop in a thread, by the one client that
everything else here uses, over connections that are kept.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch

from mslime.backends.sglang.client import EngineClient
from mslime.config.choices import FileKind
from mslime.config.errors import MALFORMED, ChangesRefused, EngineError, WeightSyncError, sync_error
from mslime.config.keys import AnnouncedBucket, BucketVersion, Endpoint, EngineInfo
from mslime.config.schema import DeadlineConfig
from mslime.config.slices import Cuts, told
from mslime.engine_plugin.wire import (
    GROUP,
    MARK,
    NO_SUCH_GROUP,
    OWN_LOADER,
    PROBE,
    PROBE_CHANGES,
    QUESTION,
    RECORDED,
    REFUSED,
    UNABLE,
    UNREACHED,
    UNSEEN,
    Order,
    as_text,
    group_of,
    group_of_version,
    group_to_forget,
    group_to_reach,
    group_to_see,
    lane_to_join,
    update_request,
)
from mslime.tensor_sums import whole_sum, word_sum

_T = TypeVar("_T")
CLOSE_SECONDS = 10.0
NO_PLUG_IN = f"{OWN_LOADER}the server has no plug-in of mslime"
WITHOUT_FILES = "the server takes no buckets in files: it was started without mslime's plug-in"
WITHOUT_HANDED = "the server takes nothing that is handed to it: it was started without mslime's plug-in"
WITHOUT_CHANGES = "the server takes no changes by broadcasts: it was started without mslime's plug-in"
WITHOUT_RELAY = "the server's ranks pass no buckets on: it was started without mslime's plug-in"
USE_BROADCAST = (
    "set weights.transport: broadcast; shm and handles are for engines on the machine of every sender, and disk and "
    "delta for a weights.directory that all machines share"
)
USE_MOONCAKE = (
    "install the extra `mooncake` for the engine too, open the sender's ports to its machine, or set "
    "weights.transport: broadcast"
)
USE_FILES = (
    "install the extra `checkpoint-engine` for the engine too; or set weights.transport: disk with a weights.directory "
    "that all machines share, on one machine handles or shm"
)
_log = logging.getLogger(__name__)


class SGLangReceivers:
    """Engines that receive weights (`weights.transport.Receivers`). For one rank; any of its threads may call.

    Args:
        deadlines: `weight_sync_s` is that of each call about weights, `engine_control_s` that of `describe`.

    Attributes:
        heard: (URL, what the engine said of a bucket that it loaded), each once.
    """

    def __init__(self, deadlines: DeadlineConfig) -> None:
        self._deadlines = deadlines
        self._clients: dict[str, EngineClient] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.heard: set[tuple[str, str]] = set()

    def describe(self, engine: Endpoint) -> EngineInfo:
        """Ask a running server for the number of processes that receive weights.

        Raises:
            WeightSyncError: it cannot be reached, or it runs pipeline- or data-parallel replicas, whose ranks SGLang
                0.5.23 does not count in a weight-update group.
        """
        client = self._client(engine)
        info = self._submit(client.server_info(), "connect", engine.url).result()
        try:
            sizes = {name: int(info[name]) for name in ("tp_size", "pp_size", "dp_size")}
            machines = int(info.get("nnodes", 1))
        except MALFORMED as error:
            raise sync_error("connect", engine.url, f"the engine does not describe itself: {error!r}") from error
        for name in ("pp_size", "dp_size"):
            if sizes[name] != 1:
                raise sync_error(
                    "connect", engine.url,
                    f"{name} = {sizes[name]}; weights can be sent to engines with {name} 1 only",
                    "start more engines instead",
                )  # fmt: skip
        drafts = info.get("speculative_algorithm") is not None
        return EngineInfo(engine.url, sizes["tp_size"], engine.keys, machines, drafts)

    def join(
        self, engine: EngineInfo, *, host: str, port: int, rank: int, world_size: int, name: str, backend: str,
        lane: int | None = None, machine: int | None = None,
    ) -> Future[None]:  # fmt: skip
        """Let an engine's ranks join a process group; done when they have.

        Args:
            host, port: of the group's store.
            rank: of the engine's first process.
            name: of the group.
            lane: one on each machine joins: that which receives from the sender of this number.
            machine: with `lane`, only the one on this machine.
        """
        name = name if lane is None else lane_to_join(lane, name, machine)
        call = self._client(engine.endpoint).join_group(host, port, rank, world_size, name, backend)
        return self._submit(call, "connect", engine.url)

    def announce(self, bucket: AnnouncedBucket, group: str) -> bytes:
        """The request for a bucket, which is the same at every sync and for every engine: see `receive`."""
        return update_request([bucket], group)

    def announce_file(self, bucket: AnnouncedBucket, kind: FileKind, path: Path) -> bytes:
        """The request for a bucket that lies in a file: see `receive`.

        Args:
            kind: what lies in the file.
        """
        return update_request([bucket], group_of(kind, path))

    def announce_version(self, bucket: AnnouncedBucket, group: str, version: BucketVersion) -> bytes:
        """The request for a bucket, or for changes of it, that is broadcast: see `receive`."""
        return update_request([bucket], group_of_version(version, group))

    def can_take_changes(self, engine: EngineInfo) -> Future[None]:
        """Done when an engine says that it can take changes by a broadcast. Raises WeightSyncError."""
        return self._submit(self._ask(engine, PROBE_CHANGES, WITHOUT_CHANGES, "files"), "connect", engine.url)

    def announce_relay(
        self, sync: str, lanes: Sequence[str], plan: str, buckets: Sequence[AnnouncedBucket],
        senders: Sequence[Sequence[int]], cuts: str,
    ) -> bytes:  # fmt: skip
        """The request for a whole sync: see `receive_all`."""
        tensors = tuple(len(each.names) for each in buckets)
        order = Order(sync, plan, tuple(lanes), tuple(map(tuple, senders)), tensors, cuts)
        return update_request(buckets, order.as_group())

    def can_relay(self, engine: EngineInfo) -> Future[None]:
        """Done when an engine says that its ranks can pass buckets on. Raises WeightSyncError."""
        return self._submit(self._ask(engine, PROBE, WITHOUT_RELAY, "relay"), "connect", engine.url)

    async def _ask(self, engine: EngineInfo, question: str, without: str, plug_in: str) -> None:
        """Let one of our plug-ins answer. Raises WeightSyncError `without` it, EngineError for what it answers."""
        try:
            await self._client(engine.endpoint).leave_group(question)
        except EngineError as error:
            if NO_SUCH_GROUP in error.rule:
                raise sync_error("transport", engine.url, without, use_plug_in(plug_in)) from error
            raise

    def see(self, engine: EngineInfo, directory: Path) -> Future[None]:
        """Done when an engine says that it can take buckets in files of this directory. Raises WeightSyncError."""

        async def seen() -> None:
            try:
                await self._ask(engine, group_to_see(directory), WITHOUT_FILES, "files")
            except EngineError as error:
                if UNSEEN in error.rule:
                    raise sync_error("transport", engine.url, f"{directory}: {error.rule}", USE_BROADCAST) from error
                raise

        return self._submit(seen(), "connect", f"{engine.url}: {directory}")

    def reach(self, engine: EngineInfo, place: Path, said: bytes) -> Future[None]:
        """Done when an engine has read these bytes in memory of this process. Raises WeightSyncError."""

        async def reached() -> None:
            try:
                await self._ask(engine, group_to_reach(place, said), WITHOUT_FILES, "files")
            except EngineError as error:
                if UNREACHED in error.rule:
                    raise sync_error("transport", engine.url, error.rule, USE_MOONCAKE) from error
                raise

        return self._submit(reached(), "connect", engine.url)

    def announce_handed(self, bucket: AnnouncedBucket) -> bytes:
        """What a bucket is called that is handed to an engine's ranks: a request for it, see `ipc`."""
        return update_request([bucket], GROUP)

    def can_take_handed(self, engine: EngineInfo) -> Future[None]:
        """Done when an engine says that it can take buckets that are handed to it. Raises WeightSyncError."""

        async def asked() -> None:
            try:
                await self._ask(engine, QUESTION, WITHOUT_HANDED, "files")
            except EngineError as error:
                if UNABLE in error.rule:
                    raise sync_error("transport", engine.url, error.rule, USE_FILES) from error
                raise

        return self._submit(asked(), "connect", engine.url)

    def take_handed(self, engine: EngineInfo, addresses: Mapping[str, str]) -> Future[None]:
        """Let an engine's ranks take buckets from who has the same GPU; done when they have loaded all of them."""

        async def taken() -> None:
            self._note(engine, await self._client(engine.endpoint).take_handed({**addresses, MARK: GROUP}))

        return self._submit(taken(), "send", engine.url)

    def forget(self, engine: EngineInfo, directory: Path) -> Future[None]:
        """Let an engine unmap the files of this directory."""
        call = self._client(engine.endpoint).leave_group(group_to_forget(directory))
        return self._submit(call, "disconnect", engine.url)

    def receive(self, engine: EngineInfo, announcement: bytes) -> Future[None]:
        """Let an engine take the bucket that is announced; done when it has loaded it."""

        async def received() -> None:
            self._note(engine, await self._received(engine, announcement))

        return self._submit(received(), "send", engine.url)

    def receive_all(self, engine: EngineInfo, announcement: bytes) -> Future[Cuts | None]:
        """Let an engine take a whole sync; done when it has loaded it. What its machines keep, where that is news."""

        async def received() -> Cuts | None:
            said, cuts = told(await self._received(engine, announcement))
            self._note(engine, said)
            return cuts

        return self._submit(received(), "send", engine.url)

    async def _received(self, engine: EngineInfo, announcement: bytes) -> str:
        try:
            return await self._client(engine.endpoint).receive_bucket(announcement)
        except EngineError as error:
            if REFUSED not in error.rule:
                raise
            raise ChangesRefused("weights.send", engine.url, error.rule, "send the whole bucket") from error

    def _note(self, engine: EngineInfo, said: str) -> None:
        """What an engine says of how it loaded."""
        if (engine.url, said) not in self.heard:
            self.heard.add((engine.url, said))
            _log.info(
                "%s: a bucket was %s", engine.url, said if said.startswith((RECORDED, OWN_LOADER)) else NO_PLUG_IN
            )

    def leave(self, engine: EngineInfo, name: str) -> Future[None]:
        """Let an engine's ranks leave a process group."""
        return self._submit(self._client(engine.endpoint).leave_group(name), "disconnect", engine.url)

    def digest(self, tensor: torch.Tensor) -> str:
        """What the ranks of an engine must say of this tensor when they hold it."""
        return as_text(*whole_sum(tensor))

    def checksum(self, tensor: torch.Tensor) -> int:
        """What an engine works out for a tensor to find out whether changes of it are right."""
        return word_sum(tensor)

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        loop, self._loop = self._loop, None
        clients, self._clients = self._clients, {}
        if loop is None:
            return

        async def close_all() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()  # of an engine that no longer answers
            for client in clients.values():
                await client.close()

        asyncio.run_coroutine_threadsafe(close_all(), loop).result(CLOSE_SECONDS)
        loop.call_soon_threadsafe(loop.stop)

    def _client(self, engine: Endpoint) -> EngineClient:
        if engine.url not in self._clients:
            self._clients[engine.url] = EngineClient(engine.url, engine.url, self._deadlines, keys=engine.keys)
        return self._clients[engine.url]

    def _submit(self, call: Coroutine[Any, Any, _T], phase: str, where: str) -> Future[_T]:
        async def named() -> _T:
            try:
                return await call
            except WeightSyncError:
                raise
            except EngineError as error:
                raise sync_error(phase, where, f"{error.value}: {error.rule}") from error

        return asyncio.run_coroutine_threadsafe(named(), self._running())

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # A daemon: an abandoned wait must not keep the process from ending.
            threading.Thread(target=_run, args=(self._loop,), daemon=True, name="weight requests").start()
        return self._loop


def use_plug_in(name: str) -> str:
    """The way out for a server that was started without one of our plug-ins."""
    return (
        "set weights.transport: broadcast, or start the server with "
        f"mslime/engine_plugin/plugins/{name} on its PYTHONPATH"
    )


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
