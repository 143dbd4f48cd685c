"""The model of one rank: a GPTModel for every virtual stage, its weights, names, and data-parallel wrapper."""

from __future__ import annotations

import importlib.util
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mslime.backends.megatron.model.gated_delta import with_gated_delta_net
from mslime.backends.megatron.model.layers import ValueHead, is_value_head, use_joint_qk_norms, use_post_norms
from mslime.backends.megatron.model.megatron_config import transformer_config
from mslime.backends.megatron.model.moe import forget_micro_batches, share_empty_states, use_own_routers
from mslime.backends.megatron.model.rotary import use_packed_rotary
from mslime.backends.megatron.parallel import make_model_parallel_groups, tensor_shard
from mslime.config.errors import CheckpointError, TrainerError
from mslime.config.layout import ParallelLayout
from mslime.config.resolved import ModelSpec
from mslime.convert.families import ModelFields, get_family
from mslime.convert.families.gqa import mtp_depth
from mslime.convert.families.qwen3_next import FLOAT32_PARAMETERS
from mslime.convert.hf import HFCheckpoint
from mslime.convert.lora_rules import is_factor
from mslime.convert.table import BoundRule, canonical_name, of_all_experts
from mslime.convert.tensor_layouts import padded_vocab_size


def block_spec(
    config: TransformerConfig, device: torch.device, vp_stage: int | None, adapters: bool = False
) -> TransformerBlockSubmodules:
    """The layers of one model chunk: Transformer Engine's on CUDA, megatron-core's own on the CPU.

    Only here, outside `backends.cpu`, does the device select the code.

    Args:
        adapters: linear layers get adapters, which need the layers' exact input: no norm is fused into them.

    Raises:
        TrainerError: on CUDA without Transformer Engine, or without the kernels of a layer.
    """
    has_delta_nets = config.experimental_attention_variant is not None
    if device.type != "cuda":
        spec = _cpu_block_spec(config, vp_stage)
        in_proj, out_proj = ColumnParallelLinear, RowParallelLinear
        return with_gated_delta_net(spec, config, vp_stage, in_proj, out_proj) if has_delta_nets else spec
    if importlib.util.find_spec("transformer_engine") is None:
        raise TrainerError(
            "transformer-engine", None, "missing: training on GPUs needs its layers",
            "install mslime with `bash scripts/install.sh --gpu`, or use the image",
        )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    if has_delta_nets and importlib.util.find_spec("fla") is None:
        raise TrainerError(
            "flash-linear-attention", None, "missing: gated delta-net layers need its kernels",
            "install mslime with `bash scripts/install.sh --gpu`, or `pip install flash-linear-attention`",
        )  # fmt: skip
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
        TENorm,
        TERowParallelLinear,
    )

    if has_delta_nets:
        spec = with_gated_delta_net(spec, config, vp_stage, TELayerNormColumnParallelLinear, TERowParallelLinear)
    if adapters:
        stand_norms_alone(spec, TELayerNormColumnParallelLinear, TEColumnParallelLinear, TENorm)
    return spec


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


def _cpu_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    from mslime.backends.cpu.megatron_layers import CpuCoreAttention, CpuExperts, DuplicatedLinear

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
    return spec


# Parameters of this rank's model chunks under their canonical names: global layers, global experts, local spec.
#
# `mslime.convert.table` spells names, Transformer Engine's included. This section adds facts that only a built model
# has: the layers and experts of this rank.

SHARED_BY_EXPERTS = "shared_by_experts"
"""Attribute of a parameter that all experts of a layer share: modules of several experts hold it."""


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    """The GPTModel inside data-parallel and precision wrappers."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def layer_ids(chunk: GPTModel) -> tuple[int, ...]:
    """Global (0-based) ids of a chunk's layers, in order."""
    return tuple(layer.layer_number - 1 for layer in chunk.decoder.layers)  # type: ignore[union-attr, misc]


def moe_layer_ids(chunks: Iterable[GPTModel], all_moe_layers: Sequence[int]) -> tuple[int, ...]:
    """Global ids of the MoE layers of these chunks, in order."""
    return tuple(layer for chunk in chunks for layer in layer_ids(chunk) if layer in set(all_moe_layers))


