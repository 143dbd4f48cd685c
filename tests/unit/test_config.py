"""The run configuration: what is accepted, what is refused, and how the refusal reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mslime.config import passthrough
from mslime.config.errors import ConfigError
from mslime.config.layout import ParallelLayout, stage_layers
from mslime.config.loader import build, load_config, merge, parse_flags
from mslime.config.megatron import check_model
from mslime.config.schema import RunConfig

BASE = ["--model.path", "ckpt", "--data.prompts", "a.jsonl"]


def load(*flags: str) -> RunConfig:
    return load_config(None, [*BASE, *flags])


def refused(*flags: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(*flags)
    assert caught.value.hint
    return caught.value


def test_flags_win_over_the_file_and_lists_are_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\ndata: {prompts: [a, b]}\ntrain: {lr: 1e-4, num_steps: 7}\n")
    config = load_config(file, ["--train.num-steps", "9", "--data.prompts", "c.jsonl"])
    assert (config.train.lr, config.train.num_steps, config.data.prompts) == (1e-4, 9, ["c.jsonl"])


def test_flags_parse_words_numbers_booleans_lists_and_equals_signs() -> None:
    parsed = parse_flags(["--a.b-c=1", "--d.flag", "--d.no-other", "--e.list", "x", "2"])
    assert parsed == {"a": {"b_c": 1}, "d": {"flag": True, "other": False}, "e": {"list": ["x", 2]}}
    config = load("--train.replay", "off", "--train.packed", "false", "--observe.progress", "on", "--train.lr", "5e-5")
    assert (config.train.replay, config.train.packed, config.observe.progress) == ("off", False, "on")
    assert config.train.lr == 5e-5, "scientific notation without a dot is a number"
    assert merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}) == {"a": {"x": 1, "y": 3}}


@pytest.mark.parametrize(("flag", "nearest"), [
    ("--rollout.max-stalenes", "max_staleness"), ("--rolout.group-size", "rollout"),
    ("--megatron.recompute-granularityy", "recompute_granularity"),
    ("--sglang.chunked-prefil-size", "chunked_prefill_size"), ("--algorithm.correction.hihg", "high"),
])  # fmt: skip
def test_unknown_keys_are_refused_with_the_nearest_name(flag: str, nearest: str) -> None:
    assert f"did you mean {nearest!r}" in str(refused(flag, "1"))


def test_engine_fields_pass_through_and_are_type_checked() -> None:
    assert load("--megatron.moe-aux-loss-coeff", "0.1").megatron.extra == {"moe_aux_loss_coeff": 0.1}
    assert load("--sglang.chunked-prefill-size", "256").sglang.extra == {"chunked_prefill_size": 256}
    assert refused("--sglang.chunked-prefill-size", "abc").field == "sglang.chunked_prefill_size"


@pytest.mark.nightly
def test_source_parsing_knows_exactly_the_fields_of_the_installed_megatron_core() -> None:
    code = """
