"""The prediction of a weight sync by `relay`: small schedules worked out by hand, and what holds for every plan.

In the schedules 200 bytes take 2 s on a lane, 0.5 s out of it, and 0.2 s over NVLink.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mslime.cli import main
from mslime.config.choices import SHARES_AT_MOST
from mslime.config.cluster import ClusterConfig
from mslime.planner.sync import (
    OBSERVED,
    Receiving,
    SyncPrediction,
    lane_bytes,
    near_ranks,
    predict,
    predict_relay,
    relay_bounds,
    relayed,
    sender_syncs,
)
from mslime.weights.plan import Bucket
from tests.fixtures.full_size import CONFIGS
from tests.fixtures.marks import MODELS, nightly_except
from tests.fixtures.syncs import BROADCAST, NODE, RATES, SHIPPED, experts, planned, shipped, small_plan, stacked

AT_ONCE = float("inf")


def engine(ranks: int, share: float = 0.0, recorded: bool = False) -> Receiving:
    """One that hands on whole buckets, unless it has recorded."""
    return Receiving(engines=2, share=share, recorded=recorded, ranks=ranks)


def sharing(ranks: int, share: float) -> Receiving:
    return engine(ranks, share, recorded=True)


def found(buckets: Sequence[Bucket], receiving: Receiving, node: int = NODE, **rates: float) -> SyncPrediction:
    return predict_relay(small_plan(buckets), replace(RATES, **rates), receiving, node)


def parts(one: SyncPrediction) -> tuple[Any, ...]:
    return tuple(pytest.approx(part) for part in (one.fill, one.wire, one.inside, one.load, one.latency))


def test_one_lane_receives_again_when_its_bucket_is_taken_out() -> None:
    # Arrives at 2, taken out to 2.5; arrives at 4.5, out to 5; at 7, out to 7.5.
    assert parts(found([experts(0)] * 3, engine(1))) == (0.0, 6.0, 1.5, 0.0, 0.0)
    # Loading (0.5 s) is behind receiving: the last is in at 7.5 as before, and loaded at 8.
    assert parts(found([experts(0)] * 3, engine(1, share=1.0))) == (0.0, 5.0, 1.5, 1.5, 0.0)


def test_one_rank_that_has_recorded_loads_a_bucket_where_it_arrived_while_the_next_one_comes() -> None:
    # Arrive at 2, 4, 6; each is loaded in 0.5 s, behind the next.
    assert parts(found([experts(0)] * 3, sharing(1, 1.0))) == (0.0, 5.0, 0.0, 1.5, 0.0)
    # Loading takes 5 s: there is room for one beside that which is loaded. Loaded at 7, 12 and 17.
    slow = found([experts(0)] * 3, sharing(1, 1.0), copy=40.0)
    assert parts(slow) == (0.0, 2.0, 0.0, 15.0, 0.0)
    # The third one's way (10 s) begins when the first is loaded, at 3 s; the second is loaded at 6 s.
    third = [experts(0, 100), experts(0, 200), experts(0, 1000)]
    assert found(third, sharing(1, 1.0), copy=50.0).seconds == pytest.approx(3.0 + 10.0 + 20.0)


def test_two_senders_send_at_the_same_time_on_two_lanes() -> None:
    # Both arrive at 2. First: out to 2.5, passed on to 2.7. Second: 3.2, 3.4. Their next arrive at 4.5 and 5.2; the
    # third is waited for (1.1), out to 5.0, passed on to 5.2; the fourth out to 5.7 and passed on to 5.9.
    assert parts(found([experts(0), experts(1)] * 2, engine(2))) == (0.0, 3.1, 2.8, 0.0, 0.0)


def test_senders_that_share_a_lane_take_turns_on_it() -> None:
    four = [experts(sender) for sender in range(4)]
    # Senders 0 and 2 on one lane are no faster than one of them alone, and likewise 1 and 3.
    assert parts(found(four, engine(2))) == (0.0, 3.1, 2.8, 0.0, 0.0)
    # With a lane for each all arrive at 2.
    assert parts(found(four, engine(4))) == (0.0, 2.0, 2.8, 0.0, 0.0)
    # A lane takes buckets in the plan's order: sender 2's is there at once, and waits until sender 0's was filled
    # (10 s), received (20 s) and taken out (5 s). With its own lane it is there long before.
    late = [stacked(0, 2000), experts(2)]
    assert parts(found(late, engine(2), nvlink=AT_ONCE)) == (10.0, 20.0 + 2.0, 5.0 + 0.5, 0.0, 0.0)
    assert parts(found(late, engine(4), nvlink=AT_ONCE)) == (10.0, 20.0, 5.0 + 0.5, 0.0, 0.0)


def test_the_lane_of_a_sender_follows_its_number_not_its_rank() -> None:
    # The fourth and the seventh of eight senders: with three ranks both are on lane 0, also where others send nothing.
    alone = [experts(3), experts(6)]
    assert found(alone, engine(3)).seconds == pytest.approx(found([experts(0)] * 2, engine(3)).seconds)
    cluster = ClusterConfig()
    assert lane_bytes(sender_syncs(small_plan(alone), cluster), 3) == {0: 400}
    assert lane_bytes(sender_syncs(small_plan(alone), cluster), 4) == {3: 200, 2: 200}


def test_ranks_that_hand_on_shares_do_so_with_the_buckets_of_all_lanes_at_once() -> None:
    # Both arrive at 2 and are packed until 2.5; each rank takes half of the other's bucket, and gives it half of its
    # own (0.1 s); each loads half of both (0.5 s). The next two arrive at 4.5, waited for from 3.1 on.
    two = [experts(0), experts(1)]
    assert parts(found(two, sharing(2, 0.5))) == (0.0, 2.0, 0.6, 0.5, 0.0)
    assert parts(found(two * 2, sharing(2, 0.5))) == (0.0, 2.0 + 1.4, 1.2, 1.0, 0.0)
    # Two of one lane one after the other: 2.5, 2.6, 2.85; there at 4.5, 5.0, 5.1, 5.35.
    assert parts(found([experts(0)] * 2, sharing(2, 0.5))) == (0.0, 2.0 + 1.65, 1.2, 0.5, 0.0)
    # Where ranks keep more, each packs more. Four lanes: a rank takes 0.3 of three buckets, and gives as much.
    four = [experts(sender) for sender in range(4)]
    packed, passed, loaded = 1.2 * 200 / 400, 0.3 * 600 / 1000, 4 * 0.3 * 200 / 400
    assert parts(found(four, sharing(4, 0.3))) == (0.0, 2.0, packed + passed, loaded, 0.0)
    # Three buckets for four ranks: the one without takes of all three, as much as the others give.
    assert parts(found(four[:3], sharing(4, 0.25))) == (0.0, 2.0, 0.5 + 0.15, 3 * 0.125, 0.0)


def test_shares_that_are_larger_than_the_bucket_are_not_handed_on() -> None:
    two = [experts(0), experts(1)]
    assert found(two, sharing(2, 0.7)) == found(two, engine(2, 0.7))
    # The starts: of the request's two lanes, of the exchange of words, of the exchange of shares.
    one_each = found(two, sharing(2, 0.5), request=0.5, collective=0.1)
    assert one_each.latency == pytest.approx(0.5 + 2 * 0.1)


def test_a_sync_that_fills_slowly_is_limited_by_filling() -> None:
    # Filled at 20, 40 and 60; each arrives 2 s later and is taken out in 10 s: the engine waits for 20, 8 and 8 s.
    slow = found([stacked(0)] * 3, engine(1), copy=20.0)
    assert parts(slow) == (36.0, 6.0, 30.0, 0.0, 0.0) and slow.limit == "fill"


def test_a_sender_is_free_when_its_bucket_has_arrived_and_a_lane_when_it_is_taken_out() -> None:
    # First: filled at 1, arrives at 3, out to 3.5, loaded at 13.5. Second: taken by the courier at 3, begun at 3.5,
    # there at 5.5, out from 13.5 to 14. Third: filled from 3 to 4, begun at 14, there at 16; loading is the rest.
    slow = found([stacked(0)] * 3, engine(1), tensor=5.0)
    assert parts(slow) == (1.0, 2.0, 1.5, 30.0, 0.0) and slow.limit == "load"
    # Rank 1 gathers for 12 s from rank 0, which begins its third bucket when its first has arrived, at 10. Of the
    # gather 4 s lie beside rank 0's buckets; then 2 s on the lane. Without the third, it lies beside the first two.
    own, gathers = [experts(0, 1000), experts(0, 200)], replace(experts(1, 200, members=(0, 1)), in_order=False)
    third = [*own, experts(0, 200), gathers]
    assert parts(found(third, engine(1), nvlink=100 / 12, copy=AT_ONCE)) == (8.0, 16.0, 0.0, 0.0, 0.0)
    assert parts(found([*own, gathers], engine(1), nvlink=100 / 12, copy=AT_ONCE)) == (0.0, 14.0, 0.0, 0.0, 0.0)


def test_nobody_gathers_what_comes_in_parts() -> None:
    # Its members send half of it each: filled at once, 2 s on the engine's adapter. Engines of two ranks pass it on, so
    # that its sender gathers for 12 s, and so does one whose other member is no sender.
    both = [experts(1, 200, members=(0, 1))]
    assert parts(found(both, engine(1), nvlink=100 / 12, copy=AT_ONCE)) == (0.0, 2.0, 0.0, 0.0, 0.0)
    assert found(both, engine(2), nvlink=100 / 12, copy=AT_ONCE).fill == pytest.approx(12.0)
    other = small_plan([experts(1, 200, members=(1, 9))])
    assert predict_relay(other, replace(RATES, nvlink=100 / 12), engine(1), 16).fill == pytest.approx(12.0)


def test_nothing_hides_the_work_of_cores_that_lanes_need_as_well() -> None:
    assert found([stacked(0)] * 3, engine(1), cores=2.0).fill == pytest.approx(1.5)
    assert found([stacked(0)] * 3, engine(1), cores=4.0).fill == pytest.approx(1.0)


def test_one_request_and_the_starts_of_collectives_are_seen() -> None:
    # Lanes receive from 0.5 on: there at 0.5 + 0.1 + 2 = 2.6. The exchange of the two ranks (0.1) lies beside the
    # lane's start. Out to 3.1, start 0.1, passed on to 3.4; the second out to 3.9, and to 4.2.
    one_each = found([experts(0), experts(1)], engine(2), request=0.5, collective=0.1, exchange=10.0)
    assert parts(one_each) == (0.0, 2.0, 1.4, 0.0, 0.5 + 3 * 0.1 + OBSERVED * 10.0)
    # One rank has nobody to pass on to: a start for each bucket.
    alone = found([experts(0)] * 3, engine(1), request=0.5, collective=0.1)
    assert parts(alone) == (0.0, 6.0, 1.5, 0.0, 0.5 + 3 * 0.1)
    # Three buckets of two ranks: two exchanges. The third is there at 3.1 + 2.1 = 5.2, waited for from 4.2 + 0.1 on.
    three = found([experts(0), experts(1), experts(0)], engine(2), request=0.5, collective=0.1)
    assert parts(three) == (0.0, 2.0 + 0.9, 2.1, 0.0, 0.5 + 2 * 0.1 + 3 * 0.1)
    # A request is time in which a sender fills: half of its second is left.
    assert found([stacked(0)], engine(1), request=0.5).fill == pytest.approx(0.5)


def test_every_machine_of_an_engine_has_lanes_for_all_senders() -> None:
    # Two lanes on each machine of two. Out of them at 2 and 2.7, passed on until 2.7 and 3.4; the third is on its way
    # from 2.5 to 4.5, and passed on until 5.2, when the fourth is there too.
    four = [experts(sender) for sender in range(4)]
    assert parts(found(four, engine(4), node=2)) == pytest.approx((0.0, 2.0 + 1.1, 4 * (0.5 + 0.2), 0.0, 0.0))
    assert found(four, engine(4), node=2) == found(four, engine(2)) != found(four, engine(4))
    syncs = sender_syncs(small_plan(four), ClusterConfig(gpus_per_node=2))
    # 800 bytes enter each machine over two adapters, and half of them each GPU over NVLink.
    assert relay_bounds(syncs, RATES, engine(4), 2) == {"fill": 0.0, "wire": 4.0, "inside": 0.4}
    assert relay_bounds(syncs, RATES, sharing(4, 0.25), 2)["inside"] == pytest.approx(0.1)
    assert [near_ranks(ranks, 8) for ranks in (1, 8, 12, 16, 32)] == [1, 8, 6, 8, 8]


def test_senders_send_to_each_machine_what_it_keeps_and_two_of_them_to_a_rank_at_once() -> None:
    # Two machines of two ranks, each of which keeps a quarter. A sender needs 2 s for both halves of its bucket, a rank
    # receives from two senders at once: all is there at 2. Packed and given within 0.3 s, loaded in 0.125 s a bucket,
    # twice: the two buckets of a step come from different ranks.
    four = [experts(sender) for sender in range(4)]
    out, passed, loaded = 0.25, 0.25 * 200 / 1000, 4 * 0.125
    assert parts(found(four, sharing(4, 0.25), node=2)) == (0.0, 2.0, 2 * (out + passed), loaded, 0.0)
    # Two senders alone send no faster than they did, and two of four machines, with four senders, half as fast again.
    two = found([experts(0), experts(1)], sharing(4, 0.25), node=2)
    assert two.wire == pytest.approx(2.0)
    # Parts that are larger take a sender longer; too large ones go as whole buckets, which come one at a time.
    larger = found(four, sharing(4, 0.3), node=2)
    assert larger.wire == pytest.approx(2.0 * 1.2) and sharing(4, 0.3).sent(2) == pytest.approx(0.6)
    assert sharing(4, 0.32).sent(2) == 1.0 and found(four, sharing(4, 0.32), node=2).wire > 3.0
    # Nothing is known of what an engine keeps that loads by its own loader, or lies on one machine.
    assert (engine(4, 0.25).sent(2), sharing(4, 0.25).sent(4), sharing(2, 0.5).sent(1)) == (1.0, 1.0, 0.5)
    syncs = sender_syncs(small_plan(four), ClusterConfig(gpus_per_node=2))
    assert relay_bounds(syncs, RATES, sharing(4, 0.25), 2)["wire"] == 2.0 == 400 * 0.5 / 100
    assert relay_bounds(syncs[:2], RATES, sharing(4, 0.3), 2)["wire"] == pytest.approx(200 * 1.2 / 100)


def test_bounds_are_of_the_fullest_lane_of_nvlink_and_of_the_slowest_gather() -> None:
    buckets = [experts(0, 400), experts(1, 200), experts(2, 200), experts(5, 800, members=(4, 5, 6, 7))]
    syncs = sender_syncs(small_plan(buckets), ClusterConfig(gpus_per_node=8))
    # Lanes of four ranks: 400; 200 + 800; 200; none. 1,600 bytes in all. 600 bytes are gathered.
    assert relay_bounds(syncs, RATES, engine(4), 8) == {"fill": 0.6, "wire": 10.0, "inside": pytest.approx(1.2)}
    assert relay_bounds(syncs, RATES, engine(1), 8) == {"fill": 0.6, "wire": 16.0, "inside": 0.0}


def any_buckets(seed: int) -> list[Bucket]:
    """Up to 24 buckets of up to eight senders, gathered or not."""
    chance = random.Random(seed)
    senders = chance.sample(range(8), chance.randint(1, 8))

    def bucket() -> Bucket:
        sender, size = chance.choice(senders), 80 * chance.randint(1, 30)
        kind = chance.choice(("own", "pair", "shared"))
        if kind == "shared":
            return stacked(sender, size)
        return experts(sender, size, tuple(sorted({sender, sender ^ 1})) if kind == "pair" else ())

    return [bucket() for _ in range(chance.randint(1, 24))]


@pytest.mark.parametrize("seed", range(40))
def test_a_prediction_is_above_the_bound_and_falls_with_a_faster_network(seed: int) -> None:
    chance, plan = random.Random(seed), small_plan(any_buckets(seed))
    ranks, node = chance.choice((1, 2, 3, 4, 8)), chance.choice((2, 4, 8))
    chosen = {"copy": chance.choice((20.0, 400.0)), "nvlink": chance.choice((50.0, 1000.0)), "collective": 0.05}
    receiving = engine(ranks, chance.choice((0.0, 1 / ranks, 1.0)), chance.choice((True, False)))
    rates = replace(RATES, **chosen)
    slow = predict_relay(plan, rates, receiving, node)
    syncs = sender_syncs(relayed(plan, receiving), ClusterConfig(gpus_per_node=node))
    bounds = relay_bounds(syncs, rates, receiving, node)
    assert slow.seconds >= max(bounds.values()) and min(slow.parts.values()) >= 0.0
    fast = predict_relay(plan, replace(rates, network=200.0), receiving, node)
    assert fast.seconds <= slow.seconds


@pytest.mark.parametrize("seed", range(10))
def test_one_sender_to_engines_of_one_rank_has_the_wire_of_broadcast(seed: int) -> None:
    buckets = [replace(bucket, sender=0, members=(0,)) for bucket in any_buckets(seed)]
    plan, receiving = small_plan(buckets), engine(1)
    assert predict_relay(plan, replace(RATES, copy=AT_ONCE), receiving, NODE).seconds == pytest.approx(
        predict(plan, replace(RATES, copy=AT_ONCE), receiving, NODE).seconds
    )


def test_nothing_to_send_takes_no_time() -> None:
    assert found([], engine(2), request=1.0).seconds == 0.0


@pytest.mark.parametrize("model", nightly_except(MODELS, SHIPPED))
@pytest.mark.slow
def test_a_launch_script_is_predicted_above_its_bound_and_below_that_of_broadcast(model: str) -> None:
    plan = shipped(model, transport="relay", senders=16)
    assert plan.prediction is not None and plan.sync_seconds == max(plan.bounds.values()) > 0
    assert plan.prediction.seconds >= plan.sync_seconds
    if plan.engine_ranks > 1:
        assert plan.prediction.seconds < plan.sync_bytes / plan.rates.network


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
    assert problem.component == "bucket" and "weights.bucket_mib" in problem.way_out


def test_the_start_of_a_collective_is_a_setting() -> None:
    plain = planned(weights={"transport": "relay"})
    later = planned(weights={"transport": "relay"}, cluster={"sync_collective_ms": 5.1})
    buckets = sum(sender.buckets for sender in plain.syncs)
    assert plain.prediction is not None and later.prediction is not None
    # Loading hides a little of each.
    assert 0.9 * buckets * 5e-3 < later.prediction.seconds - plain.prediction.seconds <= buckets * 5e-3
    requests = [planned(weights=BROADCAST, cluster=cluster).prediction for cluster in ({}, {"sync_collective_ms": 5})]
    assert requests[0] == requests[1], "broadcast has requests"


def test_the_command_prints_lanes_bound_and_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--model.path", str(CONFIGS / "olmoe-1B-7B"), "--gpus", "12", "--sglang.tp-size", "4"]
    flags += ["--megatron.expert-model-parallel-size", "8", "--weights.transport", "relay", "--weights.senders", "2"]
    assert main(flags) == 0
    said = capsys.readouterr().out
    lanes = r"received from senders by +2 of the 4 ranks of an engine on a machine, at most 6\.\d GiB each"
    assert re.search(lanes, said)
    assert re.search(r"at least +0\.1 s \(s: fill 0\.\d\d, wire 0\.1\d, inside 0\.01\)", said)
    assert re.search(r"prediction +0\.\d s, limited by \w+ \(s: fill .*wire .*inside .*load .*latency 0\.03\)", said)
    assert "5 ms a sync, 30 us a tensor, 10 ms an exchange" in said
    assert "0.1 ms for the start of a collective" in said
    assert re.search(r"outside +\S+ GiB, \S+ of it for buckets of the weight update", said)
    assert main([*flags, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert held["transport"] == "relay" and held["sync_seconds"] == held["bounds"]["wire"] > held["bounds"]["inside"]
    assert held["prediction"]["inside"] > 0 and held["prediction"]["seconds"] > held["sync_seconds"]
