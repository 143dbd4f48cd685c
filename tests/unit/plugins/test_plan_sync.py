"""What a plan says of a weight sync: bytes on each link and lower bounds, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mslime.config.base import SHARES_AT_MOST
from mslime.config.cluster import ClusterConfig
from mslime_plugins.planner.sync_bytes import Receiving, lane_bytes, near_ranks, relay_bounds, relayed, sender_syncs
from tests.fixtures.marks import MODELS, nightly_except
from tests.fixtures.syncs import BROADCAST, COLOCATED, RATES, SHIPPED, experts, planned, shipped, small_plan


def engine(ranks: int, share: float = 0.0, recorded: bool = False) -> Receiving:
    """One that hands on whole buckets, unless it has recorded."""
    return Receiving(engines=2, share=share, recorded=recorded, ranks=ranks)


def sharing(ranks: int, share: float) -> Receiving:
    return engine(ranks, share, recorded=True)


def test_a_gather_takes_the_link_that_it_crosses() -> None:
    # Three quarters of 800 bytes come from others: all of one machine, or 200 near and 400 far of two.
    plan = small_plan([experts(0, 800, members=(0, 1, 2, 3))])
    for per_node, near, far in ((4, 600, 0), (2, 200, 400)):
        (found,) = sender_syncs(plan, ClusterConfig(gpus_per_node=per_node))
        assert (found.gathered_near, found.gathered_far, found.sent, found.contributed) == (near, far, 800, 200)


def test_the_lane_of_a_sender_follows_its_number_not_its_rank() -> None:
    alone = small_plan([experts(3), experts(6)])
    assert lane_bytes(sender_syncs(alone, ClusterConfig()), 3) == {0: 400}
    assert lane_bytes(sender_syncs(alone, ClusterConfig()), 4) == {3: 200, 2: 200}


def test_nobody_gathers_what_comes_in_parts() -> None:
    both, other = small_plan([experts(1, 200, members=(0, 1))]), small_plan([experts(1, 200, members=(1, 9))])
    gathered = [
        sender_syncs(relayed(plan, engine(ranks)), ClusterConfig(gpus_per_node=16))[0].gathered_near
        for plan, ranks in ((both, 1), (both, 2), (other, 1))
    ]
    assert gathered == [0, 100, 100], "an engine of two ranks passes it on, and rank 9 is no sender"


def test_every_machine_of_an_engine_has_lanes_for_all_senders() -> None:
    syncs = sender_syncs(small_plan([experts(sender) for sender in range(4)]), ClusterConfig(gpus_per_node=2))
    # 800 bytes enter each machine over two adapters, and half of them each GPU over NVLink.
    assert relay_bounds(syncs, RATES, engine(4), 2) == {"wire": 4.0, "inside": 0.4}
    assert relay_bounds(syncs, RATES, sharing(4, 0.25), 2)["inside"] == pytest.approx(0.1)
    assert [near_ranks(ranks, 8) for ranks in (1, 8, 12, 16, 32)] == [1, 8, 6, 8, 8]


def test_senders_send_to_each_machine_what_it_keeps() -> None:
    assert sharing(4, 0.3).sent(2) == pytest.approx(0.6) and sharing(4, 0.32).sent(2) == 1.0
    # Nothing is known of what an engine keeps that loads by its own loader, or lies on one machine.
    assert (engine(4, 0.25).sent(2), sharing(4, 0.25).sent(4), sharing(2, 0.5).sent(1)) == (1.0, 1.0, 0.5)
    syncs = sender_syncs(small_plan([experts(sender) for sender in range(4)]), ClusterConfig(gpus_per_node=2))
    assert relay_bounds(syncs, RATES, sharing(4, 0.25), 2)["wire"] == 2.0 == 400 * 0.5 / 100
    assert relay_bounds(syncs[:2], RATES, sharing(4, 0.3), 2)["wire"] == pytest.approx(200 * 1.2 / 100)


def test_bounds_are_of_the_fullest_lane_and_of_nvlink() -> None:
    buckets = [experts(0, 400), experts(1, 200), experts(2, 200), experts(5, 800, members=(4, 5, 6, 7))]
    syncs = sender_syncs(small_plan(buckets), ClusterConfig(gpus_per_node=8))
    # Lanes of four ranks: 400; 200 + 800; 200; none. 1,600 bytes in all.
    assert relay_bounds(syncs, RATES, engine(4), 8) == {"wire": 10.0, "inside": pytest.approx(1.2)}
    assert relay_bounds(syncs, RATES, engine(1), 8) == {"wire": 16.0, "inside": 0.0}


HOST, LINK, NETWORK, SHARED = 25e9, 450e9, 50e9, 10e9


@pytest.mark.parametrize(
    ("weights", "moved"),
    [
        ({"transport": "broadcast"}, 1 / NETWORK),
        ({"transport": "handles"}, 2 / LINK),  # two engines beside the trainer
        ({"transport": "shm"}, 1 / HOST),
        ({"transport": "disk"}, 1 / SHARED + 1 / HOST),
        ({"transport": "delta"}, 0.05 * (1 / SHARED + 1 / HOST)),
        ({"transport": "delta", "delta_over": "broadcast"}, 0.05 / NETWORK),
        ({"transport": "mooncake"}, 2 / NETWORK),
        ({"transport": "examples.extending.transport:timed"}, 1 / NETWORK),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_a_bound_is_of_the_links_that_a_transport_uses(weights: dict[str, str], moved: float) -> None:
    plan = planned(weights=weights, cluster={"gpus_per_node": 16})  # of one machine, for those that need that
    assert plan.bounds["wire"] == pytest.approx(moved * plan.sync_bytes)
    assert plan.sync_seconds == max(plan.bounds.values())


def test_engines_that_share_the_trainers_gpus_take_no_handle_of_their_own_over_nvlink() -> None:
    beside = shipped("qwen3-30B-A3B-8gpus", transport="handles")
    assert beside.bounds["wire"] == pytest.approx(7 / LINK * beside.sync_bytes)


def test_every_rate_is_a_setting() -> None:
    rates = {"gpu_nvlink_gb_per_s": 100, "gpu_network_gbits": 200, "gpu_host_gb_per_s": 7, "directory_gb_per_s": 3}
    linked = planned(cluster=rates).rates
    assert (linked.nvlink, linked.network, linked.host, linked.directory) == (100e9, 25e9, 7e9, 3e9)


@pytest.mark.parametrize("model", nightly_except(MODELS, SHIPPED + COLOCATED))
@pytest.mark.slow
def test_a_launch_script_has_a_bound_and_relay_none_above_that_of_broadcast(model: str) -> None:
    assert shipped(model).sync_seconds > 0
    if model in SHIPPED:
        relay = shipped(model, transport="relay", senders=16)
        assert 0 < relay.bounds["wire"] <= relay.sync_bytes / relay.rates.network


@pytest.mark.slow
def test_every_rank_has_three_buckets_more_where_weights_are_handed_to_engines() -> None:
    embedding = 151_936 * 2048 * 2
    for mib, size in ((1024, 1 << 30), (256, embedding)):
        handed = shipped("qwen3-30B-A3B-8gpus", transport="checkpoint_engine", bucket_mib=mib)
        plain = shipped("qwen3-30B-A3B-8gpus", transport="disk", bucket_mib=mib)
        for stage, without in zip(handed.stages, plain.stages, strict=True):
            assert stage.memory.sync - without.memory.sync == 3 * size


def test_a_transport_that_is_left_to_the_engines_is_planned_as_what_they_will_have() -> None:
    relay, broadcast = planned(weights={"transport": "relay"}), planned(weights=BROADCAST)
    assert planned() == relay and relay.transport == "relay"
    drafting = {"num_engines": 2, "tp_size": 1, "mem_fraction_static": 0.8, "speculative_algorithm": "NEXTN"}
    assert planned(sglang=drafting).bounds == broadcast.bounds
    for sglang in (drafting, {"num_engines": 2, "tp_size": 2}, {"urls": ["http://a:30000"]}):
        assert planned(sglang=sglang).transport == "broadcast"


def test_an_engine_holds_two_buckets_and_more_where_ranks_hand_on_shares() -> None:
    relay, broadcast = planned(weights={"transport": "relay"}).engine, planned(weights=BROADCAST).engine
    assert relay is not None and broadcast is not None and relay.bucket == 2 * broadcast.bucket > 0
    assert replace(relay, bucket=broadcast.bucket) == broadcast
    of_four = {"num_engines": 1, "tp_size": 4}
    held = [
        planned(weights={"transport": "relay", "loader": loader}, sglang=of_four).engine
        for loader in ("recorded", "model")
    ]
    assert [engine.bucket / broadcast.bucket for engine in held if engine is not None] == [1 + 2 * SHARES_AT_MOST, 2]
    for of_a_machine, buckets in ((2, 3 * SHARES_AT_MOST), (1, 1 + SHARES_AT_MOST)):
        over = {**of_four, "nnodes": 4 // of_a_machine}
        apart = planned(weights={"transport": "relay"}, sglang=over, cluster={"gpus_per_node": of_a_machine}).engine
        assert apart is not None and apart.bucket == int(buckets * broadcast.bucket)
    # What mem_fraction_static leaves: enough for one bucket of 4 GiB beside the 4 GiB of everything else, not for two.
    tight = {"num_engines": 2, "tp_size": 1, "mem_fraction_static": 0.88}
    assert planned(weights={"bucket_mib": 4096, **BROADCAST}, sglang=tight).fits
    problem = planned(weights={"bucket_mib": 4096, "transport": "relay"}, sglang=tight).problems[0]
    assert problem.component == "bucket" and "weights.bucket_mib" in problem.hint