def named_local_params(chunks: Iterable[GPTModel], *, tied_copies: bool = True) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, local tensor) of every parameter of these chunks, and of the routers' expert bias; without
    adapters.

    Args:
        tied_copies: include the last pipeline stage's copy of a tied embedding (`output_layer.weight`), which is loaded
            and never exported.
    """
    for chunk in chunks:
        biases = [(name, tensor) for name, tensor in chunk.named_buffers() if name.endswith("router.expert_bias")]
        for name, tensor in _named(chunk, [*chunk.named_parameters(), *biases]):
            tied = name == "output_layer.weight" and chunk.share_embeddings_and_output_weights
            if not is_factor(name) and (tied_copies or not tied):
                yield name, tensor


def named_parameters(chunk: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, tensor) of a chunk's parameters, adapters included, in the order of `chunk.named_parameters`."""
    return _named(chunk, chunk.named_parameters())


def named_factors(chunks: Iterable[GPTModel]) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, local tensor) of the factors of these chunks' adapters."""
    return ((name, tensor) for chunk in chunks for name, tensor in named_parameters(chunk) if is_factor(name))


def _named(chunk: GPTModel, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    layers, experts = layer_ids(chunk), chunk.config.num_moe_experts or 0
    of_rank = experts // parallel_state.get_expert_model_parallel_world_size()
    first = of_rank * parallel_state.get_expert_model_parallel_rank()
    for local, tensor in tensors:
        name = canonical_name(local, first, layers)
        yield (of_all_experts(name) if hasattr(tensor, SHARED_BY_EXPERTS) else name), tensor


WHOLE_ON_EVERY_RANK = ("linear_q_down_proj", "linear_kv_down_proj")
"""Linear layers that tensor parallelism does not split."""


def build_chunks(
    config: TransformerConfig,
    model: ModelFields,
    device: torch.device,
    mtp: bool = False,
    values: bool = False,
    adapters: bool = False,
) -> list[GPTModel]:
    """This rank's model chunks, in virtual-stage order, weights not yet set.

    Args:
        mtp: also build the `config.mtp_num_layers` multi-token-prediction layers, which the trainer does not train.
        values: a critic, with a value head (at 0) in place of the output layer.
        adapters: build layers that can take adapters (`lora_layers.trained_adapters`).

    `mark_parameters` marks every parameter.
    """
    chunks: list[GPTModel] = []
    stages: Sequence[int | None] = range(config.virtual_pipeline_model_parallel_size or 0) or [None]
    for stage in stages:
        layers = block_spec(config, device, stage, adapters)
        use_packed_rotary()
        use_own_routers(layers, config)
        if model.joint_qk_norm:
            use_joint_qk_norms(layers, config)
        if model.post_norms:
            use_post_norms(layers, config)
        mtp_layers = get_gpt_mtp_block_spec(config, layers, device.type == "cuda", vp_stage=stage) if mtp else None
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=layers,  # type: ignore[arg-type]
            vocab_size=padded_vocab_size(model.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=model.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            parallel_output=True,
            share_embeddings_and_output_weights=model.tie_embeddings and not values,
            position_embedding_type=model.position_embedding,
            rotary_percent=model.rotary_percent,
            rotary_base=model.rotary_base,  # type: ignore[arg-type]
            rope_scaling=model.llama3_factor is not None,
            rope_scaling_factor=model.llama3_factor or 1.0,
            mtp_block_spec=mtp_layers,  # type: ignore[arg-type]
            vp_stage=stage,
        )
        if values and chunk.post_process:
            chunk.output_layer = ValueHead(config)  # type: ignore[assignment]
        chunks.append(chunk.to(device))
    for chunk in chunks:
        mark_parameters(chunk)
        forget_micro_batches(chunk)
        share_empty_states(chunk)
    return chunks


def mark_parameters(chunk: torch.nn.Module) -> None:
    """Mark the owner of parameters that megatron-core and Transformer Engine mark wrongly, in every layout.

    Experts are marked `allreduce=False`: megatron-core 0.16.1 does so only for EP > 1, and without it gradients are
    wrong if ETP differs from TP. `tensor_model_parallel` decides what the gradient norm counts: parameters without it
    count on the first tensor-parallel rank only. Each rank holds different experts and attention sinks, which
    Transformer Engine 2.20 leaves unmarked. It also marks MLA's replicated down-projections, which would count once per
    rank.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
        if ".experts." in name or name.endswith(".softmax_offset"):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        elif any(f".{layer}." in name for layer in WHOLE_ON_EVERY_RANK):
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]


@torch.no_grad()
def load_hf_weights(chunks: Sequence[GPTModel], hf_config: Mapping[str, object], directory: Path) -> None:
    """Fill every parameter of these chunks from a Hugging Face checkpoint, reading only this rank's parts.

    A critic's value head is in no checkpoint of a language model and keeps its values.

    Raises:
        CheckpointError: a tensor is missing, misshapen or unknown, or holds values that are not finite.
    """
    rules = get_family(hf_config).rules(hf_config)
    checkpoint = HFCheckpoint(directory)
    rules.check_hf(checkpoint.shapes, str(directory))
    for chunk in chunks:
        for name, tensor in named_local_params([chunk]):
            if is_value_head(chunk, name):
                continue
            rule, wanted = rules.bind(name), tuple(tensor.shape)
            shard = rule.to_megatron(checkpoint.view, *tensor_shard(rule.is_expert))
            assert shard.shape == tensor.shape, f"{name}: the rule gives {tuple(shard.shape)}, the model has {wanted}"
            if not _is_finite(shard):
                raise _not_finite(rule, checkpoint)
            tensor.copy_(shard)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Test in one pass without a copy: the extremes of a tensor with NaN are NaN."""
    lowest, highest = tensor.aminmax()
    return bool(lowest.isfinite() and highest.isfinite())


def _not_finite(rule: BoundRule, checkpoint: HFCheckpoint) -> CheckpointError:
    """Error with the first tensor of the file that is not finite, and how much of it."""
    for name in rule.hf_names:
        tensor = checkpoint.tensor(name)
        if not _is_finite(tensor):
            wrong = f"{int((~tensor.isfinite()).sum()):,} of {tensor.numel():,} values"
            break
    else:
        raise AssertionError(f"{rule.name} is not finite, but its source tensors are")
    return CheckpointError(
        f"{checkpoint.directory / checkpoint.info[name].file}: {name}", wrong, "are NaN or infinite, so the model "
        "cannot be used", "download the file again, or start from an earlier checkpoint of the run that "
        "wrote it",
    )  # fmt: skip


def wrap(
    chunks: Sequence[GPTModel], config: TransformerConfig, ddp_config: DistributedDataParallelConfig
) -> list[DistributedDataParallel]:
    """The chunks in their data-parallel wrappers, which own gradients (and, sharded, parameters).

    Replicas are not broadcast, because all ranks read the same checkpoint.
    """
    modules: list[MegatronModule] = [_in_bfloat16(config, chunk) if config.bf16 else chunk for chunk in chunks]
    return [
        DistributedDataParallel(config=config, ddp_config=ddp_config, module=module, disable_bucketing=stage > 0)
        for stage, module in enumerate(modules)
    ]


def _in_bfloat16(config: TransformerConfig, chunk: GPTModel) -> Float16Module:
    """The chunk in bfloat16, except for parameters and the routers' correction biases that stay in float32."""
    own = [
        (p, p.data)
        for name, p in chunk.named_parameters()
        if name.endswith(FLOAT32_PARAMETERS) or is_value_head(chunk, name)
    ]
    # Rounding replaces buffers: megatron-core would convert them back to float32 later, without the lost digits.
    biases = [(m, m.expert_bias) for m in chunk.modules() if isinstance(m, TopKRouter) and m.expert_bias is not None]
    module = Float16Module(config, chunk)
    for parameter, data in own:
        parameter.data = data
    for router, bias in biases:
        router.expert_bias = bias
    return module


# A trainer rank's model without its memory: on the meta device, in a world with this process alone.
#
# For uses that need only names and shapes: megatron-core's checkpoint layout of a model, and checks of the conversion
# rules for a full-size model in any layout. Never in a process that trains.


@contextmanager
def fake_process_group(layout: ParallelLayout, rank: int = 0) -> Generator[None]:
    """Rank `rank` of a world without its other ranks: groups exist, collectives must not be entered."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "this process already belongs to a world"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        make_model_parallel_groups(layout, create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def meta_chunks(spec: ModelSpec, hf_config: Mapping[str, object], mtp: bool = False) -> list[GPTModel]:
    """The chunks of `build_chunks` for this rank, with all parameters on the meta device.

    Call it within `fake_process_group`.

    Args:
        mtp: include the checkpoint's multi-token-prediction layers, which a trainer leaves out.
    """
    device = torch.device("cpu")
    settings, family = transformer_config(spec, hf_config, device), get_family(hf_config)
    settings.perform_initialization = False
    depth = mtp_depth(family.rules(hf_config))
    settings.mtp_num_layers = depth if mtp else None
    with torch.device("meta"):
        return build_chunks(settings, family.model_fields(hf_config), torch.device("meta"), mtp and depth > 0)
