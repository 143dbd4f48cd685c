"""The transport `broadcast`: one flat broadcast a bucket, over a process group of the sender with the engines.

The group spans one sender (rank 0) and every rank of every engine, and is independent of the trainer's groups. It is
created like the engines' end (`init_custom_process_group`), so both use the same store and names. Every wait has a
deadline, and an engine's error ends the wait at once and is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from mslime.config.errors import ChangesRefused, sync_error
from mslime.config.keys import BucketVersion, EngineInfo
from mslime.engine_plugin import wire
from mslime.network import listen, own_address
from mslime.threads import in_thread
from mslime.weights.transport import ChangeCarrier, Link, LoadingBucket, all_done, ask_all
from mslime.weights.weight_plan import Bucket

POLL_S = 0.001
"""Seconds between two polls of a send over NCCL; torch's own wait polls as often."""


def open_store(host: str, world_size: int, timeout: timedelta, *, multi_tenant: bool = False) -> TCPStore:
    """A rendezvous store that this process serves on `host` alone: torch's default listens on every address.

    Args:
        multi_tenant: let `torch.distributed.rendezvous` at the same port in this process use this store.
    """
    server = listen(host)
    port = server.getsockname()[1]
    return TCPStore(
        host, port, world_size, True, timeout,
        wait_for_workers=False, multi_tenant=multi_tenant, master_listen_fd=server.detach(),
    )  # fmt: skip


