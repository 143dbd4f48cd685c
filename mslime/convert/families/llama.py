"""Llama 3: LlamaForCausalLM (https://arxiv.org/abs/2407.21783; transformers `models/llama`).

Grouped-query attention without biases or norms of queries and keys, SwiGLU MLP. From 3.1 on the slow frequencies of the
rotary embedding are scaled down; the small 3.2 models tie their embeddings.
"""

from __future__ import annotations

from mslime.convert.families.family import HFConfig, Support, refuse_unless
from mslime.convert.families.gqa import Attention, Decoder, read_attention


class Llama(Decoder):
    """The dense family."""

    architecture = "LlamaForCausalLM"
    support = Support(("Llama-3.1-8B",), renderers=("llama-3",), served_adapters=True)
    rope_kinds = ("default", "llama3", "yarn")

    def attention(self, hf_config: HFConfig) -> Attention:
        refuse_unless(hf_config, "attention_bias", (None, False))
        refuse_unless(hf_config, "mlp_bias", (None, False))
        return read_attention(hf_config)
