"""Adapters by the rule table: which layers, what is fused, peft's files, and what merging makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mslime.cli import main
from mslime.config.errors import CheckpointError, ConfigError
from mslime.config.layout import ParallelLayout
from mslime.config.lora import LoraConfig
from mslime.convert.families import get_family, read_hf_config
from mslime.convert.lora_rules import PREFIX, Adapters, make_adapters
from mslime.convert.peft import CONFIG, WEIGHTS, AdapterFile, write_adapter_files
from mslime.offline.jobs import run_job
from mslime.offline.lora_checkpoints import MergeLora
from tests.fixtures.families import CASES
from tests.fixtures.peft_models import peft_model

ALL = ("attention", "mlp", "shared_experts", "experts")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: CASES[name].make(root / name) for name in ("qwen3-moe", "deepseek-v3", "gpt-oss", "qwen3-next")}


def adapters_of(path: Path, **lora: Any) -> Adapters:
    config = read_hf_config(path)
    return make_adapters(get_family(config).rules(config), LoraConfig(**{"rank": 4, "alpha": 6, **lora}))


def draw(adapters: Adapters) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = adapters.table.hf_shapes()
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def write(adapters: Adapters, directory: Path, base: Path) -> dict[str, torch.Tensor]:
    directory.mkdir()
    factors = draw(adapters)
    write_adapter_files(adapters, directory, base, dict.fromkeys(factors, "float32"), factors.items())
    return factors


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_an_adapter_that_is_not_finite_is_refused_by_file_and_tensor(
    models: dict[str, Path], tmp_path: Path, value: float
) -> None:
    adapters = adapters_of(models["qwen3-moe"], targets=["attention"])
    factors = write(adapters, tmp_path / "adapter", models["qwen3-moe"])
    name = next(iter(factors))
    factors[name].view(-1)[3:5] = value
    save_file(factors, tmp_path / "adapter" / WEIGHTS)
    read = AdapterFile.open(tmp_path / "adapter").reader()
    with pytest.raises(CheckpointError, match=f"2 of {factors[name].numel()} values") as error:
        [read(each) for each in factors]
    assert error.value.field == f"{tmp_path}/adapter/{WEIGHTS}: {name}"


@pytest.mark.parametrize(("name", "rank", "size"), [("q", 0, 1), ("q", 1, 2), ("v", 0, 2)])
def test_rows_of_b_lie_as_the_rows_of_the_fused_weight(
    models: dict[str, Path], name: str, rank: int, size: int
) -> None:
    """Every row of a weight that is made of numbered rows, and of a B that is numbered alike, has the same number."""
    adapters = adapters_of(models["qwen3-moe"], targets=["k_proj", f"{name}_proj"])
    bound = adapters.bound["decoder.layers.1.self_attention.linear_qkv.weight"]
    rows = {hf: torch.arange(shape[0]) + 1000 * i for i, (hf, shape) in enumerate(zip(
        bound.base.hf_names, bound.base.hf_shapes, strict=True))}  # fmt: skip
    weight = bound.base.to_megatron(lambda hf: rows[hf][:, None], rank, size)[:, 0]
    b = bound.b.to_megatron(lambda hf: rows[hf.removeprefix(PREFIX).replace(".lora_B", "")][:, None], rank, size)[:, 0]
    found = torch.cat([weight[first : first + count] for _, first, count in bound.rule.rows(rank, size)])
    assert found.equal(b) and len(b) < len(weight)


def test_factors_come_back_from_the_shards_of_any_ranks(models: dict[str, Path]) -> None:
    for name in ("qwen3-moe", "deepseek-v3"):
        adapters = adapters_of(models[name])
        factors = draw(adapters)
        for bound in adapters.table.bound.values():
            for size in (1, 2):
                shards = [bound.to_megatron(factors.__getitem__, rank, size) for rank in range(size)]
                assert all(tuple(shard.shape) == bound.kind.local_shape(size) for shard in shards)
                assert all(part.equal(factors[hf]) for hf, part in bound.to_hf(shards))


@pytest.mark.parametrize(("targets", "expected"), [
    (("attention",), {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
    (("mlp",), {"gate_proj", "up_proj", "down_proj"}),
    (("model.layers.[12].*.o_proj",), {"o_proj"}),
    (("*.shared_experts.up_proj",), {"up_proj"}),
])  # fmt: skip
def test_targets_name_layers(models: dict[str, Path], targets: tuple[str, ...], expected: set[str]) -> None:
    adapters = adapters_of(models["deepseek-v3"], targets=targets)
    modules = {name.split(".")[-3] for name in adapters.table.hf_shapes()}
    assert modules == expected
    layers = {bound.layer for bound in adapters.table.bound.values()}
    some = {"mlp": {0}, "model.layers.[12].*.o_proj": {1, 2}, "*.shared_experts.up_proj": {1, 2, 3}}
    assert layers == some.get(targets[0], {0, 1, 2, 3})


def test_ends_of_names_that_would_mean_more_are_written_whole(models: dict[str, Path]) -> None:
    assert set(adapters_of(models["qwen3-moe"]).target_modules) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    dense = adapters_of(models["deepseek-v3"], targets=["mlp"]).target_modules
    assert set(dense) == {f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")}


@pytest.mark.parametrize(("model", "lora", "words"), [
    ("qwen3-moe", {"targets": ["q_prj"]}, "did you mean 'q_proj'|q_proj"),
    ("qwen3-moe", {"targets": ["lm_head"]}, "the output layer"),
    ("qwen3-moe", {"targets": ["*.mlp.gate"]}, "routers"),
    ("qwen3-moe", {"targets": ["*.experts.3.up_proj"]}, "all experts of a layer"),
    ("qwen3-moe", {"targets": ["mlp"]}, "none of these layers"),
    ("gpt-oss", {}, "all experts of a layer in one tensor"),
    ("qwen3-next", {"targets": ["in_proj_qkvz"]}, "delta-net"),
])  # fmt: skip
def test_targets_that_are_not_there_or_not_built_are_refused(
    models: dict[str, Path], model: str, lora: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        adapters_of(models[model], **lora)


def test_every_pipeline_stage_has_something_to_train(models: dict[str, Path]) -> None:
    adapters = adapters_of(models["qwen3-moe"], targets=["model.layers.[01].*.o_proj"])
    adapters.check_stages([[[0, 2]], [[1, 3]]])
    with pytest.raises(ConfigError, match="no layer of pipeline stage 1 has an adapter"):
        adapters.check_stages([[[0, 1]], [[2, 3]]])


def test_a_run_is_checked_before_anything_starts(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "1", "label": "1"}) + "\n")
    model, data = ["--model.path", str(models["qwen3-moe"])], ["--data.prompts", str(prompts)]
    run = ["check", *model, *data, "--output-dir", str(tmp_path), "--lora.rank", "4"]
    assert main(run) == 0
    assert main([*run, "--lora.targets", "q_prj"]) == 2 and "q_prj" in capsys.readouterr().err
    assert main([*run, "--lora.init", str(tmp_path)]) == 2 and "adapter_config.json" in capsys.readouterr().err


def test_a_part_of_attention_needs_whole_groups_on_a_rank(models: dict[str, Path]) -> None:
    adapters_of(models["qwen3-moe"], targets=["q_proj"]).table.check_layout(ParallelLayout(tp=2))
    adapters_of(models["qwen3-moe"], targets=["attention"]).table.check_layout(ParallelLayout(tp=4))
    with pytest.raises(ConfigError, match="key-value groups"):
        adapters_of(models["qwen3-moe"], targets=["q_proj"]).table.check_layout(ParallelLayout(tp=4))


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_merging_is_what_peft_merges(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    lora = {"rank": 4, "alpha": 6, "rs_lora": True}
    adapters = adapters_of(models[name], **lora)
    factors = write(adapters, tmp_path / "adapter", models[name])
    run_job(MergeLora(models[name], tmp_path / "adapter"), tmp_path / "merged", workers=1)
    merged = {}
    for path in sorted((tmp_path / "merged").glob("*.safetensors")):
        merged |= load_file(path)
    expected = peft_model(models[name], adapters.target_modules, lora, factors).merge_and_unload().state_dict()
    base = load_file(models[name] / "model.safetensors")
    assert merged.keys() == base.keys()
    adapted = {key.removeprefix(PREFIX).replace(".lora_A", "") for key in factors if ".lora_A" in key}
    assert max(float((merged[key] - expected[key]).abs().max()) for key in adapted) < 1e-7
    assert min(float((merged[key] - base[key]).abs().max()) for key in adapted) > 1e-3
    assert all(merged[key].equal(base[key]) for key in base.keys() - adapted)


def test_an_adapter_of_another_model_is_not_merged(models: dict[str, Path], tmp_path: Path) -> None:
    write(adapters_of(models["qwen3-moe"]), tmp_path / "adapter", models["qwen3-moe"])
    with pytest.raises(CheckpointError, match="the model has no|and the rank"):
        MergeLora(models["deepseek-v3"], tmp_path / "adapter")
    factors = load_file(tmp_path / "adapter" / WEIGHTS)
    name = next(iter(factors))
    save_file({key: value for key, value in factors.items() if key != name}, tmp_path / "adapter" / WEIGHTS)
    with pytest.raises(CheckpointError, match="and the rank"):
        MergeLora(models["qwen3-moe"], tmp_path / "adapter")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "use_dora"), ({"peft_type": "IA3"}, "must be LORA"), ({"bias": "all"}, "biases"),
        ({"rank_pattern": {"q_proj": 2}}, "ranks"), ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"r": 0}, "must be LORA with a rank"), ({"lora_alpha": "x"}, "alpha"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_plain_lora_is_refused_by_name(
    models: dict[str, Path], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    write(adapters_of(models["qwen3-moe"]), tmp_path / "adapter", models["qwen3-moe"])
    path = tmp_path / "adapter" / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=words):
        AdapterFile.open(tmp_path / "adapter")


def test_what_engines_are_given_is_no_adapter_to_go_on_from(models: dict[str, Path], tmp_path: Path) -> None:
    """All experts of a layer are one tensor in it: the same bits, and fewer names."""
    single = adapters_of(models["qwen3-moe"])
    stacked = single.with_stacked_experts()
    shapes, of_one = stacked.table.hf_shapes(), single.table.hf_shapes()
    whole = [name for name, shape in shapes.items() if len(shape) == 3]
    experts = shapes[whole[0]][0]
    assert len(of_one) - len(shapes) == len(whole) * (experts - 1) > 0
    for name in whole:
        parts = [of_one[name.replace(".experts.", f".experts.{i}.")] for i in range(experts)]
        assert set(parts) == {shapes[name][1:]}
    assert stacked.target_modules == single.target_modules
    write(stacked, tmp_path / "adapter", models["qwen3-moe"])
    with pytest.raises(CheckpointError, match="all experts of a layer are in one tensor(?s:.*)mslime convert run"):
        MergeLora(models["qwen3-moe"], tmp_path / "adapter")


SHARED = {"experts": "shared_outer"}


def shared_by_experts(name: str) -> bool:
    outer = (".down_proj.lora_B" if ".down_proj." in name else ".lora_A") + "."
    return ".experts." in name and outer in name


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_what_experts_share_is_one_tensor_and_the_rest_lies_beside_it(models: dict[str, Path], name: str) -> None:
    own, shared = adapters_of(models[name]), adapters_of(models[name], **SHARED)
    before, files = own.with_stacked_experts().table.hf_shapes(), shared.as_files.table.hf_shapes()
    assert before.keys() == files.keys()
    for hf, shape in files.items():
        assert shape == ((1, *before[hf][1:]) if shared_by_experts(hf) else before[hf]), hf
    assert sum(map(shared_by_experts, files)) * 2 == sum(len(shape) == 3 for shape in files.values()) > 0
    factors = draw(shared)
    for bound in shared.table.bound.values():
        for size in (1, 2):
            shards = [bound.to_megatron(factors.__getitem__, rank, size) for rank in range(size)]
            assert all(tuple(shard.shape) == bound.kind.local_shape(size) for shard in shards)
            assert all(part.equal(factors[hf]) for hf, part in bound.to_hf(shards))
    assert shared.target_modules == own.target_modules


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_merging_what_experts_share_is_what_peft_merges_of_each(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    lora = {"rank": 4, "alpha": 6}
    factors = write(adapters_of(models[name], **lora, **SHARED).as_files, tmp_path / "adapter", models[name])
    run_job(MergeLora(models[name], tmp_path / "adapter"), tmp_path / "merged", workers=1)
    merged = {}
    for path in sorted((tmp_path / "merged").glob("*.safetensors")):
        merged |= load_file(path)
    single = adapters_of(models[name], **lora)
    each: dict[str, torch.Tensor] = {}
    for hf in single.table.hf_shapes():
        before, _, after = hf.partition(".experts.")
        expert, _, rest = after.partition(".")
        stack = factors.get(f"{before}.experts.{rest}")
        each[hf] = factors[hf] if stack is None else stack[min(int(expert), len(stack) - 1)]
    expected = peft_model(models[name], single.target_modules, lora, each).merge_and_unload().state_dict()
    adapted = {key.removeprefix(PREFIX).replace(".lora_A", "") for key in each if ".lora_A" in key}
    assert max(float((merged[key] - expected[key]).abs().max()) for key in adapted) < 1e-7


def test_a_shared_adapter_is_of_this_model_whole_and_said_to_be_shared(models: dict[str, Path], tmp_path: Path) -> None:
    model = models["qwen3-moe"]
    factors = write(adapters_of(model, **SHARED).as_files, tmp_path / "adapter", model)
    file = AdapterFile.open(tmp_path / "adapter")
    file.check(adapters_of(model, **SHARED))
    with pytest.raises(CheckpointError, match="lora.experts is per_expert"):
        file.check(adapters_of(model))
    write(adapters_of(model), tmp_path / "single", model)
    with pytest.raises(CheckpointError, match="lora.experts is shared_outer"):
        AdapterFile.open(tmp_path / "single").check(adapters_of(model, **SHARED))
    fewer = {name: tensor[:4].clone() if tensor.ndim == 3 else tensor for name, tensor in factors.items()}
    save_file(fewer, tmp_path / "adapter" / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"4 experts(?s:.*)the model also has \S*experts.4."):
        MergeLora(model, tmp_path / "adapter")
    name = next(name for name, tensor in factors.items() if len(tensor) > 1 and tensor.ndim == 3)
    save_file(factors | {name: factors[name][:3].clone()}, tmp_path / "adapter" / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"must be \[1, ...\] or \[8, ...\]"):
        MergeLora(model, tmp_path / "adapter")


def test_an_adapter_to_start_from_has_the_settings_of_the_run(models: dict[str, Path], tmp_path: Path) -> None:
    write(adapters_of(models["qwen3-moe"]), tmp_path / "adapter", models["qwen3-moe"])
    file = AdapterFile.open(tmp_path / "adapter")
    file.check(adapters_of(models["qwen3-moe"]))
    for lora, words in (
        ({"rank": 8}, "lora.rank is 8"), ({"alpha": 7}, "lora.alpha is 7"), ({"rs_lora": True}, "lora.rs_lora is True"),
        ({"targets": ["attention"]}, "excludes its layer"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=words):
            file.check(adapters_of(models["qwen3-moe"], **lora))
