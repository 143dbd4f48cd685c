"""Published settings of families with grouped-query or latent attention become megatron-core's, others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from mslime.config.errors import CheckpointError, ConfigError
from mslime.config.layout import ParallelLayout
from mslime.config.passthrough import megatron_fields
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


V3, V2_LARGE, MOONLIGHT = map(published_config, ("deepseek-v3", "deepseek-v2", "moonlight-16B-A3B"))
V3_YARN = V3["rope_scaling"]
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
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


@pytest.mark.parametrize(("model", "change", "named"), [
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
    ("llama3.1-8B", {"rope_scaling": LLAMA3}, "original_max_position"),
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
    ("deepseek-v3", {"hidden_act": "gelu"}, "hidden_act"),
    ("deepseek-v3", {"attention_bias": True}, "attention_bias"),
    ("deepseek-v3", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("deepseek-v3", {"rope_interleave": False}, "rope_interleave"),
    ("deepseek-v3", {"head_dim": 128}, "head_dim"),
    ("deepseek-v3", {"num_key_value_heads": 8}, "num_key_value_heads"),
    ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek-v3", {"topk_method": "greedy"}, "topk_method"),
    ("deepseek-v3", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("deepseek-v3", {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, "num_experts_per_tok"),
    ("deepseek-v3", {"topk_group": 2}, "topk_group"),
    ("deepseek-v3", {"n_group": 3}, "n_group"),
    ("deepseek-v3", {"n_group": 128, "topk_group": 2}, "n_group"),
    ("deepseek-v3", {"first_k_dense_replace": 61}, "first_k_dense_replace"),
    ("deepseek-v3", {"rope_scaling": V3_YARN | {"rope_type": "linear", "type": "linear"}}, "rope_type"),
    ("deepseek-v3", {"rope_scaling": V3_YARN | {"attention_factor": 1.2}}, "attention_factor"),
    ("deepseek-v3", {"rope_scaling": V3_YARN | {"truncate": False}}, "truncate"),
    ("deepseek-v3", {"rope_scaling": {k: v for k, v in V3_YARN.items() if k[-3:] != "dim"}}, "mscale_all_dim"),
    ("deepseek-v3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("deepseek-v3", {"index_topk": 2048}, "index_topk"),
    ("deepseek-v2-lite", {"scoring_func": "sigmoid"}, "scoring_func"),
    ("deepseek-v2-lite", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("deepseek-v2-lite", {"topk_method": "noaux_tc"}, "topk_method"),
    ("deepseek-v2-lite", {"mlp_bias": True}, "mlp_bias"),
    ("deepseek-v2", {"topk_group": 9}, "n_group"),
])  # fmt: skip
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
    assert "model.ignored_config_fields: [some_gate, other_scale]" in error.value.hint
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


# ------------------------------------------------------------------------------------------------ DeepSeek


def fields_of(config: dict[str, Any]) -> dict[str, Any]:
    return get_family(config).transformer_fields(config)


def test_deepseek_v3_is_what_its_paper_says() -> None:
    got = fields_of(V3)
    expected = {
        "multi_latent_attention": True, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "rope_type": "yarn", "rotary_scaling_factor": 40.0,
        "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0, "moe_router_num_groups": 8,
        "moe_router_group_topk": 4, "moe_router_topk": 8, "moe_router_topk_scaling_factor": 2.5,
        "moe_router_score_function": "sigmoid", "moe_shared_expert_intermediate_size": 2048,
        "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0,
    }  # fmt: skip
    assert {name: got[name] for name in expected} == expected
    assert got["moe_layer_freq"] == [0] * 3 + [1] * 58


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v2-lite", "moonlight-16B-A3B", "deepseek-v2"])
def test_every_setting_is_read_and_every_field_is_one_of_megatron_core(model: str) -> None:
    config = published_config(model)
    refuse_unread(get_family(config), config)
    assert set(fields_of(config)) <= megatron_fields().keys()


def test_the_correction_bias_alone_keeps_a_dtype_of_its_own() -> None:
    """DeepSeek publishes it in float32, transformers keeps it (`_keep_in_fp32_modules_strict`), SGLang holds it so."""
    own = {name: rule.dtype for name, rule in get_family(V3).rules(V3).all_bound.items() if rule.dtype}
    assert own.keys() == {f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in range(3, 61)} | {
        "mtp.layers.0.transformer_layer.mlp.router.expert_bias"
    }
    assert set(own.values()) == {"float32"}


def test_without_yarn_attention_scores_are_not_scaled() -> None:
    got = fields_of(MOONLIGHT)
    assert (got["rope_type"], got["rotary_scaling_factor"]) == ("rope", 1.0)
    assert "moe_router_num_groups" not in got, "one group is no choice"


def test_deepseek_v2_has_a_size() -> None:
    shapes = get_family(V2_LARGE).rules(V2_LARGE).hf_shapes().values()
    numbers = [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes]
    assert 235.7e9 < sum(numbers) < 235.8e9
    assert fields_of(V2_LARGE)["moe_router_group_topk"] == 3


def test_prediction_layers_are_declared_behind_the_last_and_repeat_embedding_and_output_layer() -> None:
    table = get_family(V3).rules(V3)
    of_layer = {name.removeprefix("model.layers.61.") for name in table.untrained_names}
    last = {name.removeprefix("model.layers.60.") for name in table.hf_shapes() if ".layers.60." in name}
    assert of_layer == last | {f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}
    assert table.aliases == {
        "model.layers.61.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight": "lm_head.weight",
    }
    assert not any(name.startswith("mtp.") for name in table.bound)
    assert not get_family(MOONLIGHT).rules(MOONLIGHT).untrained_names


@pytest.mark.slow
@pytest.mark.parametrize(("transformer_engine", "local"), [
    ("decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
    ("decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"),
    ("decoder.layers.0.input_layernorm.weight", "input_layernorm.weight"),
    ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ("decoder.layers.0.mlp.experts.linear_fc1.weight3", "mlp.experts.local_experts.11.linear_fc1.weight"),
    ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight"),
    ("decoder.layers.0.mlp.router.expert_bias", "mlp.router.expert_bias"),
])  # fmt: skip
def test_transformer_engine_spells_the_same_parameters(transformer_engine: str, local: str) -> None:
    """Its layer spec fuses the norms of latent vectors into the projections up from them, and no other of attention."""
    table = get_family(V3).rules(V3)
    layer = "decoder.layers.2." if "fc1.layer_norm" in transformer_engine else "decoder.layers.7."
    found = canonical_name(transformer_engine, 8, [int(layer.split(".")[2])])
    assert found == layer + local and found in table.bound
    if "fc1.layer_norm" not in transformer_engine:  # the prediction layer's MLP routes
        inside = transformer_engine.replace("decoder.layers.0", "module.mtp.layers.0.transformer_layer")
        assert canonical_name(inside, 8, [7]) in table.all_bound