def join_group(
    store: Store, backend: str, world_size: int, rank: int, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """A process group outside torch's default one; engines join by `init_custom_process_group` with the same name.

    Torch has no public function for this beside an existing default group; engines call the same private helper.
    """
    make: Callable[..., tuple[dist.ProcessGroup, Store]] = cast(Any, c10d)._new_process_group_helper
    group, _ = make(
        world_size, rank, [], c10d.Backend(backend), PrefixStore(name, store), group_name=name, timeout=timeout
    )  # fmt: skip
    cast(Any, c10d)._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def enter_broadcast(flat: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to broadcast `flat` from this rank."""
    return cast("dist.Work", dist.broadcast(flat.view(torch.uint8), group=group, group_src=0, async_op=True))


def broadcast_each(
    parcels: Sequence[tuple[torch.Tensor, dist.ProcessGroup]], stream: torch.cuda.Stream | None, deadline_s: float,
    entered: Future[None] | None = None,
) -> str:  # fmt: skip
    """Broadcast each tensor in its group and wait; runs in a thread, whose device and stream it sets.

    Over gloo, connections close when the last reference to their group or to a broadcast in it is gone. So this returns
    an error as text, as an exception would hold both.

    NCCL's `wait` makes the stream wait, too. Trainers have one queue to the GPU for all streams
    (CUDA_DEVICE_MAX_CONNECTIONS), so later fills would wait for this send. So completion is polled first.

    Args:
        stream: on which the tensors were filled, None on a CPU.
        entered: done when all broadcasts have begun, or one cannot.
    """
    try:
        with torch.cuda.stream(stream):  # type: ignore[arg-type]  # takes None, and then does nothing
            try:
                works = [enter_broadcast(flat, group) for flat, group in parcels]
            finally:
                if entered is not None:
                    entered.set_result(None)
            ends = time.monotonic() + deadline_s
            while stream is not None and not all(work.is_completed() for work in works) and time.monotonic() < ends:
                time.sleep(POLL_S)
            for work in works:
                work.wait(timedelta(seconds=deadline_s))
    except RuntimeError as error:
        return str(error)
    return ""


def close_groups(groups: list[dist.ProcessGroup], *, broken: bool, entered: Future[None] | None) -> None:
    """Destroy process groups, and empty the list: see `broadcast_each`.

    Args:
        broken: a sync failed: abort what this rank or an engine waits for.
        entered: done when the newest broadcasts in the groups have begun; None before the first. Until then their
            thread holds the groups' locks, and engines may wait for what it begins later. So this returns at once, and
            that thread closes the groups.
    """

    def close(_: object = None) -> None:
        if broken:
            for group in groups:
                group.abort()
        while groups:
            dist.destroy_process_group(groups.pop())

    if entered is None:
        close()
    else:
        entered.add_done_callback(close)


def connect_group(
    link: Link,
    engines: Sequence[EngineInfo],
    joining: Sequence[int],
    sender: int | None = None,
    machine: int | None = None,
) -> tuple[dist.ProcessGroup, Store]:
    """Make a process group of this rank, its rank 0, with ranks of engines.

    Args:
        joining: number of ranks of each engine in it.
        sender: index of this sender, if only the ranks that receive from it join (`JoinRelayGroup`).
        machine: restricts these to one host of each engine.

    Returns:
        The group, and the store that must live as long as the group.

    Raises:
        WeightSyncError: an engine refused, or did not join before the deadline.
    """
    timeout, world_size = timedelta(seconds=link.deadline_s), 1 + sum(joining)
    host = own_address(engines[0].url)
    store = open_store(host, world_size, timeout)
    joins: list[Future[Any]] = []
    for engine, rank in zip(engines, accumulate(joining, initial=1), strict=False):
        group = wire.JoinGroup(link.name, host, store.port, rank, world_size, link.backend)
        request = group if sender is None else wire.JoinRelayGroup(sender, group, machine)
        joins.append(link.engine_port.ask(engine, request))
    # In a separate thread: an engine's refusal ends the wait at once, while the thread is still waiting for it.
    joined = in_thread(join_group, store, link.backend, world_size, 0, link.name, timeout)
    all_done([joined, *joins], "connect", f"{len(engines)} engines", link.deadline_s)
    return joined.result(), store


class BroadcastTransport(ChangeCarrier):
    """One flat broadcast a bucket to all engines at once.

    Changes are one broadcast: places, then values. Their number and checksums are in the request that announces it.

    Args:
        with_changes: changes of buckets may follow: engines record the version of loaded buckets.
    """

    def __init__(self, link: Link, with_changes: bool = False) -> None:
        self.link, self._with_changes = link, with_changes
        self.engines: tuple[EngineInfo, ...] = ()
        self._updates: dict[int, bytes] = {}
        self._group: dist.ProcessGroup | None = None
        self._entered: Future[None] | None = None  # of the newest broadcast
        self._store: Store | None = None
        self._version, self._under_way = 0, False

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Create the process group: request every engine to join while this rank waits in it.

        Raises:
            WeightSyncError: an engine refused, or did not join before the deadline.
        """
        assert self._group is None, "connected already"
        link, self.engines = self.link, tuple(engines)
        if self._with_changes:
            ask_all(link.engine_port, engines, wire.Ping(), link.deadline_s)
        self._group, self._store = connect_group(link, engines, [engine.ranks for engine in engines])

    def begin(self, version: int, buckets: Sequence[Bucket]) -> None:
        """Record the version. If changes may follow, it is sent with each bucket."""
        self._version, self._under_way = version, True

    def complete(self) -> None:
        """Record the end of a sync that has not failed."""
        self._under_way = False

    def start(self, bucket: Bucket, flat: torch.Tensor) -> PendingBroadcast:
        """Request every engine to receive the bucket, and broadcast it."""
        if self._with_changes:
            return self._send(bucket, flat, self._update(bucket, BucketVersion(self._version)))
        if bucket.index not in self._updates:  # the request is the same at every sync
            self._updates[bucket.index] = wire.update_request([bucket], self.link.name)
        return self._send(bucket, flat, self._updates[bucket.index])

    def start_changes(
        self, bucket: Bucket, version: BucketVersion, index: torch.Tensor, value: torch.Tensor
    ) -> PendingBroadcast:
        """Request every engine to receive changes of the bucket, and broadcast them."""
        packed = torch.cat([part.view(torch.uint8) for part in (index, value)])
        return self._send(bucket, packed, self._update(bucket, version))

    def _update(self, bucket: Bucket, version: BucketVersion) -> bytes:
        return wire.update_request([bucket], self.link.name, wire.FromBroadcast(version))

    def _send(self, bucket: Bucket, flat: torch.Tensor, update: bytes) -> PendingBroadcast:
        assert self._group is not None, "not connected"
        answers = [self.link.engine_port.load(engine, update) for engine in self.engines]
        if not flat.numel():
            return PendingBroadcast(bucket, answers, None)
        # In a separate thread: over NCCL the first broadcast creates the communicator and waits for every engine
        # without a deadline. Engines create their end at the first bucket, so this cannot happen in `connect`.
        stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
        self._entered = entered = Future[None]()
        sent = in_thread(broadcast_each, [(flat, self._group)], stream, self.link.deadline_s, entered)
        return PendingBroadcast(bucket, [sent, *answers], sent)

    def disconnect(self) -> None:
        """Destroy the group at both ends. An engine that no longer answers is left alone."""
        if self._group is None:
            return
        leave = wire.LeaveGroup(self.link.name)
        leaving = [self.link.engine_port.ask(engine, leave) for engine in self.engines]
        groups, entered = [self._group], self._entered
        self._group = self._entered = None
        close_groups(groups, broken=self._under_way, entered=entered)
        wait(leaving, timeout=self.link.deadline_s)
        self._store = None


@dataclass
class PendingBroadcast(LoadingBucket):
    """One bucket in flight: the broadcast on our side, if there is one, and an HTTP answer from every engine."""

    sent: Future[str] | None

    def refused(self) -> list[ChangesRefused]:
        """Like `LoadingBucket.refused`, after the broadcast is done."""
        refused = super().refused()
        if self.sent is not None and (broke := self.sent.result()):
            raise sync_error("send", self.bucket.describe(), f"the broadcast broke: {broke}")
        return refused
