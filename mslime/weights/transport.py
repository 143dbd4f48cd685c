"""How a filled bucket reaches the engines: what a transport is, and which there are (`weights.transport`).

mslime's own are `broadcast`, `relay`, `shm`, `handles`, `disk`, `delta`, `mooncake` and `checkpoint_engine`; `auto` is
one of the first two.
A user's is named `module:function` and called with a `Link`; `contract.check_transport` says whether it keeps what is
promised here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from mslime.config.choices import AUTO, FileKind, MooncakeOver
from mslime.config.errors import WeightSyncError
from mslime.config.keys import AnnouncedBucket, BucketVersion, Endpoint, EngineInfo
from mslime.config.slices import HostSlices
from mslime.extensions import check_parameters, load_function
from mslime.weights.plan import Bucket
from mslime.weights.waiting import all_done

if TYPE_CHECKING:
    import torch

TRANSPORTS: Mapping[str, str] = {
    "broadcast": "mslime.weights.broadcast:BroadcastTransport",
    "shm": "mslime.weights.shm:ShmTransport",
    "handles": "mslime.weights.handles:HandleTransport",
    "disk": "mslime.weights.disk:DiskTransport",
    "delta": "mslime.weights.delta:DeltaTransport",
    "relay": "mslime.weights.relay:RelayTransport",
    "mooncake": "mslime.weights.mooncake:MooncakeTransport",
    "checkpoint_engine": "mslime.weights.checkpoint_engine:CheckpointEngineTransport",
}
"""Transports by the name that `weights.transport` gives them, and where each is: imported when it is used."""


class Receivers(Protocol):
    """The engines, as far as a sender needs them. Control hands it in: this room knows no engine by name.

    Calls about weights are futures, because an engine answers when the weights have arrived. They raise
    WeightSyncError, in the engine's own words.
    """

    def describe(self, engine: Endpoint) -> EngineInfo:
        """What a running engine is. Raises WeightSyncError."""
        ...

    def join(
        self, engine: EngineInfo, *, host: str, port: int, rank: int, world_size: int, name: str, backend: str,
        lane: int | None = None, machine: int | None = None,
    ) -> Future[None]:  # fmt: skip
        """Let an engine's ranks, numbered from `rank` on, join the process group `name`, whose store is there.

        Args:
            lane: one rank on each machine joins: that which receives from the sender of this number.
            machine: with `lane`, only the one on this machine of the engine.
        """
        ...

    def announce(self, bucket: AnnouncedBucket, group: str) -> bytes:
        """The description of a bucket that is broadcast in the process group `group`, for `receive`; the same for every
        engine and at every sync."""
        ...

    def announce_file(self, bucket: AnnouncedBucket, kind: FileKind, path: Path) -> bytes:
        """The description of a bucket that lies in a file, for `receive`."""
        ...

    def announce_version(self, bucket: AnnouncedBucket, group: str, version: BucketVersion) -> bytes:
        """The description of a bucket, or of changes of it, that is broadcast in the process group `group`, for
        `receive`."""
        ...

    def can_take_changes(self, engine: EngineInfo) -> Future[None]:
        """Done when an engine says that it can take changes by a broadcast."""
        ...

    def announce_relay(
        self, sync: str, lanes: Sequence[str], plan: str, buckets: Sequence[AnnouncedBucket],
        senders: Sequence[Sequence[int]], cuts: str,
    ) -> bytes:  # fmt: skip
        """The description of a whole sync for `receive_all`, the same from every sender.

        Args:
            sync: names it.
            lanes: the senders' process groups, in their order.
            plan: names the buckets.
            buckets: the plan's; empty where the engines know it.
            senders: by bucket, the number of its lane.
            cuts: name of what each machine keeps, where it is sent no more; empty: whole buckets are sent.
        """
        ...

    def can_relay(self, engine: EngineInfo) -> Future[None]:
        """Done when an engine says that its ranks can pass buckets on."""
        ...

    def see(self, engine: EngineInfo, directory: Path) -> Future[None]:
        """Done when an engine says that it can take buckets in files of this directory."""
        ...

    def reach(self, engine: EngineInfo, place: Path, said: bytes) -> Future[None]:
        """Done when an engine has read these bytes in memory of this process (`mslime.remote_memory`)."""
        ...

    def announce_handed(self, bucket: AnnouncedBucket) -> bytes:
        """The description of a bucket that is handed to an engine's ranks on their own GPUs."""
        ...

    def can_take_handed(self, engine: EngineInfo) -> Future[None]:
        """Done when an engine says that its ranks can take buckets that are handed to them."""
        ...

    def take_handed(self, engine: EngineInfo, addresses: Mapping[str, str]) -> Future[None]:
        """Let an engine's ranks take what is handed to them; done when they have loaded all of it.

        Args:
            addresses: of who hands it out on each GPU, by the GPU.
        """
        ...

    def forget(self, engine: EngineInfo, directory: Path) -> Future[None]:
        """Let an engine unmap the files of this directory."""
        ...

    def receive(self, engine: EngineInfo, announcement: bytes) -> Future[None]:
        """Let an engine take a bucket that is announced, by a broadcast or from a file; done when all its ranks have
        loaded it.

        The future raises ChangesRefused where changes are announced and the engine has loaded nothing of them.
        """
        ...

    def receive_all(self, engine: EngineInfo, announcement: bytes) -> Future[HostSlices | None]:
        """Let an engine take all of a sync; done when all its ranks have loaded it. What its machines keep of each
        bucket, where that is news."""
        ...

    def leave(self, engine: EngineInfo, name: str) -> Future[None]:
        """Let an engine's ranks leave the process group `name`."""
        ...

    def digest(self, tensor: torch.Tensor) -> str:
        """What the ranks of an engine must together say of this whole tensor when weights are compared."""
        ...

    def checksum(self, tensor: torch.Tensor) -> int:
        """Sum of a tensor's bytes by which an engine finds out whether changes of it are right; signed, of 64 bits."""
        ...

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        ...


