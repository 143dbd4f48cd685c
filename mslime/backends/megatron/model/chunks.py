"""The model of one rank: one GPTModel for every virtual pipeline stage, its weights, and its data-parallel wrapper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from mslime.backends.megatron.model.dispatch import forget_micro_batches
from mslime.backends.megatron.model.grouped_state import share_empty_states
from mslime.backends.megatron.model.naming import named_local_params
from mslime.backends.megatron.model.norms import use_joint_qk_norms, use_post_norms
from mslime.backends.megatron.model.rotary import use_packed_rotary
from mslime.backends.megatron.model.routers import use_own_routers
from mslime.backends.megatron.model.specs import block_spec
from mslime.backends.megatron.model.value_head import ValueHead, is_value_head
from mslime.backends.megatron.parallel import tensor_shard
from mslime.config.errors import CheckpointError
from mslime.convert.families import ModelFields, get_family
from mslime.convert.families.delta import FLOAT32_PARAMETERS
from mslime.convert.hf import HFCheckpoint
from mslime.convert.kinds import padded_vocab_size
from mslime.convert.table import BoundRule, RuleTable

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
        values: a critic, with a value head (at 0) in the place of the output layer.
        adapters: of layers that can take adapters (`adapters.attach_adapters`).

    Every parameter is marked as `mark_parameters` says.
    """
    stages: Sequence[int | None] = range(config.virtual_pipeline_model_parallel_size or 0) or [None]
    chunks = [_build_chunk(config, model, device, stage, mtp, values, adapters).to(device) for stage in stages]
    for chunk in chunks:
        mark_parameters(chunk)
        forget_micro_batches(chunk)
        share_empty_states(chunk)
    return chunks


def mark_parameters(chunk: torch.nn.Module) -> None:
    """Say of the parameters that megatron-core and Transformer Engine mark wrongly whose they are, in every layout.

    Experts are marked `allreduce=False`: megatron-core 0.16.1 does it for EP > 1 only, and without it trains on wrong
    gradients where ETP differs from TP. `tensor_model_parallel` decides what the gradient norm counts: a parameter
    without it is counted on the first tensor-parallel rank only. Each such rank holds other experts and other attention
    sinks, which Transformer Engine 2.20 leaves unmarked; it marks every weight of a linear layer, also those of MLA's
    down-projections, of which each rank holds the whole and which would be counted once per rank.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
        if ".experts." in name or name.endswith(".softmax_offset"):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        elif any(f".{layer}." in name for layer in WHOLE_ON_EVERY_RANK):
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]


def _build_chunk(
    config: TransformerConfig,
    model: ModelFields,
    device: torch.device,
    stage: int | None,
    mtp: bool,
    values: bool,
    adapters: bool,
) -> GPTModel:
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
    return chunk


@torch.no_grad()
def load_hf_weights(chunks: Sequence[GPTModel], hf_config: Mapping[str, object], directory: Path) -> None:
    """Fill every parameter of these chunks from a Hugging Face checkpoint, reading only this rank's parts.

    A critic's value head is in no checkpoint of a language model, and keeps its values.

    Raises:
        CheckpointError: a tensor is missing, misshapen or unknown, or holds values that are not finite.
    """
    rules = get_family(hf_config).rules(hf_config)
    checkpoint = HFCheckpoint(directory)
    rules.check_hf(checkpoint.shapes, str(directory))
    for chunk in chunks:
        for name, tensor in named_local_params([chunk]):
            if not is_value_head(chunk, name):
                tensor.copy_(_local_shard(rules, checkpoint, name, tensor.shape))


def _local_shard(rules: RuleTable, checkpoint: HFCheckpoint, name: str, shape: torch.Size) -> torch.Tensor:
    rule = rules.bind(name)
    shard = rule.to_megatron(checkpoint.view, *tensor_shard(rule.is_expert))
    assert shard.shape == shape, f"{name}: the rule gives {tuple(shard.shape)}, the model has {tuple(shape)}"
    if not _is_finite(shard):
        raise _not_finite(rule, checkpoint)
    return shard


def _is_finite(tensor: torch.Tensor) -> bool:
    """One pass without a copy: the extremes of a tensor with NaN in it are NaN."""
    lowest, highest = tensor.aminmax()
    return bool(lowest.isfinite() and highest.isfinite())


def _not_finite(rule: BoundRule, checkpoint: HFCheckpoint) -> CheckpointError:
    """Names the first tensor of the file that is to blame, with how much of it."""
    for name in rule.hf_names:
        tensor = checkpoint.tensor(name)
        if not _is_finite(tensor):
            wrong = f"{int((~tensor.isfinite()).sum()):,} of {tensor.numel():,} values"
            break
    else:
        raise AssertionError(f"{rule.name} is not finite, and the tensors that it is made of are")
    return CheckpointError(
        f"{checkpoint.directory / checkpoint.info[name].file}: {name}", wrong, "are NaN or infinite, so nothing can be "
        "computed with this model", "download the file again, or start from an earlier checkpoint of the run that "
        "wrote it",
    )  # fmt: skip


def wrap(
    chunks: Sequence[GPTModel], config: TransformerConfig, ddp_config: DistributedDataParallelConfig
) -> list[DistributedDataParallel]:
    """The chunks in their data-parallel wrappers, which own gradients (and, sharded, parameters).

    Replicas are not broadcast: all have read the same checkpoint.
    """
    modules: list[MegatronModule] = [_in_bfloat16(config, chunk) if config.bf16 else chunk for chunk in chunks]
    return [
        DistributedDataParallel(config=config, ddp_config=ddp_config, module=module, disable_bucketing=stage > 0)
        for stage, module in enumerate(modules)
    ]


def _in_bfloat16(config: TransformerConfig, chunk: GPTModel) -> Float16Module:
    """The chunk in bfloat16, but for the parameters, and the routers' correction biases, that stay in float32."""
    own = [
        (p, p.data)
        for name, p in chunk.named_parameters()
        if name.endswith(FLOAT32_PARAMETERS) or is_value_head(chunk, name)
    ]
    # Rounding replaces buffers: megatron-core would turn them to float32 again later, without the digits.
    biases = [(m, m.expert_bias) for m in chunk.modules() if isinstance(m, TopKRouter) and m.expert_bias is not None]
    module = Float16Module(config, chunk)
    for parameter, data in own:
        parameter.data = data
    for router, bias in biases:
        router.expert_bias = bias
    return module
