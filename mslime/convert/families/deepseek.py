"""DeepSeek-V2 and V3: DeepseekV2ForCausalLM (https://arxiv.org/abs/2405.04434; transformers `models/deepseek_v2`).

Multi-head latent attention: queries (not in the Lite model), and keys with values, are projected down to a latent
vector, normed and projected up. Part of each head's features rotate, in interleaved pairs; all heads share the rotating
part of the key. megatron-core reorders the pairs itself, so weights keep their order. The first layers are dense. The
others have shared experts and a softmax router, whose values are not normalised after the choice.
"""

from __future__ import annotations

from mslime.convert.families.experts import Experts, limited_groups, read_experts
from mslime.convert.families.family import (
    Family,
    HFConfig,
    ModelFields,
    Support,
    norm_epsilon,
    refuse_unless,
    refused,
    required_int,
    required_number,
    rotary,
)
from mslime.convert.families.gqa import dense_mlp_rules, mlp_norm_rules, whole_model, with_multi_token_prediction
from mslime.convert.table import Rule, RuleTable
from mslime.convert.tensor_layouts import Column, Kind, Replicated, Row

_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."


class DeepseekV2(Family):
    """The DeepSeek-V2 family; DeepSeek-V3 has the same layers and another router."""

    architecture = "DeepseekV2ForCausalLM"
    support = Support(
        ("DeepSeek-V2-Lite", "DeepSeek-V2"),
        notes=("The choice among groups of experts is mslime's own router: megatron-core ranks groups otherwise.",),
    )
    # Expert distribution in the authors' own code, and groups that greedy choice ignores.
    harmless = frozenset({"ep_size", "n_group", "topk_group"})

    def transformer_fields(self, hf_config: HFConfig) -> dict[str, object]:
        _refuse_unbuilt(hf_config)
        layers = required_int(hf_config, "num_hidden_layers")
        return {
            "num_layers": layers,
            "hidden_size": required_int(hf_config, "hidden_size"),
            "ffn_hidden_size": required_int(hf_config, "intermediate_size"),
            "num_attention_heads": required_int(hf_config, "num_attention_heads"),
            "normalization": "RMSNorm",
            # Also for the norms of latent vectors, as in SGLang; transformers always uses 1e-6 there.
            "layernorm_epsilon": norm_epsilon(hf_config),
            "qk_layernorm": True,
            "activation_func": "silu",
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "rotary_interleaved": False,  # megatron-core separates the pairs before it rotates halves
            **_latent_fields(hf_config),
            **self.experts(hf_config).transformer_fields(layers),
            **self.group_fields(hf_config),
        }

    def experts(self, hf_config: HFConfig) -> Experts:
        """Router, routed and shared experts; raises like `transformer_fields`."""
        refuse_unless(hf_config, "scoring_func", (None, "softmax"))
        refuse_unless(hf_config, "norm_topk_prob", (None, False))
        return read_experts(hf_config)

    def group_fields(self, hf_config: HFConfig) -> dict[str, object]:
        """Choice among groups of experts; raises like `transformer_fields`.

        With softmax scores, groups are ranked by their best expert (`backends.megatron.model.moe`).
        """
        refuse_unless(hf_config, "topk_method", (None, "group_limited_greedy", "greedy"))
        return limited_groups(hf_config) if hf_config.get("topk_method") == "group_limited_greedy" else {}

    def model_fields(self, hf_config: HFConfig) -> ModelFields:
        rope, experts = rotary(hf_config, ("default", "yarn")), self.experts(hf_config)
        return ModelFields(
            vocab_size=required_int(hf_config, "vocab_size"),
            max_positions=required_int(hf_config, "max_position_embeddings"),
            rotary_base=rope.base,
            rotary_percent=rope.percent,
            tie_embeddings=False,
            num_layers=required_int(hf_config, "num_hidden_layers"),
            moe_layer_ids=experts.layers,
            num_experts=experts.number,
            top_k=experts.top_k,
        )

    def rules(self, hf_config: HFConfig) -> RuleTable:
        hidden, experts = required_int(hf_config, "hidden_size"), self.experts(hf_config)
        layers = tuple(range(required_int(hf_config, "num_hidden_layers")))
        return whole_model(hf_config, (
            *_attention_rules(hf_config, layers),
            *mlp_norm_rules(hidden, layers),
            *dense_mlp_rules(hf_config, [layer for layer in layers if layer not in experts.layers]),
            *experts.rules(hidden),
        ))  # fmt: skip


def _refuse_unbuilt(config: HFConfig) -> None:
    refuse_unless(config, "hidden_act", ("silu",))
    refuse_unless(config, "attention_bias", (None, False))
    refuse_unless(config, "attention_dropout", (None, 0, 0.0))
    refuse_unless(config, "mlp_bias", (None, False))
    refuse_unless(config, "tie_word_embeddings", (None, False))
    refuse_unless(config, "moe_layer_freq", (None, 1))
    refuse_unless(config, "rope_interleave", (None, True))
    # Derived sizes that some versions of transformers write.
    nope, rope = required_int(config, "qk_nope_head_dim"), required_int(config, "qk_rope_head_dim")
    refuse_unless(config, "qk_head_dim", (None, nope + rope))
    refuse_unless(config, "head_dim", (None, rope))
    refuse_unless(config, "num_key_value_heads", (None, required_int(config, "num_attention_heads")))