@dataclass(frozen=True)
class Link:
    """What a transport is made with.

    Attributes:
        name: of this sender's connection; unique among the senders of all stages and runs that share an engine.
        backend: of process groups: `nccl` on GPUs, `gloo` on CPUs.
        deadline_s: for meeting the engines, and for each bucket.
        receivers: the engines' requests. The caller closes them.
        group: what the names of all senders' connections begin with.
        rank: of this sender.
        directory: for weights in files; None where there is none (`weights.directory`), and where `delta` goes by
            broadcasts (`weights.delta_over`).
        senders: names of the connections of all senders, by rank, in their order; empty: this one is alone.
        mooncake_over: what `mooncake` reads over.
        ranks: of the trainer.
        bucket_bytes: of a bucket, at most, unless a single tensor is larger.
    """

    name: str
    backend: str
    deadline_s: float
    receivers: Receivers
    group: str = ""
    rank: int = 0
    directory: Path | None = None
    senders: Mapping[int, str] = field(default_factory=dict[int, str])
    mooncake_over: MooncakeOver = "rdma"
    ranks: int = 1
    bucket_bytes: int = 0


class Pending(Protocol):
    """A bucket on its way."""

    def wait(self) -> None:
        """Return when every engine has loaded the bucket.

        Raises:
            WeightSyncError: an engine refused it, the connection broke, or the deadline passed.
        """
        ...


class Transport(Protocol):
    """Moves filled buckets from one sender to all engines."""

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Meet the engines. Raises WeightSyncError when one of them refuses, or does not come in time."""
        ...

    def start(self, bucket: Bucket, flat: torch.Tensor) -> Pending:
        """Begin to send `flat` [bucket.hf_numel]; it must not be written to before the wait is over.

        The sender waits for a bucket before it starts the next, and converts the next meanwhile.
        """
        ...

    def disconnect(self) -> None:
        """Leave the engines; safe to call twice, and after a failure."""
        ...


@dataclass(frozen=True)
class Moved:
    """What one sender's part of a sync has moved to each engine.

    Attributes:
        bytes: of weights.
        changed: elements that are different from the version before.
        elements: of all buckets whose changes are known.
    """

    bytes: int = 0
    changed: int = 0
    elements: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.bytes + other.bytes, self.changed + other.changed, self.elements + other.elements)


@runtime_checkable
class MoveCounter(Protocol):
    """What a transport may have beside that does not move all of every bucket."""

    def moved(self) -> Moved:
        """In the sync that is under way, or was the last. Called on every sender."""
        ...


@runtime_checkable
class SyncObserver(Protocol):
    """What a transport may have beside, to be told of whole syncs."""

    def begin(self, version: int, buckets: Sequence[Bucket]) -> None:
        """Buckets of this version follow. Called on every sender.

        Args:
            buckets: of all senders, in the order of the plan.

        Raises:
            WeightSyncError: they cannot be sent.
        """
        ...

    def complete(self) -> None:
        """Every sender's buckets have been loaded by every engine. Raises WeightSyncError."""
        ...


