"""GLM-4 dense: Glm4ForCausalLM (https://arxiv.org/abs/2406.12793 for the series; transformers `models/glm4`).

Grouped-query attention with biases on queries, keys and values, half of whose heads rotates in interleaved pairs; what
attention and MLP add to the residual stream is normed first. The checkpoint holds gate and up projections as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mslime.convert.families.family import HFConfig, ModelFields, Support, flag, required_int
from mslime.convert.families.gqa import Attention, Decoder, read_attention
from mslime.convert.kinds import FusedGatedMLP, Replicated, Row
from mslime.convert.table import Rule

_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."


class Glm4(Decoder):
    """The dense family; GLM-4.5's MoE family is built otherwise."""

    architecture = "Glm4ForCausalLM"
    support = Support(("GLM-4-9B-0414",))
    partial_rotary = 0.5

    def attention(self, hf_config: HFConfig) -> Attention:
        return read_attention(hf_config, bias=flag(hf_config, "attention_bias", True))

    def transformer_fields(self, hf_config: HFConfig) -> dict[str, object]:
        return super().transformer_fields(hf_config) | {"rotary_interleaved": True}

    def model_fields(self, hf_config: HFConfig) -> ModelFields:
        return replace(super().model_fields(hf_config), post_norms=True)

    def mlp_rules(self, hf_config: HFConfig, layers: Sequence[int]) -> tuple[Rule, ...]:
        hidden, ffn = required_int(hf_config, "hidden_size"), required_int(hf_config, "intermediate_size")
        norm, at = Replicated((hidden,)), tuple(layers)
        return (
            Rule(f"{_M}self_attn_bda.norm.weight", (f"{_H}post_self_attn_layernorm.weight",), norm, at),
            Rule(f"{_M}mlp.linear_fc1.weight", (f"{_H}mlp.gate_up_proj.weight",), FusedGatedMLP(ffn, hidden), at),
            Rule(f"{_M}mlp.linear_fc2.weight", (f"{_H}mlp.down_proj.weight",), Row((hidden, ffn)), at),
            Rule(f"{_M}mlp_bda.norm.weight", (f"{_H}post_mlp_layernorm.weight",), norm, at),
        )
