"""Settings of the trainer's engine under megatron-core's own names, and what recomputation they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from mslime.config.base import EngineSection
from mslime.config.errors import ConfigError
from mslime.config.layout import ParallelLayout, stage_layers

DEFAULT_MODULES = frozenset({"core_attn"})
"""Of selective recompute (`TransformerConfig.__post_init__`, megatron-core 0.16.1)."""


@dataclass(frozen=True)
class Recompute:
    """Nothing left open.

    Attributes:
        granularity: None: everything is kept.
        method, num_layers: of full recompute: groups of so many layers (`uniform`), or the first so many of a chunk
            (`block`).
        modules: of selective recompute.
    """

    granularity: Literal["full", "selective"] | None
    method: Literal["uniform", "block"]
    num_layers: int
    modules: frozenset[str]

    def fields(self) -> dict[str, Any]:
        """As `TransformerConfig` takes them."""
        full = self.granularity == "full"
        return {
            "recompute_granularity": self.granularity,
            "recompute_method": self.method if full else None,
            "recompute_num_layers": self.num_layers if full else None,
            "recompute_modules": sorted(self.modules) if self.granularity == "selective" else None,
        }


MEGATRON_RESERVED: dict[str, str] = {
    "calculate_per_token_loss": "denominators are computed over the whole step before micro-batching; megatron-core "
    "0.16.1 also scales auxiliary losses by 1/TP with it",
    "moe_enable_routing_replay": "it follows train.replay",
    "variable_seq_lengths": "it follows train.packed",
    "pipeline_dtype": "it follows megatron.params_dtype",
    "bf16": "it follows megatron.params_dtype",
    "fp16": "the trainer runs in bfloat16 or float32",
    "fp8": "use train.fp8",
    "fp8_recipe": "use train.fp8",
    "fp8_quantizer_factory": "use train.fp8",
    "fp8_param": "parameters stay bfloat16: engines and checkpoints are given them as they lie in memory",
    "lr": "use train.lr",
    "min_lr": "use train.min_lr",
    "weight_decay": "use train.weight_decay",
    "adam_beta1": "use train.adam_beta1",
    "adam_beta2": "use train.adam_beta2",
    "adam_eps": "use train.adam_eps",
    "clip_grad": "use train.clip_grad",
    "pipeline_model_parallel_layout": "use num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split": "use num_layers_in_first_pipeline_stage",
    "account_for_loss_in_pipeline_split": "use num_layers_in_last_pipeline_stage",
    "softmax_scale": "the architecture comes from the checkpoint",
    "no_rope_freq": "the architecture comes from the checkpoint",
    "apply_residual_connection_post_layernorm": "no model family of mslime has it",
    "mtp_num_layers": "layers of multi-token prediction are carried in checkpoints, and not trained",
    "moe_router_force_load_balancing": "routers choose their experts as engines do",
    "moe_input_jitter_eps": "routers choose their experts as engines do",
    "optimizer": "the trainer's optimizer is AdamW",
    **dict.fromkeys(
        (
            "muon_momentum",
            "muon_split_qkv",
            "muon_use_nesterov",
            "muon_scale_mode",
            "muon_fp32_matmul_prec",
            "muon_num_ns_steps",
            "muon_tp_mode",
            "muon_extra_scale_factor",
        ),
        "the trainer's optimizer is AdamW",
    ),
    "use_megatron_fsdp": "parameters are sent and saved from megatron-core's own buffers",
    "num_distributed_optimizer_instances": "one distributed optimizer spans all data-parallel ranks",
    "overlap_moe_expert_parallel_comm": "the schedule does not split a micro-batch's layers for it",
    "transformer_impl": "it follows cluster.device: Transformer Engine on cuda, the local spec on cpu",
}

MEGATRON_TESTED = frozenset(
    {
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "moe_aux_loss_coeff",
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "moe_router_load_balancing_type",
        "moe_z_loss_coeff",
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "use_precision_aware_optimizer",
    }
)


class MegatronConfig(EngineSection):
    """The trainer's parallel layout and memory settings, under megatron-core's own names."""

    engine: ClassVar[str] = "megatron"
    reserved: ClassVar[dict[str, str]] = MEGATRON_RESERVED
    tested: ClassVar[frozenset[str]] = MEGATRON_TESTED

    tensor_model_parallel_size: int = Field(
        default=1, ge=1, description="TP: ranks that share every layer's matrices; keep it within a machine."
    )
    pipeline_model_parallel_size: int = Field(
        default=1, ge=1, description="PP: stages that the layers are divided over."
    )
    virtual_pipeline_model_parallel_size: int | None = Field(
        default=None, ge=1, description="VPP: chunks of layers on each stage, for a smaller bubble."
    )
    num_layers_in_first_pipeline_stage: int | None = Field(
        default=None, ge=1, description="For layers that the stages do not divide; the stages between share the rest."
    )
    num_layers_in_last_pipeline_stage: int | None = Field(
        default=None, ge=1, description="Likewise; the last stage also computes the output layer."
    )
    context_parallel_size: int = Field(default=1, ge=1, description="CP: ranks that share the tokens of one sequence.")
    expert_model_parallel_size: int = Field(default=1, ge=1, description="EP: ranks that the experts are divided over.")
    expert_tensor_parallel_size: int = Field(
        default=1, ge=1, description="ETP: ranks that share each expert's matrices."
    )
    sequence_parallel: bool | None = Field(
        default=None, description="Default: on exactly when TP > 1 (MoE requires it)."
    )
    use_distributed_optimizer: bool = Field(default=True, description="Shard optimizer state over data-parallel ranks.")
    overlap_grad_reduce: bool = Field(default=False, description="Reduce gradients while the backward pass goes on.")
    overlap_param_gather: bool = Field(
        default=False, description="Gather parameters while the forward pass goes on; needs the distributed optimizer."
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = Field(
        default="alltoall", description="How tokens reach their experts; flex is DeepEP's."
    )
    recompute_granularity: Literal["full", "selective"] | None = Field(
        default=None,
        description="Compute activations again in the backward pass: of whole layers (full), or of recompute_modules.",
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        default=None,
        description="full: every recompute_num_layers layers (uniform), or the first so many of a stage (block).",
    )
    recompute_num_layers: int | None = Field(
        default=None, ge=1, description="full: layers at a time, see recompute_method."
    )
    recompute_modules: list[str] | None = Field(
        default=None, description="selective: what is computed again, for example [core_attn, moe_act]."
    )
    params_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None, description="Default: bfloat16 on cuda, float32 on cpu."
    )
    extra: dict[str, Any] = Field(
        default_factory=dict,
        description="Any other field of megatron-core's TransformerConfig, "
        "OptimizerConfig or DistributedDataParallelConfig; may also be given beside these.",
    )

    @property
    def recompute(self) -> Recompute:
        """What is computed again in the backward pass, megatron-core's defaults filled in."""
        default = DEFAULT_MODULES if self.recompute_granularity == "selective" else ()
        return Recompute(
            self.recompute_granularity,
            self.recompute_method or "uniform",
            self.recompute_num_layers or 1,
            frozenset(self.recompute_modules or default),
        )

    def groups_experts(self, *, cuda: bool) -> bool:
        """Whether experts are multiplied in one grouped GEMM: as configured, else on a GPU."""
        return bool(self.extra.get("moe_grouped_gemm", cuda))

    def layout(self, trainer_ranks: int | None) -> ParallelLayout:
        """The parallel layout on `trainer_ranks` ranks (default: data parallel 1). Raises ConfigError when illegal."""
        tp, pp, cp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.context_parallel_size
        world = trainer_ranks or tp * pp * cp
        if world % (tp * pp * cp):
            raise ConfigError(
                "cluster.trainer_ranks",
                world,
                f"must be a multiple of TP x PP x CP = {tp} x {pp} x {cp}",
                f"use {-(-world // (tp * pp * cp)) * tp * pp * cp}, or change a parallel size",
            )
        return ParallelLayout(
            tp,
            pp,
            self.virtual_pipeline_model_parallel_size or 1,
            cp,
            world // (tp * pp * cp),
            self.expert_model_parallel_size,
            self.expert_tensor_parallel_size,
        )

    def stage_layers(self, num_layers: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Global layer ids `[stage][chunk]` of a model with `num_layers` layers. Raises ConfigError when illegal."""
        return stage_layers(
            num_layers,
            self.pipeline_model_parallel_size,
            self.virtual_pipeline_model_parallel_size or 1,
            self.num_layers_in_first_pipeline_stage,
            self.num_layers_in_last_pipeline_stage,
        )
