"""How a filled bucket reaches the engines. One protocol; this file holds the broadcast over a process group.

The group spans one sender (rank 0) and every rank of every engine, and belongs to no trainer group: it is made the way
SGLang's `init_custom_process_group` makes it, so that both ends meet in the same store under the same names. Every wait
has a deadline, and an engine that answers with an error ends the wait at once, with the engine's own words.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import httpx
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from mslime.network import listen
from mslime.weights.errors import WeightSyncError, sync_error
from mslime.weights.http import EngineHttp, EngineInfo, encode, in_thread
from mslime.weights.plan import Bucket


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
        """Meet the engines. Raises WeightSyncError."""
        ...

    def start(self, bucket: Bucket, flat: torch.Tensor) -> Pending:
        """Begin to send `flat` [bucket.hf_numel]; it must not be written to before the wait is over."""
        ...

    def disconnect(self) -> None:
        """Leave the engines; safe to call twice."""
        ...


def open_store(host: str, world_size: int, timeout: timedelta, *, multi_tenant: bool = False) -> TCPStore:
    """A rendezvous store that this process serves on `host` alone: by itself, torch's listens on every address.

    Args:
        multi_tenant: `torch.distributed.rendezvous` at the same port in this process uses this store.
    """
    server = listen(host)
    port = server.getsockname()[1]
    return TCPStore(
        host, port, world_size, True, timeout,
        wait_for_workers=False, multi_tenant=multi_tenant, master_listen_fd=server.detach(),
    )  # fmt: skip


def own_address(engine_url: str) -> str:
    """The local address from which this machine reaches an engine: where the engine finds our store."""
    url = httpx.URL(engine_url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((url.host, url.port or 80))
        return probe.getsockname()[0]


def join_group(
    store: Store, backend: str, world_size: int, rank: int, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """A process group outside torch's default one, met by SGLang's `init_custom_process_group` of the same name.

    Torch has no public way to make one beside an existing default group; the private helper is what SGLang calls too.
    """
    make: Callable[..., tuple[dist.ProcessGroup, Store]] = cast(Any, c10d)._new_process_group_helper
    group, _ = make(
        world_size, rank, [], c10d.Backend(backend), PrefixStore(name, store), group_name=name, timeout=timeout
    )  # fmt: skip
    cast(Any, c10d)._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def enter_broadcast(flat: torch.Tensor, group: dist.ProcessGroup, stream: torch.cuda.Stream | None) -> dist.Work:
    """Begin to broadcast `flat` from this rank; for a thread, whose current device and stream are its own.

    Args:
        stream: on which `flat` was filled, None on a CPU.
    """
    with torch.cuda.stream(stream):  # type: ignore[arg-type]  # takes None, and then does nothing
        return cast("dist.Work", dist.broadcast(flat.view(torch.uint8), group=group, group_src=0, async_op=True))


class BroadcastTransport:
    """One flat broadcast a bucket to all engines at once.

    Args:
        name: of the process group; unique among the senders of all stages and runs that share an engine.
        backend: `nccl` on GPUs, `gloo` on CPUs.
        http: connections to the engines; the caller closes them.
        deadline_s: for meeting the engines, and for each bucket.
    """

    def __init__(self, name: str, backend: str, http: EngineHttp, deadline_s: float) -> None:
        self._name, self._backend, self._deadline_s = name, backend, deadline_s
        self._engines: tuple[EngineInfo, ...] = ()
        self._http = http
        self._bodies: dict[int, bytes] = {}
        self._group: dist.ProcessGroup | None = None
        self._entered: Future[dist.Work] | None = None
        self._store: Store | None = None

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Make the process group: every engine is asked to join while this rank waits in it.

        Raises:
            WeightSyncError: an engine refused, or did not come before the deadline.
        """
        assert self._group is None, "connected already"
        self._engines = tuple(engines)
        world_size = 1 + sum(engine.ranks for engine in engines)
        timeout = timedelta(seconds=self._deadline_s)
        host = own_address(engines[0].url)
        store = open_store(host, world_size, timeout)
        joins: list[Future[dict[str, Any]]] = []
        offset = 1
        for engine in engines:
            body = {"master_address": host, "master_port": store.port, "rank_offset": offset, "world_size": world_size,
                    "group_name": self._name, "backend": self._backend}  # fmt: skip
            joins.append(self._submit(engine, "/init_weights_update_group", body, "connect"))
            offset += engine.ranks
        self._store = store
        # In a thread of its own, so that an engine's refusal is heard while this rank still waits for it.
        joined = in_thread(join_group, store, self._backend, world_size, 0, self._name, timeout)
        self._await([joined, *joins], "connect", f"{len(engines)} engines", self._deadline_s)
        self._group = joined.result()

    def _submit(
        self, engine: EngineInfo, path: str, body: Mapping[str, object] | bytes, phase: str
    ) -> Future[dict[str, Any]]:
        return in_thread(self._http.post, engine, path, body, phase)

    @staticmethod
    def _await(futures: Sequence[Future[Any]], phase: str, where: str, deadline_s: float) -> None:
        done, waiting = wait(futures, timeout=deadline_s, return_when=FIRST_EXCEPTION)
        # An engine's own words first: a broken collective is only their echo.
        failures = [error for future in done if (error := future.exception()) is not None]
        for error in sorted(failures, key=lambda e: not isinstance(e, WeightSyncError)):
            if isinstance(error, WeightSyncError):
                raise error
            raise sync_error(phase, where, f"{type(error).__name__}: {error}") from error
        if waiting:
            raise sync_error(phase, where, f"not finished within {deadline_s:.0f} s")

    def start(self, bucket: Bucket, flat: torch.Tensor) -> PendingBroadcast:
        """Ask every engine to receive the bucket, and broadcast it."""
        assert self._group is not None, "not connected"
        body = self._body(bucket)
        answers = [self._submit(engine, "/update_weights_from_distributed", body, "send") for engine in self._engines]
        # In a thread of its own: over NCCL the first broadcast makes the communicator, and waits in it for every engine
        # without a deadline. SGLang makes its end when it receives the first bucket, so it cannot be made in `connect`.
        stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
        self._entered = in_thread(enter_broadcast, flat, self._group, stream)
        return PendingBroadcast(bucket, flat, self._entered, answers, self._deadline_s)

    def _body(self, bucket: Bucket) -> bytes:
        """The request for a bucket, which is the same at every sync."""
        if bucket.index not in self._bodies:
            self._bodies[bucket.index] = encode(
                {
                    "names": [entry.name for entry in bucket.entries],
                    "dtypes": [bucket.dtype] * len(bucket.entries),
                    "shapes": [list(entry.shape) for entry in bucket.entries],
                    "group_name": self._name,
                    "load_format": "flattened_bucket",
                    "flush_cache": False,  # once for the whole sync, by whoever holds the engines' pause
                }
            )
        return self._bodies[bucket.index]

    def disconnect(self) -> None:
        """Destroy the group at both ends. An engine that no longer answers is left alone."""
        group, self._group = self._group, None
        leaving = [
            self._submit(engine, "/destroy_weights_update_group", {"group_name": self._name}, "disconnect")
            for engine in (self._engines if group is not None else ())
        ]
        # A broadcast that was never met holds the group's lock.
        if group is not None and (self._entered is None or self._entered.done()):
            dist.destroy_process_group(group)
        wait(leaving, timeout=self._deadline_s)
        self._store = None


@dataclass
class PendingBroadcast:
    """One bucket in flight: the broadcast on our side, an HTTP answer from every engine."""

    bucket: Bucket
    flat: torch.Tensor
    entered: Future[dist.Work]
    answers: Sequence[Future[dict[str, Any]]]
    deadline_s: float

    def wait(self) -> None:
        """Return when the broadcast is done and every engine has loaded the bucket.

        Raises:
            WeightSyncError: from the engine that refused it, or when the deadline passes.
        """
        waiting: set[Future[Any]] = {self.entered, *self.answers}
        while waiting:  # each request keeps the deadline; the first that fails ends the wait for all
            done, waiting = wait(waiting, return_when=FIRST_EXCEPTION)
            for answer in done:
                if (error := answer.exception()) is not None:
                    raise self._name_bucket(error)
        try:
            self.entered.result().wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            raise sync_error("send", self.bucket.describe(), f"the broadcast broke: {error}") from error

    def _name_bucket(self, error: BaseException) -> WeightSyncError:
        rule = error.rule if isinstance(error, WeightSyncError) else repr(error)
        where = error.value if isinstance(error, WeightSyncError) else "engine"
        return sync_error("send", f"{self.bucket.describe()} to {where}", rule)
