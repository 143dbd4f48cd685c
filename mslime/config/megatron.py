"""Section `megatron`: settings of the trainer under megatron-core's own names, and their rules.

megatron.training checked some of these rules before megatron-core started. megatron-core 0.16.1 alone does not, and
trains on silently wrong gradients. The trainer contains workarounds for other corruptions (experts marked
`allreduce=False`, forced parameter sync before export, duplicated MLA down-projections).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from pydantic import Field

from mslime.config.base import Device, EngineSection, Fp8Recipe, ReplayMode, Rule, refuse_first
from mslime.config.cluster import ClusterConfig
from mslime.config.errors import ConfigError
from mslime.config.fp8 import check_fp8_model
from mslime.config.layout import ParallelLayout, stage_layers

DEFAULT_MODULES = frozenset({"core_attn"})
"""Modules of selective recompute (`TransformerConfig.__post_init__`, megatron-core 0.16.1)."""


@dataclass(frozen=True)
class Recompute:
    """Complete recompute settings.

    Attributes:
        granularity: None: everything is kept.
        method, num_layers: of full recompute: groups of `num_layers` layers (`uniform`), or the first ones of a chunk
            (`block`).
        modules: of selective recompute.
    """

    granularity: Literal["full", "selective"] | None
    method: Literal["uniform", "block"]
    num_layers: int
    modules: frozenset[str]

    def fields(self) -> dict[str, Any]:
        """Fields for `TransformerConfig`."""
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
    "fp8_param": "parameters stay bfloat16: engines and checkpoints receive them as stored in memory",
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
        default=None,
        ge=1,
        description="Layers of the first stage, if the stages do not divide all layers; the stages "
        "between share the rest.",
    )
    num_layers_in_last_pipeline_stage: int | None = Field(
        default=None, ge=1, description="Layers of the last stage, which also computes the output layer."
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
    overlap_grad_reduce: bool = Field(default=False, description="Reduce gradients during the backward pass.")
    overlap_param_gather: bool = Field(
        default=False, description="Gather parameters during the forward pass; needs the distributed optimizer."
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = Field(
        default="alltoall", description="How tokens reach their experts; flex is DeepEP's."
    )
    recompute_granularity: Literal["full", "selective"] | None = Field(
        default=None,
        description="Recompute activations in the backward pass: of whole layers (full), or of recompute_modules "
        "(selective).",
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        default=None,
        description="full: all layers, recompute_num_layers at a time (uniform), or only the first "
        "recompute_num_layers of a stage (block).",
    )
    recompute_num_layers: int | None = Field(
        default=None, ge=1, description="full: number of layers, see recompute_method."
    )
    recompute_modules: list[str] | None = Field(
        default=None, description="selective: modules to recompute, for example [core_attn, moe_act]."
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
        """Recompute settings with megatron-core's defaults."""
        default = DEFAULT_MODULES if self.recompute_granularity == "selective" else ()
        return Recompute(
            self.recompute_granularity,
            self.recompute_method or "uniform",
            self.recompute_num_layers or 1,
            frozenset(self.recompute_modules or default),
        )

    @property
    def counts_over_a_step(self) -> bool:
        """Whether routers count tokens over all micro-batches of a pass, regardless of their adapter."""
        kinds: Any = self.extra.get("moe_router_load_balancing_type", "none")
        return "global_aux_loss" in ([kinds] if isinstance(kinds, str) else kinds)

    def groups_experts(self, *, cuda: bool) -> bool:
        """Whether experts use one grouped GEMM: as configured, else on a GPU."""
        return bool(self.extra.get("moe_grouped_gemm", cuda))

    def layout(self, trainer_ranks: int | None) -> ParallelLayout:
        """Parallel layout on `trainer_ranks` ranks (default: data parallel 1). Raises ConfigError if it is invalid."""
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
        """Global layer ids `[stage][chunk]` of a model with `num_layers` layers. Raises ConfigError."""
        return stage_layers(
            num_layers,
            self.pipeline_model_parallel_size,
            self.virtual_pipeline_model_parallel_size or 1,
            self.num_layers_in_first_pipeline_stage,
            self.num_layers_in_last_pipeline_stage,
        )


def check_megatron(
    m: MegatronConfig, cluster: ClusterConfig, layout: ParallelLayout, replay: ReplayMode, *, has_critic: bool
) -> None:
    """Reject settings of megatron-core that the run's machines, routing replay or placement do not support.

    Args:
        replay: `train.replay`.
        has_critic: a value model is trained, too.

    Raises:
        ConfigError: the first broken rule.
    """
    if cluster.colocated:
        refuse_first("megatron", _fixed_addresses(m))
    refuse_first("megatron", _gradients(m))
    refuse_first("megatron", _router_dispatch(m, layout, replay))
    refuse_first("megatron", _recompute(m, cluster.device))
    if cluster.device == "cpu":
        refuse_first("megatron", _cpu_limits(m))
    refuse_first("megatron", _optimizer(m, cluster.device, has_critic=has_critic))
    tp = m.tensor_model_parallel_size
    if cluster.device == "cuda" and tp > cluster.gpus_per_node:
        raise ConfigError(
            "megatron.tensor_model_parallel_size", tp,
            f"a tensor-parallel group must fit on one machine, which has {cluster.gpus_per_node} GPUs "
            "(cluster.gpus_per_node)", "lower it, and use more pipeline or expert parallelism",
        )  # fmt: skip