def _latent_fields(config: HFConfig) -> dict[str, object]:
    """Multi-head latent attention and its own rotary embedding."""
    rope = rotary(config, ("default", "yarn"))
    refuse_unless({"partial_rotary_factor": rope.percent}, "partial_rotary_factor", (1.0,))
    fields: dict[str, object] = {
        "multi_latent_attention": True,
        "q_lora_rank": _query_rank(config),
        "kv_lora_rank": required_int(config, "kv_lora_rank"),
        "qk_head_dim": required_int(config, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": required_int(config, "qk_rope_head_dim"),
        "v_head_dim": required_int(config, "v_head_dim"),
        "rotary_base": rope.base,
    }
    if rope.kind == "default":
        # Explicit, because megatron-core scales attention scores by the factor's logarithm here too; its default is 40.
        return fields | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    given = rope.settings
    refuse_unless(given, "truncate", (None, True))
    return fields | {
        "rope_type": "yarn",
        "rotary_scaling_factor": required_number(given, "factor"),
        "original_max_position_embeddings": required_int(given, "original_max_position_embeddings"),
        "beta_fast": required_number({"beta_fast": 32, **given}, "beta_fast"),
        "beta_slow": required_number({"beta_slow": 1, **given}, "beta_slow"),
        # Required: transformers and megatron-core interpret a missing one differently.
        "mscale": required_number(given, "mscale"),
        "mscale_all_dim": required_number(given, "mscale_all_dim"),
    }


def _query_rank(config: HFConfig) -> int | None:
    """Rank of the queries' latent vector; None if queries are projected directly."""
    return None if config.get("q_lora_rank") is None else required_int(config, "q_lora_rank")


def _attention_rules(config: HFConfig, layers: tuple[int, ...]) -> tuple[Rule, ...]:
    """Attention and the norm before it.

    Every tensor-parallel rank holds whole down projections to latent vectors, and up projections of some heads.
    """
    hidden, heads = required_int(config, "hidden_size"), required_int(config, "num_attention_heads")
    nope, rope = required_int(config, "qk_nope_head_dim"), required_int(config, "qk_rope_head_dim")
    value, kv_rank = required_int(config, "v_head_dim"), required_int(config, "kv_lora_rank")
    query, q_rank = heads * (nope + rope), _query_rank(config)
    m, h = f"{_M}self_attention.", f"{_H}self_attn."

    def rule(megatron: str, hf: str, kind: Kind, bundle: str = "") -> Rule:
        return Rule(f"{m}{megatron}.weight", (f"{h}{hf}.weight",), kind, layers, bundle=bundle)

    queries = [rule("linear_q_proj", "q_proj", Column((query, hidden)))] if q_rank is None else [
        rule("linear_q_down_proj", "q_a_proj", Replicated((q_rank, hidden)), "down"),
        rule("q_layernorm", "q_a_layernorm", Replicated((q_rank,))),
        rule("linear_q_up_proj", "q_b_proj", Column((query, q_rank))),
    ]  # fmt: skip
    return (
        Rule(f"{_M}input_layernorm.weight", (f"{_H}input_layernorm.weight",), Replicated((hidden,)), layers),
        *queries,
        rule("linear_kv_down_proj", "kv_a_proj_with_mqa", Replicated((kv_rank + rope, hidden)), "down"),
        rule("kv_layernorm", "kv_a_layernorm", Replicated((kv_rank,))),
        rule("linear_kv_up_proj", "kv_b_proj", Column((heads * (nope + value), kv_rank))),
        rule("linear_proj", "o_proj", Row((hidden, heads * value))),
    )


# DeepSeek-V3 and R1: DeepseekV3ForCausalLM (https://arxiv.org/abs/2412.19437; transformers `models/deepseek_v3`).
#
# DeepSeek-V2's layers with a sigmoid router: a correction bias enters the choice of experts but not their weights, and
# groups of experts are ranked by their two best. Moonlight (https://arxiv.org/abs/2502.16982) and Kimi-K2
# (https://arxiv.org/abs/2507.20534) are of this architecture with one group.


class DeepseekV3(DeepseekV2):
    """The DeepSeek-V3 family."""

    architecture = "DeepseekV3ForCausalLM"
    support = Support(
        ("DeepSeek-V3", "DeepSeek-R1", "DeepSeek-V3.1", "Moonlight-16B-A3B", "Kimi-K2"),
        renderers=("deepseek-v3", "deepseek-r1", "kimi-k2"),
        notes=(
            "The router's correction bias stays as the checkpoint has it: training does not balance experts.",
            "Multi-token-prediction layers are not trained; exports copy them from the source checkpoint.",
            "Moonlight's latent norms use rms_norm_eps (1e-5) as in SGLang, where transformers has 1e-6.",
        ),
    )
    harmless = frozenset({"ep_size"})

    def experts(self, hf_config: HFConfig) -> Experts:
        refuse_unless(hf_config, "scoring_func", (None, "sigmoid"))
        refuse_unless(hf_config, "topk_method", (None, "noaux_tc"))
        refuse_unless(hf_config, "norm_topk_prob", (None, True))
        return read_experts(hf_config, sigmoid=True)

    def group_fields(self, hf_config: HFConfig) -> dict[str, object]:
        fields, top_k = limited_groups(hf_config), required_int(hf_config, "num_experts_per_tok")
        # megatron-core ranks groups by their best top_k // topk_group experts, the model by their best two.
        if fields and top_k // required_int(hf_config, "topk_group") != 2:
            raise refused(
                "topk_group", hf_config.get("topk_group"),
                f"megatron-core ranks groups by two experts only if topk_group is half of top-{top_k}",
                "use a checkpoint with two experts per group, or with one group",
            )  # fmt: skip
        return fields

    def rules(self, hf_config: HFConfig) -> RuleTable:
        name = "num_nextn_predict_layers"
        depth = required_int(hf_config, name) if hf_config.get(name) else 0
        return with_multi_token_prediction(super().rules(hf_config), hf_config, depth)
