"""Mixtral: MixtralForCausalLM (https://arxiv.org/abs/2401.04088; transformers `models/mixtral`).

Grouped-query attention without biases. Every layer has experts, weighted by a softmax over the logits of the chosen
ones. `intermediate_size` is an expert's.
"""

from __future__ import annotations

from mslime.convert.families.experts import Experts
from mslime.convert.families.family import HFConfig, Support, refuse_unless, refused, required_int
from mslime.convert.families.gqa import Attention, Decoder, read_attention


class Mixtral(Decoder):
    """The Mixtral family."""

    architecture = "MixtralForCausalLM"
    support = Support(("Mixtral-8x7B",))

    def attention(self, hf_config: HFConfig) -> Attention:
        refuse_unless(hf_config, "sliding_window", (None,))
        return read_attention(hf_config)

    def refuse_for_engine(self, hf_config: HFConfig) -> None:
        attention = self.attention(hf_config)
        if attention.head_dim * attention.heads != attention.hidden:
            raise refused(
                "head_dim", attention.head_dim,
                "SGLang 0.5.23 ignores it and divides hidden_size by num_attention_heads",
                "train it with train.task: sft, or use a checkpoint with that head size",
            )  # fmt: skip

    def experts(self, hf_config: HFConfig) -> Experts:
        return Experts(
            layers=tuple(range(required_int(hf_config, "num_hidden_layers"))),
            number=required_int(hf_config, "num_local_experts", "num_experts"),
            top_k=required_int(hf_config, "num_experts_per_tok"),
            ffn=required_int(hf_config, "intermediate_size"),
            block="block_sparse_moe",
            names=("w1", "w3", "w2"),
        )
