"""GPT-OSS, Qwen3-Next and Qwen3.5-MoE: what of config.json and of the layout is refused, and what follows from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mslime.config.errors import CheckpointError, ConfigError
from mslime.config.layout import ParallelLayout
from mslime.config.schema import RunConfig
from mslime.convert.families import get_family, refuse_unread
from mslime.convert.hf import HFCheckpoint
from mslime.convert.table import canonical_name
from tests.fixtures.full_size import published_config


def layout(**sizes: int) -> ParallelLayout:
    ranks = sizes.pop("ranks")
    raw = {
        "model": {"path": "unused"}, "data": {"prompts": ["unused.jsonl"]},
        "cluster": {"device": "cpu", "trainer_ranks": ranks}, "megatron": sizes,
    }  # fmt: skip
    return RunConfig.model_validate(raw).layout


def changed(config: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy with one setting changed, `a.b` being one inside a section."""
    copy = json.loads(json.dumps(config))
    *sections, name = path.split(".")
    inner = copy
    for section in sections:
        inner = inner[section]
    inner[name] = value
    return copy


@pytest.mark.parametrize(("model", "path", "value"), [
    ("gpt-oss-20b", "swiglu_alpha", 1.0), ("gpt-oss-20b", "experts_per_token", 2),
    ("gpt-oss-20b", "initial_context_length", 8192), ("gpt-oss-20b", "attention_bias", False),
    ("gpt-oss-20b", "layer_types", ["full_attention"]), ("gpt-oss-20b", "rope_scaling.rope_type", "linear"),
    ("gpt-oss-20b", "rope_scaling.attention_factor", 2.0), ("gpt-oss-20b", "sliding_window", None),
    ("gpt-oss-20b", "a_new_setting", 1), ("qwen3-next-80B-A3B", "full_attention_interval", 0),
    ("qwen3-next-80B-A3B", "layer_types", ["linear_attention"] * 48),
    ("qwen3-next-80B-A3B", "linear_num_value_heads", 24), ("qwen3-next-80B-A3B", "hidden_act", "gelu"),
    ("qwen3-next-80B-A3B", "attention_bias", True), ("qwen3-next-80B-A3B", "use_sliding_window", True),
    ("qwen3.5-35B-A3B", "text_config.attn_output_gate", False),
    ("qwen3.5-35B-A3B", "text_config.output_gate_type", "sigmoid"),
    ("qwen3.5-35B-A3B", "text_config.rope_parameters.rope_type", "yarn"),
    ("qwen3.5-35B-A3B", "text_config.mlp_only_layers", [0]),
    ("qwen3.5-35B-A3B", "text_config.mtp_num_hidden_layers", 2),
    ("qwen3.5-35B-A3B", "text_config.tie_word_embeddings", True), ("qwen3.5-35B-A3B", "text_config.a_new_setting", 1),
    ("qwen3.5-35B-A3B", "text_config", None),
])  # fmt: skip
def test_a_setting_that_changes_the_arithmetic_is_refused_by_name(model: str, path: str, value: object) -> None:
    config = published_config(model)
    refuse_unread(get_family(config), config)
    wrong = changed(config, path, value)
    with pytest.raises(CheckpointError, match=path.rsplit(".", 1)[-1].removesuffix("_value_heads")):
        refuse_unread(get_family(wrong), wrong)


