"""The weight plan: complete, bounded, aligned, ordered, and the same on every rank."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mslime.config.errors import ConfigError
from mslime.config.layout import ParallelLayout
from mslime.convert.families import get_family
from mslime.convert.safetensors_files import batches
from mslime.weights.buckets import convert, pack
from mslime.weights.weight_plan import Bucket, Senders, WeightPlan, _hf_numel, build_plan
from tests.fixtures.full_size import CONFIGS, published_config
from tests.fixtures.marks import MODELS, nightly_except
from tests.unit.weights_world import LAYOUTS, gathered, local_params, moe_table, plan_of, stages, whole_tensors

BUCKET_SIZES = [1, 700, 1 << 30]


@pytest.mark.parametrize("senders", [1, 3, 8])
@pytest.mark.parametrize("bucket_bytes", BUCKET_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_hf_tensor_is_sent_exactly_once_in_its_shape(layout: str, bucket_bytes: int, senders: int) -> None:
    plan = plan_of(LAYOUTS[layout], bucket_bytes, senders=senders)
    sent = [(entry.name, entry.shape) for bucket in plan.buckets for entry in bucket.entries]
    assert len(sent) == len({name for name, _ in sent})
    assert dict(sent) == moe_table().hf_shapes()


@pytest.mark.parametrize("bucket_bytes", BUCKET_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_follow_each_other_without_gaps(layout: str, bucket_bytes: int) -> None:
    for bucket in plan_of(LAYOUTS[layout], bucket_bytes).buckets:
        end = 0
        for entry in bucket.entries:
            assert entry.offset == end
            end += entry.numel
        assert end == bucket.hf_numel
        end = 0
        for slot in bucket.slots:
            assert slot.offset == end
            end += slot.numel
        assert end == bucket.local_numel


def test_buckets_respect_the_limit_unless_one_group_is_larger() -> None:
    table, limit = moe_table(), 700
    for bucket in plan_of(LAYOUTS["tp2 ep2"], limit).buckets:
        assert bucket.hf_bytes <= limit or len(bucket.slots) == 1, bucket.describe()
    smallest = plan_of(LAYOUTS["one rank"], 1)
    assert len(smallest.buckets) == len([rule for rule in table.bound.values() if rule.exported])
    units: Any = [((SimpleNamespace(kind=SimpleNamespace(hf_shapes=((n,),))),),) for n in (4, 3, 2, 2, 5, 1)]
    runs = [[_hf_numel(unit) for unit in run] for run in batches(((unit, _hf_numel(unit)) for unit in units), limit=4)]
    assert runs == [[4], [3], [2, 2], [5], [1]], "each bucket is as full as may be, and no fuller"


def test_senders_take_turns_and_send_experts_before_shared_tensors() -> None:
    layout = LAYOUTS["tp2 ep2 pp2"]
    plan = plan_of(layout, 700, senders=8)
    assert plan.senders.everyone() == (0, 1, 2, 3)
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    assert [bucket.sender for bucket in plan.buckets[:8]] == [0, 1, 2, 3] * 2
    for sender in range(4):
        own = [bucket for bucket in plan.buckets if bucket.sender == sender]
        experts = ["local_experts" in bucket.slots[0].names[0] for bucket in own]
        assert experts == sorted(experts, reverse=True) and any(experts) and not all(experts)
        assert {bucket.stage for bucket in own} == {layout.pp_rank(sender)}
    first = {entry.name for bucket in plan.stage_buckets(0) for entry in bucket.entries}
    assert "model.embed_tokens.weight" in first and "lm_head.weight" not in first
    layers = {name.split(".")[2] for name in first if ".layers." in name}
    assert layers == {"0", "2"}


def experts_of(names: Iterable[str]) -> list[str]:
    return [name.split("local_experts.")[1].split(".")[0] for name in names]


def test_a_sender_gathers_the_experts_of_its_block() -> None:
    layout = LAYOUTS["dp4 ep4"]
    one = plan_of(layout).buckets[0]
    assert one.members == (0, 1, 2, 3) and experts_of(one.slots[0].names) == ["0", "2", "4", "6"]
    assert [experts_of(one.packed_by(rank))[:1] for rank in range(4)] == [["0"], ["2"], ["4"], ["6"]]
    two = plan_of(layout, senders=2).buckets[1]
    assert (two.sender, two.members) == (2, (2, 3)) and experts_of(two.slots[0].names) == ["4", "6"]
    every = plan_of(layout, senders=4).buckets[3]
    assert (every.sender, every.members) == (3, (3,)) and set(experts_of(every.packed_by(3))) == {"6", "7"}
    assert every.in_order and not two.in_order


def test_shared_tensors_are_dealt_out_evenly_and_gathered_over_each_sender_s_own_tensor_ranks() -> None:
    layout = ParallelLayout(tp=2, dp=2, ep=4)
    shared = [b for b in plan_of(layout, 1, senders=4).buckets if "local_experts" not in b.slots[0].names[0]]
    assert {bucket.sender: bucket.members for bucket in shared} == {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    sizes = [sum(bucket.hf_bytes for bucket in shared if bucket.sender == rank) for rank in range(4)]
    assert max(sizes) - min(sizes) <= max(bucket.hf_bytes for bucket in shared)


@pytest.mark.parametrize(
    ("layout", "most", "ranks", "block"),
    [
        (ParallelLayout(), 8, (0,), 1),
        (ParallelLayout(dp=4, ep=4, pp=2), 4, (0, 2, 4, 6), 2),
        (ParallelLayout(dp=6, ep=6), 4, (0, 2, 4), 2),
        (ParallelLayout(dp=4, ep=4, pp=4), 1, (0, 4, 8, 12), 4),
        (ParallelLayout(tp=2, dp=2, ep=2, etp=2), 8, (0, 2), 1),
        (ParallelLayout(tp=2, dp=4, ep=2), 8, (0, 1), 1),
    ],
)
def test_there_are_as_many_senders_as_allowed(
    layout: ParallelLayout, most: int, ranks: tuple[int, ...], block: int
) -> None:
    senders = Senders.at_most(layout, most)
    assert (senders.everyone(), senders.block) == (ranks, block)


@pytest.mark.parametrize("senders", [1, 2, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bucket_is_in_order_exactly_where_converting_would_not_move_anything(layout: str, senders: int) -> None:
    """Against the conversion itself, bucket by bucket, with numbers that are all different."""
    table, sizes = moe_table(), LAYOUTS[layout]
    whole = {name: torch.zeros(shape) for name, shape in table.hf_shapes().items()}
    at = 0
    for tensor in whole.values():
        tensor.view(-1).copy_(torch.arange(at, at + tensor.numel()))
        at += tensor.numel()
    ranks = [local_params(table, sizes, rank, whole) for rank in range(sizes.stage_size)]
    for bucket in plan_of(sizes, 500, senders=senders).buckets:
        packed = gathered(bucket, lambda rank: ranks[rank % sizes.stage_size])
        converted = convert(replace(bucket, in_order=False), packed, table)
        same = torch.equal(torch.cat(packed), converted)
        assert same == bucket.in_order, bucket.describe()


@pytest.mark.parametrize("layout", ["dp4 ep4", "tp2 ep2 pp2"])
def test_a_large_shared_tensor_that_lies_right_goes_alone_and_a_small_one_with_others(layout: str) -> None:
    """Embeddings, where the vocabulary divides evenly: nobody packs or converts such a bucket."""
    table = moe_table(vocab_size=50)
    (embedding,) = (rule for rule in table.bound.values() if rule.name.startswith("embedding."))
    size = 4 * math.prod(embedding.hf_shapes[0])

    def bucket_of(limit: int) -> Bucket:
        plan = plan_of(LAYOUTS[layout], limit, senders=8, table=table)
        (found,) = (bucket for bucket in plan.buckets if embedding.hf_names[0] in bucket.names)
        return found

    alone, beside = bucket_of(4 * size), bucket_of(4 * size + 16)
    assert alone.names == embedding.hf_names and alone.in_order
    assert len(beside.names) > 1 and not beside.in_order


def test_experts_share_buckets_however_large_they_are() -> None:
    plan = plan_of(ParallelLayout(), 1)  # each alone
    largest = max(bucket.hf_bytes for bucket in plan.buckets if "local_experts" in bucket.slots[0].names[0])
    together = [bucket for bucket in plan_of(ParallelLayout(), 2 * largest).buckets if len(bucket.slots) > 1]
    assert any("local_experts" in bucket.slots[0].names[0] for bucket in together)


FULL_SIZE = ParallelLayout(tp=4, pp=16, dp=16, ep=64)


Event = tuple[str, int, int]


def full_size_plan(senders: int = 64) -> WeightPlan:
    table = moe_table(num_hidden_layers=32, num_experts=128, mlp_only_layers=[], vocab_size=64)
    layers = [[2 * stage, 2 * stage + 1] for stage in range(16)]
    plan = build_plan(table, Senders.at_most(FULL_SIZE, senders), layers, "bfloat16", 600)
    assert len(plan.buckets) > 500 and len({m for b in plan.buckets for m in b.members}) == 1024
    return plan


def whole(bucket: Bucket) -> tuple[int, ...]:
    """Who sends a bucket that does not come in parts."""
    return (bucket.sender,)


def filling(plan: WeightPlan, sent_by: Callable[[Bucket], tuple[int, ...]] = whole) -> dict[Event, set[Event]]:
    """What ranks wait for to fill buckets.

    A rank walks its buckets in the order of the plan; a sender begins one when its second one before has arrived.
    Nobody waits for another one's part.
    """
    waits: dict[Event, set[Event]] = {}
    walked: dict[int, Event] = {}  # by rank: where it was before
    own: dict[int, list[int]] = {}  # by sender
    for bucket in plan.buckets:
        waits["filled", bucket.index, 0] = {("entered", bucket.index, member) for member in bucket.members}
        for member in bucket.members:
            entered = waits["entered", bucket.index, member] = set()
            before = walked.get(member)
            if before is not None:
                entered.add(before)
            if member in sent_by(bucket):
                entered |= {("arrived", older, 0) for older in own.get(member, [])[-2:-1]}
                own.setdefault(member, []).append(bucket.index)
            in_parts = len(sent_by(bucket)) > 1
            walked[member] = ("entered", bucket.index, member) if in_parts else ("filled", bucket.index, 0)
    return waits


def test_nobody_waits_in_a_circle_on_1024_ranks() -> None:
    """What every rank and every engine waits for, as a graph: gathers, turns, the thread that sends, and engines.

    A bucket is sent when it is filled, its sender's bucket before has arrived, and so has the bucket before it in the
    plan; every engine takes them in the order in which they are sent. Then every event waits for earlier ones alone,
    whoever is slow.
    """
    plan = full_size_plan()
    waits = filling(plan)
    for bucket in plan.buckets:
        before = {("arrived", bucket.index - 1, 0)} if bucket.index else set()
        waits["arrived", bucket.index, 0] = {("filled", bucket.index, 0)} | before
    assert len(list(TopologicalSorter(waits).static_order())) == len(waits)


def relaying(
    plan: WeightPlan, engines: Sequence[int], lane_order: Callable[[Bucket], Any],
    sent_by: Callable[[Bucket], tuple[int, ...]] = whole,
) -> dict[Event, set[Event]]:  # fmt: skip
    """What everybody waits for with `relay`, which has no turns.

    A bucket arrives when it is filled, its senders' buckets before have arrived, and the rank of each engine that takes
    it has asked for it: when it took the one before of those that it takes. An engine takes a bucket when it has
    arrived and the one before it in the plan is loaded by all of the engine's ranks.

    Args:
        engines: how many ranks each has.
        lane_order: in which a rank asks for its buckets.
        sent_by: who sends a bucket: several only to engines of one rank.
    """
    waits = filling(plan, sent_by)
    numbers = {rank: number for number, rank in enumerate(plan.senders.everyone())}
    sent_before: dict[int, Event] = {}
    for bucket in plan.buckets:
        arrived = ("arrived", bucket.index, 0)
        waits[arrived] = {("filled", bucket.index, 0)}
        waits[arrived] |= {sent_before[sender] for sender in sent_by(bucket) if sender in sent_before}
        sent_before |= dict.fromkeys(sent_by(bucket), arrived)
    for engine, ranks in enumerate(engines):
        taken_before: dict[int, int] = {}
        for bucket in sorted(plan.buckets, key=lane_order):
            rank = numbers[bucket.sender] % ranks
            if rank in taken_before:
                waits["arrived", bucket.index, 0].add(("loaded", taken_before[rank], engine))
            taken_before[rank] = bucket.index
        for bucket in plan.buckets:
            loaded = waits["loaded", bucket.index, engine] = {("arrived", bucket.index, 0)}
            if bucket.index:
                loaded.add(("loaded", bucket.index - 1, engine))
    return waits


@pytest.mark.slow
@pytest.mark.parametrize("engines", [(1,), (8,), (16, 16), (1, 2, 8, 3, 64, 128)])
def test_nobody_waits_in_a_circle_on_1024_ranks_when_engines_relay(engines: tuple[int, ...]) -> None:
    plan = full_size_plan()
    waits = relaying(plan, engines, lambda bucket: bucket.index)
    assert len(list(TopologicalSorter(waits).static_order())) == len(waits)
    with pytest.raises(CycleError):  # were each sender's buckets asked for in one go, they would
        TopologicalSorter(relaying(plan, (*engines, 8), lambda bucket: (bucket.sender, bucket.index))).prepare()


def test_nobody_waits_in_a_circle_on_1024_ranks_when_their_parts_go_side_by_side() -> None:
    plan = full_size_plan(1024)
    senders = set(plan.senders.everyone())

    def sent_by(bucket: Bucket) -> tuple[int, ...]:
        return bucket.members if bucket.comes_in_parts(senders, [1, 1]) else whole(bucket)

    in_parts = [bucket.entries[0].name for bucket in plan.buckets if len(sent_by(bucket)) == FULL_SIZE.tp]
    assert len(senders) == 1024 and in_parts == ["model.embed_tokens.weight", "lm_head.weight"]
    waits = relaying(plan, (1, 1), lambda bucket: bucket.index, sent_by)
    assert len(list(TopologicalSorter(waits).static_order())) == len(waits)
    with pytest.raises(CycleError):
        TopologicalSorter(relaying(plan, (1, 1), lambda bucket: (bucket.sender, bucket.index), sent_by)).prepare()


def test_a_tied_output_layer_is_not_sent() -> None:
    table = moe_table(tie_word_embeddings=True)
    plan = build_plan(table, Senders(LAYOUTS["one rank"]), stages(LAYOUTS["one rank"]), "float32", 1 << 30)
    names = [entry.name for bucket in plan.buckets for entry in bucket.entries]
    assert names.count("model.embed_tokens.weight") == 1 and "lm_head.weight" not in names


@pytest.mark.slow
def test_fingerprints_tell_plans_apart_and_survive_processes() -> None:
    here = plan_of(LAYOUTS["tp2 ep2"], 700).fingerprint()
    assert here != plan_of(LAYOUTS["tp2 ep2"], 800).fingerprint()
    code = "from tests.unit.weights_world import *; print(plan_of(LAYOUTS['tp2 ep2'], 700).fingerprint())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == here


LATENT_QUERIES = ("deepseek-r1", "deepseek-v2", "deepseek-v3", "deepseek-v3.1", "kimi-k2")


@pytest.mark.parametrize(
    "model", nightly_except((*MODELS, "deepseek-v3"), sorted(path.name for path in CONFIGS.iterdir() if path.is_dir()))
)
@pytest.mark.nightly
def test_tensors_that_an_engine_joins_travel_together_in_every_published_model(model: str) -> None:
    """SGLang's loader for latent attention drops the first of two projections that come in two requests."""
    config = published_config(model)
    table = get_family(config).rules(config)
    layers = sorted({rule.layer for rule in table.bound.values()} - {-1})
    plan = build_plan(table, Senders.at_most(ParallelLayout(dp=4, ep=4), 4), [layers], "bfloat16", 1)
    bucket_of = {entry.name: bucket.index for bucket in plan.buckets for entry in bucket.entries}
    first, second = ".q_a_proj.weight", ".kv_a_proj_with_mqa.weight"
    begins = [name.removesuffix(first) for name in bucket_of if name.endswith(first)]
    assert [bucket_of[begin + first] for begin in begins] == [bucket_of[begin + second] for begin in begins]
    assert bool(begins) == (model in LATENT_QUERIES)


