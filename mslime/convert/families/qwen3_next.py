"""Qwen3-Next: Qwen3NextForCausalLM (https://qwen.ai/blog?id=qwen3-next; transformers `models/qwen3_next`).

Three of four layers mix tokens with a gated delta-net (https://arxiv.org/abs/2412.06464), the others with attention
whose output is gated; zero-centred norms, a quarter of each head rotates, many small experts and a gated shared one.
"""

from __future__ import annotations

from dataclasses import replace

from mslime.convert.families.delta import delta_heads, delta_rules, gated_attention_rules, linear_layers, mtp_rules
from mslime.convert.families.experts import Experts
from mslime.convert.families.family import HFConfig, Support, flag, refuse_unless, required_int
from mslime.convert.families.gqa import Attention, Decoder, dense_mlp_rules, mlp_norm_rules, read_attention, whole_model
from mslime.convert.families.qwen3_moe import moe_layer_ids, refuse_dense_layers_for_engine
from mslime.convert.kinds import Kind
from mslime.convert.kinds_delta import DeltaByKeyHead
from mslime.convert.table import Rule, RuleTable

NOT_SERVED = "SGLang 0.5.23 runs gated delta-nets on CPUs with sgl-kernel only, of which there is no CPU package"
_NO_CP = "megatron-core's gated delta-net layer has none"


class Qwen3Next(Decoder):
    """The family; its `mtp` layer is carried, not trained."""

    architecture = "Qwen3NextForCausalLM"
    support = Support(
        ("Qwen3-Next-80B-A3B",),
        renderers=("qwen3",),
        not_served=NOT_SERVED,
        notes=(f"Context parallelism is refused: {_NO_CP}.",),
    )
    rope_kinds = ("default",)
    rope_base = 1e7
    partial_rotary = 0.25
    harmless = frozenset({"max_window_layers", "sliding_window"})
    own_dtype: str | None = None
    """Dtype in which the file keeps the decay rates and the norm inside a gated delta-net layer; None: the model's."""

    def attention(self, hf_config: HFConfig) -> Attention:
        refuse_unless(hf_config, "attention_bias", (None, False))
        refuse_unless(hf_config, "use_sliding_window", (None, False))
        return read_attention(hf_config, norm="head")

    def experts(self, hf_config: HFConfig) -> Experts:
        return Experts(
            layers=moe_layer_ids(hf_config),
            number=required_int(hf_config, "num_experts"),
            top_k=required_int(hf_config, "num_experts_per_tok"),
            ffn=required_int(hf_config, "moe_intermediate_size"),
            normalised=flag(hf_config, "norm_topk_prob", True),
            shared_ffn=required_int(hf_config, "shared_expert_intermediate_size"),
            shared="shared_expert",
            shared_gate="shared_expert_gate",
        )

    def transformer_fields(self, hf_config: HFConfig) -> dict[str, object]:
        heads, linear = delta_heads(hf_config), linear_layers(hf_config)
        layers = range(required_int(hf_config, "num_hidden_layers"))
        return super().transformer_fields(hf_config) | {
            "attention_output_gate": True,
            "layernorm_zero_centered_gamma": True,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(layer in linear) for layer in layers],
            "linear_conv_kernel_dim": required_int(hf_config, "linear_conv_kernel_dim"),
            "linear_key_head_dim": heads.key_dim,
            "linear_value_head_dim": heads.value_dim,
            "linear_num_key_heads": heads.keys,
            "linear_num_value_heads": heads.values,
        }

    def refuse_for_engine(self, hf_config: HFConfig) -> None:
        refuse_dense_layers_for_engine(hf_config, "Qwen3-Next")

    def rules(self, hf_config: HFConfig) -> RuleTable:
        a, experts, linear = self.attention(hf_config), self.experts(hf_config), linear_layers(hf_config)
        layers = range(required_int(hf_config, "num_hidden_layers"))
        full, dense = ([i for i in layers if i not in others] for others in (linear, experts.layers))
        width = required_int(hf_config, "linear_conv_kernel_dim")
        table = whole_model(hf_config, (
            *gated_attention_rules(a, full),
            *delta_rules(delta_heads(hf_config), width, linear, *self.projection(hf_config), self.own_dtype),
            *mlp_norm_rules(a.hidden, layers),
            *(dense_mlp_rules(hf_config, dense) if dense else ()),
            *self.expert_rules(hf_config, a.hidden),
        ))  # fmt: skip
        predicting = replace(experts, layers=(0,)).rules(a.hidden)
        block = (*gated_attention_rules(a, [0]), *mlp_norm_rules(a.hidden, [0]), *predicting)
        return replace(table, rules=(*table.rules, *mtp_rules(block, a.hidden)), undivided={"cp": _NO_CP})

    def projection(self, hf_config: HFConfig) -> tuple[tuple[str, ...], Kind]:
        """Names and layout of a gated delta-net layer's input projection."""
        return ("in_proj_qkvz", "in_proj_ba"), DeltaByKeyHead(delta_heads(hf_config))

    def expert_rules(self, hf_config: HFConfig, hidden: int) -> tuple[Rule, ...]:
        """Router, experts and shared expert of the trained layers."""
        return self.experts(hf_config).rules(hidden)
