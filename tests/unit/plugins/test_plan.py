"""`mslime plan`: sums that anyone can check by hand, and what the command says."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mslime.cli import main
from mslime.config.errors import CheckpointError, ConfigError
from mslime.config.layout import ParallelLayout
from mslime.config.megatron import Recompute
from mslime.convert.families import get_family
from mslime.convert.flops import read_widths
from mslime.weights.weight_plan import Bucket
from mslime_plugins.planner.activations import chunks_in_flight, kept_elements, layer_elements, working_bytes
from mslime_plugins.planner.engine import static_fraction
from mslime_plugins.planner.parameters import model_parameters, stage_parameters, work_per_token
from mslime_plugins.planner.plan import RunPlan, make_plan
from mslime_plugins.planner.plan_command import plan_config
from mslime_plugins.planner.problems import GIB
from mslime_plugins.planner.trainer_memory import (
    TrainerMemory,
    offloaded_bytes_per_parameter,
    optimizer_bytes_per_parameter,
    sync_bytes,
)
from tests.fixtures.full_size import CONFIGS, published_config
from tests.fixtures.syncs import experts, stacked

# Billions of parameters as published (model cards, papers), which is what the config.json files must add up to.
PUBLISHED_BILLIONS = {
    "deepseek-v2-lite": 15.706, "deepseek-v3": 671.026, "deepseek-r1": 671.026, "deepseek-v3.1": 671.026,
    "glm4-9b": 9.400, "glm4.5-air-106B-A12B": 106.852, "glm4.5-355B-A32B": 352.798, "glm4.7-355B-A32B": 352.798,
    "gpt-oss-20b": 20.915, "gpt-oss-120b": 116.829, "kimi-k2": 1026.408, "llama3.1-8B": 8.030, "minimax-m2": 228.690,
    "mixtral-8x7B": 46.703, "moonlight-16B-A3B": 15.960, "olmoe-1B-7B": 6.919, "qwen1.5-moe-A2.7B": 14.316,
    "qwen2-57B-A14B": 57.409, "qwen2.5-0.5B": 0.494, "qwen2.5-7B": 7.616, "qwen3-235B-A22B": 235.094,
    "qwen3-30B-A3B": 30.532, "qwen3-4B": 4.022, "qwen3-next-80B-A3B": 79.674, "qwen3.5-35B-A3B": 34.661,
    "qwen3.5-397B-A17B": 396.346,
}  # fmt: skip
LAYOUT = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 4,
    "expert_tensor_parallel_size": 2,
}


def planned(model: str, **sections: Any) -> RunPlan:
    cluster = {"device": "cuda", **sections.pop("cluster", {})}
    config = plan_config({"model": {"path": str(CONFIGS / model)}, "cluster": cluster, **sections})
    return make_plan(config, published_config(model))


def test_a_plan_refuses_what_a_check_refuses() -> None:
    config = plan_config({"model": {"path": str(CONFIGS / "qwen3-30B-A3B")}, "cluster": {"device": "cuda"}})
    with pytest.raises(CheckpointError, match="some_gate"):
        make_plan(config, published_config("qwen3-30B-A3B") | {"some_gate": True})


@pytest.mark.parametrize("model", PUBLISHED_BILLIONS)
def test_the_published_number_of_parameters_follows_from_config_json(model: str) -> None:
    hf_config = published_config(model)
    assert model_parameters(get_family(hf_config).rules(hf_config)) / 1e9 == pytest.approx(
        PUBLISHED_BILLIONS[model], abs=1e-3
    )


@pytest.mark.parametrize("model", ["qwen3-30B-A3B", "moonlight-16B-A3B", "qwen2.5-0.5B"])
def test_a_rank_s_parameters_are_the_same_summed_name_by_name(model: str) -> None:
    hf_config = published_config(model)
    family = get_family(hf_config)
    table, layers = family.rules(hf_config), family.model_fields(hf_config).num_layers
    layout = ParallelLayout(tp=2, pp=2, dp=8, ep=4, etp=2)
    chunks = ((tuple(range(layers - 9)),), (tuple(range(layers - 9, layers)),))
    for held in stage_parameters(table, layout, chunks):
        total = {"dense": 0, "expert": 0}
        for rule in table.bound.values():
            first, last = rule.name.startswith("embedding."), rule.layer < 0 and not rule.name.startswith("embedding.")
            here = rule.layer in held.layers or (first and held.stage == 0) or (last and held.stage == 1)
            # The last rank of the expert-parallel group has the last quarter of the experts.
            mine = not rule.is_expert or rule.expert >= family.model_fields(hf_config).num_experts * 3 // 4
            if here and mine and not rule.name.endswith("router.expert_bias"):
                total["expert" if rule.is_expert else "dense"] += math.prod(rule.kind.local_shape(2))
        assert (held.dense, held.expert) == (total["dense"], total["expert"])


def test_bytes_per_parameter_are_those_of_megatron_core_s_table() -> None:
    """docs of megatron-core's distributed optimizer: 18 bytes, 6 + 12/d sharded; 16 and 8 + 8/d in float32."""
    llama = 8030261248
    for width, dtype, extra in ((2, "bfloat16", 12), (4, "float32", 8)):
        whole = planned("llama3.1-8B", megatron={"params_dtype": dtype}, train={"replay": "off"})
        shared = planned(
            "llama3.1-8B", megatron={"params_dtype": dtype}, cluster={"trainer_ranks": 8}, train={"replay": "off"}
        )
        for plan, state in ((whole, extra * llama), (shared, extra * llama // 8)):
            [stage] = plan.stages
            assert (stage.memory.weights, stage.memory.gradients) == (llama * width, llama * 4)
            assert stage.memory.optimizer == state


def test_experts_are_shared_out_over_their_own_data_parallel_ranks() -> None:
    plan = planned(
        "qwen3-30B-A3B", megatron={**LAYOUT, "pipeline_model_parallel_size": 1}, cluster={"trainer_ranks": 32}
    )
    [stage] = plan.stages
    assert (plan.layout.dp, plan.layout.edp) == (16, 4)
    assert stage.memory.optimizer == 12 * (stage.held.dense / 16 + stage.held.expert / 4)


def test_a_tied_output_layer_is_a_copy_only_on_a_stage_of_its_own() -> None:
    tied, embedding = 494032768, 151936 * 896
    [alone] = planned("qwen2.5-0.5B", train={"replay": "off"}).stages
    assert alone.held.trained == tied
    two = planned(
        "qwen2.5-0.5B",
        train={"replay": "off"},
        megatron={"pipeline_model_parallel_size": 2},
        cluster={"trainer_ranks": 2},
    )
    assert sum(stage.held.trained for stage in two.stages) == tied + embedding


def test_the_precision_aware_optimizer_and_offload_take_less() -> None:
    assert optimizer_bytes_per_parameter(2, {}) == 12
    bf16_moments = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
    assert optimizer_bytes_per_parameter(2, bf16_moments) == 2 + 2 + 2
    assert optimizer_bytes_per_parameter(2, {**bf16_moments, "store_param_remainders": False}) == 4 + 2 + 2
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75}
    assert optimizer_bytes_per_parameter(2, offload) == 4 + 8 / 4, "the main weight is on the GPU as well"
    assert optimizer_bytes_per_parameter(2, {**offload, **bf16_moments}) == 12 / 4, "and float32 throughout"


@pytest.mark.nightly
def test_an_offloaded_optimizer_is_counted_in_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    aware = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True}
    # Main weight, two moments; pinned: the gradient, and the bfloat16 weight that the optimizer was given.
    assert offloaded_bytes_per_parameter(2, aware) == pytest.approx(4 + 8 + (4 + 2) * 1.44)
    assert offloaded_bytes_per_parameter(2, aware | {"pin_cpu_grads": False}) == pytest.approx(4 + 8 + 4 + 2 * 1.44)
    assert offloaded_bytes_per_parameter(2, {**aware, "optimizer_offload_fraction": 0.5}) == pytest.approx(20.64 / 2)
    plain = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    assert offloaded_bytes_per_parameter(2, plain) == pytest.approx(8 + (4 + 4) * 1.44)
    assert offloaded_bytes_per_parameter(2, {}) == 0

    # The layout of slime's page on DeepSeek-R1: 16 machines of 8.
    layout = {
        "tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4, "context_parallel_size": 4,
        "expert_model_parallel_size": 32, "num_layers_in_last_pipeline_stage": 13, "recompute_granularity": "full",
    }  # fmt: skip
    plan = planned("deepseek-r1", megatron=layout | aware, cluster={"trainer_ranks": 128})
    assert plan.host.optimizer / 1e9 == pytest.approx(671.026 * 20.64 / 16, rel=0.15), "stages are not quite equal"
    assert plan.host.copies == 0 and max(stage.memory.optimizer for stage in plan.stages) == 0
    with_reference = planned(
        "deepseek-r1", megatron=layout | aware, cluster={"trainer_ranks": 128}, algorithm={"kl_coef": 0.1}
    )
    assert with_reference.host.optimizer == plan.host.optimizer and with_reference.host.copies > 0

    small = ["--model.path", str(CONFIGS / "qwen3-30B-A3B"), "--cluster.trainer-ranks", "8", "--cluster.device", "cuda"]
    small += ["--megatron.expert-model-parallel-size", "8", "--megatron.recompute-granularity", "full"]
    small += [f"--megatron.{name.replace('_', '-')}={value}" for name, value in aware.items()]
    status, out, _ = command(capsys, *small)
    assert status == 0 and "GiB of a trainer machine" in out and "for the optimizer" in out
    status, out, _ = command(capsys, *small, "--cluster.host-memory-gb", "256", "--json")
    [problem] = json.loads(out)["problems"]
    assert status == 1 and problem["where"] == "trainer machine, host memory"
    assert problem["component"] == "optimizer" and "optimizer_offload_fraction" in problem["hint"]
    assert command(capsys, *small, "--cluster.host-memory-gb", "2048")[0] == 0


