"""Bytes that one weight sync moves over each link: gathers within a stage, then broadcasts to the engines.

Read off the weight plan that the sync itself follows. Trainer ranks fill machines in order, engines the machines after
them. NCCL's broadcast is counted as its ring: every machine receives the bytes once and forwards them once.
"""

from __future__ import annotations

from dataclasses import dataclass

from mslime.config.cluster import ClusterConfig
from mslime.config.layout import ParallelLayout
from mslime.weights.plan import DTYPE_BYTES, WeightPlan

NVLINK_BYTES_PER_SECOND = 450e9
"""Fourth-generation NVLink, one direction."""


@dataclass(frozen=True)
class StageSync:
    """What one stage's part of a sync moves.

    Attributes:
        stage: pipeline stage.
        buckets: gathers and broadcasts.
        sent: bytes that the leader broadcasts.
        gathered_near: bytes that the leader receives from ranks of its own machine, over NVLink.
        gathered_far: bytes that it receives from other machines, over its adapter.
        contributed: bytes that each other rank of the gather groups sends, at most.
        seconds: lower bound: time of adapter and NVLink, gathers hidden behind broadcasts where those take longer.
    """

    stage: int
    buckets: int
    sent: int
    gathered_near: int
    gathered_far: int
    contributed: int
    seconds: float


def stage_syncs(plan: WeightPlan, layout: ParallelLayout, cluster: ClusterConfig) -> tuple[StageSync, ...]:
    """The traffic of every stage, in sending order."""
    return tuple(_stage_sync(plan, layout, stage, layout.leader(stage), cluster) for stage in range(layout.pp))


def network_bytes_per_second(cluster: ClusterConfig) -> float:
    """Of one GPU's adapter, in one direction."""
    return cluster.gpu_network_gbits * 1e9 / 8


def _stage_sync(plan: WeightPlan, layout: ParallelLayout, stage: int, leader: int, cluster: ClusterConfig) -> StageSync:
    near = far = contributed = 0
    buckets = plan.stage_buckets(stage)
    for bucket in buckets:
        size = layout.expert_size if bucket.expert else layout.tp
        beside = min(size, cluster.gpus_per_node - leader % cluster.gpus_per_node) - 1
        local = bucket.local_numel * DTYPE_BYTES[bucket.dtype]
        near += beside * local
        far += (size - 1 - beside) * local
        contributed += local if size > 1 else 0
    sent, network = sum(bucket.hf_bytes for bucket in buckets), network_bytes_per_second(cluster)
    seconds = max(sent / network, far / network, near / NVLINK_BYTES_PER_SECOND)
    return StageSync(stage, len(buckets), sent, near, far, contributed, seconds)
