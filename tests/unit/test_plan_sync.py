"""The prediction of a weight sync: small schedules worked out by hand, and what holds for every plan."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from mslime.cli import main
from mslime.config.layout import ParallelLayout
from mslime.convert.families import get_family
from mslime.planner.command import plan_config
from mslime.planner.filling import Rates
from mslime.planner.sync import EXCHANGES, OBSERVED, Receiving, SyncPrediction, Way, predict
from mslime.planner.ways import Changing, delta_way, disk_way, way_of
from mslime.weights.plan import Bucket, WeightPlan, build_plan
from mslime.weights.senders import Senders
from tests.fixtures.full_size import CONFIGS, published_config
from tests.fixtures.marks import MODELS, nightly_except
from tests.fixtures.syncs import (
    BROADCAST,
    COLOCATED,
    NODE,
    RATES,
    SHIPPED,
    experts,
    planned,
    shipped,
    small_plan,
    stacked,
)

ONE, TWO = Receiving(engines=1, share=0.0, recorded=True), Receiving(engines=2, share=0.0, recorded=True)


def found(buckets: Sequence[Bucket], receiving: Receiving = ONE, **rates: float) -> SyncPrediction:
    return predict(small_plan(buckets), replace(RATES, **rates), receiving, NODE)


def parts(one: SyncPrediction) -> tuple[Any, ...]:
    return tuple(pytest.approx(part) for part in (one.fill, one.wire, one.load, one.latency))


def test_one_sender_fills_a_bucket_while_the_one_before_is_sent() -> None:
    # Each fills in 1 s (200 bytes copied twice at 400) and is sent in 2 s: 1 + 2 + 2 + 2.
    assert parts(found([stacked(0)] * 3)) == (1.0, 6.0, 0.0, 0.0)
    assert found([stacked(0)] * 3).limit == "wire"


def test_a_sender_holds_two_buckets_and_fills_no_third() -> None:
    # The first is filled in 10 s and sent to 20 s; the second is there at 12 s and taken at 20 s. Only then the third
    # is begun: filled to 30 s, sent to 40 s. With room for a third it would be 32 s.
    assert parts(found([stacked(0, 1000), stacked(0), stacked(0, 1000)], copy=200.0)) == (18.0, 22.0, 0.0, 0.0)
    # While its first is sent, to 10 s, rank 0 takes part in a gather of rank 1's, which takes 12 s.
    gathers = experts(1, 200, members=(0, 1))
    assert found([experts(0, 1000), experts(0, 200), gathers], nvlink=100 / 12).fill == 0.0
    # Not so where one of its own, which would be the third, comes before in the plan: that is begun at 10 s.
    waits = found([experts(0, 1000), *[experts(0, 200)] * 2, gathers], nvlink=100 / 12)
    assert parts(waits) == (10.0 + 12.0 - 14.0, 16.0, 0.0, 0.0)


def test_two_senders_to_one_engine_hide_each_other_s_fills() -> None:
    # Sender 0 and 1 fill by 1 s; 0 sends to 3 s, 1 to 5 s; the second ones are filled long before.
    assert parts(found([stacked(0), stacked(1)] * 2)) == (1.0, 8.0, 0.0, 0.0)


def test_one_engine_takes_buckets_as_they_are_ready_and_several_in_the_plan_s_order() -> None:
    # Sender 0's is filled at 10 s (2,000 bytes twice at 400) and sent in 20; sender 1's two are there at once, of 2 s.
    buckets = [stacked(0, 2000), experts(1), experts(1)]
    assert parts(found(buckets)) == (6.0, 24.0, 0.0, 0.0)
    assert parts(found(buckets, TWO)) == (10.0, 24.0, 0.0, 0.0)


@pytest.mark.parametrize("receiving", [ONE, TWO])
def test_every_request_and_the_exchanges_at_the_end_are_seen(receiving: Receiving) -> None:
    asked = found([experts(0), experts(1)] * 2, receiving, request=0.5, exchange=10.0)
    assert parts(asked) == (0.0, 8.0, 0.0, 4 * 0.5 + EXCHANGES * 10.0)
    # A request is time in which others fill: 1 s is there before the second bucket is asked for, at 2.5 s.
    assert found([experts(0), stacked(1)], receiving, request=0.5).fill == 0.0


def test_a_sync_that_fills_slowly_is_limited_by_filling() -> None:
    # 20 s a bucket, one after the other; each is sent (2 s) while the next is filled, the last after all.
    slow = found([stacked(0)] * 3, copy=20.0)
    assert parts(slow) == (20.0 + 18.0 + 18.0, 6.0, 0.0, 0.0) and slow.limit == "fill"
    two = found([stacked(0), stacked(1)], copy=20.0)
    assert parts(two) == (20.0, 4.0, 0.0, 0.0)


def test_a_gather_takes_the_link_that_it_crosses() -> None:
    # Three quarters of 800 bytes come from others: near 600 at 1,000; of two machines of two, 200 near and 400 far.
    bucket = replace(experts(0, 800, members=(0, 1, 2, 3)), index=0)
    plan = WeightPlan(Senders(ParallelLayout(dp=4, ep=4)), (bucket,))
    assert predict(plan, RATES, ONE, 4).fill == pytest.approx(0.6)
    assert predict(plan, RATES, ONE, 2).fill == pytest.approx(4.0)


def test_an_engine_loads_a_bucket_before_it_takes_the_next() -> None:
    # A quarter of 200 bytes at 400, for each of two buckets; then ten tensors of 0.3 s each.
    loading = replace(ONE, share=0.25)
    assert parts(found([experts(0, tensors=10), experts(1, tensors=10)], loading)) == (0.0, 4.0, 0.25, 0.0)
    own = found([experts(0, tensors=10), experts(1, tensors=10)], replace(loading, recorded=False), tensor=0.3)
    assert parts(own) == (0.0, 4.0, 0.25 + 6.0, 0.0) and own.limit == "load"
    assert found([experts(0)], tensor=0.3).load == 0.0
    # Loading hides a fill as sending does: 2 s + ten tensors of 0.5 s, and sender 1's is filled at 7 s.
    hidden = found([experts(0, tensors=10), stacked(1, 1400)], replace(ONE, recorded=False), tensor=0.5)
    assert parts(hidden) == (0.0, 2.0 + 14.0, 5.0 + 1.0, 0.0)


def test_nothing_hides_the_work_of_cores_that_broadcasts_need_as_well() -> None:
    # Three buckets of 1 s each (copied twice) on two cores: 1.5 s, of which the engine waits for 1 s anyway.
    assert parts(found([stacked(0)] * 3, cores=2.0)) == (1.5, 6.0, 0.0, 0.0)
    assert parts(found([stacked(0)] * 3, cores=4.0)) == (1.0, 6.0, 0.0, 0.0)
    # A gather of 1 s, hidden behind the first bucket, keeps its sender and its receiver.
    gathers = [experts(0, 400), experts(1, 200, members=(0, 1))]
    assert found(gathers, nvlink=100.0).fill == 0.0
    assert found(gathers, nvlink=100.0, cores=2.0).fill == pytest.approx(1.0)


def test_nothing_to_send_takes_no_time() -> None:
    assert found([], request=1.0).seconds == 0.0


@pytest.mark.parametrize("model", nightly_except(MODELS, SHIPPED + COLOCATED))
@pytest.mark.slow
def test_a_prediction_is_never_below_the_lower_bound(model: str) -> None:
    for plan in (shipped(model), shipped(model, **BROADCAST) if model in SHIPPED else None):
        if plan is not None:
            assert plan.prediction is not None and plan.sync_seconds > 0
            assert plan.prediction.seconds >= plan.sync_seconds
            if plan.transport == "broadcast":
                assert plan.prediction.wire == pytest.approx(plan.sync_bytes / plan.rates.network)


@pytest.mark.parametrize("engines", nightly_except([4], [1, 4]))
@pytest.mark.parametrize("nvlink", nightly_except([10e9], [450e9, 10e9]))
@pytest.mark.slow
def test_more_senders_make_no_sync_longer(engines: int, nvlink: float) -> None:
    hf_config = published_config("qwen3-30B-A3B")
    table, layout = get_family(hf_config).rules(hf_config), ParallelLayout(tp=2, dp=8, ep=8)
    rates = Rates(network=50e9, nvlink=nvlink, copy=1200e9, request=0.0, tensor=0.0, exchange=0.0)

    def seconds(senders: int) -> float:
        plan = build_plan(table, Senders.at_most(layout, senders), [list(range(48))], "bfloat16", 1 << 30)
        return predict(plan, rates, Receiving(engines, 0.1, recorded=True), NODE).seconds

    found = [seconds(senders) for senders in (1, 2, 4, 8)]
    assert found == sorted(found, reverse=True), found
    assert nvlink > 100e9 or found[-1] < 0.5 * found[0], "gathers over a slow link are the limit, and are shared"


def test_every_rate_is_a_setting() -> None:
    plain = planned(weights=BROADCAST).prediction
    assert plain is not None
    slower = planned(weights=BROADCAST, cluster={"gpu_copy_gb_per_s": 120}).prediction
    assert slower is not None and slower.load == pytest.approx(10 * plain.load)
    later = planned(weights=BROADCAST, cluster={"sync_request_ms": 10, "sync_exchange_ms": 20}).prediction
    assert later is not None and later.latency == pytest.approx(2 * plain.latency)
    linked = planned(cluster={"gpu_nvlink_gb_per_s": 100, "gpu_network_gbits": 200, "sync_tensor_us": 7}).rates
    assert (linked.nvlink, linked.network, linked.tensor) == (100e9, 25e9, pytest.approx(7e-6))


@pytest.mark.nightly
def test_engines_without_records_load_tensor_by_tensor() -> None:
    plain, own = (planned(weights={**BROADCAST, "loader": each}).prediction for each in ("recorded", "model"))
    assert plain is not None and own is not None
    tensors = len(get_family(published_config("olmoe-1B-7B")).rules(published_config("olmoe-1B-7B")).hf_shapes())
    assert own.load - plain.load == pytest.approx(tensors * 30e-6)
    for latent in (shipped("moonlight-16B-A3B").prediction, shipped("deepseek-v3").prediction):
        assert latent is not None and latent.load < 0.1, "multi-latent attention is derived once, at the end"
    attached = planned(sglang={"urls": ["http://a:30000", "http://b:30000"]}).prediction
    assert attached == own, "servers that mslime did not start"


def test_a_transport_that_is_left_to_the_engines_is_planned_as_what_they_will_have() -> None:
    relay, broadcast = planned(weights={"transport": "relay"}), planned(weights=BROADCAST)
    assert planned() == relay and relay.transport == "relay"
    drafting = {"num_engines": 2, "tp_size": 1, "mem_fraction_static": 0.8, "speculative_algorithm": "NEXTN"}
    assert planned(sglang=drafting).prediction == broadcast.prediction
    for sglang in (drafting, {"num_engines": 2, "tp_size": 2}, {"urls": ["http://a:30000"]}):
        assert planned(sglang=sglang).transport == "broadcast"


def test_what_is_done_before_a_bucket_is_sent_is_hidden_behind_other_senders_but_not_in_what_they_share() -> None:
    buckets = [experts(0), experts(1)]  # there at once, of 200 bytes
    by = partial(predict, small_plan(buckets), replace(RATES, exchange=1.0), gpus_per_node=NODE)
    # Both are prepared in 2 s, moved in 1 s each, and unpacked in 1 s.
    alone = by(TWO, way=Way(move=1 / 200, prepare=2 / 200, unpack=1 / 200))
    assert parts(alone) == (2.0, 2.0, 2.0, OBSERVED * 1.0)
    # Written one after the other: there at 5 and 8 s; moved at once then.
    assert parts(by(TWO, way=Way(move=1 / 200, prepare=2 / 200, write=3 / 200))) == (5.0 + 2.0, 2.0, 0.0, 2.0)
    # The third is of the first sender, which is free when its first has arrived, at 3 s.
    third = predict(small_plan([*buckets, experts(0)]), RATES, TWO, NODE, Way(move=1 / 200, prepare=2 / 200))
    assert parts(third) == (2.0 + 1.0, 3.0, 0.0, 0.0)


def test_turns_are_taken_only_where_a_way_has_them() -> None:
    buckets = small_plan([stacked(0, 2000), experts(1), experts(1)])
    ordered, free = (predict(buckets, RATES, TWO, NODE, Way(1 / 100, turns=turns)) for turns in (True, False))
    assert (ordered.fill, free.fill) == (pytest.approx(10.0), pytest.approx(6.0))


def test_what_a_sender_notes_of_a_bucket_that_has_arrived_is_hidden_behind_others() -> None:
    way = Way(move=1 / 100, keep=1 / 200)  # 2 s, then 1 s
    # Moved to 2, 5 and 8 s, and the last is noted at 9 s.
    assert parts(predict(small_plan([experts(0)] * 3), RATES, ONE, NODE, way)) == (3.0, 6.0, 0.0, 0.0)
    two = small_plan([experts(0), experts(1)] * 2)
    assert parts(predict(two, RATES, TWO, NODE, way)) == (1.0, 8.0, 0.0, 0.0)
    # A turn is passed on before.
    assert parts(predict(two, RATES, TWO, NODE, replace(way, turns=True))) == (1.0, 8.0, 0.0, 0.0)


def test_a_sender_makes_room_and_an_engine_opens_it_once_in_a_sync() -> None:
    two = small_plan([experts(0), experts(1)] * 2)
    # Both have room at 3 s; each is moved in 2 s, and opened in 0.5 s once.
    made = predict(two, RATES, TWO, NODE, Way(move=1 / 100, room=3.0, opening=0.5))
    assert parts(made) == (3.0, 8.0, 0.0, 2 * 0.5)
    ended = predict(two, replace(RATES, exchange=1.0), TWO, NODE, Way(move=1 / 100, closing=7.0))
    assert parts(ended) == (0.0, 8.0, 0.0, 7.0 + OBSERVED * 1.0)


def test_a_directory_is_read_at_a_rate_of_its_own() -> None:
    rates = replace(RATES, directory=50.0, reading=20.0, host=10.0)
    assert disk_way(rates, 3) == Way(3 / 20 + 1 / 10, prepare=1 / 10, write=1 / 50)
    changes = delta_way(rates, 3, Changing(sent=0.5, compare=1.0, keep=2.0, restore=3.0))
    assert changes == Way(0.5 * (3 / 20 + 1 / 10), prepare=1.0, write=0.5 / 50, unpack=3.0, keep=2.0)


COPY, HOST, LINK, NETWORK, SHARED = 1200e9, 25e9, 450e9, 50e9, 10e9


@pytest.mark.parametrize(
    ("weights", "moved", "prepared", "written", "turns"),
    [
        ({"transport": "broadcast"}, 1 / NETWORK, 0, 0, True),
        ({"transport": "handles"}, 2 / LINK, 1 / COPY, 0, False),  # two engines beside the trainer
        ({"transport": "shm"}, 1 / HOST, 1 / HOST, 0, False),
        ({"transport": "disk"}, 1 / SHARED + 1 / HOST, 1 / HOST, 1 / SHARED, False),
        ({"transport": "delta"}, 0.05 * (1 / SHARED + 1 / HOST), 1 / HOST + 2.5 / COPY, 0.05 / SHARED, False),
        ({"transport": "delta", "delta_over": "broadcast"}, 0.05 / NETWORK, 1 / HOST + 2.5 / COPY, 0, True),
        ({"transport": "mooncake"}, 2 / NETWORK, 1 / COPY, 0, False),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_every_transport_of_mslime_is_predicted_over_the_links_that_it_uses(
    weights: dict[str, str], moved: float, prepared: float, written: float, turns: bool
) -> None:
    plan = planned(weights=weights, cluster={"gpus_per_node": 16})  # of one machine, for those that need that
    assert plan.prediction is not None
    assert plan.prediction.wire == pytest.approx(moved * plan.sync_bytes)
    assert plan.bounds["wire"] == pytest.approx(plan.prediction.wire)
    assert plan.prediction.seconds > plan.sync_seconds
    config = plan_config({"model": {"path": str(CONFIGS / "olmoe-1B-7B")}, "weights": weights})
    way = way_of(config.transport, config.weights, config.cluster, plan.rates, TWO)
    assert way is not None and way.turns == turns
    assert (way.prepare, way.write) == (pytest.approx(prepared), pytest.approx(written))
    noted = 0.05 * (1 / HOST + 0.4e-9) if weights["transport"] == "delta" else 0.0
    closed = plan.rates.request if weights["transport"] == "handles" else 0.0
    assert (way.keep, way.closing) == (pytest.approx(noted), closed)


def test_changes_are_put_into_what_an_engine_takes_back() -> None:
    plain, changed = planned().prediction, planned(weights={"transport": "delta"}).prediction
    assert plain is not None and changed is not None
    assert changed.load == pytest.approx(2 * plain.load + planned().sync_bytes / COPY)


def test_engines_that_share_the_trainers_gpus_take_no_handle_of_their_own_over_nvlink() -> None:
    apart = planned(weights={"transport": "handles"}, cluster={"gpus_per_node": 16})
    beside = shipped("qwen3-30B-A3B-8gpus", transport="handles")
    assert apart.prediction is not None and beside.prediction is not None
    assert beside.prediction.wire == pytest.approx(7 / LINK * beside.sync_bytes)
    shm = shipped("qwen3-30B-A3B-8gpus").prediction
    assert shm is not None and shm.seconds > beside.prediction.seconds


@pytest.mark.slow
def test_every_rank_has_three_buckets_more_where_weights_are_handed_to_engines() -> None:
    embedding = 151_936 * 2048 * 2
    for mib, size in ((1024, 1 << 30), (256, embedding)):
        handed = shipped("qwen3-30B-A3B-8gpus", transport="checkpoint_engine", bucket_mib=mib)
        plain = shipped("qwen3-30B-A3B-8gpus", transport="disk", bucket_mib=mib)
        assert handed.prediction is None and plain.prediction is not None
        for stage, without in zip(handed.stages, plain.stages, strict=True):
            assert stage.memory.sync - without.memory.sync == 3 * size


def test_a_transport_of_a_user_is_not_predicted() -> None:
    found = planned(weights={"transport": "examples.extending.transport:timed"})
    assert found.prediction is None and found.bounds == planned(weights=BROADCAST).bounds
    assert planned(train={"task": "sft"}).prediction is None


def test_the_command_prints_bound_prediction_and_rates(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--model.path", str(CONFIGS / "olmoe-1B-7B"), "--gpus", "9"]
    flags += ["--megatron.expert-model-parallel-size", "8", "--cluster.sync-request-ms", "7"]
    flags += ["--weights.transport", "broadcast"]
    assert main(flags) == 0
    said = capsys.readouterr().out
    assert re.search(r"at least +0\.3 s over 50 GB/s", said) and re.search(
        r"prediction +0\.\d s, limited by latency", said
    )
    assert "network 50, NVLink 450, copies 1200 GB/s; 7 ms a bucket, 30 us a tensor, 10 ms an exchange" in said
    assert main([*flags, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    prediction = held["prediction"]
    parts = sum(prediction[name] for name in ("fill", "wire", "load", "latency"))
    assert prediction["seconds"] == pytest.approx(parts) and prediction["limit"] == "latency"
    assert held["rates"]["request"] == pytest.approx(7e-3) and prediction["seconds"] > held["sync_seconds"]