@pytest.mark.slow
def test_a_tensor_on_its_way_into_a_checkpoint_is_counted_in_host_memory() -> None:
    """Of each rank one, and moments that the optimizer keeps with a scale."""
    megatron = {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True}
    cluster = {"trainer_ranks": 16}
    plan = planned("qwen3-30B-A3B", megatron=megatron, cluster=cluster)
    embedding = 151936 * 2048 // 2
    assert plan.host.checkpoint == 8 * 4 * embedding and plan.host.total == plan.host.checkpoint + plan.host.shards
    small = planned("qwen3-30B-A3B", megatron=megatron, cluster=cluster | {"host_memory_gb": 4}).problems
    [problem] = [each for each in small if each.where == "trainer machine, host memory"]
    assert problem.component == "checkpoint" and problem.needs == plan.host.total
    for dtype, bytes_each in (("bfloat16", 0), ("float16", 4)):
        halved = megatron | {"use_precision_aware_optimizer": True, "exp_avg_dtype": dtype}
        more = planned("qwen3-30B-A3B", megatron=halved, cluster=cluster).host.checkpoint - plan.host.checkpoint
        assert more == pytest.approx(bytes_each * 30.5e9 / 16 * 8, rel=0.05)


def test_what_a_run_writes_to_disks_is_planned_in_bytes_seconds_and_as_a_share_of_its_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = ["--model.path", str(CONFIGS / "qwen2.5-7B"), "--train.replay", "off", "--gpus", "16"]
    model += ["--cluster.directory-gb-per-s", "2", "--checkpoint.save-every", "10", "--checkpoint.hf-every", "50"]
    plan = json.loads(command(capsys, *model, "--json")[1])
    n = 7_615_616_512
    saved = plan["saved"]
    assert (saved["weights"], saved["main"], saved["moments"]) == (2 * n, 4 * n, 8 * n)
    assert saved["seconds"] == 14 * n / 2e9 and saved["at_once"] == 3 and saved["exports"] == [3, 2 * n]
    assert plan["save_share"] == pytest.approx(saved["seconds"] / (10 * plan["seconds"]["step"]))
    assert plan["disk_bytes"] == 3 * 14 * n + 3 * 2 * n
    assert not any("checkpoint" in said for said in plan["remarks"])

    kept = ["--checkpoint.keep-best", "reward/mean", "--checkpoint.keep-every", "20", "--weights.transport", "delta"]
    halved = ["--megatron.use-precision-aware-optimizer", "--megatron.exp-avg-dtype", "bfloat16"]
    more = json.loads(command(capsys, *model, *kept, *halved, "--deadlines.checkpoint-s", "9", "--json")[1])
    saved = more["saved"]
    assert (saved["main"], saved["moments"]) == (2 * n, 6 * n)  # the 16 bits that bfloat16 lacks; a moment in 16 bits
    assert saved["at_once"] == 4 and saved["for_ever"] == 5 and saved["sync"] == 2 * 2 * n
    assert any("more than deadlines.checkpoint_s" in said for said in more["remarks"])


