"""config.json -> model: both generations of its spelling, and everything that mslime does not build refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mslime.config.errors import CheckpointError
from mslime.config.passthrough import megatron_fields
from mslime.convert.families import FAMILIES, get_family, read_hf_config

# The published config.json of Qwen3-30B-A3B in the spelling of transformers 4.
QWEN3_30B_A3B: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip


def fields(config: dict[str, object]) -> dict[str, Any]:
    return get_family(config).transformer_fields(config)


def test_a_published_config_gives_its_transformer_fields() -> None:
    got = fields(QWEN3_30B_A3B)
    expected = {
        "num_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_query_groups": 4, "kv_channels": 128,
        "ffn_hidden_size": 6144, "moe_ffn_hidden_size": 768, "num_moe_experts": 128, "moe_router_topk": 8,
        "qk_layernorm": True, "layernorm_epsilon": 1e-6, "activation_func": "silu", "gated_linear_unit": True,
        "add_bias_linear": False, "moe_router_pre_softmax": False, "moe_layer_freq": [1] * 48,
    }  # fmt: skip
    assert {name: got[name] for name in expected} == expected and set(got) <= megatron_fields().keys()
    assert fields(QWEN3_30B_A3B | {"norm_topk_prob": False})["moe_router_pre_softmax"] is True
    model = get_family(QWEN3_30B_A3B).model_fields(QWEN3_30B_A3B)
    assert (model.vocab_size, model.rotary_base, model.top_k, model.tie_embeddings) == (151936, 1e6, 8, False)
    assert model.moe_layer_ids == tuple(range(48))


def test_both_spellings_of_rotary_settings_and_of_experts_mean_the_same() -> None:
    family = get_family(QWEN3_30B_A3B)
    new = {name: value for name, value in QWEN3_30B_A3B.items() if not name.startswith("rope")}
    new["rope_parameters"] = {"rope_theta": 1000000.0, "rope_type": "default"}
    assert family.model_fields(new) == family.model_fields(QWEN3_30B_A3B)
    new = {name: value for name, value in QWEN3_30B_A3B.items() if name != "num_experts"} | {"num_local_experts": 128}
    assert fields(new) == fields(QWEN3_30B_A3B)


def test_the_first_layers_may_be_dense_and_every_second_may_route() -> None:
    config = QWEN3_30B_A3B | {"num_hidden_layers": 6, "mlp_only_layers": [1], "decoder_sparse_step": 2}
    assert fields(config)["moe_layer_freq"] == [0, 0, 0, 1, 0, 1]
    assert get_family(config).model_fields(config).moe_layer_ids == (3, 5)


@pytest.mark.parametrize(("change", "named"), [
    ({"hidden_act": "gelu"}, "hidden_act"), ({"attention_bias": True}, "attention_bias"),
    ({"attention_dropout": 0.1}, "attention_dropout"), ({"use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["sliding_attention"] * 48}, "layer_types"),
    ({"dual_chunk_attention_config": {}}, "dual_chunk_attention_config"),
    ({"num_experts_per_tok": 1}, "num_experts_per_tok"), ({"num_hidden_layers": "48"}, "num_hidden_layers"),
    ({"num_experts": None}, "num_experts"), ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"mlp_only_layers": list(range(48))}, "mlp_only_layers"), ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
])  # fmt: skip
def test_settings_that_change_the_arithmetic_are_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {named}"):
        fields(QWEN3_30B_A3B | change)


@pytest.mark.parametrize(("change", "named"), [
    *(({"max_position_embeddings": positions}, "max_position_embeddings") for positions in (10**25, 0, -1, True)),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type = 'dynamic'"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}, "rope_type = 'linear'"),
    ({"rope_theta": None}, "rope_theta"),
])  # fmt: skip
def test_positions_and_rotations_that_no_model_has_are_refused(change: dict[str, object], named: str) -> None:
    config = {name: value for name, value in (QWEN3_30B_A3B | change).items() if change.get(name, 0) is not None}
    with pytest.raises(CheckpointError, match=named):
        get_family(config).model_fields(config)


@pytest.mark.parametrize("architectures", [["GPT9ForCausalLM"], None, [], "Qwen3ForCausalLM"])
def test_an_unknown_architecture_lists_the_supported_ones(architectures: object) -> None:
    with pytest.raises(CheckpointError, match="Qwen3ForCausalLM, Qwen3MoeForCausalLM"):
        get_family({"architectures": architectures})


def test_a_missing_or_broken_config_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="valid JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="JSON object"):
        read_hf_config(tmp_path)


def test_families_are_read_and_expanded_without_torch() -> None:
    code = (
        "import sys; from mslime.convert.families import FAMILIES; import mslime.convert.hf;"
        "import mslime.weights.weight_plan;"
        "assert 'torch' not in sys.modules and 'safetensors' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert FAMILIES
