"""GLM-4 dense and MoE: Glm4ForCausalLM (https://arxiv.org/abs/2406.12793 for the series; transformers `models/glm4`).

Grouped-query attention with biases on queries, keys and values; half of each head rotates in interleaved pairs. Outputs
of attention and MLP are normed before they are added to the residual stream. The checkpoint holds gate and up
projections as one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mslime.convert.families.experts import Experts, read_experts
from mslime.convert.families.family import HFConfig, ModelFields, Support, flag, refuse_unless, required_int
from mslime.convert.families.gqa import Attention, Decoder, read_attention, with_multi_token_prediction
from mslime.convert.table import Rule, RuleTable
from mslime.convert.tensor_layouts import FusedGatedMLP, Replicated, Row

_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."


class Glm4(Decoder):
    """The dense family; GLM-4.5's MoE family has another structure."""

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


# GLM-4.5, 4.6 and 4.7 mixture of experts: Glm4MoeForCausalLM (https://arxiv.org/abs/2508.06471; transformers
# `models/glm4_moe`).
#
# Grouped-query attention with biases on queries, keys and values; the large models have a norm on every query and key
# head. Half of each head rotates. The experts are DeepSeek-V3's with one group, and so is the layer of multi-token
# prediction behind the last.


class Glm4Moe(Decoder):
    """The MoE family."""

    architecture = "Glm4MoeForCausalLM"
    support = Support(
        ("GLM-4.5", "GLM-4.5-Air", "GLM-4.7"),
        renderers=("glm-4.5", "glm-5"),
        served_adapters=True,
        notes=("The layer of multi-token prediction is not trained; exports copy it from the source checkpoint.",),
    )
    partial_rotary = 0.5

    def attention(self, hf_config: HFConfig) -> Attention:
        norm = "head" if flag(hf_config, "use_qk_norm", False) else "none"
        return read_attention(hf_config, flag(hf_config, "attention_bias", False), norm)

    def experts(self, hf_config: HFConfig) -> Experts:
        refuse_unless(hf_config, "norm_topk_prob", (None, True))
        refuse_unless(hf_config, "n_group", (None, 1))
        refuse_unless(hf_config, "topk_group", (None, 1))
        return read_experts(hf_config, sigmoid=True)

    def rules(self, hf_config: HFConfig) -> RuleTable:
        names = ("num_nextn_predict_layers", "num_mtp_layers")  # names in transformers 4 and 5
        depth = required_int(hf_config, *names) if any(hf_config.get(name) for name in names) else 0
        return with_multi_token_prediction(super().rules(hf_config), hf_config, depth)