@pytest.mark.slow
@pytest.mark.nightly
def test_what_senders_keep_is_counted_in_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    megatron = {"expert_model_parallel_size": 8, "recompute_granularity": "full"}

    def kept(transport: str, **weights: Any) -> int:
        cluster = {"trainer_ranks": 16, "gpus_per_node": 32 if transport == "shm" else 8}
        wanted = {"transport": transport, **weights}
        return planned("qwen3-30B-A3B", megatron=megatron, cluster=cluster, weights=wanted).host.sync

    whole = planned("qwen3-30B-A3B", megatron=megatron, cluster={"trainer_ranks": 16}).sync_bytes
    # Eight senders, all on the first machine; blocks of pinned memory are powers of two.
    assert kept("delta") == pytest.approx(1.44 * whole, rel=1e-6)
    embedding = 151_936 * 2048 * 2  # and the head: larger than a bucket, and another sender's
    assert kept("shm", bucket_mib=256) == pytest.approx(2 * embedding + 6 * 256 * 2**20, rel=0.01)
    assert kept("broadcast") == kept("disk") == 0
    cluster = {"trainer_ranks": 16, "gpus_per_node": 8, "placement": "colocated"}
    handed = {"transport": "checkpoint_engine"}
    plan = planned("qwen3-30B-A3B", megatron=megatron, cluster=cluster, weights=handed, sglang={"num_engines": 16})
    assert plan.host.sync == pytest.approx(2.44 * whole, rel=1e-6)  # a copy of each bucket, and the pinned one

    small = ["--model.path", str(CONFIGS / "qwen3-30B-A3B"), "--cluster.trainer-ranks", "8", "--cluster.device", "cuda"]
    small += ["--megatron.expert-model-parallel-size", "8", "--megatron.recompute-granularity", "full"]
    small += ["--weights.transport", "delta", "--cluster.gpu-memory-gb", "141"]
    status, out, _ = command(capsys, *small)
    assert status == 0 and "for the weight sync" in out
    status, out, _ = command(capsys, *small, "--cluster.host-memory-gb", "64", "--json")
    [problem] = json.loads(out)["problems"]
    assert status == 1 and problem["component"] == "sync" and "other than delta" in problem["hint"]