def _fixed_addresses(m: MegatronConfig) -> Iterator[Rule]:
    """Settings that need fixed memory addresses: an offloaded trainer releases its memory."""
    graphs = "CUDA graphs hold parameter addresses, which change when the trainer is offloaded"
    buffers = "NCCL keeps addresses of registered buffers, which change when the trainer is offloaded"
    off = "remove it, or set cluster.placement: separate"
    for name, why in (("enable_cuda_graph", graphs), ("external_cuda_graph", graphs), ("nccl_ub", buffers)):
        yield m.extra.get(name), name, m.extra.get(name), why, off
    impl = m.extra.get("cuda_graph_impl", "none")
    yield impl != "none", "cuda_graph_impl", impl, graphs, off


def _gradients(m: MegatronConfig) -> Iterator[Rule]:
    """Settings with wrong gradients, or with another policy than the one that sampled."""
    # VPP with batched p2p: an error of 43 in |d grad| was measured.
    for name, wanted in (("batch_p2p_comm", False), ("overlap_p2p_comm", True)):
        batched = (m.virtual_pipeline_model_parallel_size or 1) > 1 and m.extra.get(name, wanted) is not wanted
        yield (
            batched, name, m.extra.get(name), "virtual pipeline stages with batched p2p communication train on wrong "
            "gradients in megatron-core 0.16.1", f"remove it (mslime sets {str(wanted).lower()})",
        )  # fmt: skip
    split = m.tensor_model_parallel_size > 1
    yield (
        m.sequence_parallel is False and split, "sequence_parallel", False,
        "MoE layers with tensor parallelism need sequence parallelism",
        "remove it (it follows tensor_model_parallel_size)",
    )  # fmt: skip
    yield (
        m.sequence_parallel and not split, "sequence_parallel", True,
        "sequence parallelism splits over the tensor-parallel group, which has one rank",
        "remove it, or raise tensor_model_parallel_size",
    )  # fmt: skip
    for name, effect in (
        ("hidden_dropout", "dropout"),
        ("attention_dropout", "dropout"),
        ("moe_input_jitter_eps", "jitter"),
    ):
        yield (
            m.extra.get(name), name, m.extra.get(name), f"{effect} makes the trained policy differ from the sampling "
            "policy and from the evaluated one", "remove it (mslime uses none)",
        )  # fmt: skip
    yield (
        m.extra.get("cross_entropy_loss_fusion"), "cross_entropy_loss_fusion", True,
        "the fused kernel casts gradients to bfloat16 and bypasses mslime's log-probs", "remove it",
    )  # fmt: skip


def _router_dispatch(m: MegatronConfig, layout: ParallelLayout, replay: ReplayMode) -> Iterator[Rule]:
    """Settings under which a token may reach other experts than the replayed ones, or none."""
    extra, replays = m.extra, replay != "off"
    balancing, graphs = extra.get("moe_router_load_balancing_type"), extra.get("cuda_graph_impl", "none")
    capacity, without = extra.get("moe_expert_capacity_factor"), "remove it, or set train.replay: off"
    yield (
        extra.get("moe_router_fusion") and replays, "moe_router_fusion", True,
        f"the fused router kernel bypasses routing replay (train.replay = {replay})", without,
    )  # fmt: skip
    yield (
        graphs != "none" and replays, "cuda_graph_impl", graphs,
        f"a captured graph replays the routes of its capture (train.replay = {replay})", without,
    )  # fmt: skip
    yield (
        capacity is not None, "moe_expert_capacity_factor", capacity, "capacity drops tokens per "
        "rank, so the loss depends on the layout and the engine's routes are not honoured", "remove it",
    )  # fmt: skip
    yield (
        balancing == "sinkhorn", "moe_router_load_balancing_type", "sinkhorn",
        "sinkhorn routing does not go through the top-k that replay forces", "use none, aux_loss or seq_aux_loss",
    )  # fmt: skip
    several = layout.dp * layout.cp > 1 or layout.vpp > 1
    yield (
        balancing == "global_aux_loss" and several, "moe_router_load_balancing_type", "global_aux_loss",
        "its running mean differs between data-parallel layouts by design, and counts micro-batches of padding",
        "use aux_loss or seq_aux_loss",
    )  # fmt: skip


