"""Bytes that one weight sync moves over each link: gathers within a stage, then broadcasts to the engines.

Read off the weight plan that the sync itself follows. Trainer ranks fill machines in order, engines the machines after
them. NCCL's broadcast is counted as its ring: every machine receives the bytes once and forwards them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mslime.config.cluster import ClusterConfig
from mslime.weights.plan import DTYPE_BYTES, Bucket, WeightPlan

NVLINK_BYTES_PER_SECOND = 450e9
"""Fourth-generation NVLink, one direction."""


@dataclass(frozen=True)
class SenderSync:
    """What one sender's part of a sync moves.

    Attributes:
        rank: of the sender.
        stage: its pipeline stage.
        buckets: gathers and broadcasts.
        sent: bytes that it broadcasts.
        gathered_near: bytes that it receives from ranks of its own machine, over NVLink.
        gathered_far: bytes that it receives from other machines, over its adapter.
        contributed: bytes that each other rank sends to it, at most.
    """

    rank: int
    stage: int
    buckets: int
    sent: int
    gathered_near: int
    gathered_far: int
    contributed: int


def sender_syncs(plan: WeightPlan, cluster: ClusterConfig) -> tuple[SenderSync, ...]:
    """The traffic of every sender that has something to send."""
    by_sender: dict[int, list[Bucket]] = {rank: [] for rank in plan.senders.everyone()}
    for bucket in plan.buckets:
        by_sender[bucket.sender].append(bucket)
    return tuple(_sender_sync(rank, buckets, cluster.gpus_per_node) for rank, buckets in by_sender.items() if buckets)


def network_bytes_per_second(cluster: ClusterConfig) -> float:
    """Of one GPU's adapter, in one direction."""
    return cluster.gpu_network_gbits * 1e9 / 8


def least_seconds(syncs: Sequence[SenderSync], network: float) -> float:
    """Lower bound of a whole sync: every engine GPU receives all bytes, one bucket at a time.

    Senders fill their buckets at the same time, hidden behind the sending of other buckets where that takes longer.

    Args:
        network: bytes a second of one GPU's adapter.
    """
    filling = (max(s.gathered_far / network, s.gathered_near / NVLINK_BYTES_PER_SECOND) for s in syncs)
    return max(sum(s.sent for s in syncs) / network, *filling, 0.0)


def _sender_sync(rank: int, buckets: Sequence[Bucket], gpus_per_node: int) -> SenderSync:
    near = far = contributed = 0
    for bucket in buckets:
        local = bucket.local_numel * DTYPE_BYTES[bucket.dtype]
        beside = sum(member // gpus_per_node == rank // gpus_per_node for member in bucket.members) - 1
        near += beside * local
        far += (len(bucket.members) - 1 - beside) * local
        contributed += local if len(bucket.members) > 1 else 0
    sent = sum(bucket.hf_bytes for bucket in buckets)
    return SenderSync(rank, buckets[0].stage, len(buckets), sent, near, far, contributed)
