"""What a run's engines do with a weight sync, as far as its plan needs it: what they hold of it, and what it takes."""

from __future__ import annotations

from mslime.config.choices import SHARES_AT_MOST
from mslime.config.cluster import ClusterConfig
from mslime.config.engines import SGLangConfig
from mslime.config.weights import WeightsConfig
from mslime.planner.engine import EngineMemory
from mslime.planner.filling import Rates
from mslime.planner.sync import (
    Receiving,
    SenderSync,
    SyncPrediction,
    bounds,
    near_ranks,
    predict,
    predict_relay,
    relay_bounds,
)
from mslime.planner.ways import way_of
from mslime.weights.plan import WeightPlan


def buckets_held(transport: str, weights: WeightsConfig, engine: SGLangConfig, cluster: ClusterConfig) -> float:
    """Buckets that fit into what a weight update needs on an engine GPU.

    With `relay` one is passed on while the next arrives. Ranks that hand on shares pack those that they give, and take
    others into the memory of the one that is passed on. Of an engine on several machines several parts arrive at once.
    """
    if transport != "relay":
        return 1
    near = near_ranks(engine.tp_size, cluster.gpus_per_node)
    recorded = _records(weights, engine)
    arriving = SHARES_AT_MOST if recorded and engine.tp_size > near else 1
    return arriving + (2 * SHARES_AT_MOST if recorded and near > 1 else 1)


def _records(weights: WeightsConfig, engine: SGLangConfig) -> bool:
    """Whether engines load by recorded copies: those that mslime started (`backends/sglang/recorded.py`)."""
    return weights.loader == "recorded" and not engine.urls


def receiving_of(weights: WeightsConfig, engine: SGLangConfig, sync: WeightPlan, memory: EngineMemory) -> Receiving:
    """What a run's engines do with a bucket."""
    return Receiving(
        engines=engine.gpus // engine.tp_size,
        share=min(1.0, memory.weights / max(1, sync.total_bytes)),
        recorded=_records(weights, engine),
        ranks=engine.tp_size,
    )


def bounds_of(
    transport: str,
    weights: WeightsConfig,
    cluster: ClusterConfig,
    syncs: tuple[SenderSync, ...],
    receiving: Receiving | None,
    rates: Rates,
) -> dict[str, float]:
    """Lower bounds of a sync in seconds, by what it would be limited by; of a transport that is not predicted those of
    `broadcast`."""
    if receiving is None:
        return bounds(syncs, rates)
    if transport == "relay":
        return relay_bounds(syncs, rates, receiving, cluster.gpus_per_node)
    return bounds(syncs, rates, way_of(transport, weights, cluster, rates, receiving))


def prediction_of(
    transport: str, weights: WeightsConfig, cluster: ClusterConfig, sync: WeightPlan, receiving: Receiving, rates: Rates
) -> SyncPrediction | None:
    """Of a sync after engines have recorded how to load, where they do; None for a user's transport."""
    per_node = cluster.gpus_per_node
    if transport == "relay":
        return predict_relay(sync, rates, receiving, per_node)
    way = way_of(transport, weights, cluster, rates, receiving)
    return None if way is None else predict(sync, rates, receiving, per_node, way)
