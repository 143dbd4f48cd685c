"""DeepSeek's config.json -> model: the published files, and every setting that nobody builds refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from mslime.config.errors import CheckpointError
from mslime.config.passthrough import megatron_fields
from mslime.convert.families import get_family, refuse_unread
from mslime.convert.table import canonical_name
from tests.fixtures.full_size import published_config


def fields(config: dict[str, Any]) -> dict[str, Any]:
    return get_family(config).transformer_fields(config)


V3, V2 = published_config("deepseek-v3"), published_config("deepseek-v2-lite")
MOONLIGHT = published_config("moonlight-16B-A3B")
YARN = V3["rope_scaling"]
V2_LARGE = published_config("deepseek-v2")


def test_deepseek_v3_is_what_its_paper_says() -> None:
    got = fields(V3)
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


@pytest.mark.parametrize("config", [V3, V2, MOONLIGHT, V2_LARGE], ids=["v3", "v2-lite", "moonlight", "v2"])
def test_every_setting_is_read_and_every_field_is_one_of_megatron_core(config: dict[str, Any]) -> None:
    refuse_unread(get_family(config), config)
    assert set(fields(config)) <= megatron_fields().keys()


def test_the_correction_bias_alone_keeps_a_dtype_of_its_own() -> None:
    """DeepSeek publishes it in float32, transformers keeps it (`_keep_in_fp32_modules_strict`), SGLang holds it so."""
    own = {name: rule.dtype for name, rule in get_family(V3).rules(V3).all_bound.items() if rule.dtype}
    assert own.keys() == {f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in range(3, 61)} | {
        "mtp.layers.0.transformer_layer.mlp.router.expert_bias"
    }
    assert set(own.values()) == {"float32"}


def test_without_yarn_attention_scores_are_not_scaled() -> None:
    got = fields(MOONLIGHT)
    assert (got["rope_type"], got["rotary_scaling_factor"]) == ("rope", 1.0)
    assert "moe_router_num_groups" not in got, "one group is no choice"


def test_deepseek_v2_has_a_size() -> None:
    shapes = get_family(V2_LARGE).rules(V2_LARGE).hf_shapes().values()
    numbers = [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes]
    assert 235.7e9 < sum(numbers) < 235.8e9
    assert fields(V2_LARGE)["moe_router_group_topk"] == 3


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


@pytest.mark.parametrize(("config", "change", "named"), [
    (V3, {"hidden_act": "gelu"}, "hidden_act"), (V3, {"attention_bias": True}, "attention_bias"),
    (V3, {"tie_word_embeddings": True}, "tie_word_embeddings"), (V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
    (V3, {"rope_interleave": False}, "rope_interleave"), (V3, {"head_dim": 128}, "head_dim"),
    (V3, {"num_key_value_heads": 8}, "num_key_value_heads"), (V3, {"scoring_func": "softmax"}, "scoring_func"),
    (V3, {"topk_method": "greedy"}, "topk_method"), (V3, {"norm_topk_prob": False}, "norm_topk_prob"),
    (V3, {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, "num_experts_per_tok"),
    (V3, {"topk_group": 2}, "topk_group"), (V3, {"n_group": 3}, "n_group"),
    (V3, {"n_group": 128, "topk_group": 2}, "n_group"), (V3, {"first_k_dense_replace": 61}, "first_k_dense_replace"),
    (V3, {"rope_scaling": YARN | {"rope_type": "linear", "type": "linear"}}, "rope_type"),
    (V3, {"rope_scaling": YARN | {"attention_factor": 1.2}}, "attention_factor"),
    (V3, {"rope_scaling": YARN | {"truncate": False}}, "truncate"),
    (V3, {"rope_scaling": {k: v for k, v in YARN.items() if k != "mscale_all_dim"}}, "mscale_all_dim"),
    (V3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"), (V3, {"index_topk": 2048}, "index_topk"),
    (V2, {"scoring_func": "sigmoid"}, "scoring_func"), (V2, {"norm_topk_prob": True}, "norm_topk_prob"),
    (V2, {"topk_method": "noaux_tc"}, "topk_method"), (V2, {"mlp_bias": True}, "mlp_bias"),
    (V2_LARGE, {"topk_group": 9}, "n_group"),
])  # fmt: skip
def test_what_is_not_built_is_refused_by_name(config: dict[str, Any], change: dict[str, Any], named: str) -> None:
    changed = config | change
    with pytest.raises(CheckpointError) as caught:
        refuse_unread(get_family(changed), changed)
    assert named in caught.value.field


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
