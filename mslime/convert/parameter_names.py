"""Spellings of Megatron parameter names: everything that differs from the canonical ones is mapped here, once.

Canonical is the local layer spec with global layer and expert ids. Transformer Engine fuses norms into the linear
layer after them and numbers the weights of a grouped GEMM, as we do its adapters; pipeline stages and expert ranks
count from zero.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_LAYER = re.compile(r"(?:module\.)*(?:decoder\.layers\.(\d+)|(mtp\.layers\.\d+\.transformer_layer))\.(.+)")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
_GROUPED_ADAPTER = re.compile(r"mlp\.experts\.(linear_fc[12])\.adapter\.(\d+)\.(lora_[AB])")
_SEQUENTIAL = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(mlp\.experts\.)local_experts\.[^.]+\.")
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    # Multi-latent attention: Transformer Engine norms a latent vector in the projection up from it.
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def canonical_name(local_name: str, first_expert: int = 0, global_layers: Collection[int] | None = None) -> str:
    """Canonical name of a parameter of one model chunk.

    Args:
        local_name: from `named_parameters()` of a local-spec or Transformer Engine model, wrappers' `module.` allowed.
        first_expert: global id of this rank's expert 0.
        global_layers: global (0-based) id of each of the chunk's layers in order; default: they are global already.
            Multi-token-prediction layers have ids of their own, which are global.
    """
    match = _LAYER.fullmatch(local_name)
    if match is None:
        return re.sub(r"^(?:module\.)+", "", local_name)
    prefix = match[2] or f"decoder.layers.{match[1] if global_layers is None else tuple(global_layers)[int(match[1])]}"
    rest = _FUSED_NORMS.get(match[3], match[3])
    if grouped := _GROUPED.fullmatch(rest):
        rest = f"mlp.experts.local_experts.{grouped[3]}.{grouped[1]}.{grouped[2]}"
    if adapter := _GROUPED_ADAPTER.fullmatch(rest):
        rest = f"mlp.experts.local_experts.{adapter[2]}.{adapter[1]}.adapter.{adapter[3]}"
    if sequential := _SEQUENTIAL.fullmatch(rest):
        rest = f"mlp.experts.local_experts.{int(sequential[1]) + first_expert}.{sequential[2]}"
    return f"{prefix}.{rest}"


def of_all_experts(name: str) -> str:
    """Canonical name of what all experts of a layer share, from the name that it has, or would have, in one of them."""
    return _EXPERT.sub(r"\1", name)