def _recompute(m: MegatronConfig, device: Device) -> Iterator[Rule]:
    granularity, modules = m.recompute_granularity, m.recompute_modules
    yield (
        granularity is None and (m.recompute_method or m.recompute_num_layers or modules), "recompute_granularity",
        None, "recompute settings have no effect without it", "set it to full or selective",
    )  # fmt: skip
    yield (
        granularity == "full" and modules, "recompute_modules", modules, "applies to selective recompute only",
        "set recompute_granularity: selective, or remove the modules",
    )  # fmt: skip
    name = "recompute_method" if m.recompute_method else "recompute_num_layers"
    yield (
        granularity == "selective" and (m.recompute_method or m.recompute_num_layers), name, getattr(m, name),
        "applies to full recompute only", f"set recompute_granularity: full, or remove {name}",
    )  # fmt: skip
    yield (
        "moe_act" in (modules or []) and not m.groups_experts(cuda=device == "cuda"), "recompute_modules", modules,
        "moe_act needs grouped GEMM", "use the module 'moe', or cluster.device: cuda",
    )  # fmt: skip


def _cpu_limits(m: MegatronConfig) -> Iterator[Rule]:
    """Settings that need CUDA kernels, for the device cpu."""
    for name in ("moe_grouped_gemm", "moe_router_fusion", "apply_rope_fusion"):
        value = m.extra.get(name)
        yield value, name, value, "needs CUDA kernels, and cluster.device is cpu", "remove it"
    yield (
        m.moe_token_dispatcher_type == "flex", "moe_token_dispatcher_type", "flex",
        "DeepEP needs CUDA, and cluster.device is cpu", "use alltoall",
    )  # fmt: skip


def _optimizer(m: MegatronConfig, device: Device, *, has_critic: bool) -> Iterator[Rule]:
    yield (
        m.overlap_param_gather and not (m.use_distributed_optimizer and m.overlap_grad_reduce), "overlap_param_gather",
        True, "needs use_distributed_optimizer and overlap_grad_reduce", "turn both on, or remove it",
    )  # fmt: skip
    # megatron-core 0.16.1 passes views of float32 parameters to its offloading optimizer, which torch rejects as
    # non-leaf tensors (distrib_optimizer.py). 16-bit ones are copied.
    offloads = device != "cpu" and _offloads(m)
    yield (
        offloads and m.params_dtype == "float32", "optimizer_cpu_offload", True,
        f"{_OFFLOADED}, and megatron.params_dtype is float32", "set megatron.params_dtype: bfloat16, or remove it",
    )  # fmt: skip
    yield (
        offloads and has_critic, "optimizer_cpu_offload", True, f"{_OFFLOADED}, and a critic's value head is float32",
        "remove it, or choose an algorithm.advantage without a critic",
    )  # fmt: skip


_OFFLOADED = "megatron-core can offload the optimizer of 16-bit parameters only"


def _offloads(megatron: MegatronConfig) -> bool:
    return bool(megatron.extra.get("optimizer_cpu_offload")) and megatron.use_distributed_optimizer


def check_model(
    megatron: MegatronConfig, device: Device, derived: Mapping[str, object], fp8: Fp8Recipe | None = None
) -> None:
    """Raise ConfigError if pipeline stages cannot divide the layers, or a flag contradicts the checkpoint.

    Args:
        derived: every TransformerConfig field that mslime derives from the checkpoint's config.json.
        fp8: FP8 recipe of linear layers (`train.fp8`).
    """
    megatron.stage_layers(cast("int", derived["num_layers"]))
    cp, extra = megatron.context_parallel_size, megatron.extra
    special = derived.get("softmax_type") not in (None, "vanilla") or derived.get("window_size") is not None
    refuse_first("megatron", [
        *((key in derived and derived[key] != value, key, value,
           f"contradicts the checkpoint's config.json, which has {derived.get(key)!r}",
           "remove it; the architecture comes from the checkpoint") for key, value in extra.items()),
        # Transformer Engine 2.20 lacks ring kernels for them.
        (device == "cuda" and special and cp > 1 and extra.get("cp_comm_type") != "a2a", "context_parallel_size", cp,
         "on GPUs, ring attention does not support sinks or a sliding window (Transformer Engine 2.20 has no kernel "
         "for it)", "set it to 1, or set megatron.cp_comm_type: a2a, which is not tested"),
    ])  # fmt: skip
    check_fp8_model(fp8, megatron.tensor_model_parallel_size, megatron.expert_tensor_parallel_size, derived)
    refuse_first("megatron", [
        (device != "cpu" and _offloads(megatron) and derived.get("experimental_attention_variant"),
         "optimizer_cpu_offload", True, f"{_OFFLOADED}, and this model's delta-nets have float32 parameters",
         "remove it; megatron.use_precision_aware_optimizer with 16-bit moments also saves memory"),
        (derived.get("rotary_interleaved") and extra.get("apply_rope_fusion"), "apply_rope_fusion", True,
         "megatron-core's fused kernel for packed sequences rotates halves, this model rotates interleaved pairs",
         "remove it"),
    ])  # fmt: skip