def as_neighbours(params: dict[str, torch.Tensor], experts: bool) -> dict[str, torch.Tensor]:
    """Dense or expert ones in one buffer, from the last to the first, as megatron-core lays them out."""
    chosen = {name: param for name, param in reversed(params.items()) if (".experts." in name) == experts}
    flat = torch.cat([param.flatten() for param in chosen.values()])
    parts = flat.split([param.numel() for param in chosen.values()])
    return {name: part.view(param.shape) for part, (name, param) in zip(parts, chosen.items(), strict=True)}


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("layout", ["one rank", "tp2 ep2", "tp2 dp2 ep2 etp2"])
def test_what_is_unmoved_is_packed_by_no_copy_where_parameters_are_neighbours(layout: str, in_order: bool) -> None:
    table, sizes = moe_table(), LAYOUTS[layout]
    params = local_params(table, sizes, 0, whole_tensors(table))
    held = as_neighbours(params, experts=False) | as_neighbours(params, experts=True)
    positions = {name: at for at, name in enumerate(held)} if in_order else None
    plan = build_plan(table, Senders(sizes), [list(range(4))], "float32", 1400, positions)
    buffers = {param.untyped_storage().data_ptr() for param in held.values()}
    unmoved = {bucket.index for bucket in plan.buckets_of(0) if bucket.unmoved}
    views = {b.index for b in plan.buckets_of(0) if pack(b, held, 0).untyped_storage().data_ptr() in buffers}
    assert len(unmoved) > 5 and len(plan.buckets_of(0)) - len(unmoved) == (4 if layout == "one rank" else 0)
    assert (views == unmoved) == in_order, "in the model's order the last of a bucket lies first"


@pytest.mark.slow
def test_tensors_that_travel_together_are_moved() -> None:
    config = published_config("deepseek-v3")
    table = get_family(config).rules(config)
    layers = sorted({rule.layer for rule in table.bound.values()} - {-1})
    plan = build_plan(table, Senders.at_most(ParallelLayout(dp=4, ep=4), 4), [layers], "bfloat16", 1 << 26)
    moved = {bucket.index for bucket in plan.buckets if not bucket.unmoved}
    joined = {bucket.index for bucket in plan.buckets if any(".q_a_proj." in name for name in bucket.names)}
    assert moved == joined and 0 < len(moved) < len(plan.buckets)


def test_a_dtype_that_is_no_weight_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="int8"):
        plan_of(LAYOUTS["one rank"], dtype="int8")
