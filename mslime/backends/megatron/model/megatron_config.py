"""megatron-core's own configuration objects, derived from a model's spec and the checkpoint's config.json.

This module sets everything that megatron.training would set from flags, with the rules that keep megatron-core 0.16.1
from training on silently wrong gradients. The user's passed-through fields are applied last, by name.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mslime.config.base import Device
from mslime.config.errors import ConfigError
from mslime.config.fp8 import fp8_fields
from mslime.config.megatron import MegatronConfig, check_model
from mslime.config.model_facts import trainer_dtype
from mslime.config.resolved import ModelSpec
from mslime.config.train import TrainConfig
from mslime.convert.families import get_family

T = TypeVar("T")

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "quick_gelu": quick_gelu,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class YarnTransformerConfig(TransformerConfig):
    """Config fields that `GPTModel` and its attention read for YaRN rotary embeddings.

    megatron-core 0.16.1 reads these attributes but declares them only for multi-latent attention (`YarnRotaryEmbedding`
    documents each). Without `yarn_mscale` the published factor 0.1 ln(scaling) + 1 holds.
    """

    yarn_rotary_scaling_factor: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float | None = None
    yarn_mscale_all_dim: float | None = None
    yarn_correction_range_round_to_int: bool = True


def device_of(device: Device, rank: int) -> torch.device:
    """The device of a trainer rank; `auto` is CUDA if available.

    Raises:
        ConfigError: cuda is configured and not available.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("cluster.device", "cuda", "torch finds no GPU on this machine", "use auto or cpu")
    if device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def params_dtype(megatron: MegatronConfig, device: torch.device) -> torch.dtype:
    """The model's dtype: as configured, else bfloat16 on a GPU and float32 on a CPU."""
    return DTYPES[trainer_dtype(megatron, cpu=device.type == "cpu")]


def transformer_config(spec: ModelSpec, hf_config: Mapping[str, object], device: torch.device) -> TransformerConfig:
    """The model's TransformerConfig: architecture from the checkpoint, layout and numerics from `spec`.

    Raises:
        ConfigError: the layout does not divide the model, or a passed-through field contradicts the checkpoint.
        CheckpointError: the checkpoint's architecture is not supported.
    """
    megatron, layout = spec.megatron, spec.layout
    dispatcher, dtype, cuda = megatron.moe_token_dispatcher_type, params_dtype(megatron, device), device.type == "cuda"
    if dispatcher == "allgather" and (layout.pp > 1 or layout.expert_size > layout.tp * layout.cp):
        raise ConfigError(
            "megatron.moe_token_dispatcher_type", dispatcher,
            "needs equal token counts on the ranks that share experts, and micro-batches of data-parallel ranks differ",
            "use alltoall",
        )  # fmt: skip
    family = get_family(hf_config)
    architecture = family.transformer_fields(hf_config)
    check_model(megatron, spec.device, architecture, spec.fp8)
    family.rules(hf_config).check_layout(layout)
    interleaved = layout.vpp > 1
    values: dict[str, Any] = {
        **architecture,
        "activation_func": ACTIVATIONS[str(architecture["activation_func"])],
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if interleaved else None,
        "num_layers_in_first_pipeline_stage": megatron.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": megatron.num_layers_in_last_pipeline_stage,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.tp > 1 if megatron.sequence_parallel is None else megatron.sequence_parallel,
        # With batched point-to-point calls the interleaved schedule trains on wrong gradients.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # Stages send each other the shape of every micro-batch: packed and unpacked ones differ in length.
        "variable_seq_lengths": layout.pp > 1,
        # Interleaved stages free an output during its send: a CUDA stream keeps it alive, gloo does not.
        "deallocate_pipeline_outputs": layout.pp > 1 and cuda,
        # Also for dense models: the default refuses variable lengths.
        "moe_token_dispatcher_type": dispatcher,
        **megatron.recompute.fields(),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Weights come from a checkpoint, but initialisation is still needed: without it layers do not mark which
        # weights tensor parallelism splits, and the gradient norm counts only those of the first rank.
        "perform_initialization": True,
        "use_cpu_initialization": not cuda,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # The loss includes its denominators; with per-token averaging 0.16.1 also scales aux losses by 1/TP.
        "calculate_per_token_loss": False,
        "gradient_accumulation_fusion": cuda and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        "bias_activation_fusion": cuda,
        "bias_dropout_fusion": cuda,
        "masked_softmax_fusion": False,
        "persist_layer_norm": cuda,
        **fp8_fields(spec.fp8, cpu=not cuda),
    }
    if architecture.get("num_moe_experts"):
        values |= {
            "moe_grouped_gemm": megatron.groups_experts(cuda=cuda),
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            # The fused router kernel computes its own top-k and bypasses routing replay.
            "moe_router_fusion": False,
            "moe_enable_routing_replay": spec.replay != "off",
        }
    if architecture["add_bias_linear"]:
        values["bias_dropout_fusion"] = False  # the grouped experts do not support it with biases
    kind = MLATransformerConfig if architecture.get("multi_latent_attention") else TransformerConfig
    if kind is TransformerConfig and "yarn_rotary_scaling_factor" in architecture:
        kind = YarnTransformerConfig
    return _construct(kind, values, megatron.extra)


def optimizer_config(t: TrainConfig, megatron: MegatronConfig, device: torch.device) -> OptimizerConfig:
    """AdamW with these hyperparameters; master weights and moments are float32."""
    dtype = params_dtype(megatron, device)
    values: dict[str, Any] = {
        "optimizer": "adam",
        "lr": t.lr,
        "min_lr": t.min_lr,
        "weight_decay": t.weight_decay,
        "adam_beta1": t.adam_beta1,
        "adam_beta2": t.adam_beta2,
        "adam_eps": t.adam_eps,
        # With 0 megatron-core would not compute the norm either.
        "clip_grad": t.clip_grad or math.inf,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": megatron.use_distributed_optimizer,
        "overlap_param_gather": megatron.overlap_param_gather,
    }
    return _construct(OptimizerConfig, values, megatron.extra)


def ddp_config(megatron: MegatronConfig) -> DistributedDataParallelConfig:
    """Data-parallel settings; gradients are summed in float32."""
    values: dict[str, Any] = {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": megatron.overlap_grad_reduce,
        "overlap_param_gather": megatron.overlap_param_gather,
        "use_distributed_optimizer": megatron.use_distributed_optimizer,
    }
    return _construct(DistributedDataParallelConfig, values, megatron.extra)


def _construct(kind: type[T], values: Mapping[str, Any], extra: Mapping[str, Any]) -> T:
    """Build a megatron-core object from our values and the user's; its errors become a ConfigError."""
    further = passthrough(extra, kind)
    try:
        return kind(**{**values, **further})
    except (AssertionError, ValueError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            "megatron", further, f"megatron-core's {kind.__name__} rejects these settings: {error}",
            "change the field named in the message",
        ) from error  # fmt: skip


def passthrough(extra: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The user's further fields that `kind` has, with names of dtypes and enum members resolved."""
    defaults = {f.name: f.default for f in fields(kind)}
    return {name: _as_typed(value, defaults[name]) for name, value in extra.items() if name in defaults}


def _as_typed(value: Any, default: Any) -> Any:
    if isinstance(value, str) and isinstance(default, torch.dtype):
        return DTYPES[value]
    if isinstance(value, str) and isinstance(default, Enum):
        return type(default)[value]
    return value
