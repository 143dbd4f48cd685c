"""Bytes of one weight sync on each link, and a lower bound of its time.

The numbers come from the weight plan of the sync itself. Trainer ranks fill hosts in order, engines the following ones.
NCCL's broadcast counts as its ring: every host receives the bytes once and forwards them once. The actual time is not
predicted; a run measures it as `weights/seconds`.

`broadcast` sends one bucket at a time to all engine ranks. With `relay` sender i sends only to rank i mod T of an
engine's T ranks on a host, its lane. That rank passes the bucket on within its host, while the other lanes receive. If
engines load by recorded copies, it passes on slices, of several lanes' buckets at once
(`engine_plugin/slices.py`). Every rank is assumed to keep the same fraction of every bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mslime.config.base import SHARES_AT_MOST
from mslime.config.cluster import ClusterConfig
from mslime.config.engines import SGLangConfig
from mslime.config.transports import traits_of
from mslime.config.weights import WeightsConfig
from mslime.weights.weight_plan import DTYPE_BYTES, Bucket, WeightPlan
from mslime_plugins.planner.engine import EngineMemory

CHANGED = 0.05
"""Fraction of the weights' bytes that `delta` sends: an assumption above the measurements of docs/weight_sync.md."""


@dataclass(frozen=True)
class LinkRates:
    """Bytes a second of the links of a sync: settings, not measurements.

    Attributes:
        network: of one GPU's adapter, in one direction.
        nvlink: into one GPU from others of its host.
        host: between one GPU and its host's memory, in one direction, while all GPUs of a host copy.
        directory: into or out of a directory that hosts share, over all concurrent users.
    """

    network: float
    nvlink: float
    host: float
    directory: float


def rates_of(cluster: ClusterConfig) -> LinkRates:
    """Rates from the settings."""
    return LinkRates(
        cluster.gpu_network_gbits * 1e9 / 8, cluster.gpu_nvlink_gb_per_s * 1e9, cluster.gpu_host_gb_per_s * 1e9,
        cluster.directory_gb_per_s * 1e9,
    )  # fmt: skip


@dataclass(frozen=True)
class Receiving:
    """How engines receive a bucket.

    Attributes:
        engines: their number; several engines take all buckets in one order.
        share: fraction of a bucket's bytes that one GPU keeps.
        recorded: whether they load by recorded copies, not tensor by tensor.
        ranks: number in each engine.
    """

    engines: int
    share: float
    recorded: bool
    ranks: int = 1

    def hands_on_shares(self, near: int) -> bool:
        """Whether `near` ranks of a host exchange slices instead of whole buckets."""
        return self.recorded and near > 1 and near * self.share <= SHARES_AT_MOST

    def sent(self, near: int) -> float:
        """Fraction of a bucket's bytes that `relay` sends to each host of an engine with `near` of its ranks."""
        machines, kept = self.ranks // near, min(1.0, near * self.share)
        return kept if self.recorded and machines > 1 and machines * kept <= SHARES_AT_MOST else 1.0


@dataclass(frozen=True)
class SenderSync:
    """Traffic of one sender in a sync.

    Attributes:
        rank: of the sender.
        number: its index among all senders.
        stage: its pipeline stage.
        buckets: gathers and broadcasts.
        sent: bytes that it broadcasts.
        gathered_near: bytes that it receives from ranks of its own host, over NVLink.
        gathered_far: bytes that it receives from other hosts, over its adapter.
        contributed: most bytes that another rank sends to it.
    """

    rank: int
    number: int
    stage: int
    buckets: int
    sent: int
    gathered_near: int
    gathered_far: int
    contributed: int


def sender_syncs(plan: WeightPlan, cluster: ClusterConfig) -> tuple[SenderSync, ...]:
    """The traffic of every sender with anything to send."""
    by_sender: dict[int, list[Bucket]] = {rank: [] for rank in plan.senders.everyone()}
    for bucket in plan.buckets:
        by_sender[bucket.sender].append(bucket)
    return tuple(
        _sender_sync(number, rank, buckets, cluster.gpus_per_node)
        for number, (rank, buckets) in enumerate(by_sender.items())
        if buckets
    )


def relayed(plan: WeightPlan, receiving: Receiving) -> WeightPlan:
    """The gathers of a plan under `relay`: a bucket sent in parts by its members at the same time counts as its
    sender's."""
    senders = set(plan.senders.everyone())
    buckets = (
        replace(bucket, members=(bucket.sender,)) if bucket.comes_in_parts(senders, [receiving.ranks]) else bucket
        for bucket in plan.buckets
    )
    return replace(plan, buckets=tuple(buckets))


def lane_bytes(syncs: Iterable[SenderSync], near: int, sent: float = 1.0) -> dict[int, int]:
    """With `relay`: bytes from senders for each of an engine's ranks on a host that receives any.

    Args:
        near: number of these ranks (`near_ranks`).
        sent: see `Receiving.sent`.
    """
    lanes: dict[int, int] = {}
    for sender in syncs:
        lane = sender.number % near
        lanes[lane] = lanes.get(lane, 0) + int(sent * sender.sent)
    return lanes


