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

from mslime.backends.sglang.client import EngineClient, NoPlugIn
from mslime.config.choices import FileKind
from mslime.config.errors import MALFORMED, ChangesRefused, EngineError, WeightSyncError, sync_error
from mslime.config.keys import AnnouncedBucket, BucketVersion, Endpoint, EngineInfo
from mslime.config.schema import DeadlineConfig
from mslime.config.slices import HostSlices
from mslime.engine_plugin import wire
from mslime.engine_plugin.wire import OWN_LOADER, RECORDED, update_request
from mslime.tensor_sums import whole_sum, word_sum

_T = TypeVar("_T")
CLOSE_SECONDS = 10.0
NO_PLUG_IN = f"{OWN_LOADER}the server has no plug-in of mslime"
WITHOUT_PLUG_IN = "the server was started without mslime's plug-in"
USE_PLUG_IN = (
    "set weights.transport: broadcast, or start the server with mslime/engine_plugin/path_entry on its PYTHONPATH"
)
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
        if lane is None:
            call = self._client(engine.endpoint).join_group(host, port, rank, world_size, name, backend)
        else:
            request = wire.JoinRelayGroup(lane, name, host, port, rank, world_size, backend, machine)
            call = self._do(engine, request)
        return self._submit(call, "connect", engine.url)

    def announce(self, bucket: AnnouncedBucket, group: str) -> bytes:
        """The request for a bucket, which is the same at every sync and for every engine: see `receive`."""
        return update_request([bucket], group)

    def announce_file(self, bucket: AnnouncedBucket, kind: FileKind, path: Path) -> bytes:
        """The request for a bucket that lies in a file: see `receive`.

        Args:
            kind: what lies in the file.
        """
        return update_request([bucket], load=wire.FromFile(kind, path))

    def announce_version(self, bucket: AnnouncedBucket, group: str, version: BucketVersion) -> bytes:
        """The request for a bucket, or for changes of it, that is broadcast: see `receive`."""
        return update_request([bucket], group, wire.FromBroadcast(version))

    def can_take_changes(self, engine: EngineInfo) -> Future[None]:
        """Done when an engine replies that it has the plug-in. Raises WeightSyncError."""
        return self._able(engine, wire.Ping())

    def announce_relay(
        self, sync: str, lanes: Sequence[str], plan: str, buckets: Sequence[AnnouncedBucket],
        senders: Sequence[Sequence[int]], cuts: str,
    ) -> bytes:  # fmt: skip
        """The request for a whole sync: see `receive_all`."""
        tensors = tuple(len(each.names) for each in buckets)
        load = wire.RelaySync(sync, plan, tuple(lanes), tuple(map(tuple, senders)), tensors, cuts)
        return update_request(buckets, load=load)

    def can_relay(self, engine: EngineInfo) -> Future[None]:
        """Done when an engine replies that it has the plug-in. Raises WeightSyncError."""
        return self._able(engine, wire.Ping())

    def see(self, engine: EngineInfo, directory: Path) -> Future[None]:
        """Done when an engine replies that it reads files of this directory. Raises WeightSyncError."""
        return self._able(engine, wire.ReadDirectory(directory), USE_BROADCAST, str(directory))

    def reach(self, engine: EngineInfo, place: Path, said: bytes) -> Future[None]:
        """Done when an engine has read these bytes in memory of this process. Raises WeightSyncError."""
        return self._able(engine, wire.ReadMemory(place, said.hex()), USE_MOONCAKE)

    def _able(self, engine: EngineInfo, request: wire.Request, way_out: str = "", what: str = "") -> Future[None]:
        """Done when an engine replies that it can do something. Raises WeightSyncError.

        Args:
            way_out: if it replies why not.
            what: that is about, for the message.
        """

        async def asked() -> None:
            try:
                reply = await self._client(engine.endpoint).ask(request, wire.Answer)
            except NoPlugIn as error:
                raise sync_error("transport", engine.url, WITHOUT_PLUG_IN, USE_PLUG_IN) from error
            if reply.why_not:
                rule = f"{what}: {reply.why_not}" if what else reply.why_not
                raise sync_error("transport", engine.url, rule, way_out)

        return self._submit(asked(), "connect", f"{engine.url}: {what}" if what else engine.url)

    def announce_handed(self, bucket: AnnouncedBucket) -> bytes:
        """The name of a bucket that is handed to an engine's ranks."""
        return wire.encode(wire.IpcBucket.of(bucket)).encode()

    def can_take_handed(self, engine: EngineInfo) -> Future[None]:
        """Done when an engine replies that it can take buckets that are handed to it. Raises WeightSyncError."""
        return self._able(engine, wire.CheckIpc(), USE_FILES)

    def take_handed(self, engine: EngineInfo, addresses: Mapping[str, str]) -> Future[None]:
        """Let an engine's ranks take buckets from who has the same GPU; done when they have loaded all of them."""

        async def taken() -> None:
            request = wire.TakeIpc(dict(addresses))
            self._note(engine, (await self._client(engine.endpoint).ask(request, wire.Loaded)).how)

        return self._submit(taken(), "send", engine.url)

    def forget(self, engine: EngineInfo, directory: Path) -> Future[None]:
        """Let an engine unmap the files of this directory."""
        return self._submit(self._do(engine, wire.ForgetDirectory(directory)), "disconnect", engine.url)

    async def _do(self, engine: EngineInfo, request: wire.Request) -> None:
        await self._client(engine.endpoint).ask(request, wire.Answer)

    def receive(self, engine: EngineInfo, announcement: bytes) -> Future[None]:
        """Let an engine take the bucket that is announced; done when it has loaded it."""

        async def received() -> None:
            self._note(engine, await self._received(engine, announcement))

        return self._submit(received(), "send", engine.url)

    def receive_all(self, engine: EngineInfo, announcement: bytes) -> Future[HostSlices | None]:
        """Let an engine take a whole sync; done when it has loaded it. What its machines keep, where that is news."""

        async def received() -> HostSlices | None:
            message = await self._received(engine, announcement)
            with self._client(engine.endpoint).reading("the sync"):
                loaded = wire.decode(message)
                if not isinstance(loaded, wire.Loaded):
                    raise TypeError(f"it answered a relay with {message!r}")
            self._note(engine, loaded.how)
            return loaded.cuts

        return self._submit(received(), "send", engine.url)

    async def _received(self, engine: EngineInfo, announcement: bytes) -> str:
        try:
            return await self._client(engine.endpoint).receive_bucket(announcement)
        except EngineError as error:
            if wire.REFUSED not in error.rule:
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
        return wire.format_sum(*whole_sum(tensor))

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


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