def test_a_tight_plan_says_so_by_a_status_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model.path", str(CONFIGS / "qwen2.5-7B"), "--train.replay", "off", "--gpus", "9"]
    peak = max(s["peak"] for s in json.loads(command(capsys, *model, "--json")[1])["stages"])
    for share, verdict, statuses in ((0.93, "fits", (0, 0)), (0.97, "tight", (3, 1)), (1.05, "does not fit", (1, 1))):
        # Of a GPU that the run fills by `share`: 5% of it are reserved, and 1% is the driver's.
        size = ["--gpu-memory-gb", str((peak - 0.05 * 79.2 * GIB) / (share - 0.05) / 0.99 / GIB)]
        status, out, _ = command(capsys, *model, *size)
        assert f"\n{verdict}" in out and (status, command(capsys, *model, *size, "--strict")[0]) == statuses
        assert json.loads(command(capsys, *model, *size, "--json")[1])["verdict"] == verdict


@pytest.mark.slow
def test_expert_groups_over_machines_and_idle_gpus_are_remarked_upon() -> None:
    def remarks(ep: int, ranks: int, **cluster: Any) -> str:
        layout = {"expert_model_parallel_size": ep}
        return "; ".join(planned("qwen3-30B-A3B", megatron=layout, cluster={"trainer_ranks": ranks, **cluster}).remarks)

    assert "all-to-all" in remarks(16, 16) and "all-to-all" not in remarks(8, 16)
    assert "all-to-all" in remarks(4, 16, gpus_per_node=6), "groups of four do not divide machines of six"
    assert "7 GPUs of the last machines are not used" in remarks(8, 16), "an engine has a machine to itself"
    assert planned("olmoe-1B-7B", cluster={"trainer_ranks": 7}).remarks == ()


def test_a_layer_of_llama_keeps_what_a_count_by_hand_gives() -> None:
    fields = get_family(published_config("llama3.1-8B")).transformer_fields(published_config("llama3.1-8B"))
    widths, one = read_widths(fields, frozenset()), ParallelLayout()
    norms = 4 * 4096  # inputs of two norms and of the two projections after them
    attention = 4096 + 2 * 1024 + 4096 + 2 * 32  # q, k and v, output, log-sum-exp in float32
    assert layer_elements(widths, one, 0) == norms + attention + 3 * 14336
    assert layer_elements(widths, ParallelLayout(tp=4), 0) == (norms + attention + 3 * 14336) / 4
    # With more ranks than key-value heads every rank holds a whole one.
    assert layer_elements(widths, ParallelLayout(tp=16), 0) == (norms + attention + 2 * 8 * 128 + 3 * 14336) / 16
    layers = (tuple(range(32)),)
    assert kept_elements(widths, one, layers, Recompute("full", "uniform", 1, frozenset())) == 32 * 4096
    assert kept_elements(widths, one, layers, Recompute("full", "uniform", 4, frozenset())) == 8 * 4096
    block = kept_elements(widths, one, layers, Recompute("full", "block", 8, frozenset()))
    assert block == 8 * 4096 + 24 * layer_elements(widths, one, 0)
    selective = kept_elements(widths, one, layers, Recompute("selective", "uniform", 1, frozenset({"mlp"})))
    assert selective == 32 * (layer_elements(widths, one, 0) - 3 * 14336)


def test_experts_keep_the_tokens_that_are_sent_to_them() -> None:
    fields = get_family(published_config("qwen3-30B-A3B")).transformer_fields(published_config("qwen3-30B-A3B"))
    widths = read_widths(fields, tuple(range(48)))
    whole, without = (layer_elements(widths, ParallelLayout(), 0, frozenset(dropped)) for dropped in ((), ("moe",)))
    assert whole - without == 6 * 128 + 1.25 * 8 * (2048 + 3 * 768)


