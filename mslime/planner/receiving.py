"""What a run's engines do with a weight sync, as far as its plan needs it: what they hold of it, and what it takes."""

from __future__ import annotations

from mslime.config.choices import SHARES_AT_MOST
from mslime.config.schema import RunConfig
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


def buckets_held(config: RunConfig) -> float:
    """Buckets that fit into what a weight update needs on an engine GPU.

    With `relay` one is passed on while the next arrives. Ranks that hand on shares pack those that they give, and take
    others into the memory of the one that is passed on. Of an engine on several machines several parts arrive at once.
    """
    if config.transport != "relay":
        return 1
    near = near_ranks(config.sglang.tp_size, config.cluster.gpus_per_node)
    recorded = _records(config)
    arriving = SHARES_AT_MOST if recorded and config.sglang.tp_size > near else 1
    return arriving + (2 * SHARES_AT_MOST if recorded and near > 1 else 1)


def _records(config: RunConfig) -> bool:
    """Whether engines load by recorded copies: those that mslime started (`engine_plugin/copy_plan.py`)."""
    return config.weights.loader == "recorded" and not config.sglang.urls


def receiving_of(config: RunConfig, sync: WeightPlan, engine: EngineMemory) -> Receiving:
    """What a run's engines do with a bucket."""
    return Receiving(
        engines=config.sglang.gpus // config.sglang.tp_size,
        share=min(1.0, engine.weights / max(1, sync.total_bytes)),
        recorded=_records(config),
        ranks=config.sglang.tp_size,
    )


def bounds_of(
    config: RunConfig, syncs: tuple[SenderSync, ...], receiving: Receiving | None, rates: Rates
) -> dict[str, float]:
    """Lower bounds of a sync in seconds, by what it would be limited by; of a transport that is not predicted those of
    `broadcast`."""
    if receiving is None:
        return bounds(syncs, rates)
    if config.transport == "relay":
        return relay_bounds(syncs, rates, receiving, config.cluster.gpus_per_node)
    return bounds(syncs, rates, way_of(config, rates, receiving))


def prediction_of(
    config: RunConfig, sync: WeightPlan, receiving: Receiving | None, rates: Rates
) -> SyncPrediction | None:
    """Of a sync after engines have recorded how to load, where they do; None for a user's transport, and for
    adapters, which go through files."""
    transport, per_node = config.transport, config.cluster.gpus_per_node
    if receiving is None or config.syncs_adapters:
        return None
    if transport == "relay":
        return predict_relay(sync, rates, receiving, per_node)
    way = way_of(config, rates, receiving)
    return None if way is None else predict(sync, rates, receiving, per_node, way)
