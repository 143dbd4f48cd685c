"""GPT-OSS: GptOssForCausalLM (https://arxiv.org/abs/2508.10925; transformers `models/gpt_oss`).

Grouped-query attention with a learned sink in every head's softmax and a sliding window in every other layer, YaRN, and
clamped gated experts. Every linear layer has a bias, the router too. The file stacks a layer's experts in one tensor.
"""

from __future__ import annotations

from dataclasses import replace

from mslime.convert.families.family import (
    HFConfig,
    ModelFields,
    Support,
    as_list,
    refuse_unless,
    refused,
    required_int,
    required_number,
    rotary,
    yarn_fields,
)
from mslime.convert.families.gqa import Attention, Decoder, attention_rules, mlp_norm_rules, read_attention, whole_model
from mslime.convert.table import Rule, RuleTable
from mslime.convert.tensor_layouts import Column, InterleavedGatedMLP, Replicated, TransposedRow

_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."


_NO_ETP = "megatron-core does not divide experts with biases"


class GptOss(Decoder):
    """The GPT-OSS family; every layer has experts."""

    architecture = "GptOssForCausalLM"
    support = Support(
        ("gpt-oss-20b", "gpt-oss-120b"),
        renderers=("harmony",),
        not_served="SGLang 0.5.23's attention for CPUs does not support sinks",
        notes=(f"Expert tensor parallelism is not supported: {_NO_ETP}.",),
    )
    rope_kinds = ("yarn",)
    rope_base = 150000.0

    def attention(self, hf_config: HFConfig) -> Attention:
        refuse_unless(hf_config, "attention_bias", (None, True))
        return read_attention(hf_config, bias=True)

    def transformer_fields(self, hf_config: HFConfig) -> dict[str, object]:
        refuse_unless(hf_config, "swiglu_alpha", (None, 1.702))  # megatron-core's quick_gelu has this constant
        top_k, layers = required_int(hf_config, "num_experts_per_tok"), required_int(hf_config, "num_hidden_layers")
        refuse_unless(hf_config, "experts_per_token", (None, top_k))
        # Largest input of the activation; transformers' default if config.json does not set it.
        limit = required_number(hf_config, "swiglu_limit") if hf_config.get("swiglu_limit") is not None else 7.0
        yarn = yarn_fields(rotary(hf_config, self.rope_kinds, self.rope_base))
        refuse_unless(hf_config, "initial_context_length", (None, yarn["yarn_original_max_position_embeddings"]))
        return super().transformer_fields(hf_config) | _windows(hf_config, layers) | {
            "softmax_type": "learnable",
            "add_bias_linear": True,
            "activation_func": "quick_gelu",
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": limit,
            "num_moe_experts": required_int(hf_config, "num_local_experts"),
            "moe_router_topk": top_k,
            "moe_ffn_hidden_size": required_int(hf_config, "intermediate_size"),
            "moe_layer_freq": [1] * layers,
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": False,
        }  # fmt: skip

    def model_fields(self, hf_config: HFConfig) -> ModelFields:
        return replace(
            super().model_fields(hf_config),
            moe_layer_ids=tuple(range(required_int(hf_config, "num_hidden_layers"))),
            num_experts=required_int(hf_config, "num_local_experts"),
            top_k=required_int(hf_config, "num_experts_per_tok"),
        )

    def rules(self, hf_config: HFConfig) -> RuleTable:
        a, layers = self.attention(hf_config), tuple(range(required_int(hf_config, "num_hidden_layers")))
        attention, router, sinks = f"{_H}self_attn.", f"{_H}mlp.router.", Column((a.heads,))
        experts, ffn = required_int(hf_config, "num_local_experts"), required_int(hf_config, "intermediate_size")
        table = whole_model(hf_config, (
            *attention_rules(a, layers),
            Rule(f"{_M}self_attention.linear_proj.bias", (f"{attention}o_proj.bias",), Replicated((a.hidden,)), layers),
            Rule(f"{_M}self_attention.core_attention.softmax_offset", (f"{attention}sinks",), sinks, layers),
            *mlp_norm_rules(a.hidden, layers),
            Rule(f"{_M}mlp.router.weight", (f"{router}weight",), Replicated((experts, a.hidden)), layers),
            Rule(f"{_M}mlp.router.bias", (f"{router}bias",), Replicated((experts,)), layers),
            *_expert_rules(a.hidden, ffn, experts, layers),
        ))  # fmt: skip
        return replace(table, undivided={"etp": _NO_ETP})


def _expert_rules(hidden: int, ffn: int, experts: int, layers: tuple[int, ...]) -> tuple[Rule, ...]:
    m, h = f"{_M}mlp.experts.local_experts.{{expert}}.", f"{_H}mlp.experts."
    kinds = {
        ("linear_fc1.weight", "gate_up_proj"): InterleavedGatedMLP(ffn, hidden),
        ("linear_fc1.bias", "gate_up_proj_bias"): InterleavedGatedMLP(ffn, None),
        ("linear_fc2.weight", "down_proj"): TransposedRow((hidden, ffn)),
        ("linear_fc2.bias", "down_proj_bias"): Replicated((hidden,)),
    }
    return tuple(Rule(m + ours, (h + theirs,), kind, layers, experts) for (ours, theirs), kind in kinds.items())


def _windows(config: HFConfig, layers: int) -> dict[str, object]:
    """Layers with a sliding window; transformers counts the token itself, megatron-core only the tokens before it."""
    types = as_list(config.get("layer_types")) or ["sliding_attention", "full_attention"] * layers
    types = types[:layers]
    if len(types) < layers or set(types) - {"sliding_attention", "full_attention"}:
        raise refused("layer_types", types, f"must list {layers} layers, each sliding_attention or full_attention")
    window = required_int(config, "sliding_window")
    return {
        "window_size": (window - 1, 0),
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in types],
    }
