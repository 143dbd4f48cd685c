"""The transport `checkpoint_engine`: Moonshot's ParameterServer, one in each trainer rank, on its engine rank's GPU.

For engines on the trainer's GPUs, on any number of hosts. A sender keeps its filled buckets in host memory. Once all
are filled, the ranks broadcast them over the trainer's own process group. Each rank then passes the result to the
engine process on the same GPU as a CUDA handle, over ZeroMQ. No process group contains an engine.

For the ParameterServer a bucket is one tensor, whose name describes it to engines. So engines load buckets as with
every other transport, and buckets are never split.

The package (the extra `checkpoint-engine`) is imported only when a rank connects with the engines. One version is
required (`VERSION`), because two private parts are changed: its sockets wait without a deadline (`PatientSocket`), and
their names repeat in each new server.
"""

from __future__ import annotations

import importlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from mslime.config.errors import WeightSyncError, sync_error
from mslime.config.keys import EngineInfo
from mslime.engine_plugin import wire
from mslime.network import free_port, own_address
from mslime.weights.broadcast import open_store
from mslime.weights.transport import CollectiveTransport, Link, all_done, ask_all
from mslime.weights.weight_plan import Bucket

VERSION = "0.4.2"
"""Required version of the package `checkpoint-engine`."""
CHECKPOINT = "mslime"
POLL_MS = 100
GRACE_S = 60.0
"""Seconds that a rank waits for its engine's rank after a failure elsewhere: a live engine rank answers, and must then
get the end of the sync."""
_FOR_ENGINES = (
    "install the extra `checkpoint-engine` for the engine too; or set weights.transport: disk with a weights.directory "
    "that all hosts share, or on one host handles or shm"
)
_POLL_IN, _POLL_OUT = 1, 2
"""ZeroMQ's constants."""


@dataclass(frozen=True)
class ArrivedBucket:
    """A bucket that is kept: nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


@dataclass
class UpdateFailures:
    """Errors of one update on any rank; the first report counts.

    Args:
        store: shared by all ranks.
        key: of this update.
        ends: time (`time.monotonic`) after which no rank waits.
    """

    store: TCPStore
    key: str
    ends: float
    _noticed: float | None = None

    def report(self, reason: str) -> None:
        """Report an error to every rank."""
        self.store.compare_set(self.key, "", reason)

    def reason(self) -> str:
        """The first reported error; empty if there is none."""
        return self.store.get(self.key).decode(errors="replace") if self.store.check([self.key]) else ""

    def gives_up(self, peer: str) -> bool:
        """Whether further waiting for `peer` is pointless."""
        now = time.monotonic()
        if self._noticed is None and self.store.check([self.key]):
            self._noticed = now
        if now > self.ends:
            self.report(f"{peer} does not answer in time")
        return now > self.ends or (self._noticed is not None and now > self._noticed + GRACE_S)


@dataclass
class PatientSocket:
    """A ParameterServer's socket with a deadline.

    The server's own `send` waits until an engine's rank has connected, and `recv` until it answers. Once waiting is
    pointless, nothing is sent, and `recv` returns an error. The server treats it as an engine's refusal, agrees with
    all other ranks, and ends the update on all of them.

    Args:
        socket: ZeroMQ's, of the kind REQ.
        failures: of this update.
        peer: the peer's name, for messages.
    """

    socket: Any
    failures: UpdateFailures
    peer: str
    given_up: bool = False

    def send_pyobj(self, value: object) -> None:
        """Send, unless waiting is pointless."""
        if self._can(_POLL_OUT):
            self.socket.send_pyobj(value)

    def recv(self) -> bytes:
        """The answer of the engine's rank: empty on success."""
        if not self._can(_POLL_IN):
            return f"{self.peer} does not answer".encode()
        answer: bytes = self.socket.recv()
        if answer:
            self.failures.report(f"{self.peer}: {answer.decode(errors='replace').strip().splitlines()[-1]}")
        return answer

    def close(self) -> None:
        """Close it, even with unread messages."""
        self.socket.close(linger=0)

    def _can(self, event: int) -> bool:
        while not self.given_up:
            if self.socket.poll(POLL_MS, event):
                return True
            self.given_up = self.failures.gives_up(self.peer)
        return False


