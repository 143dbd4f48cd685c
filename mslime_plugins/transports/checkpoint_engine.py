"""The transport `checkpoint_engine`: Moonshot's ParameterServer, one in each trainer rank, on its engine rank's GPU.

For engines on the trainer's GPUs, over any number of machines. A sender keeps what it has filled in the host's memory.
When all is filled, the ranks broadcast it to each other over the trainer's own process group, and each gives the
engine's rank on its GPU a CUDA handle of what arrived, over ZeroMQ. No process group has an engine in it.

To the ParameterServer a bucket is one tensor, whose name is what engines are told of it. So an engine loads buckets
here as it does with every other transport, and no bucket is torn apart.

The package (the extra `checkpoint-engine`) is imported when a rank meets the engines, and nowhere else. Of its private
parts two are touched, which is why one version is asked for (`VERSION`): its sockets wait for ever (`PatientSocket`),
and their names repeat in each new server.
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
"""Of the package `checkpoint-engine`."""
CHECKPOINT = "mslime"
POLL_MS = 100
GRACE_S = 60.0
"""How long a rank waits for its engine's rank when something has failed elsewhere: one that lives answers, and must
hear then that the sync is over."""
_FOR_ENGINES = (
    "install the extra `checkpoint-engine` for the engine too; or set weights.transport: disk with a weights.directory "
    "that all machines share, on one machine handles or shm"
)
_POLL_IN, _POLL_OUT = 1, 2
"""ZeroMQ's numbers."""


@dataclass(frozen=True)
class Arrived:
    """A bucket that is kept: nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


@dataclass
class Failures:
    """What went wrong in one update, on any rank: the first words win.

    Args:
        store: that all ranks reach.
        key: of this update.
        ends: time (`time.monotonic`) after which nobody waits any more.
    """

    store: TCPStore
    key: str
    ends: float
    _noticed: float | None = None

    def report(self, words: str) -> None:
        """Let every rank know."""
        self.store.compare_set(self.key, "", words)

    def words(self) -> str:
        """Of the first failure that was reported; empty: there is none."""
        return self.store.get(self.key).decode(errors="replace") if self.store.check([self.key]) else ""

    def gives_up(self, whom: str) -> bool:
        """Whether it is no use to wait any longer for `whom`."""
        now = time.monotonic()
        if self._noticed is None and self.store.check([self.key]):
            self._noticed = now
        if now > self.ends:
            self.report(f"{whom} does not answer in time")
        return now > self.ends or (self._noticed is not None and now > self._noticed + GRACE_S)


@dataclass
class PatientSocket:
    """A ParameterServer's socket, at which nobody waits for ever.

    The server's own `send` waits until an engine's rank has connected, and `recv` until it answers. From when that is
    of no use, nothing is sent, and what is received says so: the server takes it for an engine's refusal, agrees with
    all other ranks, and ends the update on all of them.

    Args:
        socket: ZeroMQ's, of the kind REQ.
        failures: of this update.
        whom: it talks to, for messages.
    """

    socket: Any
    failures: Failures
    whom: str
    given_up: bool = False

    def send_pyobj(self, said: object) -> None:
        """Send, unless it was given up."""
        if self._can(_POLL_OUT):
            self.socket.send_pyobj(said)

    def recv(self) -> bytes:
        """What the engine's rank answers: nothing where all is well."""
        if not self._can(_POLL_IN):
            return f"{self.whom} does not answer".encode()
        answer: bytes = self.socket.recv()
        if answer:
            self.failures.report(f"{self.whom}: {answer.decode(errors='replace').strip().splitlines()[-1]}")
        return answer

    def close(self) -> None:
        """Close it, also with words that nobody has fetched."""
        self.socket.close(linger=0)

    def _can(self, event: int) -> bool:
        while not self.given_up:
            if self.socket.poll(POLL_MS, event):
                return True
            self.given_up = self.failures.gives_up(self.whom)
        return False


