"""The weight plan: complete, bounded, aligned, ordered, and the same on every rank."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mslime.config.errors import ConfigError
from mslime.weights.plan import build_plan
from tests.unit.weights_world import LAYOUTS, moe_table, plan_of, stages

BUCKET_SIZES = [1, 700, 1 << 30]


@pytest.mark.parametrize("bucket_bytes", BUCKET_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_hf_tensor_is_sent_exactly_once_in_its_shape(layout: str, bucket_bytes: int) -> None:
    plan = plan_of(LAYOUTS[layout], bucket_bytes)
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


def test_stages_follow_each_other_and_shared_tensors_come_before_experts() -> None:
    plan = plan_of(LAYOUTS["tp2 ep2 pp2"], 700)
    order = [(bucket.stage, bucket.expert) for bucket in plan.buckets]
    assert order == sorted(order) and [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    first = {entry.name for bucket in plan.stage_buckets(0) for entry in bucket.entries}
    assert "model.embed_tokens.weight" in first and "lm_head.weight" not in first
    layers = {name.split(".")[2] for name in first if ".layers." in name}
    assert layers == {"0", "2"}


def test_an_expert_slot_names_the_expert_of_every_rank() -> None:
    bucket = next(bucket for bucket in plan_of(LAYOUTS["dp4 ep4"]).buckets if bucket.expert)
    experts = [name.split("local_experts.")[1].split(".")[0] for name in bucket.slots[0].names]
    assert experts == ["0", "2", "4", "6"]


def test_bytes_count_the_wire_dtype() -> None:
    layout = LAYOUTS["one rank"]
    assert plan_of(layout, dtype="float32").total_bytes == 2 * plan_of(layout, dtype="bfloat16").total_bytes


def test_a_tied_output_layer_is_not_sent() -> None:
    table = moe_table(tie_word_embeddings=True)
    plan = build_plan(table, LAYOUTS["one rank"], stages(LAYOUTS["one rank"]), "float32", 1 << 30)
    names = [entry.name for bucket in plan.buckets for entry in bucket.entries]
    assert names.count("model.embed_tokens.weight") == 1 and "lm_head.weight" not in names


def test_fingerprints_tell_plans_apart_and_survive_processes() -> None:
    here = plan_of(LAYOUTS["tp2 ep2"], 700).fingerprint()
    assert here != plan_of(LAYOUTS["tp2 ep2"], 800).fingerprint()
    code = "from tests.unit.weights_world import *; print(plan_of(LAYOUTS['tp2 ep2'], 700).fingerprint())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == here


def test_a_dtype_that_is_no_weight_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="int8"):
        plan_of(LAYOUTS["one rank"], dtype="int8")