@dataclass
class _Server:
    """The ParameterServer of this rank, and its shared state."""

    made: Any
    store: TCPStore
    updates: int = 0
    failures: UpdateFailures | None = field(default=None)


class CheckpointEngineTransport(CollectiveTransport):
    """One trainer rank's part; exists on every rank, including those that send nothing."""

    def __init__(self, link: Link) -> None:
        self.link, self._engines = link, tuple[EngineInfo, ...]()
        self._kept: dict[str, torch.Tensor] = {}
        self._store: TCPStore | None = None
        self._server: _Server | None = None

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Store the engines; `connect_ranks` connects."""
        self._engines = tuple(engines)

    def start(self, bucket: Bucket, flat: torch.Tensor) -> ArrivedBucket:
        """Keep a copy in host memory, until `deliver`."""
        self._kept[wire.encode(wire.IpcBucket.of(bucket))] = flat.view(torch.uint8).to("cpu", copy=True)
        return ArrivedBucket()

    def disconnect(self) -> None:
        """Disconnect; pinned memory returns to torch, which reuses it for the next server."""
        self._kept, self._server, self._store = {}, None, None

    def offer(self) -> str:
        """Check whether this rank can take part; on rank 0, returns the rendezvous address and number."""
        engines, link = self._engines, self.link
        if any(engine.drafts for engine in engines):
            raise _unusable("engines with a draft model are not supported: they open the handle twice",
                            "start engines without one")  # fmt: skip
        if (ranks := sum(engine.ranks for engine in engines)) != link.ranks:
            raise _unusable(
                f"each of {link.ranks} trainer ranks needs an engine rank on its GPU, and there are {ranks}",
                "let engines fill the trainer's GPUs (cluster.trainer_ranks); if an engine has died, resume the "
                "run, which restarts all of them",
            )
        _package()
        gpus, current = own_gpus()
        if not gpus or link.rank % gpus != current:
            raise _unusable(f"trainer rank {link.rank} is on GPU {current} of {gpus}, and the package expects it on "
                            "the GPU with its number", "show each rank only its own GPU, as Ray does")  # fmt: skip
        if link.rank:
            return ""
        ask_all(link.engine_port, engines, wire.CheckIpc(), link.deadline_s, _FOR_ENGINES)
        try:
            host = _outward(engines)
            self._store = open_store(host, link.ranks, timedelta(seconds=link.deadline_s))
            return f"{host} {self._store.port} {free_port(host)} {secrets.randbelow(1 << 30)}"
        except OSError as error:
            raise _unusable(
                f"trainer ranks have no address to connect to: {error}", "check the host's network"
            ) from error

    def connect_ranks(self, offers: Sequence[str]) -> None:
        """Start the ParameterServer, with all other ranks."""
        link = self.link
        host, port, own, first = offers[0].split()
        try:
            store = self._store or TCPStore(host, int(port), link.ranks, False, timedelta(seconds=link.deadline_s),
                                            wait_for_workers=False)  # fmt: skip
            with _as_the_package_wants_it(link):
                made: Any = _package().ParameterServer(
                    rank=link.rank, world_size=link.ranks, auto_pg=False, gpu_count=own_gpus()[0],
                    master_addr=host, master_port=int(own),
                )  # fmt: skip
        except Exception as error:  # of a third-party package: it is raised on every rank
            raise _failed("connect", link, f"its ParameterServer does not start: {error!r}") from error
        # otherwise an engine's rank that waits for an older server would receive from this one
        made._zmq_addr_counter = int(first)
        server, bind = _Server(made, store), made._bind_zmq_socket
        made._bind_zmq_socket = lambda: _patient(bind(), server, link)
        self._store, self._server = store, server

    def load(self) -> None:
        """Copy the kept buckets to the ParameterServer's pinned memory, which is reused by the next sync."""
        assert self._server is not None, "not connected"
        kept, self._kept = self._kept, {}
        if not kept:
            return
        try:
            self._server.made.register_checkpoint(CHECKPOINT, named_tensors=kept, use_shared_memory_pool=True)
        except Exception as error:  # of a third-party package: it is raised on every rank
            raise _failed("send", self.link, f"weights cannot be pinned in host memory: {error!r}") from error

    def deliver(self, ends: float) -> None:
        """Send the buckets of all ranks to the engines, together with all other ranks."""
        assert self._server is not None, "not connected"
        server, made = self._server, self._server.made
        server.updates += 1
        failures = server.failures = UpdateFailures(server.store, f"failed {server.updates}", ends)
        try:
            made.gather_metas(CHECKPOINT)
            made.update(CHECKPOINT, self._ask(failures))
        except Exception as error:  # of a third-party package: it is raised on every rank
            raise _failed("send", self.link, failures.reason() or repr(error)) from error
        finally:
            if self._sends:
                made.unregister_checkpoint(CHECKPOINT)  # its memory is kept
        if reason := failures.reason():
            raise _failed("send", self.link, reason)

    @property
    def _sends(self) -> bool:
        return self.link.rank in self.link.senders

    def _ask(self, failures: UpdateFailures) -> Callable[[Sequence[tuple[str, str]]], None]:
        """The callback of a ParameterServer, with (GPU, address of its rank's socket) of all ranks: rank 0 requests
        engines."""

        def ask(addresses: Sequence[tuple[str, str]]) -> None:
            if self.link.rank:
                return
            request = wire.TakeIpc(dict(addresses))
            try:
                pending = [self.link.engine_port.ask(engine, request) for engine in self._engines]
                left = max(failures.ends - time.monotonic(), 0.0)
                all_done(pending, "send", f"{len(pending)} engines", left + GRACE_S)
            except WeightSyncError as error:
                failures.report(f"{error.value}: {error.rule}")
            except Exception as error:  # in a thread of the package, which would lose it
                failures.report(repr(error))

        return ask