def test_earlier_stages_hold_more_micro_batches() -> None:
    layout = ParallelLayout(pp=4)
    assert [chunks_in_flight(layout, stage) for stage in range(4)] == [4, 3, 2, 1]
    # arXiv:2205.05198 section 4.2.3: the first interleaved stage keeps 1 + (p - 1) / (p m) times as much.
    assert chunks_in_flight(ParallelLayout(pp=4, vpp=3), 0) / 4 == pytest.approx(1 + 3 / 12)


def test_the_work_of_a_token_is_its_active_parameters() -> None:
    hf_config = published_config("qwen3-30B-A3B")
    table = get_family(hf_config).rules(hf_config)
    whole = (tuple(range(48)),)
    [held] = stage_parameters(table, ParallelLayout(), [whole])
    work = work_per_token(held, ParallelLayout(), 8, 128)
    assert work == pytest.approx(3.35e9 - 151936 * 2048, rel=0.01)  # 3.3 B active, the embedding not multiplied
    layout = ParallelLayout(tp=2, dp=8, ep=8)
    [shared] = stage_parameters(table, layout, [whole])
    assert work_per_token(shared, layout, 8, 128) == pytest.approx(work / 2, rel=0.01)


def test_an_engine_s_cache_holds_what_the_architecture_needs() -> None:
    heads = planned("llama3.1-8B", train={"replay": "off"}, sglang={"tp_size": 2, "mem_fraction_static": 0.8}).engine
    assert heads is not None and heads.token_bytes == 32 * 2 * 4 * 128 * 2
    assert heads.weights == pytest.approx(2 * 8030261248 / 2, rel=1e-3)
    latent = planned("moonlight-16B-A3B", sglang={"tp_size": 4, "mem_fraction_static": 0.8}).engine
    assert latent is not None and latent.token_bytes == 27 * (512 + 64) * 2  # not divided by TP
    assert latent.tokens == (int(int(80 * GIB * 0.99) * 0.8) - latent.weights) // latent.token_bytes
    narrow = planned("qwen2.5-0.5B", train={"replay": "off"}, sglang={"tp_size": 4, "mem_fraction_static": 0.8}).engine
    assert narrow is not None and narrow.token_bytes == 24 * 2 * 1 * 64 * 2  # two heads on four GPUs: one on each


def test_the_default_share_of_an_engine_is_sglang_s_own() -> None:
    """SGLang 0.5.23 on an H100: 1.5 MiB for each of 8,192 prefill tokens, a GiB for TP8, a GiB of decode graphs."""
    config = plan_config({"model": {"path": "m"}, "sglang": {"tp_size": 8}})
    reserved = 512 + 8192 * 1.5 + 1024 + 2 * 512
    assert static_fraction(config.sglang, 80 * GIB) == pytest.approx((80 * 1024 - reserved) / (80 * 1024), abs=1e-3)


@pytest.mark.slow
def test_a_weight_sync_moves_every_trained_parameter_once_to_every_engine_gpu() -> None:
    megatron, weights = {**LAYOUT, "expert_tensor_parallel_size": 1}, {"transport": "broadcast"}
    cluster = {"trainer_ranks": 8, "gpus_per_node": 2}
    plan = planned("qwen3-30B-A3B", megatron=megatron, cluster=cluster, weights=weights)
    assert plan.sync_bytes == 2 * plan.parameters
    slow = {**cluster, "gpu_network_gbits": 100}
    slower = planned("qwen3-30B-A3B", megatron=megatron, cluster=slow, weights=weights)
    assert slower.sync_seconds == pytest.approx(4 * plan.sync_seconds)
    assert plan.sync_seconds == pytest.approx(plan.sync_bytes / 50e9)
    few = planned("qwen3-30B-A3B", megatron=megatron, cluster=cluster, weights={**weights, "senders": 1})
    assert len(few.syncs) == len(few.stages)
    for stage, sync in zip(few.stages, few.syncs, strict=True):
        # The sender gathers all but its own shards; with two GPUs a machine the other tensor rank is near, and so is
        # one of the three other expert ranks.
        expert, dense = stage.held.expert * 2, stage.held.dense * 2
        assert sync.gathered_far == 2 * expert and sync.gathered_near == expert + dense
        assert sync.contributed == expert + dense
    assert len(plan.syncs) == 4 * len(plan.stages), "each expert rank sends its own"
    for stage, held in enumerate(each.held for each in plan.stages):
        mine = [sync for sync in plan.syncs if sync.stage == stage]
        assert sum(sync.gathered_near for sync in mine) == held.dense * 2 and not any(s.gathered_far for s in mine)
        assert max(sync.sent for sync in mine) < 1.3 * min(sync.sent for sync in mine)