import dataclasses, json
from megatron.core.distributed import DistributedDataParallelConfig as D
from megatron.core.optimizer import OptimizerConfig as O
from megatron.core.transformer.transformer_config import MLATransformerConfig as M
print(json.dumps(sorted({f.name for c in (D, O, M) for f in dataclasses.fields(c) if f.name[0] != "_"})))
"""
    # A process of its own: the tests of the CPU platform must be the first to import megatron.core in theirs.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120, capture_output=True, text=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == sorted(passthrough.megatron_fields())


def test_importing_the_configuration_needs_no_torch() -> None:
    code = "import sys, mslime, mslime.config.loader; assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_broken_yaml_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  path: [x\ntrain: 1\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:\d"):
        load_config(file)


def test_missing_required_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        build({"data": {"prompts": ["a"]}, "model": {}})


VPP = ["--megatron.pipeline-model-parallel-size", "2", "--megatron.virtual-pipeline-model-parallel-size", "2"]
SILENT_CORRUPTIONS = {
    "vpp with batched p2p": ([*VPP, "--megatron.batch-p2p-comm"], "megatron.batch_p2p_comm"),
    "vpp without overlapped p2p": ([*VPP, "--megatron.no-overlap-p2p-comm"], "megatron.overlap_p2p_comm"),
    "per-token loss scales aux losses by 1/TP": (
        ["--megatron.calculate-per-token-loss"],
        "megatron.calculate_per_token_loss",
    ),
    "fused cross entropy casts to bf16": (
        ["--megatron.cross-entropy-loss-fusion"],
        "megatron.cross_entropy_loss_fusion",
    ),
    "moe and tp without sp": (
        ["--megatron.tensor-model-parallel-size", "2", "--megatron.no-sequence-parallel"],
        "megatron.sequence_parallel",
    ),
    "fused router bypasses replay": (["--megatron.moe-router-fusion"], "megatron.moe_router_fusion"),
    "graphs bypass replay": (["--megatron.cuda-graph-impl", "local"], "megatron.cuda_graph_impl"),
    "capacity drops tokens per rank": (
        ["--megatron.moe-expert-capacity-factor", "1.0"],
        "megatron.moe_expert_capacity_factor",
    ),
    "sinkhorn bypasses replay": (
        ["--megatron.moe-router-load-balancing-type", "sinkhorn"],
        "megatron.moe_router_load_balancing_type",
    ),
    "global aux loss differs by dp": (
        ["--cluster.trainer-ranks", "2", "--megatron.moe-router-load-balancing-type", "global_aux_loss"],
        "megatron.moe_router_load_balancing_type",
    ),
    "dropout": (["--megatron.hidden-dropout", "0.1"], "megatron.hidden_dropout"),
    "jitter": (["--megatron.moe-input-jitter-eps", "0.1"], "megatron.moe_input_jitter_eps"),
    "grouped gemm on cpu": (["--cluster.device", "cpu", "--megatron.moe-grouped-gemm"], "megatron.moe_grouped_gemm"),
    "deepep on cpu": (
        ["--cluster.device", "cpu", "--megatron.moe-token-dispatcher-type", "flex"],
        "megatron.moe_token_dispatcher_type",
    ),
    "recompute moe_act without grouped gemm": (
        ["--megatron.recompute-granularity", "selective", "--megatron.recompute-modules", "moe_act"],
        "megatron.recompute_modules",
    ),
    "top-p whose support is not bounded": (["--rollout.top-p", "0.9"], "rollout.top_k"),
    "min-p whose support is not bounded": (["--rollout.min-p", "0.1"], "rollout.top_k"),
    "no id left": (["--rollout.top-k", "0"], "rollout.top_k"),
    "one id left": (["--rollout.top-k", "1", "--rollout.top-p", "0.9"], "rollout.top_k"),
    "more ids than the engine returns": (["--rollout.top-k", "4097"], "rollout.top_k"),
    "more ids than the engine is told to return": (
        ["--rollout.top-k", "50", "--sglang.sampling-mask-max-tokens", "49"],
        "rollout.top_k",
    ),
    "min-p from a seed": (
        ["--rollout.min-p", "0.1", "--rollout.top-k", "50", "--sglang.enable-deterministic-inference"],
        "rollout.min_p",
    ),
    "engine without routes": (["--sglang.no-enable-return-routed-experts"], "sglang.enable_return_routed_experts"),
    "offloaded float32 parameters": (
        ["--cluster.device", "cuda", "--megatron.optimizer-cpu-offload", "--megatron.params-dtype", "float32"],
        "megatron.optimizer_cpu_offload",
    ),
    "an offloaded value head": (
        ["--cluster.device", "cuda", "--megatron.optimizer-cpu-offload", "--algorithm.advantage", "gae"],
        "megatron.optimizer_cpu_offload",
    ),
    "another scale than the checkpoint's": (["--megatron.softmax-scale", "0.5"], "megatron.softmax_scale"),
    "layers without a rotation": (["--megatron.no-rope-freq", "4"], "megatron.no_rope_freq"),
    "residuals that no family has": (
        ["--megatron.apply-residual-connection-post-layernorm"],
        "megatron.apply_residual_connection_post_layernorm",
    ),
    "layers that are not built": (["--megatron.mtp-num-layers", "1"], "megatron.mtp_num_layers"),
    "another optimizer than AdamW": (["--megatron.optimizer", "sgd"], "megatron.optimizer"),
    "another data parallelism": (["--megatron.use-megatron-fsdp"], "megatron.use_megatron_fsdp"),
    "several distributed optimizers": (
        ["--megatron.num-distributed-optimizer-instances", "2"],
        "megatron.num_distributed_optimizer_instances",
    ),
    "a schedule that the trainer does not have": (
        ["--megatron.overlap-moe-expert-parallel-comm"],
        "megatron.overlap_moe_expert_parallel_comm",
    ),
    "routers that do not choose": (
        ["--megatron.moe-router-force-load-balancing"],
        "megatron.moe_router_force_load_balancing",
    ),
    "param gather without its parts": (["--megatron.overlap-param-gather"], "megatron.overlap_param_gather"),
}


@pytest.mark.parametrize("name", SILENT_CORRUPTIONS)
def test_silent_corruptions_are_refused(name: str) -> None:
    flags, field = SILENT_CORRUPTIONS[name]
    assert refused(*flags).field == field


def test_draws_from_a_part_of_the_vocabulary_are_accepted_where_the_engine_can_tell_which() -> None:
    assert not load().rollout.truncated
    assert load("--rollout.top-k", "2").rollout.truncated
    assert load("--rollout.top-k", "4096", "--rollout.top-p", "0.9", "--rollout.min-p", "0.05").rollout.truncated
    wide = load("--rollout.top-k", "9000", "--sglang.sampling-mask-max-tokens", "9000")
    assert wide.rollout.top_k == 9000


SENSELESS = {
    "group of one": (["--rollout.group-size", "1"], "rollout.group_size"),
    "filter not named module:function": (["--rollout.dynamic-filter", "x"], "rollout.dynamic_filter"),
    "min lr above lr": (["--train.lr", "1e-5", "--train.min-lr", "1e-4"], "train.min_lr"),
    "steps do not divide groups": (
        ["--train.optimizer-steps-per-rollout", "3", "--rollout.groups-per-step", "8"],
        "train.optimizer_steps_per_rollout",
    ),
    "recompute settings without granularity": (
        ["--megatron.recompute-method", "uniform"],
        "megatron.recompute_granularity",
    ),
    "ranks do not divide": (
        ["--cluster.trainer-ranks", "3", "--megatron.tensor-model-parallel-size", "2"],
        "cluster.trainer_ranks",
    ),
    "experts over too many ranks": (
        ["--megatron.expert-model-parallel-size", "4"],
        "megatron.expert_model_parallel_size",
    ),
    "vpp without pp": (
        ["--megatron.virtual-pipeline-model-parallel-size", "2"],
        "megatron.virtual_pipeline_model_parallel_size",
    ),
    "unknown correction": (["--algorithm.correction.preset", "tiss"], "algorithm.correction.preset"),
    "no prompts": (["--data.prompts", "[]"], "data.prompts"),
    "warm-up as long as the run": (
        ["--train.num-steps", "4", "--train.optimizer-steps-per-rollout", "2", "--train.lr-warmup-steps", "8"],
        "train.lr_warmup_steps",
    ),
    "launched engine larger than a machine": (
        ["--cluster.device", "cuda", "--cluster.gpus-per-node", "4", "--sglang.tp-size", "8"],
        "sglang.tp_size",
    ),
    "a layout that mslime's stages do not follow": (
        ["--megatron.account-for-loss-in-pipeline-split"],
        "megatron.account_for_loss_in_pipeline_split",
    ),
}


@pytest.mark.parametrize("name", SENSELESS)
def test_senseless_settings_are_refused(name: str) -> None:
    flags, field = SENSELESS[name]
    assert refused(*flags).field == field


@pytest.mark.parametrize(("setting", "value", "said"), [
    ("--rollout.dynamic-filter", "zero_varianc", "did you mean 'zero_variance'?"),
    ("--rollout.dynamic-filter", "3", "expected: none, zero_variance or text"),
    ("--rollout.function", "single_turns", "did you mean 'single_turn'?"),
    ("--weights.transport", "shmm", "did you mean 'shm'?"),
    ("--algorithm.loss", "pp o", "module:function"),
])  # fmt: skip
def test_a_word_that_is_neither_a_choice_nor_a_function_is_refused_with_both(setting: str, value: str, said: str):
    with pytest.raises(ConfigError) as caught:
        load(setting, value)
    field = setting.removeprefix("--").replace("-", "_")
    assert caught.value.field == field and said in str(caught.value)


def test_evaluation_sets_need_distinct_names_and_a_temperature_for_pass_at_k() -> None:
    def sets(*entries: dict[str, object]) -> dict[str, object]:
        return {"model": {"path": "m"}, "data": {"prompts": ["a"], "eval_sets": list(entries)}}

    with pytest.raises(ConfigError, match="differ"):
        build(sets({"name": "a", "path": "x"}, {"name": "a", "path": "y"}))
    with pytest.raises(ConfigError, match="pass@k"):
        build(sets({"name": "a", "path": "x", "samples_per_prompt": 4}))


@pytest.mark.parametrize(("layers", "sizes", "held"), [
    (61, (4, 1, None, 13), [16, 16, 16, 13]), (61, (4, 1, 13, None), [13, 16, 16, 16]),
    (94, (8, 1, 11, 11), [11, 12, 12, 12, 12, 12, 12, 11]), (46, (2, 1, None, None), [23, 23]),
    (27, (3, 3, None, None), [9, 9, 9]), (10, (2, 2, 4, None), [4, 6]),
])  # fmt: skip
def test_uneven_stages_hold_every_layer_once_in_order(layers: int, sizes: tuple[int, int, int, int], held: list[int]):
    stages = stage_layers(layers, *sizes)
    assert [sum(map(len, stage)) for stage in stages] == held
    in_order = [layer for chunk in range(sizes[1]) for stage in stages for layer in stage[chunk]]
    assert in_order == list(range(layers))


@pytest.mark.parametrize(("layers", "sizes", "field", "words"), [
    (61, (4, 1, None, None), "pipeline_model_parallel_size", "num_layers_in_last_pipeline_stage: 13"),
    (61, (4, 1, 3, 3), "pipeline_model_parallel_size", "3 in the first stage and 3 in the last stage"),
    (61, (1, 1, None, 5), "num_layers_in_last_pipeline_stage", "only one pipeline stage"),
    (8, (2, 1, 9, None), "pipeline_model_parallel_size", "9 in the first stage"),
    (61, (2, 2, 31, None), "virtual_pipeline_model_parallel_size", "one holds 31"),
    (12, (2, 2, 4, 8), "num_layers_in_last_pipeline_stage", "needs stages between"),
])  # fmt: skip
def test_layers_that_stages_cannot_share_are_refused_with_a_way_out(
    layers: int, sizes: tuple[int, int, int, int], field: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        stage_layers(layers, *sizes)
    assert caught.value.field == f"megatron.{field}" and words in str(caught.value)


def test_a_fused_rotation_of_interleaved_pairs_is_refused() -> None:
    derived, fused = {"hidden_size": 64, "num_layers": 4}, load("--megatron.apply-rope-fusion", "true")
    check_model(fused.megatron, "cpu", derived | {"rotary_interleaved": False})
    with pytest.raises(ConfigError, match="interleaved pairs"):
        check_model(fused.megatron, "cpu", derived | {"rotary_interleaved": True})


def test_an_offloaded_optimizer_takes_16_bit_parameters_alone() -> None:
    derived, off = {"hidden_size": 64, "num_layers": 4}, load("--megatron.optimizer-cpu-offload").megatron
    nets = derived | {"experimental_attention_variant": "gated_delta_net"}
    for device, fields in (("cuda", derived), ("cpu", nets)):
        check_model(off, device, fields)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="delta-nets have float32"):
        check_model(off, "cuda", nets)
    assert load("--cluster.device", "cuda", "--megatron.optimizer-cpu-offload").megatron.extra["optimizer_cpu_offload"]
    plain = ["--megatron.params-dtype", "float32", "--megatron.no-use-distributed-optimizer"]
    load("--cluster.device", "cuda", "--megatron.optimizer-cpu-offload", *plain)


def test_a_layout_that_divides_the_model_is_accepted() -> None:
    check_model(load(*VPP, "--megatron.hidden-size", "64").megatron, "cpu", {"hidden_size": 64, "num_layers": 4})


def test_expert_activations_are_recomputed_on_a_gpu_where_grouped_gemm_is_the_default() -> None:
    flags = ["--megatron.recompute-granularity", "selective", "--megatron.recompute-modules", "moe_act"]
    assert load(*flags, "--cluster.device", "cuda").megatron.recompute_modules == ["moe_act"]
    off = refused(*flags, "--cluster.device", "cuda", "--megatron.no-moe-grouped-gemm")
    assert off.field == "megatron.recompute_modules"


def test_layout_ranks_follow_megatrons_default_order() -> None:
    layout = ParallelLayout(tp=2, pp=2, cp=2, dp=2, ep=4)
    assert layout.world_size == 16 and layout.edp == 2
    assert [layout.dp_rank(r) for r in range(8)] == [0] * 4 + [1] * 4
    assert [layout.pp_rank(r) for r in (0, 7, 8, 15)] == [0, 0, 1, 1]


def test_a_run_configuration_survives_a_round_trip_through_yaml_values() -> None:
    config = load("--megatron.moe-aux-loss-coeff", "0.1", "--algorithm.correction.preset", "mis")
    assert build(config.as_dict()) == config