@pytest.mark.parametrize(
    ("model", "sizes", "field"),
    [
        ("qwen3-next-80B-A3B", {"ranks": 2, "context_parallel_size": 2}, "megatron.context_parallel_size"),
        ("qwen3.5-35B-A3B", {"ranks": 2, "context_parallel_size": 2}, "megatron.context_parallel_size"),
        (
            "gpt-oss-20b",
            {"ranks": 2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
            "megatron.expert_tensor_parallel_size",
        ),
    ],
)
def test_a_layout_that_megatron_core_cannot_build_is_refused_before_anything_starts(
    model: str, sizes: dict[str, int], field: str
) -> None:
    config = published_config(model)
    table = get_family(config).rules(config)
    table.check_layout(layout(ranks=1))
    with pytest.raises(ConfigError, match=f"{field} = 2: .*\n.*set {field} to 1"):
        table.check_layout(layout(**sizes))


def test_a_window_counts_the_token_itself_in_transformers_and_not_in_megatron_core() -> None:
    fields = get_family(config := published_config("gpt-oss-20b")).transformer_fields(config)
    assert fields["window_size"] == (127, 0)
    assert fields["window_attn_skip_freq"] == [1, 0] * 12


def test_layer_kinds_follow_from_the_interval_where_they_are_not_listed() -> None:
    fields = get_family(config := published_config("qwen3-next-80B-A3B")).transformer_fields(config)
    assert fields["linear_attention_freq"] == [1, 1, 1, 0] * 12


def test_fp8_checkpoints_of_qwen3_5_hold_their_experts_one_by_one() -> None:
    config = published_config("qwen3.5-35B-A3B")
    stacked = get_family(config).rules(config).hf_shapes()
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    single = get_family(config).rules(config).hf_shapes()
    assert stacked["model.language_model.layers.0.mlp.experts.down_proj"] == (256, 2048, 512)
    assert single["model.language_model.layers.0.mlp.experts.255.down_proj.weight"] == (2048, 512)


def test_the_published_mxfp4_file_is_read_expert_by_expert_as_transformers_unpacks_it(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = published_config("gpt-oss-20b") | {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "num_local_experts": 4, "vocab_size": 32,
        "layer_types": ["sliding_attention"],
    }  # fmt: skip
    table = get_family(config).rules(config)
    draw, packed, tensors = torch.Generator().manual_seed(0), {}, {}
    for name, shape in table.hf_shapes().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, rows, columns = shape
            blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), generator=draw, dtype=torch.uint8)
            scales = torch.randint(120, 130, (experts, columns, rows // 32), generator=draw, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            packed[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        else:
            tensors[name] = torch.randn(shape, generator=draw).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = HFCheckpoint(tmp_path)
    table.check_hf(checkpoint.shapes, str(tmp_path))
    for expert in range(4):
        name = f"decoder.layers.0.mlp.experts.local_experts.{expert}.linear_"
        gate_up, down = (packed[f"model.layers.0.mlp.experts.{part}"][expert] for part in ("gate_up_proj", "down_proj"))
        found = table.bind(f"{name}fc1.weight").to_megatron(checkpoint.view, 0, 1)
        assert torch.equal(found, torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], 1).T)
        assert torch.equal(table.bind(f"{name}fc2.weight").to_megatron(checkpoint.view, 0, 1), down.T)


def test_transformer_engines_names_of_biases_and_of_the_fused_norm_are_mapped() -> None:
    assert (
        canonical_name("decoder.layers.1.mlp.experts.linear_fc2.bias3", first_expert=4)
        == "decoder.layers.1.mlp.experts.local_experts.7.linear_fc2.bias"
    )
    assert (
        canonical_name("decoder.layers.0.self_attention.in_proj.layer_norm_weight")
        == "decoder.layers.0.input_layernorm.weight"
    )


NO_KERNEL = """
def chunk_gated_delta_rule(*args, **kwargs):
    raise RuntimeError("a kernel of a GPU was called on a CPU")
"""
ON_A_CPU = """
import sys, torch
from pathlib import Path
from tests.fixtures.families import CASES
for name in ("qwen3-next", "qwen3.5-moe"):
    case, path = CASES[name], Path(sys.argv[1]) / name
    path.mkdir()
    case.make(path)
    assert case.transformers_model(path)(torch.arange(3, 20)[None]).logits.isfinite().all()
"""


@pytest.mark.nightly
def test_the_reference_computes_on_a_cpu_where_kernels_for_gpus_are_installed(tmp_path: Path) -> None:
    """Beside a trainer on GPUs flash-linear-attention is installed, and transformers would take it."""
    package = tmp_path / "fla" / "ops" / "gated_delta_rule"
    package.mkdir(parents=True)
    for directory in (package, package.parent, package.parent.parent):
        (directory / "__init__.py").write_text(NO_KERNEL if directory == package else "")
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{root}"}
    command = [sys.executable, "-W", "ignore", "-c", ON_A_CPU, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