def bounds(
    transport: str, weights: WeightsConfig, syncs: Sequence[SenderSync], receiving: Receiving | None,
    cluster: ClusterConfig,
) -> dict[str, float]:  # fmt: skip
    """Lower bounds of a whole sync in seconds, by limiting link; for a user's transport those of `broadcast`.

    Every engine takes all bytes, one bucket at a time, while senders fill the next ones.
    """
    rates = rates_of(cluster)
    fill = max((max(s.gathered_far / rates.network, s.gathered_near / rates.nvlink) for s in syncs), default=0.0)
    if traits_of(transport).passes_on and receiving is not None:
        return {"fill": fill, **relay_bounds(syncs, rates, receiving, cluster.gpus_per_node)}
    wire = sum(s.sent for s in syncs) * _seconds_a_byte(transport, weights, rates, receiving, cluster)
    return {"fill": fill, "wire": wire}


def _seconds_a_byte(
    transport: str, weights: WeightsConfig, rates: LinkRates, receiving: Receiving | None, cluster: ClusterConfig
) -> float:
    """Seconds per byte into an engine, which reads a bucket at the same time as the others."""
    if receiving is None:
        return 1 / rates.network
    gpus, near = receiving.engines * receiving.ranks, near_ranks(receiving.ranks, cluster.gpus_per_node)
    files = -(-gpus // cluster.gpus_per_node) / rates.directory + 1 / rates.host
    share = CHANGED if traits_of(transport).sends_changes else 1
    match traits_of(weights.carrier_of(transport)).way:
        case "gpus":
            return (gpus - cluster.colocated) / rates.nvlink  # all but the sender's own, at the same time
        case "host":
            return 1 / rates.host
        case "directory":
            return share * files
        case "adapters":
            return receiving.engines / rates.network + (near - 1) / near / rates.nvlink
        case _:
            return share / rates.network


def relay_bounds(
    syncs: Sequence[SenderSync], rates: LinkRates, receiving: Receiving, gpus_per_node: int
) -> dict[str, float]:
    """Lower bounds of a sync by `relay`.

    Wire: a lane is one adapter, and so is a sender, which sends each host of an engine its slice, or the whole bucket
    to all at once. Inside: a GPU receives over NVLink what its adapter does not deliver. Of r GPUs on a host the mean
    one receives (r - 1) / r of its slice, or of the whole bucket.
    """
    near = near_ranks(receiving.ranks, gpus_per_node)
    taken = sum(s.sent for s in syncs) * (receiving.share if receiving.hands_on_shares(near) else 1.0)
    sent, machines = receiving.sent(near), receiving.ranks // near
    leaving = max((s.sent for s in syncs), default=0) * (machines * sent if sent < 1 else 1.0)
    return {
        "wire": max(leaving, *lane_bytes(syncs, near, sent).values(), 0) / rates.network,
        "inside": taken * (near - 1) / near / rates.nvlink,
    }


def buckets_in_flight(transport: str, weights: WeightsConfig, engine: SGLangConfig, cluster: ClusterConfig) -> float:
    """Number of buckets that a weight update holds on an engine GPU.

    With `relay` one is passed on while the next arrives. Ranks that exchange slices pack theirs, and receive others
    into the memory of the current bucket. On an engine with several hosts several parts arrive at once.
    """
    if not traits_of(transport).passes_on:
        return 1
    near = near_ranks(engine.tp_size, cluster.gpus_per_node)
    recorded = _records(weights, engine)
    arriving = SHARES_AT_MOST if recorded and engine.tp_size > near else 1
    return arriving + (2 * SHARES_AT_MOST if recorded and near > 1 else 1)


def _records(weights: WeightsConfig, engine: SGLangConfig) -> bool:
    """Whether engines load by recorded copies, as those started by mslime do (`engine_plugin/copy_plan.py`)."""
    return weights.loader == "recorded" and not engine.urls


def receiving_of(weights: WeightsConfig, engine: SGLangConfig, sync: WeightPlan, memory: EngineMemory) -> Receiving:
    """How a run's engines receive a bucket."""
    return Receiving(
        engines=engine.gpus // engine.tp_size,
        share=min(1.0, memory.weights / max(1, sync.total_bytes)),
        recorded=_records(weights, engine),
        ranks=engine.tp_size,
    )


def near_ranks(ranks: int, gpus_per_node: int) -> int:
    """Number of an engine's ranks on one host."""
    return ranks // -(-ranks // gpus_per_node)


def _sender_sync(number: int, rank: int, buckets: Sequence[Bucket], gpus_per_node: int) -> SenderSync:
    received = [gathered(bucket, gpus_per_node) for bucket in buckets]
    return SenderSync(
        rank=rank,
        number=number,
        stage=buckets[0].stage,
        buckets=len(buckets),
        sent=sum(bucket.hf_bytes for bucket in buckets),
        gathered_near=sum(near for near, _ in received),
        gathered_far=sum(far for _, far in received),
        contributed=sum(local_bytes(bucket) for bucket in buckets if len(bucket.members) > 1),
    )


def local_bytes(bucket: Bucket) -> int:
    """Bytes that one of its members packs."""
    return bucket.local_numel * DTYPE_BYTES[bucket.gathered_dtype]


def gathered(bucket: Bucket, gpus_per_node: int) -> tuple[int, int]:
    """Bytes that the sender receives from ranks of (its own host, others)."""
    machine, local = bucket.sender // gpus_per_node, local_bytes(bucket)
    beside = sum(member // gpus_per_node == machine for member in bucket.members) - 1
    return beside * local, (len(bucket.members) - 1 - beside) * local