@dataclass
class _Server:
    """The ParameterServer of this rank, and what it shares with the others."""

    made: Any
    store: TCPStore
    updates: int = 0
    failures: Failures | None = field(default=None)


class CheckpointEngineTransport(CollectiveTransport):
    """One trainer rank's part; on every rank, also on those that send nothing."""

    def __init__(self, link: Link) -> None:
        self.link, self._engines = link, tuple[EngineInfo, ...]()
        self._kept: dict[str, torch.Tensor] = {}
        self._store: TCPStore | None = None
        self._server: _Server | None = None

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Note who they are; `meet` meets them."""
        self._engines = tuple(engines)

    def start(self, bucket: Bucket, flat: torch.Tensor) -> Arrived:
        """Keep a copy in the host's memory, until `deliver`."""
        self._kept[wire.encode(wire.IpcBucket.of(bucket))] = flat.view(torch.uint8).to("cpu", copy=True)
        return Arrived()

    def disconnect(self) -> None:
        """Leave; pinned memory goes back to torch, which gives it to the next server."""
        self._kept, self._server, self._store = {}, None, None

    def offer(self) -> str:
        """See whether this rank can take part; of rank 0, where and by which number all meet."""
        engines, link = self._engines, self.link
        if any(engine.drafts for engine in engines):
            raise _unusable("an engine with a draft model asks for the handle twice, and there is one",
                            "start engines without one")  # fmt: skip
        if (ranks := sum(engine.ranks for engine in engines)) != link.ranks:
            raise _unusable(
                f"every one of {link.ranks} trainer ranks needs an engine's rank on its GPU, and {ranks} are there",
                "let engines fill the trainer's GPUs (cluster.trainer_ranks); where an engine has died, resume the "
                "run, which starts all of them",
            )
        _package()
        gpus, current = own_gpus()
        if not gpus or link.rank % gpus != current:
            raise _unusable(f"trainer rank {link.rank} is on GPU {current} of {gpus}, and the package expects it on "
                            "the one of its number", "let every rank see its own GPU alone, as Ray does")  # fmt: skip
        if link.rank:
            return ""
        ask_all(link.engine_port, engines, wire.CheckIpc(), link.deadline_s, _FOR_ENGINES)
        try:
            host = _outward(engines)
            self._store = open_store(host, link.ranks, timedelta(seconds=link.deadline_s))
            return f"{host} {self._store.port} {free_port(host)} {secrets.randbelow(1 << 30)}"
        except OSError as error:
            raise _unusable(
                f"trainer ranks have no address to meet at: {error}", "look at the machine's network"
            ) from error

    def meet(self, offers: Sequence[str]) -> None:
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
        except Exception as error:  # of a foreign package: it is raised on every rank
            raise _failed("connect", link, f"its ParameterServer does not start: {error!r}") from error
        made._zmq_addr_counter = int(first)  # else an engine's rank that waits for an older server hears this one
        server, bind = _Server(made, store), made._bind_zmq_socket
        made._bind_zmq_socket = lambda: _patient(bind(), server, link)
        self._store, self._server = store, server

    def load(self) -> None:
        """Put what was kept where the ParameterServer takes it from: pinned memory, which stays for the next sync."""
        assert self._server is not None, "not connected"
        kept, self._kept = self._kept, {}
        if not kept:
            return
        try:
            self._server.made.register_checkpoint(CHECKPOINT, named_tensors=kept, use_shared_memory_pool=True)
        except Exception as error:  # of a foreign package: it is raised on every rank
            raise _failed("send", self.link, f"weights cannot be pinned in the host's memory: {error!r}") from error

    def deliver(self, ends: float) -> None:
        """Bring what all ranks have loaded to the engines, with all other ranks."""
        assert self._server is not None, "not connected"
        server, made = self._server, self._server.made
        server.updates += 1
        failures = server.failures = Failures(server.store, f"failed {server.updates}", ends)
        try:
            made.gather_metas(CHECKPOINT)
            made.update(CHECKPOINT, self._ask(failures))
        except Exception as error:  # of a foreign package: it is raised on every rank
            raise _failed("send", self.link, failures.words() or repr(error)) from error
        finally:
            if self._sends:
                made.unregister_checkpoint(CHECKPOINT)  # its memory stays
        if words := failures.words():
            raise _failed("send", self.link, words)

    @property
    def _sends(self) -> bool:
        return self.link.rank in self.link.senders

    def _ask(self, failures: Failures) -> Callable[[Sequence[tuple[str, str]]], None]:
        """What a ParameterServer calls with (GPU, address of its rank's socket) of all ranks: rank 0 asks engines."""

        def ask(addresses: Sequence[tuple[str, str]]) -> None:
            if self.link.rank:
                return
            request = wire.TakeIpc(dict(addresses))
            try:
                asked = [self.link.engine_port.ask(engine, request) for engine in self._engines]
                left = max(failures.ends - time.monotonic(), 0.0)
                all_done(asked, "send", f"{len(asked)} engines", left + GRACE_S)
            except WeightSyncError as error:
                failures.report(f"{error.value}: {error.rule}")
            except Exception as error:  # in a thread of the package, which would lose it
                failures.report(repr(error))

        return ask