@pytest.mark.slow
def test_deepseek_v3_on_1024_gpus_is_planned_in_ten_seconds() -> None:
    megatron = {
        "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 16, "expert_model_parallel_size": 64,
        "num_layers_in_last_pipeline_stage": 1, "recompute_granularity": "full",
    }  # fmt: skip
    started = time.process_time()
    plan = planned("deepseek-v3", megatron=megatron, cluster={"trainer_ranks": 1024}, sglang={"tp_size": 8})
    assert time.process_time() - started < 10
    assert plan.trainer_gpus == 1024 and len(plan.stages) == 16


def command(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    status = main(["plan", *flags])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_a_directory_with_config_json_is_enough(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copy(CONFIGS / "qwen2.5-0.5B" / "config.json", tmp_path)
    fits = ["--model.path", str(tmp_path), "--train.replay", "off", "--megatron.recompute-granularity", "full"]
    status, out, _ = command(capsys, *fits, "--gpus", "3")
    assert status == 0 and "fits:" in out and "Weight sync" in out and "0.49 B parameters" in out
    status, out, _ = command(capsys, *fits, "--gpus", "3", "--gpu-memory-gb", "12")
    assert status == 1 and "does not fit" in out and "hint" in out


@pytest.mark.parametrize(
    ("flags", "component", "hint"),
    [
        (["--model.path", "llama3.1-8B"], "optimizer", "cluster.trainer_ranks"),
        (["--model.path", "kimi-k2", "--gpus", "1025", "--megatron.expert-model-parallel-size", "8"], "gradients",
         "expert"),
        (["--model.path", "qwen2.5-7B", "--gpus", "65", "--train.max-tokens-per-micro-batch", "65536"], "activations",
         "recompute_granularity: full"),
        (["--model.path", "qwen2.5-0.5B", "--gpus", "65", "--train.max-tokens-per-micro-batch", "240000",
          "--megatron.recompute-granularity", "full", "--train.logits-mib", "1e6"], "logits",
         "max_tokens_per_micro_batch"),
        (["--model.path", "qwen2.5-7B", "--gpus", "65", "--weights.bucket-mib", "40000"], "bucket", "bucket_mib"),
        (["--model.path", "llama3.1-8B", "--gpus", "65", "--gpu-memory-gb", "24",
          "--sglang.mem-fraction-static", "0.6"], "weights", "sglang.tp_size"),
        (["--model.path", "qwen2.5-7B", "--gpus", "5", "--megatron.recompute-granularity", "full",
          "--algorithm.advantage", "gae"], "critic", "critic.placement: separate"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_what_does_not_fit_is_named_with_the_setting_to_change(
    capsys: pytest.CaptureFixture[str], flags: list[str], component: str, hint: str
) -> None:
    flags = [str(CONFIGS / flag) if flag in PUBLISHED_BILLIONS else flag for flag in flags]
    status, out, _ = command(capsys, *flags, "--train.replay", "off", "--json")
    problems = json.loads(out)["problems"]
    assert status == 1
    assert any(p["component"] == component and hint in p["hint"] for p in problems), problems


def test_logits_above_their_limit_take_the_limit_and_hidden_states() -> None:
    """Of Qwen2.5-0.5B: 151,936 logits, 896 hidden features, bfloat16."""
    tokens, gpus = 240_000, {"trainer_ranks": 64}

    def logits(**train: Any) -> int:
        sections = {"train": {"max_tokens_per_micro_batch": tokens, "replay": "off", **train}, "cluster": gpus}
        return planned("qwen2.5-0.5B", **sections).stages[0].memory.logits

    inputs = tokens * (76 + 2 * 896 * 2) + 151_936 * 896 * 2  # and the weight's gradient
    whole = logits(logits_mib=80_000)
    assert whole == tokens * 151_936 * 2 + inputs
    assert logits() == 2**30 + inputs + tokens * 896 * (4 + 2)
    assert logits(logits_mib=8) == 2**23 + inputs + tokens * 896 * (4 + 2)


def test_json_holds_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model.path", str(CONFIGS / "olmoe-1B-7B"), "--gpus", "9", "--megatron.expert-model-parallel-size", "8"]
    status, out, _ = command(capsys, *model, "--json")
    found = json.loads(out)
    assert status == 0 and found["fits"] and found["layout"]["ep"] == 8 and found["trainer_gpus"] == 8
    [stage] = found["stages"]
    memory = stage["memory"]
    step = memory["activations"] + max(memory["working"], memory["logits"])
    stays = sum(memory[k] for k in ("weights", "gradients", "optimizer", "reserve"))
    assert stage["peak"] == stays + max(step, memory["sync"])
    assert found["engine"]["tokens"] > 0 and found["sync_bytes"] == 2 * found["parameters"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--gpus", "1"], "--gpus"),
        (["--gpus", "9", "--megatron.expert-model-parallel-size", "3"], "megatron.expert_model_parallel_size"),
        (["--megatron.pipeline-model-parallel-size", "5"], "megatron.pipeline_model_parallel_size"),
        (["--model.path", "/nowhere"], "/nowhere"),
        (["--gpu-memory-gb", "-1"], "cluster.gpu_memory_gb"),
    ],
)
def test_mistakes_end_with_status_2(capsys: pytest.CaptureFixture[str], flags: list[str], named: str) -> None:
    status, _, err = command(capsys, "--model.path", str(CONFIGS / "olmoe-1B-7B"), *flags)
    assert status == 2 and named in err and "hint" in err


def test_supervised_runs_have_no_engines() -> None:
    plan = planned("olmoe-1B-7B", train={"task": "sft"}, cluster={"trainer_ranks": 8})
    assert plan.engine is None and plan.engine_gpus == 0 and plan.sync_bytes == 0 and plan.nodes == 1


def test_machines_are_those_that_trainer_and_engines_fill() -> None:
    def nodes(ranks: int, engines: int, tp: int, **more: Any) -> int:
        sglang = {"num_engines": engines, "tp_size": tp, "mem_fraction_static": 0.8, **more}
        return planned("olmoe-1B-7B", cluster={"trainer_ranks": ranks}, sglang=sglang).nodes

    assert [nodes(4, 4, 1), nodes(4, 2, 2), nodes(4, 5, 1), nodes(8, 1, 8), nodes(6, 1, 4)] == [1, 1, 2, 2, 2]
    assert nodes(8, 1, 16, urls=["http://a", "http://b"]) == 5


def test_a_teacher_that_is_launched_takes_machines() -> None:
    sections = {"algorithm": {"opd_coef": 1.0}, "teacher": {"path": ".", "num_engines": 2, "tp_size": 4}}
    sglang = {"num_engines": 1, "tp_size": 4}
    plan = planned("olmoe-1B-7B", cluster={"trainer_ranks": 4}, sglang=sglang, **sections)
    assert plan.nodes == 2


def test_a_teacher_on_the_trainers_gpus_has_the_dtype_that_its_server_is_started_with() -> None:
    hf_config = published_config("olmoe-1B-7B")

    def held(dtype: str, **megatron: Any) -> int:
        sections = {
            "algorithm": {"opd_coef": 1.0}, "teacher": {"path": ".", "tp_size": 4, "placement": "colocated"},
            "sglang": {"num_engines": 1, "tp_size": 4}, "weights": {"transport": "shm"}, "megatron": megatron,
            "cluster": {"device": "cuda", "trainer_ranks": 8, "placement": "colocated"},
        }  # fmt: skip
        config = plan_config({"model": {"path": str(CONFIGS / "olmoe-1B-7B")}, **sections})
        return make_plan(config, hf_config, teacher={**hf_config, "torch_dtype": dtype}).host.teacher

    in_bfloat16 = held("bfloat16")
    assert in_bfloat16 == held("float16") > 0, "a teacher keeps its checkpoint's dtype"
    assert held("float32", params_dtype="float32") == 2 * in_bfloat16, "the trainer's, where it is in float32"


def test_a_critic_is_a_second_model_without_an_output_layer() -> None:
    def with_critic(placement: str, **sections: Any) -> RunPlan:
        critic = {"critic": {"placement": placement}, "algorithm": {"advantage": "gae"}}
        return planned("qwen2.5-7B", cluster={"trainer_ranks": 8}, **critic, **sections)

    model = published_config("qwen2.5-7B")
    hidden, vocabulary = model["hidden_size"], model["vocab_size"]
    alone, shared, apart = (
        planned("qwen2.5-7B", cluster={"trainer_ranks": 8}),
        *map(with_critic, ("shared", "separate")),
    )
    [policy], [critic], [both] = alone.stages, apart.critic_stages, shared.stages
    assert critic.held.trained == policy.held.trained - hidden * vocabulary + hidden + 1
    assert critic.held.float32 == hidden + 1
    assert both.memory.peak == policy.memory.peak + critic.memory.states
    assert (alone.nodes, shared.nodes, apart.nodes) == (2, 2, 3) and not shared.critic_stages
    assert critic.memory.logits < policy.memory.logits / 10 and critic.memory.sync == 0


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from mslime.cli import main; "
        f"main(['plan', '--model.path', {str(CONFIGS / 'deepseek-v2-lite')!r}, '--json']); "
        "assert not {'torch', 'megatron', 'sglang', 'ray', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("model", "megatron", "ranks", "field", "named"),
    [
        ("qwen1.5-moe-A2.7B", {"expert_model_parallel_size": 8}, 8, "megatron.expert_model_parallel_size", "60"),
        ("deepseek-v3", {"pipeline_model_parallel_size": 4}, 4, "megatron.pipeline_model_parallel_size", "13"),
    ],
)
def test_what_the_layout_does_not_divide_is_refused_by_name(
    model: str, megatron: dict[str, int], ranks: int, field: str, named: str
) -> None:
    """The number of experts, and the last stage's layers with which uneven stages would work."""
    with pytest.raises(ConfigError) as caught:
        planned(model, megatron=megatron, cluster={"trainer_ranks": ranks}, train={"replay": "off"})
    assert caught.value.field == field and named in str(caught.value)


def test_a_sync_takes_a_bucket_and_the_one_before_it_on_the_rank_that_sends_them() -> None:
    """Buckets of 200 bytes: gathered as they lie from two ranks, or packed and converted."""
    own, of_two, converted = experts(0, 1000), experts(0, 200, (0, 1)), stacked(0, 200)
    assert sync_bytes([own], 2) == {0: 0}, "a view of the parameters"
    assert sync_bytes([own], 0) == {0: 1000}, "a copy, where they lie apart"
    assert sync_bytes([of_two], 2) == {0: 200, 1: 0}, "each shard is sent as it lies, into what is sent"
    assert sync_bytes([of_two], 4) == {0: 300, 1: 100}, "shards are rounded into a copy first"
    assert sync_bytes([converted, of_two, experts(1, 400, (1, 0))], 2) == {0: 200 + 200, 1: 400}
    assert sync_bytes([converted, converted], 2) == {0: 200 + 200}, "out of its parameters, which are not packed"
    joined = replace(converted, members=(0, 1))
    assert joined.sharing == 2 and sync_bytes([joined], 2) == {0: 200 + 400 + 200, 1: 200}, "joined in their places"
    assert sync_bytes([replace(joined, unmoved=True)], 2) == {0: 400 + 200, 1: 0}, "out of the parameters, in a row"


# ------------------------------------------------------- beside the trainer's state, as steps at full size have shown

FULL = Recompute("full", "uniform", 1, frozenset())
DEEPSEEK = {
    "num_layers": 4, "hidden_size": 7168, "num_attention_heads": 128, "multi_latent_attention": True,
    "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "ffn_hidden_size": 18432, "num_moe_experts": 256, "moe_router_topk": 8, "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
}  # fmt: skip


@pytest.mark.parametrize(("working", "logits", "step"), [(5, 7, 17), (9, 7, 19)])
def test_logits_are_gone_when_the_backward_pass_comes_to_the_layers(working: int, logits: int, step: int) -> None:
    assert TrainerMemory(1, 2, 3, activations=10, working=working, logits=logits, sync=0, reserve=0).step == step


def test_gradients_of_all_local_experts_are_counted() -> None:
    """Measured at full size: 3.07 and 1.14 GiB."""
    widths = read_widths(DEEPSEEK, (0, 1, 2, 3))
    for layout, measured in ((ParallelLayout(tp=4, dp=2, ep=8), 3.072), (ParallelLayout(tp=8, dp=32, ep=32), 1.142)):
        found = working_bytes(widths, layout, (0,), FULL, 9216, 2) / GIB
        assert abs(found / measured - 1) < 0.05, (layout, found)


def test_layers_without_experts_hold_as_many_gradients_as_activations() -> None:
    widths, layout = read_widths(DEEPSEEK, ()), ParallelLayout(tp=4)
    each = layer_elements(widths, layout, 0)
    assert working_bytes(widths, layout, (0,), FULL, 10, 2) == int(20 * each + 20 * (each + 2 * 7168))


@pytest.mark.parametrize(
    ("bucket", "neighbours", "shares", "fullest"),
    [
        (experts(0, 2000), 2, False, 0),  # a view of parameters
        (experts(0, 2000), 4, False, 4000),
        (experts(0, 2000), 0, False, 4000),
        (experts(0, 2000), 2, True, 2000),
        (stacked(0, 2000), 0, False, 4000),  # converted from where its shards lie
        (stacked(0, 2000), 2, False, 4000),
        (experts(0, 2000, (0, 1)), 0, False, 1000 + 4000),
    ],
)
def test_the_fullest_rank_holds_a_bucket_while_the_one_before_is_on_its_way(
    bucket: Bucket, neighbours: int, shares: bool, fullest: int
) -> None:
    assert max(sync_bytes([bucket, bucket], neighbours, shares).values()) == fullest


def test_who_sends_nothing_packs_its_shards_alone() -> None:
    found = sync_bytes([stacked(0, 2000), experts(1, 2000, (1, 2))] * 2, neighbours=0)
    assert found == {0: 4000, 1: 5000, 2: 1000}
