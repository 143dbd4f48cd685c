"""Families with grouped-query attention: published settings become megatron-core's, others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from mslime.config.errors import CheckpointError, ConfigError
from mslime.config.layout import ParallelLayout
from mslime.convert.families import get_family, refuse_unread
from mslime.convert.table import canonical_name
from tests.fixtures.full_size import CONFIGS, published_config


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("qwen2.5-7B", {"add_qkv_bias": True, "qk_layernorm": False, "num_query_groups": 4, "kv_channels": 128}),
        ("llama3.1-8B", {"add_qkv_bias": False, "ffn_hidden_size": 14336, "rotary_interleaved": False}),
        ("glm4-9b", {"add_qkv_bias": True, "rotary_interleaved": True, "kv_channels": 128}),
        ("qwen1.5-moe-A2.7B", {"moe_shared_expert_intermediate_size": 5632, "moe_shared_expert_gate": True,
                               "moe_router_pre_softmax": True, "moe_ffn_hidden_size": 1408, "add_qkv_bias": True}),
        ("glm4.5-355B-A32B", {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
                              "moe_router_topk_scaling_factor": 2.5, "qk_layernorm": True, "add_qkv_bias": True,
                              "moe_layer_freq": [0] * 3 + [1] * 89, "moe_shared_expert_intermediate_size": 1536,
                              "moe_router_bias_update_rate": 0.0, "moe_shared_expert_gate": False}),
        ("glm4.5-air-106B-A12B", {"qk_layernorm": False, "moe_router_topk_scaling_factor": None}),
        ("minimax-m2", {"qk_layernorm": False, "moe_router_score_function": "sigmoid", "moe_ffn_hidden_size": 1536,
                        "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": None}),
        ("mixtral-8x7B", {"moe_router_pre_softmax": False, "moe_router_topk": 2, "moe_ffn_hidden_size": 14336}),
        ("olmoe-1B-7B", {"moe_router_pre_softmax": True, "qk_layernorm": False, "moe_ffn_hidden_size": 1024}),
    ],
)  # fmt: skip
def test_published_settings_become_megatron_cores(model: str, fields: dict[str, Any]) -> None:
    found = get_family(published_config(model)).transformer_fields(published_config(model))
    assert {name: found[name] for name in fields} == fields


@pytest.mark.parametrize(("model", "percent", "joint", "post", "factor"), [
    ("qwen2.5-7B", 1.0, False, False, None), ("llama3.1-8B", 1.0, False, False, 8.0),
    ("glm4-9b", 0.5, False, True, None), ("glm4.5-air-106B-A12B", 0.5, False, False, None),
    ("minimax-m2", 0.5, True, False, None), ("olmoe-1B-7B", 1.0, True, False, None),
])  # fmt: skip
def test_rotation_and_norms_beside_megatron_cores_settings(
    model: str, percent: float, joint: bool, post: bool, factor: float | None
) -> None:
    found = get_family(published_config(model)).model_fields(published_config(model))
    assert (found.rotary_percent, found.joint_qk_norm, found.post_norms) == (percent, joint, post)
    assert found.llama3_factor == factor


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("model", ["qwen2.5-7B", "qwen3-4B", "qwen3-30B-A3B", "qwen2-57B-A14B", "llama3.1-8B"])
def test_yarn_is_read_as_its_publishers_document_it(model: str) -> None:
    config = published_config(model) | {"rope_scaling": YARN}
    family = get_family(config)
    refuse_unread(family, config)
    assert family.model_fields(config).position_embedding == "yarn"
    fields = family.transformer_fields(config)
    assert {name: value for name, value in fields.items() if name.startswith("yarn") and value is not None} == {
        "yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 32768, "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0, "yarn_correction_range_round_to_int": True,
    }  # fmt: skip


@pytest.mark.parametrize("model", ["glm4-9b", "glm4.5-air-106B-A12B"])
def test_glm_rotates_half_a_head_where_the_file_does_not_say(model: str) -> None:
    config = {name: value for name, value in published_config(model).items() if name != "partial_rotary_factor"}
    assert get_family(config).model_fields(config).rotary_percent == 0.5


@pytest.mark.parametrize(
    ("model", "change", "named"),
    [
        ("qwen2.5-7B", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen2.5-7B", {"use_mrope": True}, "use_mrope"),
        ("qwen2.5-7B", {"max_position_embeddings": 10**25}, "max_position_embeddings"),
        ("qwen2.5-7B", {"rms_norm_eps": 0.5}, "rms_norm_eps"),
        ("qwen2.5-7B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("qwen2.5-7B", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type"),
        ("qwen2.5-7B", {"rope_scaling": YARN | {"attn_factor": 0.88}}, "attn_factor"),
        ("qwen2.5-7B", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        ("llama3.1-8B", {"attention_bias": True}, "attention_bias"),
        ("llama3.1-8B", {"mlp_bias": True}, "mlp_bias"),
        ("llama3.1-8B", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 4096}}, "original_max_position"),
        ("qwen1.5-moe-A2.7B", {"qkv_bias": False}, "qkv_bias"),
        ("glm4.5-355B-A32B", {"n_group": 8}, "n_group"),
        ("glm4.5-355B-A32B", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("glm4.5-355B-A32B", {"first_k_dense_replace": 92}, "first_k_dense_replace"),
        ("minimax-m2", {"qk_norm_type": "per_head"}, "qk_norm_type"),
        ("minimax-m2", {"scoring_func": "softmax"}, "scoring_func"),
        ("minimax-m2", {"attn_type_list": [0] * 62}, "attn_type_list"),
        ("minimax-m2", {"shared_intermediate_size": 8}, "shared_intermediate_size"),
        ("minimax-m2", {"use_routing_bias": False}, "use_routing_bias"),
        ("minimax-m2", {"partial_rotary_factor": 0.25}, "rotary_dim"),
        ("mixtral-8x7B", {"sliding_window": 4096}, "sliding_window"),
        ("mixtral-8x7B", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
        ("olmoe-1B-7B", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmoe-1B-7B", {"layer_norm_type": "other"}, "layer_norm_type"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(model: str, change: dict[str, Any], named: str) -> None:
    config = published_config(model) | change
    with pytest.raises(CheckpointError) as caught:
        refuse_unread(get_family(config), config)
    assert named in caught.value.field


@pytest.mark.parametrize("model", sorted(path.parent.name for path in CONFIGS.glob("*/config.json")))
def test_the_epsilon_of_norms_is_the_files_in_every_family(model: str) -> None:
    config = published_config(model)
    section = config.get("text_config", config)
    assert "rms_norm_eps" in section
    section["rms_norm_eps"] = 0.0025
    assert get_family(config).transformer_fields(config)["layernorm_epsilon"] == 0.0025
    section["rms_norm_eps"] = 0.5
    with pytest.raises(CheckpointError, match="rms_norm_eps"):
        get_family(config).transformer_fields(config)


CODER = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}


def test_what_published_files_and_tools_write_beside_is_read_at_the_value_that_changes_nothing() -> None:
    """Qwen3-Coder's own settings, unsloth's, and how transformers 4 generated."""
    config = published_config("qwen3-30B-A3B")
    sampling = {"top_k": 20, "temperature": 0.7, "do_sample": True, "repetition_penalty": 1.05}
    more = CODER | sampling | {"unsloth_version": "2025.7", "unsloth_fixed": True, "model_name": "x"}
    refuse_unread(get_family(config), config | more)
    for name, value in CODER.items():
        wrong = config | CODER | {name: 1 if value == 0 and value is not False else not value}
        with pytest.raises(CheckpointError, match=name):
            refuse_unread(get_family(config), wrong)


def test_all_settings_that_nobody_reads_are_named_at_once() -> None:
    config = published_config("qwen3-30B-A3B") | {"some_gate": True, "other_scale": 2.0}
    with pytest.raises(CheckpointError) as error:
        refuse_unread(get_family(config), config)
    assert "model.ignored_config_fields: [some_gate, other_scale]" in error.value.way_out
    refuse_unread(get_family(config), config, ["some_gate", "other_scale"])


@pytest.mark.parametrize(("model", "change"), [
    ("mixtral-8x7B", {"head_dim": 64}), ("olmoe-1B-7B", {"rms_norm_eps": 1e-6}),
    ("olmoe-1B-7B", {"num_key_value_heads": 8}), ("olmoe-1B-7B", {"norm_topk_prob": True}),
    ("minimax-m2", {"rotary_dim": None}), ("minimax-m2", {"use_qk_norm": None}),
    ("qwen1.5-moe-A2.7B", {"mlp_only_layers": [0]}),
])  # fmt: skip
def test_what_sglang_computes_otherwise_is_refused_for_the_engine_alone(model: str, change: dict[str, Any]) -> None:
    config = published_config(model)
    get_family(config).refuse_for_engine(config)
    refuse_unread(get_family(config), config | change)
    with pytest.raises(CheckpointError) as caught:
        get_family(config).refuse_for_engine(config | change)
    assert next(iter(change)) in caught.value.field


def test_heads_with_a_joint_norm_are_not_split_over_ranks() -> None:
    rules = get_family(published_config("minimax-m2")).rules(published_config("minimax-m2"))
    rules.check_layout(ParallelLayout(tp=8))
    with pytest.raises(ConfigError, match="8 heads with a joint norm"):
        rules.check_layout(ParallelLayout(tp=16))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "local"), [
    ("glm4.5-355B-A32B", "self_attention.linear_qkv.bias"), ("glm4.5-355B-A32B", "self_attention.q_layernorm.weight"),
    ("glm4.5-355B-A32B", "pre_mlp_layernorm.weight"), ("glm4.5-355B-A32B", "mlp.router.expert_bias"),
    ("glm4.5-355B-A32B", "mlp.shared_experts.linear_fc1.weight"),
    ("glm4.5-355B-A32B", "mlp.experts.linear_fc2.weight3"), ("qwen1.5-moe-A2.7B", "mlp.shared_experts.gate_weight"),
    ("minimax-m2", "self_attention.k_layernorm.weight"), ("glm4-9b", "self_attn_bda.norm.weight"),
    ("glm4-9b", "mlp_bda.norm.weight"), ("glm4-9b", "mlp.linear_fc1.layer_norm_weight"),
    ("llama3.1-8B", "self_attention.linear_qkv.layer_norm_weight"),
])  # fmt: skip
def test_transformer_engine_spells_parameters_that_have_a_rule(model: str, local: str) -> None:
    table = get_family(published_config(model)).rules(published_config(model))
    assert canonical_name(f"module.decoder.layers.0.{local}", 0, [7]) in table.bound
