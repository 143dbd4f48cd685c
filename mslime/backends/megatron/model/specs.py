"""Modules of a transformer layer: Transformer Engine's on CUDA, megatron-core's own on the CPU.

Only here, outside `backends.cpu`, does the device select the code.
"""

from __future__ import annotations

import importlib.util
from typing import Any, cast

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mslime.backends.megatron.model.gated_delta import with_gated_delta_net
from mslime.config.errors import TrainerError


def block_spec(
    config: TransformerConfig, device: torch.device, vp_stage: int | None, adapters: bool = False
) -> TransformerBlockSubmodules:
    """The layers of one model chunk.

    Args:
        adapters: linear layers get adapters, which need the layers' exact input: no norm is fused into them.

    Raises:
        TrainerError: on CUDA without Transformer Engine, or without the kernels of a layer.
    """
    if device.type == "cuda":
        if importlib.util.find_spec("transformer_engine") is None:
            raise TrainerError(
                "transformer-engine", None, "training on GPUs uses its layers",
                "install mslime with `bash scripts/install.sh --gpu`, or use the image",
            )  # fmt: skip
        spec = _cuda_block_spec(config, vp_stage)
        if adapters:
            from megatron.core.extensions.transformer_engine import (
                TEColumnParallelLinear,
                TELayerNormColumnParallelLinear,
                TENorm,
            )

            stand_norms_alone(spec, TELayerNormColumnParallelLinear, TEColumnParallelLinear, TENorm)
        return spec
    return _cpu_block_spec(config, vp_stage)


NORMS_BEFORE = {
    "linear_qkv": ("layer", "input_layernorm"),
    "linear_q_proj": ("layer", "input_layernorm"),
    "linear_q_up_proj": ("attention", "q_layernorm"),
    "linear_kv_up_proj": ("attention", "kv_layernorm"),
    "in_proj": ("layer", "input_layernorm"),
    "linear_fc1": ("layer", "pre_mlp_layernorm"),
}
"""Names under which megatron-core stores the norm that Transformer Engine fuses into a layer."""


def stand_norms_alone(spec: TransformerBlockSubmodules, fused: type, plain: type, norm: type) -> None:
    """Replace norms fused into linear layers of attention and dense MLPs by separate norms before them.

    Args:
        fused: a column-parallel layer that norms its input first. plain: the same without the norm. norm: the norm.
    """
    for layer in spec.layer_specs or []:
        modules: Any = layer.submodules
        attention, mlp = modules.self_attention.submodules, modules.mlp.submodules
        places = {"layer": modules, "attention": attention}
        for holder in (attention, mlp):
            for name, (where, before) in NORMS_BEFORE.items():
                if vars(holder).get(name) is fused:
                    setattr(holder, name, plain)
                    setattr(places[where], before, norm)


def _cuda_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    if config.experimental_attention_variant is None:
        return spec
    if importlib.util.find_spec("fla") is None:
        raise TrainerError(
            "flash-linear-attention",
            None,
            "gated delta-net layers use its kernels",
            "install mslime with `bash scripts/install.sh --gpu`, or `pip install flash-linear-attention`",
        )
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear

    return with_gated_delta_net(spec, config, vp_stage, TELayerNormColumnParallelLinear, TERowParallelLinear)


def _cpu_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    from mslime.backends.cpu.attention import CpuCoreAttention, DuplicatedLinear
    from mslime.backends.cpu.megatron_layers import CpuExperts

    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in spec.layer_specs or []:
        modules = cast("Any", layer.submodules)
        attention = modules.self_attention.submodules
        attention.core_attention = CpuCoreAttention
        if modules.mlp.module is MoELayer:
            modules.mlp.submodules.experts.module = CpuExperts
        if config.multi_latent_attention:
            attention.linear_q_down_proj = attention.linear_kv_down_proj = DuplicatedLinear
    if config.experimental_attention_variant is None:
        return spec
    return with_gated_delta_net(spec, config, vp_stage, ColumnParallelLinear, RowParallelLinear)
