"""MiniMax-M2: MiniMaxM2ForCausalLM (https://arxiv.org/abs/2506.13585 for the series; transformers `models/minimax_m2`).

Queries and keys are normed over all heads jointly, and half of each head rotates. Every layer has experts, chosen by
sigmoid scores with a correction bias. The published config.json has settings for multi-token prediction, but its
weights were not published. `intermediate_size` is an expert's.
"""

from __future__ import annotations

from dataclasses import replace

from mslime.convert.families.experts import Experts
from mslime.convert.families.family import HFConfig, ModelFields, Support, refuse_unless, refused, required_int
from mslime.convert.families.gqa import Attention, Decoder, read_attention


class MiniMaxM2(Decoder):
    """The MiniMax-M2 family."""

    architecture = "MiniMaxM2ForCausalLM"
    support = Support(("MiniMax-M2",), renderers=("minimax-m2",))
    harmless = frozenset({"use_mtp", "num_mtp_modules", "mtp_transformer_layers"})
    partial_rotary = 1.0

    def attention(self, hf_config: HFConfig) -> Attention:
        layers = required_int(hf_config, "num_hidden_layers")
        refuse_unless(hf_config, "attn_type_list", (None, [1] * layers))  # 0 was the linear attention of MiniMax-01
        refuse_unless(hf_config, "use_qk_norm", (None, True))
        refuse_unless(hf_config, "qk_norm_type", (None, "per_layer"))
        return read_attention(hf_config, norm="projection")

    def refuse_for_engine(self, hf_config: HFConfig) -> None:
        # SGLang takes these to be off, or does not start without them; in transformers they are built in.
        for name in ("rotary_dim", "scoring_func", "use_qk_norm", "use_routing_bias"):
            if hf_config.get(name) is None:
                raise refused(
                    name, None, "SGLang 0.5.23 computes another model without it",
                    "copy it from the published config.json; transformers may drop it when saving",
                )  # fmt: skip

    def experts(self, hf_config: HFConfig) -> Experts:
        refuse_unless(hf_config, "scoring_func", (None, "sigmoid"))
        refuse_unless(hf_config, "use_routing_bias", (None, True))
        refuse_unless(hf_config, "shared_intermediate_size", (None, 0))
        return Experts(
            layers=tuple(range(required_int(hf_config, "num_hidden_layers"))),
            number=required_int(hf_config, "num_local_experts", "num_experts"),
            top_k=required_int(hf_config, "num_experts_per_tok"),
            ffn=required_int(hf_config, "intermediate_size"),
            score="sigmoid",
            block="block_sparse_moe",
            names=("w1", "w3", "w2"),
            correction="e_score_correction_bias",
        )

    def model_fields(self, hf_config: HFConfig) -> ModelFields:
        fields = super().model_fields(hf_config)
        if hf_config.get("rotary_dim") is None:
            return fields
        percent = required_int(hf_config, "rotary_dim") / self.attention(hf_config).head_dim
        if fields.rotary_percent not in (1.0, percent):
            raise refused(
                "rotary_dim", hf_config["rotary_dim"], f"contradicts partial_rotary_factor {fields.rotary_percent}"
            )
        return replace(fields, rotary_percent=percent)
