"""The rule tables: every name exactly once, wrong models and checkpoints refused, HF -> Megatron -> HF bit-exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mslime.config.errors import CheckpointError, ConfigError
from mslime.config.layout import ParallelLayout
from mslime.convert.families import get_family, read_hf_config
from mslime.convert.hf import HFCheckpoint
from mslime.convert.table import RuleTable, canonical_name
from tests.fixtures.tiny_models import make_tiny_qwen3_dense, make_tiny_qwen3_moe

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "moe": (make_tiny_qwen3_moe, {}),
    "moe with dense layers": (make_tiny_qwen3_moe, {"mlp_only_layers": [0], "decoder_sparse_step": 2}),
    "dense": (make_tiny_qwen3_dense, {}),
    "dense tied": (make_tiny_qwen3_dense, {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    return {name: make(root / name.replace(" ", "-"), **kw) for name, (make, kw) in MODELS.items()}


def table_of(path: Path) -> RuleTable:
    config = read_hf_config(path)
    return get_family(config).rules(config)


@pytest.mark.parametrize("model", MODELS)
def test_every_hf_tensor_is_written_by_exactly_one_rule(checkpoints: dict[str, Path], model: str) -> None:
    table, checkpoint = table_of(checkpoints[model]), HFCheckpoint(checkpoints[model])
    written = [name for rule in table.bound.values() if rule.exported for name in rule.hf_names]
    assert sorted(written) == sorted(checkpoint.info), "tensors written and tensors of the checkpoint"
    table.check_hf(checkpoint.shapes, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_hf_to_megatron_to_hf_is_bit_exact(
    checkpoints: dict[str, Path], model: str, tp_size: int, dtype: torch.dtype
) -> None:
    table, checkpoint = table_of(checkpoints[model]), HFCheckpoint(checkpoints[model])
    original = {name: checkpoint.tensor(name).to(dtype) for name in checkpoint.info}
    back: dict[str, torch.Tensor] = {}
    for rule in table.bound.values():
        shards = [rule.to_megatron(original.__getitem__, rank, tp_size) for rank in range(tp_size)]
        assert all(tuple(shard.shape) == rule.kind.local_shape(tp_size) for shard in shards), rule.name
        if rule.exported:
            back.update(rule.to_hf(shards))
    assert back.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_lazy_views_of_the_file_give_the_same_shards(checkpoints: dict[str, Path]) -> None:
    table, checkpoint = table_of(checkpoints["moe"]), HFCheckpoint(checkpoints["moe"])
    for rule in table.bound.values():
        lazy, eager = (rule.to_megatron(read, 1, 2) for read in (checkpoint.view, checkpoint.tensor))
        assert torch.equal(lazy, eager), rule.name


def test_tables_follow_the_model_from_embedding_to_head(checkpoints: dict[str, Path]) -> None:
    rules = list(table_of(checkpoints["moe with dense layers"]).bound.values())
    assert rules[0].name == "embedding.word_embeddings.weight"
    assert [rule.name for rule in rules[-2:]] == ["decoder.final_layernorm.weight", "output_layer.weight"]
    layers = [rule.layer for rule in rules[1:-2]]
    assert layers == sorted(layers) and set(layers) == {0, 1, 2, 3}


def test_dense_layers_of_a_moe_model_have_an_mlp_and_no_router(checkpoints: dict[str, Path]) -> None:
    names = tuple(table_of(checkpoints["moe with dense layers"]).bound)
    routed = {name.split(".")[2] for name in names if ".router." in name}
    dense = {name.split(".")[2] for name in names if name.endswith(".mlp.linear_fc1.weight")}
    assert routed == {"1", "3"} and dense == {"0", "2"}


def test_a_tied_output_layer_is_loaded_from_the_embedding_and_never_written(checkpoints: dict[str, Path]) -> None:
    output = table_of(checkpoints["dense tied"]).bind("output_layer.weight")
    assert output.hf_names == ("model.embed_tokens.weight",) and not output.exported


def test_check_model_names_a_parameter_without_rule_and_a_rule_without_parameter(checkpoints: dict[str, Path]) -> None:
    table = table_of(checkpoints["moe"])
    names = list(table.bound)
    table.check_model(names)
    with pytest.raises(CheckpointError, match=r"linear_qkv\.bias"):
        table.check_model([*names, "decoder.layers.0.self_attention.linear_qkv.bias"])
    with pytest.raises(CheckpointError, match=r"final_layernorm.*lacks 1"):
        table.check_model([name for name in names if "final_layernorm" not in name])


def test_check_hf_names_missing_misshapen_and_unknown_tensors(checkpoints: dict[str, Path]) -> None:
    table, shapes = table_of(checkpoints["moe"]), HFCheckpoint(checkpoints["moe"]).shapes
    gate = "model.layers.1.mlp.gate.weight"
    with pytest.raises(CheckpointError, match=rf"dir: {gate}.*missing"):
        table.check_hf({name: shape for name, shape in shapes.items() if name != gate}, "dir")
    with pytest.raises(CheckpointError, match=r"dir: lm_head.weight = \(9, 9\).*\(320, 64\)"):
        table.check_hf(shapes | {"lm_head.weight": (9, 9)}, "dir")
    with pytest.raises(CheckpointError, match=r"q_proj\.bias.*no conversion rule"):
        table.check_hf(shapes | {"model.layers.0.self_attn.q_proj.bias": (128,)}, "dir")


@pytest.mark.parametrize(("layout", "field"), [
    (ParallelLayout(tp=8, ep=1), "tensor_model_parallel_size"),
    (ParallelLayout(dp=3, ep=3), "expert_model_parallel_size"),
    (ParallelLayout(tp=64, etp=64), "tensor_model_parallel_size"),
    (ParallelLayout(dp=3, etp=3), "expert_tensor_parallel_size"),
])  # fmt: skip
def test_layouts_that_do_not_divide_the_model_are_refused(
    checkpoints: dict[str, Path], layout: ParallelLayout, field: str
) -> None:
    with pytest.raises(ConfigError, match=field):
        table_of(checkpoints["moe"]).check_layout(layout)


def test_layouts_that_divide_the_model_are_accepted(checkpoints: dict[str, Path]) -> None:
    for layout in (ParallelLayout(), ParallelLayout(tp=4, ep=4), ParallelLayout(tp=2, dp=4, ep=8)):
        table_of(checkpoints["moe"]).check_layout(layout)


@pytest.mark.parametrize(
    ("local", "canonical"),
    [
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("module.module.output_layer.weight", "output_layer.weight"),
        ("decoder.layers.1.pre_mlp_layernorm.weight", "decoder.layers.5.pre_mlp_layernorm.weight"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.4.input_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.4.pre_mlp_layernorm.weight"),
        ("decoder.layers.1.mlp.experts.linear_fc2.weight3",
         "decoder.layers.5.mlp.experts.local_experts.11.linear_fc2.weight"),
        ("module.decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight",
         "decoder.layers.5.mlp.experts.local_experts.10.linear_fc1.weight"),
    ],
)  # fmt: skip
def test_both_spellings_become_canonical_with_global_ids(local: str, canonical: str) -> None:
    assert canonical_name(local, first_expert=8, global_layers=(4, 5)) == canonical
