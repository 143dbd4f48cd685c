"""Qwen2, Qwen2.5 and Qwen3 dense: Qwen2ForCausalLM (https://arxiv.org/abs/2412.15115; transformers `models/qwen2`).

Grouped-query attention with biases on queries, keys and values, SwiGLU MLP. The small models tie their embeddings.
"""

from __future__ import annotations

from mslime.convert.families.family import HFConfig, Support, refuse_unless
from mslime.convert.families.gqa import Attention, Decoder, read_attention, refuse_windows


class Qwen2(Decoder):
    """The dense family; the MoE family has the same attention."""

    architecture = "Qwen2ForCausalLM"
    support = Support(("Qwen2.5-0.5B", "Qwen2.5-7B"), served_adapters=True)
    rope_kinds = ("default", "yarn")
    harmless = frozenset({"max_window_layers", "sliding_window"})

    def attention(self, hf_config: HFConfig) -> Attention:
        refuse_unless(hf_config, "use_mrope", (None, False))
        refuse_unless(hf_config, "dual_chunk_attention_config", (None,))
        refuse_windows(hf_config)
        return read_attention(hf_config, bias=True)


# Qwen3 dense: Qwen3ForCausalLM (https://arxiv.org/abs/2505.09388; transformers `models/qwen3`).
#
# Grouped-query attention with an RMS norm on every query and key head, SwiGLU MLP, no biases.


class Qwen3(Decoder):
    """The dense family; the MoE family has the same attention."""

    architecture = "Qwen3ForCausalLM"
    support = Support(("Qwen3-4B",), renderers=("qwen3",), served_adapters=True)
    rope_kinds = ("default", "yarn")
    harmless = frozenset({"max_window_layers", "sliding_window"})

    def attention(self, hf_config: HFConfig) -> Attention:
        refuse_unless(hf_config, "attention_bias", (None, False))
        refuse_unless(hf_config, "dual_chunk_attention_config", (None,))
        refuse_windows(hf_config)
        return read_attention(hf_config, norm="head")
