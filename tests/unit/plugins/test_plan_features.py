"""Plans of runs with adapters, FP8, shared GPUs and other dtypes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mslime.backends.sglang.flags import server_fields
from mslime.config.layout import ParallelLayout
from mslime.config.lora import LoraConfig
from mslime.config.resolved import engine_spec
from mslime.convert.families import get_family
from mslime.convert.lora_rules import make_adapters
from mslime.run.sharing import PHASES
from mslime_plugins.planner.plan import RunPlan, make_plan, served_adapters, together
from mslime_plugins.planner.plan_command import plan_config
from mslime_plugins.planner.plan_command import plan_of as plan_of_values
from mslime_plugins.planner.problems import GIB
from mslime_plugins.planner.stages import ENGINE_OFFLOADED_BYTES, TRAINER_OFFLOADED_BYTES
from mslime_plugins.planner.trainer_memory import micro_batch_tokens
from tests.fixtures.full_size import CONFIGS, published_config
from tests.fixtures.least import least
from tests.unit.plugins.test_plan import LAYOUT, planned
from tests.unit.test_several_adapters import VALUES
from tests.unit.test_several_adapters import config as several


@pytest.mark.slow
def test_a_plan_counts_the_adapters_of_an_engine_and_of_a_sync() -> None:
    sections: dict[str, Any] = {"cluster": {"trainer_ranks": 16}, "megatron": LAYOUT, "sglang": {"tp_size": 2}}
    lora = {"rank": 8, "targets": ["attention"]}
    merged = planned("qwen3-30B-A3B", **sections, lora=lora)
    alone = planned("qwen3-30B-A3B", **sections, lora=lora | {"sync": "adapter"})
    hidden, q, kv = 2048, 32 * 128, 4 * 128
    a_file = 2 * 8 * 48 * ((hidden + q) * 2 + (hidden + kv) * 2)
    assert alone.sync_bytes == a_file and merged.sync_bytes > 1000 * a_file
    # Two versions on TP 2: A of q, k, v and B of o are whole, the rest is halved.
    each = 2 * 8 * 48 * (3 * hidden + (q + 2 * kv) // 2 + q // 2 + hidden)
    assert alone.engine is not None and merged.engine is not None
    assert (alone.engine.adapters, merged.engine.adapters) == (2 * each, 0)
    assert alone.engine.bucket == 0 and alone.engine.cache < merged.engine.cache


@pytest.mark.slow
def test_a_plan_counts_gradients_and_optimizer_of_adapters_alone() -> None:
    sections = {"cluster": {"trainer_ranks": 16}, "megatron": LAYOUT, "algorithm": {"kl_coef": 0.1}}
    full = planned("qwen3-30B-A3B", **sections)
    lora = planned("qwen3-30B-A3B", **sections, lora={"rank": 8, "targets": ["attention", "experts"]})
    hf_config = published_config("qwen3-30B-A3B")
    adapters = make_adapters(get_family(hf_config).rules(hf_config), LoraConfig(rank=8))
    # Of the whole model, by hand: A and B of q, k, v, o, and of gate, up and down of 128 experts, in 48 layers.
    hidden, q, kv, ffn = 2048, 32 * 128, 4 * 128, 768
    attention, expert = (hidden + q) * 2 + (hidden + kv) * 2, (hidden + ffn) * 3
    assert sum(map(math.prod, adapters.table.hf_shapes().values())) == 8 * 48 * (attention + 128 * expert)
    for before, after in zip(full.stages, lora.stages, strict=True):
        assert after.adapters is not None and after.held == before.held
        # A stage of 24 layers on TP 2: A of q, k, v and B of o are whole, the rest is halved. Experts: EP 4, ETP 2.
        dense = 8 * 24 * (3 * hidden + (q + 2 * kv) // 2 + q // 2 + hidden)
        experts = 8 * 24 * 32 * (2 * hidden + 2 * ffn // 2 + ffn // 2 + hidden)
        assert (after.adapters.dense, after.adapters.expert) == (dense, experts)
        assert after.memory.gradients == 4 * (dense + experts) and after.trained == dense + experts
        assert after.memory.weights == before.memory.weights + 2 * (dense + experts)
        assert after.memory.optimizer * 20 < before.memory.optimizer
    assert full.host.copies > 0 and lora.host.copies == 0, "the reference is the model without adapters"
    assert lora.sync_bytes == full.sync_bytes


def test_a_plan_counts_what_experts_share_once() -> None:
    sections = {"cluster": {"trainer_ranks": 16}, "megatron": LAYOUT}
    lora = {"rank": 8, "targets": ["experts"], "experts": "shared_outer"}
    hidden, ffn = 2048, 768
    for stage in planned("qwen3-30B-A3B", **sections, lora=lora).stages:
        # A of gate and of up and B of down are whole on every rank; the others are halved by ETP 2, and shared by EP 4.
        assert stage.adapters is not None
        assert (stage.adapters.dense, stage.adapters.expert) == (8 * 24 * 3 * hidden, 8 * 24 * 32 * 3 * ffn // 2)


def test_a_plan_holds_all_adapters_and_serves_the_largest() -> None:
    run = several(adapters=[*VALUES["adapters"], {"name": "long", "rollout": {"groups_per_step": 500}}])
    whole = together(run)
    assert (whole.lora.rank, whole.rollout.groups_per_step, whole.name) == (16, 500, "several")
    assert "experts" in whole.lora.targets and served_adapters(run).rank == 8
    alone = run.adapter_runs["maths"]
    assert together(alone) is alone and served_adapters(alone) == alone.lora


def test_the_plan_counts_copies_of_the_weights_and_padding() -> None:
    plain, fp8 = (planned("qwen3-4B", train={"fp8": recipe}).stages[0] for recipe in (None, "blockwise"))
    vocabulary = 151936 * 2560
    body = 4_022_468_096 - vocabulary  # the published number, the tied embedding once
    assert fp8.memory.weights - plain.memory.weights == 2 * body
    layout = ParallelLayout(tp=2)
    train = least(train={"fp8": "blockwise", "max_tokens_per_micro_batch": 4000}, cluster={"device": "cuda"}).train
    assert micro_batch_tokens(train, layout, 100) == 4096
    assert micro_batch_tokens(train.model_copy(update={"fp8": None}), layout, 100) == 4000


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("named", ["bfloat16", "float32", None])
def test_server_flag_and_plan_agree_with_the_wire(tmp_path: Path, device: str, named: str | None) -> None:
    published = {k: v for k, v in published_config("qwen3-30B-A3B").items() if k not in ("dtype", "torch_dtype")}
    hf_config = published | ({"dtype": named} if named else {})
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    config = least(cluster={"device": device}, model={"path": str(tmp_path)})
    wire = engine_spec(config).dtype(hf_config)
    assert server_fields(engine_spec(config), 0, "h", 1)["dtype"] == wire
    planned = plan_config({"model": {"path": str(CONFIGS / "qwen3-30B-A3B")}, "cluster": {"device": device}})
    assert make_plan(planned, hf_config).engine_dtype == wire


# Shared GPUs

SHARED_LAYOUT = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 8, "recompute_granularity": "full"}
ENGINES = {"num_engines": 2, "tp_size": 4}


def plan_of(placement: str, memory: float = 141, **sections: Any) -> RunPlan:
    cluster = {"placement": placement, "trainer_ranks": 8, "gpu_memory_gb": memory, **sections.pop("cluster", {})}
    weights = {"transport": "shm" if placement == "colocated" else "broadcast", "bucket_mib": 1024}
    given = {"megatron": SHARED_LAYOUT, "sglang": ENGINES, "weights": weights, **sections}
    return planned("qwen3-30B-A3B", cluster=cluster, **given)


@pytest.mark.slow
def test_a_shared_gpu_needs_the_larger_of_its_phases_and_not_their_sum() -> None:
    shared, apart = plan_of("colocated"), plan_of("separate", cluster={"gpus_per_node": 8})
    assert (shared.nodes, apart.nodes) == (1, 2) and not apart.phases and shared.engine_gpus == 8
    assert shared.engine is not None and apart.engine is not None
    memory, phases = shared.stages[0].memory, {phase.phase: phase for phase in shared.phases}
    assert memory == apart.stages[0].memory and list(phases) == list(PHASES)
    train, send, save, generate = (phases[name] for name in ("train", "send", "save", "generate"))
    at_work = memory.activations + max(memory.working, memory.logits)
    assert train.trainer == memory.weights + memory.gradients + memory.optimizer + at_work + memory.reserve
    assert train.engine == ENGINE_OFFLOADED_BYTES
    assert send.total == memory.weights + memory.sync + memory.reserve + (
        shared.engine.weights + shared.engine.bucket + ENGINE_OFFLOADED_BYTES
    )
    assert save.trainer == memory.weights + memory.optimizer + memory.reserve
    assert save.engine == shared.engine.weights + ENGINE_OFFLOADED_BYTES
    assert generate.trainer == TRAINER_OFFLOADED_BYTES and generate.total == pytest.approx(shared.gpu_bytes, abs=1e6)
    assert shared.engine.weights == apart.engine.weights and shared.engine.tokens < apart.engine.tokens
    assert shared.fullest == train.total > apart.fullest
    assert shared.fullest < apart.fullest + shared.engine.weights + shared.engine.cache


@pytest.mark.slow
def test_state_that_sleeps_in_memory_is_counted_there_and_on_a_disk_is_not() -> None:
    shared = plan_of("colocated")
    memory = shared.stages[0].memory
    assert shared.host.offloaded == pytest.approx(8 * (memory.weights + memory.optimizer), rel=1e-3)
    assert (
        plan_of("colocated", cluster={"offload_to": "disk"}).host.offloaded == 0 == plan_of("separate").host.offloaded
    )
    [problem] = plan_of("colocated", cluster={"host_memory_gb": 256}).problems
    assert problem.component == "offloaded" and "offload_to: disk" in problem.hint


def test_a_phase_that_does_not_fit_is_named() -> None:
    tight = {"num_engines": 8, "tp_size": 1}
    problems = plan_of("colocated", 90, sglang=tight).problems
    named = [problem for problem in problems if problem.where == "shared GPU of stage 0, phase save"]
    assert len(named) == 1 and named[0].needs > named[0].has > 0 and "sglang.tp_size (1)" in named[0].hint
    assert named[0].needs / GIB == pytest.approx(57.8 + 56.9 + 3 + 90 * 0.99 * 0.05 - 79.2 * 0.05, abs=1.5)


def test_gpus_without_an_engine_are_remarked_upon() -> None:
    [remark] = plan_of("colocated", sglang={"num_engines": 1, "tp_size": 4}).remarks
    assert remark.startswith("4 of the trainer's GPUs have no engine")


@pytest.mark.slow
def test_a_teacher_that_shares_is_planned_on_gpus_without_an_engine_and_in_the_machines_memory() -> None:
    values = {"model": {"path": str(CONFIGS / "qwen3-30B-A3B")}, "sglang": {"num_engines": 1, "tp_size": 4},
              "megatron": SHARED_LAYOUT, "weights": {"transport": "shm", "bucket_mib": 1024},
              "algorithm": {"opd_coef": 1.0},
              "teacher": {"path": str(CONFIGS / "qwen3-30B-A3B"), "tp_size": 4, "placement": "colocated"},
              "cluster": {"placement": "colocated", "gpu_memory_gb": 141, "host_memory_gb": 2000}}  # fmt: skip
    plan = plan_of_values(values, gpus=8)
    assert (plan.trainer_gpus, plan.nodes, plan.remarks) == (8, 1, ()) and plan.fits
    served, taught = (next(p for p in plan.phases if p.server == who) for who in ("engine", "teacher"))
    assert taught.phase == "generate" and taught.total == pytest.approx(served.total, abs=1e6)
    assert plan.engine is not None and plan.host.teacher == 4 * plan.engine.weights
    values["cluster"]["gpus_per_node"] = 16
    without = plan_of_values({**values, "teacher": {**values["teacher"], "placement": "separate"}}, gpus=12)
    assert without.trainer_gpus == 8 and without.host.teacher == 0 and len(without.phases) == len(plan.phases) - 1
    assert without.host.total == plan.host.total - plan.host.teacher
    values["teacher"] |= {"tp_size": 1, "mem_fraction_static": 0.3}
    small = plan_of_values(values, gpus=8)
    assert [problem.where for problem in small.problems] == ["teacher"] and "teacher.tp_size" in small.problems[0].hint