def own_gpus() -> tuple[int, int]:
    """Number of GPUs visible to this process, and the index of its own."""
    count = torch.cuda.device_count()
    return count, torch.cuda.current_device() if count else 0


def _patient(bound: tuple[Any, Any], server: _Server, link: Link) -> tuple[PatientSocket, Any]:
    """Wrap the socket that a ParameterServer has bound; keep its addresses."""
    socket, addresses = bound
    assert server.failures is not None
    return PatientSocket(socket, server.failures, f"the engine on the GPU of trainer rank {link.rank}"), addresses


def _package() -> Any:
    """Import the module with the ParameterServer. Raises WeightSyncError."""
    hint = f"install the extra on all hosts of the run (pip install 'mslime[checkpoint-engine]', {VERSION})"
    os.environ.setdefault("LOGURU_LEVEL", "WARNING")  # it logs two lines per bucket on every rank
    try:
        package: Any = importlib.import_module("checkpoint_engine")
        if package.__version__ != VERSION:
            raise _unusable(f"checkpoint-engine {package.__version__} is installed; required is {VERSION}", hint)
        return importlib.import_module("checkpoint_engine.ps")
    except ImportError as error:
        raise _unusable(f"the package checkpoint-engine is not usable here: {error}", hint) from error


@contextmanager
def _as_the_package_wants_it(link: Link) -> Generator[None]:
    """Set RANK in the environment, which the package reads, and disable Mooncake, which it would start on every
    adapter.

    It reads the limit of its buckets in each update: the size of ours, of which it holds three on a GPU.
    """
    os.environ["PS_MAX_BUCKET_SIZE_GB"] = str(link.bucket_bytes / (1 << 30))
    rank, mooncake = os.environ.get("RANK"), sys.modules.get("mooncake.engine")
    os.environ["RANK"] = str(link.rank)
    sys.modules["mooncake.engine"] = None  # pyright: ignore[reportArgumentType]  # makes its import fail
    try:
        yield
    finally:
        del os.environ["RANK"], sys.modules["mooncake.engine"]
        if rank is not None:
            os.environ["RANK"] = rank
        if mooncake is not None:
            sys.modules["mooncake.engine"] = mooncake


def _outward(engines: Sequence[EngineInfo]) -> str:
    """The address of this host for engines on other hosts, if there are any."""
    addresses = [own_address(engine.url) for engine in engines]
    return next((address for address in addresses if not address.startswith("127.")), addresses[0])


def _failed(phase: str, link: Link, reason: str) -> WeightSyncError:
    return sync_error(phase, f"checkpoint-engine of trainer rank {link.rank}", reason)


def _unusable(rule: str, hint: str) -> WeightSyncError:
    return WeightSyncError(
        "weights.transport", "checkpoint_engine", rule,
        f"{hint}; or set disk with a weights.directory that all hosts share, or on one host handles or shm",
    )  # fmt: skip
