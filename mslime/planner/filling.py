"""How the senders of a weight sync fill their buckets: rates, and every rank's walk through the plan."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from mslime.config.cluster import ClusterConfig
from mslime.weights.plan import DTYPE_BYTES, Bucket


@dataclass(frozen=True)
class Rates:
    """How fast each part of a sync goes: settings, not measurements.

    Attributes:
        network: bytes a second of one GPU's adapter, in one direction.
        nvlink: bytes a second into one GPU from others of its machine.
        copy: bytes a second that one GPU copies within its memory.
        request: seconds of a request to the engines beside its bytes, with the start of the collective that it asks
            for: one for each bucket of `broadcast`, one for a whole sync of `relay`.
        tensor: seconds of one tensor in a model's own loader.
        exchange: seconds in which all trainer ranks hear from each other.
        collective: seconds until a collective that nobody asks for by a request moves its first byte.
        host: bytes a second between one GPU and its host's memory, in one direction, while all GPUs of a machine copy.
        directory: bytes a second into a directory that machines share, by all who write at the same time.
        reading: bytes a second out of it, by all who read at the same time.
        cores: that ranks and engines share, where processors and not adapters carry a sync: over gloo.
    """

    network: float
    nvlink: float
    copy: float
    request: float
    tensor: float
    exchange: float
    collective: float = 0.0
    host: float = math.inf
    directory: float = math.inf
    reading: float = math.inf
    cores: float = math.inf


def rates_of(cluster: ClusterConfig) -> Rates:
    """The settings, in bytes and seconds."""
    return Rates(
        network=cluster.gpu_network_gbits * 1e9 / 8,
        nvlink=cluster.gpu_nvlink_gb_per_s * 1e9,
        copy=cluster.gpu_copy_gb_per_s * 1e9,
        request=cluster.sync_request_ms / 1e3,
        tensor=cluster.sync_tensor_us / 1e6,
        exchange=cluster.sync_exchange_ms / 1e3,
        collective=cluster.sync_collective_ms / 1e3,
        host=cluster.gpu_host_gb_per_s * 1e9,
        directory=cluster.directory_gb_per_s * 1e9,
        reading=cluster.directory_gb_per_s * 1e9,
    )


class Filling:
    """Every rank on its walk through the buckets that it packs a part of, as far as couriers let it.

    A sender holds two buckets: it begins to fill one when its courier has taken the one before, which is when the one
    before that is sent. Until then it takes part in gathers of others' that come before in the plan.
    """

    def __init__(self, buckets: Iterable[Bucket], rates: Rates, gpus_per_node: int) -> None:
        self._rates, self._gpus_per_node = rates, gpus_per_node
        self._walks: dict[int, deque[Bucket]] = {}
        for bucket in buckets:
            for rank in bucket.members:
                self._walks.setdefault(rank, deque()).append(bucket)
        self._free = dict.fromkeys(self._walks, 0.0)  # since when
        self._room = dict.fromkeys(self._walks, 0.0)  # likewise, for a bucket of its own; not where there is none yet
        self._couriers = dict.fromkeys(self._walks, 0.0)  # likewise, one that is sending is not in it
        self._filled: dict[int, tuple[float, Bucket]] = {}
        self._given: list[tuple[float, Bucket]] = []
        self._fill(self._walks)

    def given(self) -> list[tuple[float, Bucket]]:
        """Buckets that couriers have taken since the last call, and when."""
        given, self._given = self._given, []
        return given

    def sent(self, bucket: Bucket, at: float) -> None:
        """The bucket needs its sender no more: the courier takes the next."""
        self._couriers[bucket.sender] = at
        self._give(bucket.sender)
        self._fill((bucket.sender,))

    def _fill(self, ranks: Iterable[int]) -> None:
        """Fill the next bucket of these ranks, of which all members are free; then theirs."""
        todo = deque(ranks)
        while todo:
            walk = self._walks[todo.popleft()]
            if not walk:
                continue
            bucket = walk[0]
            sender = bucket.sender
            if sender not in self._room or any(self._walks[rank][0] is not bucket for rank in bucket.members):
                continue
            gathering, converting = fill_seconds(bucket, self._rates, self._gpus_per_node)
            gathered = max(self._room.pop(sender), *(self._free[rank] for rank in bucket.members)) + gathering
            for rank in bucket.members:
                self._walks[rank].popleft()
                self._free[rank] = gathered
            self._free[sender] = gathered + converting
            self._filled[sender] = self._free[sender], bucket
            self._give(sender)
            todo.extend(bucket.members)

    def _give(self, sender: int) -> None:
        if sender in self._filled and sender in self._couriers:
            filled, bucket = self._filled.pop(sender)
            self._room[sender] = max(filled, self._couriers.pop(sender))
            self._given.append((self._room[sender], bucket))


def fill_seconds(bucket: Bucket, rates: Rates, gpus_per_node: int) -> tuple[float, float]:
    """(packing and gathering, which take every member; converting, which takes the sender).

    What a bucket holds are neighbours in Megatron's buffer, and not packed, but for experts of stacks.
    """
    stacked = len({piece.name for piece in bucket.pieces}) < len(bucket.pieces)
    packing = local_bytes(bucket) / rates.copy if stacked else 0.0
    near, far = gathered(bucket, gpus_per_node)
    plain = bucket.converted_numel * DTYPE_BYTES[bucket.gathered_dtype]
    # Quantising reads all of a bucket once more.
    converting = (0 if bucket.in_order else plain) / rates.copy + (plain if bucket.packed_dtype else 0) / rates.copy
    return packing + max(near / rates.nvlink, far / rates.network), converting


def fill_on_shared_cores(buckets: Iterable[Bucket], rates: Rates, gpus_per_node: int) -> float:
    """Seconds that filling keeps the cores which others need as well, so that nothing hides it; 0 where nobody shares
    them.

    Every member packs; what is gathered keeps two of them busy, its sender's and its receiver's.
    """
    work = 0.0
    for bucket in buckets if math.isfinite(rates.cores) else ():
        gathering, converting = fill_seconds(bucket, rates, gpus_per_node)
        work += gathering * min(2, len(bucket.members)) + converting
    return work / rates.cores


def local_bytes(bucket: Bucket) -> int:
    return bucket.local_numel * DTYPE_BYTES[bucket.gathered_dtype]


def gathered(bucket: Bucket, gpus_per_node: int) -> tuple[int, int]:
    """Bytes that the sender receives from ranks of (its own machine, others)."""
    machine, local = bucket.sender // gpus_per_node, local_bytes(bucket)
    beside = sum(member // gpus_per_node == machine for member in bucket.members) - 1
    return beside * local, (len(bucket.members) - 1 - beside) * local
