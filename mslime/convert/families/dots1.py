"""dots.llm1: Dots1ForCausalLM (https://arxiv.org/abs/2506.05767; transformers `models/dots1`).

Grouped-query attention with a norm on every query and key head; dense first layers, then DeepSeek-V3's experts.
`docs/add_a_model.md` uses this file as its example.
"""

from __future__ import annotations

from mslime.convert.families.experts import Experts, limited_groups, read_experts
from mslime.convert.families.family import HFConfig, Support, refuse_unless, refused, required_int
from mslime.convert.families.gqa import Attention, Decoder, read_attention


class Dots1(Decoder):
    """The dots.llm1 family."""

    architecture = "Dots1ForCausalLM"
    support = Support(("dots.llm1",), not_served="SGLang 0.5.23 does not support the architecture")
    harmless = frozenset({"max_window_layers"})

    def attention(self, hf_config: HFConfig) -> Attention:
        refuse_unless(hf_config, "attention_bias", (None, False))
        layers = required_int(hf_config, "num_hidden_layers")
        refuse_unless(hf_config, "layer_types", (None, ["full_attention"] * layers))
        if hf_config.get("layer_types") is None:
            refuse_unless(hf_config, "sliding_window", (None,))
        return read_attention(hf_config, norm="head")

    def experts(self, hf_config: HFConfig) -> Experts:
        refuse_unless(hf_config, "scoring_func", (None, "noaux_tc", "sigmoid"))
        refuse_unless(hf_config, "topk_method", (None, "noaux_tc"))
        refuse_unless(hf_config, "norm_topk_prob", (True,))
        refuse_unless(hf_config, "moe_layer_freq", (None, 1))
        return read_experts(hf_config, sigmoid=True)

    def transformer_fields(self, hf_config: HFConfig) -> dict[str, object]:
        return super().transformer_fields(hf_config) | limited_groups(hf_config)

    def refuse_for_engine(self, hf_config: HFConfig) -> None:
        raise refused(
            "architectures", hf_config["architectures"], self.support.not_served, "train it with train.task: sft"
        )