@runtime_checkable
class OrderKeeper(Protocol):
    """What a transport may have beside whose engines put buckets into the order of the plan: its senders do not take
    turns, and engines wait for every bucket."""

    def skip(self, bucket: Bucket) -> None:
        """Let engines not wait for a bucket that cannot be sent: the sync has failed. Raises WeightSyncError."""
        ...


@runtime_checkable
class PartTaker(Protocol):
    """What a transport may have beside whose engines put some buckets together: each member sends what it packs."""

    def comes_in_parts(self, bucket: Bucket) -> bool:
        """Whether `start` and `skip` are called on every member of the bucket, with its part."""
        ...


@runtime_checkable
class InAnyOrder(Protocol):
    """What a transport may have beside whose engines may take buckets of different senders in different orders.

    Attributes:
        any_order: whether no engine waits for another one in it, so that its senders do not take turns.
    """

    @property
    def any_order(self) -> bool: ...


@runtime_checkable
class EveryRank(Protocol):
    """What a transport may have beside that needs every trainer rank to bring weights to engines, also those that send
    nothing: each of them has one, and connects it.

    `start` only keeps a bucket. Before ranks do anything with each other they agree that none has failed, so that
    nobody waits in a collective for one that does not come.
    """

    def offer(self) -> str:
        """What this rank has to say to all before they meet; by itself. Raises WeightSyncError when it cannot."""
        ...

    def meet(self, offers: Sequence[str]) -> None:
        """Meet the other ranks: collective, after `connect`. Raises WeightSyncError.

        Args:
            offers: of all ranks, by rank.
        """
        ...

    def load(self) -> None:
        """Make ready what was kept of a sync; by itself. Raises WeightSyncError."""
        ...

    def deliver(self, ends: float) -> None:
        """Bring it to every engine: collective. Raises WeightSyncError, on every rank where it does on one.

        Args:
            ends: time (`time.monotonic`) after which no rank waits for an engine any more.
        """
        ...


@runtime_checkable
class Preparer(Protocol):
    """What a transport may have beside that has work to do on a bucket for which no engine is needed."""

    def prepare_bucket(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Called before the sender has its turn; `start` follows, with the same bucket, unless the sync fails. Raises
        WeightSyncError."""
        ...


def takes_turns(transport: Transport, engines: int) -> bool:
    """Whether senders to so many engines send one after the other, in the order of the plan."""
    in_any_order = isinstance(transport, InAnyOrder) and transport.any_order
    return engines > 1 and not in_any_order and not isinstance(transport, OrderKeeper)


def group_name(group: str, sender: int) -> str:
    """The name of the connection of a trainer rank with the engines."""
    return f"{group}-rank{sender}"


def transport_for(engines: Sequence[EngineInfo], receivers: Receivers, deadline_s: float) -> str:
    """What `auto` comes to with these engines.

    `relay` where each is one rank that nobody has to pass a bucket on to: it then loads a bucket while the next one
    arrives, and takes part in as many process groups as with `broadcast`, with one other bucket in memory.

    Raises:
        WeightSyncError: an engine does not answer.
    """
    if any(engine.ranks > 1 or engine.drafts for engine in engines):
        return "broadcast"
    try:
        all_done([receivers.can_relay(engine) for engine in engines], "connect", f"{len(engines)} engines", deadline_s)
    except WeightSyncError as error:
        if error.field != "weights.transport":
            raise
        return "broadcast"  # a server that somebody else has started, without the plug-in
    return "relay"


MakeTransport = Callable[[Link], Transport]


def find_transport(spec: str) -> MakeTransport:
    """What makes the transport that `weights.transport` names.

    Raises:
        ConfigError: the function cannot be imported, or takes other arguments.
    """
    assert spec != AUTO, "transport_for says which one it is"
    make = load_function(TRANSPORTS.get(spec, spec), "weights.transport")
    check_parameters(make, spec, "weights.transport", "link")
    return make