def own_gpus() -> tuple[int, int]:
    """How many GPUs this process sees, and which one it works on."""
    count = torch.cuda.device_count()
    return count, torch.cuda.current_device() if count else 0


def _patient(bound: tuple[Any, Any], server: _Server, link: Link) -> tuple[PatientSocket, Any]:
    """In the place of what a ParameterServer has bound."""
    socket, addresses = bound
    assert server.failures is not None
    return PatientSocket(socket, server.failures, f"the engine on the GPU of trainer rank {link.rank}"), addresses


def _package() -> Any:
    """The module with the ParameterServer. Raises WeightSyncError."""
    way_out = f"install the extra on all machines of the run (pip install 'mslime[checkpoint-engine]', {VERSION})"
    os.environ.setdefault("LOGURU_LEVEL", "WARNING")  # it logs two lines for each bucket, on every rank
    try:
        package: Any = importlib.import_module("checkpoint_engine")
        if package.__version__ != VERSION:
            raise _unusable(f"checkpoint-engine {package.__version__} is installed, and {VERSION} was read", way_out)
        return importlib.import_module("checkpoint_engine.ps")
    except ImportError as error:
        raise _unusable(f"the package checkpoint-engine is not usable here: {error}", way_out) from error


@contextmanager
def _as_the_package_wants_it(link: Link) -> Generator[None]:
    """RANK in the environment, where rank 0 is looked for; and no Mooncake, which it would start on every adapter.

    How large its buckets may be it reads in each update: as large as ours, of which it holds three on a GPU.
    """
    os.environ["PS_MAX_BUCKET_SIZE_GB"] = str(link.bucket_bytes / (1 << 30))
    rank, mooncake = os.environ.get("RANK"), sys.modules.get("mooncake.engine")
    os.environ["RANK"] = str(link.rank)
    sys.modules["mooncake.engine"] = None  # pyright: ignore[reportArgumentType]  # what makes its import fail
    try:
        yield
    finally:
        del os.environ["RANK"], sys.modules["mooncake.engine"]
        if rank is not None:
            os.environ["RANK"] = rank
        if mooncake is not None:
            sys.modules["mooncake.engine"] = mooncake


def _outward(engines: Sequence[EngineInfo]) -> str:
    """The address of this machine by which it reaches an engine elsewhere, where there is one."""
    addresses = [own_address(engine.url) for engine in engines]
    return next((address for address in addresses if not address.startswith("127.")), addresses[0])


def _failed(phase: str, link: Link, words: str) -> WeightSyncError:
    return sync_error(phase, f"checkpoint-engine of trainer rank {link.rank}", words)


def _unusable(rule: str, way_out: str) -> WeightSyncError:
    return WeightSyncError(
        "weights.transport", "checkpoint_engine", rule,
        f"{way_out}; or set disk with a weights.directory that all machines share, on one machine handles or shm",
    )  # fmt: skip
