"""Rules about the layout of the trainer, its kernels and the machines of a run; and what a checkpoint adds to them.

megatron.training used to guard some of these before megatron-core started; megatron-core 0.16.1 alone does not, and
trains on silently wrong gradients. The corruptions that mslime works around instead of refusing (experts marked
`allreduce=False`, forced parameter sync before export, duplicated MLA down-projections) live in the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from mslime.config.cluster import claims, count_gpus, describe_gpus, engine_nccl
from mslime.config.errors import ConfigError
from mslime.config.fp8 import check_fp8_model

if TYPE_CHECKING:
    from mslime.config.choices import Device, Fp8Recipe
    from mslime.config.megatron import MegatronConfig
    from mslime.config.schema import RunConfig


def check_layout(config: RunConfig) -> None:
    """Raise ConfigError for the first broken rule."""
    for rule in _RULES:
        rule(config)


def _pipeline_p2p(config: RunConfig) -> None:
    """VPP with batched p2p gives wrong gradients (|d grad| 43 in facts); megatron.training guarded it."""
    m = config.megatron
    if (m.virtual_pipeline_model_parallel_size or 1) < 2:
        return
    for key, wanted in (("batch_p2p_comm", False), ("overlap_p2p_comm", True)):
        if m.extra.get(key, wanted) is not wanted:
            raise ConfigError(
                f"megatron.{key}",
                m.extra[key],
                "virtual pipeline stages with batched p2p communication train on "
                "wrong gradients in megatron-core 0.16.1",
                f"remove it (mslime sets {str(wanted).lower()})",
            )


def _sequence_parallel(config: RunConfig) -> None:
    m = config.megatron
    if m.sequence_parallel is False and m.tensor_model_parallel_size > 1:
        raise ConfigError(
            "megatron.sequence_parallel",
            False,
            "MoE layers with tensor parallelism need sequence parallelism",
            "remove it (it follows tensor_model_parallel_size)",
        )
    if m.sequence_parallel and m.tensor_model_parallel_size == 1:
        raise ConfigError(
            "megatron.sequence_parallel",
            True,
            "sequence parallelism splits over the tensor-parallel group, which has one rank",
            "remove it, or raise tensor_model_parallel_size",
        )


def _dropout(config: RunConfig) -> None:
    for key in ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps"):
        if config.megatron.extra.get(key):
            what = "jitter" if key == "moe_input_jitter_eps" else "dropout"
            raise ConfigError(
                f"megatron.{key}",
                config.megatron.extra[key],
                f"{what} makes the trainer's policy differ from the one that sampled, and from the one that is "
                "evaluated",
                "remove it (mslime sets none)",
            )


def _fused_cross_entropy(config: RunConfig) -> None:
    if config.megatron.extra.get("cross_entropy_loss_fusion"):
        raise ConfigError(
            "megatron.cross_entropy_loss_fusion",
            True,
            "the fused kernel casts gradients to bfloat16 and bypasses mslime's log-probs",
            "remove it",
        )


def _router_dispatch(config: RunConfig) -> None:
    """Settings under which a token may reach other experts than the ones replayed, or none."""
    extra, replay = config.megatron.extra, config.train.replay
    if extra.get("moe_router_fusion") and replay != "off":
        raise ConfigError(
            "megatron.moe_router_fusion",
            True,
            f"the fused router kernel bypasses routing replay (train.replay = {replay})",
            "remove it, or set train.replay: off",
        )
    if extra.get("cuda_graph_impl", "none") != "none" and replay != "off":
        raise ConfigError(
            "megatron.cuda_graph_impl",
            extra["cuda_graph_impl"],
            f"a captured graph replays the routes of its capture (train.replay = {replay})",
            "remove it, or set train.replay: off",
        )
    if extra.get("moe_expert_capacity_factor") is not None:
        raise ConfigError(
            "megatron.moe_expert_capacity_factor",
            extra["moe_expert_capacity_factor"],
            "capacity drops tokens per "
            "rank, so the loss depends on the layout and the engine's routes are not honoured",
            "remove it",
        )
    if extra.get("moe_router_load_balancing_type") == "sinkhorn":
        raise ConfigError(
            "megatron.moe_router_load_balancing_type",
            "sinkhorn",
            "sinkhorn routing does not go through the top-k that replay forces",
            "use none, aux_loss or seq_aux_loss",
        )
    several = config.layout.dp * config.layout.cp > 1 or config.layout.vpp > 1
    if extra.get("moe_router_load_balancing_type") == "global_aux_loss" and several:
        raise ConfigError(
            "megatron.moe_router_load_balancing_type",
            "global_aux_loss",
            "its running mean differs between data-parallel layouts by design, and counts micro-batches of padding",
            "use aux_loss or seq_aux_loss",
        )


def _recompute(config: RunConfig) -> None:
    m = config.megatron
    if m.recompute_granularity is None and (m.recompute_method or m.recompute_num_layers or m.recompute_modules):
        raise ConfigError(
            "megatron.recompute_granularity",
            None,
            "recompute settings have no effect without it",
            "set it to full or selective",
        )
    if m.recompute_granularity == "full" and m.recompute_modules:
        raise ConfigError(
            "megatron.recompute_modules",
            m.recompute_modules,
            "applies to selective recompute only",
            "set recompute_granularity: selective, or remove the modules",
        )
    if m.recompute_granularity == "selective" and (m.recompute_method or m.recompute_num_layers):
        name = "recompute_method" if m.recompute_method else "recompute_num_layers"
        raise ConfigError(
            f"megatron.{name}",
            getattr(m, name),
            "applies to full recompute only",
            f"set recompute_granularity: full, or remove {name}",
        )
    if "moe_act" in (m.recompute_modules or []) and not m.groups_experts(cuda=config.cluster.device == "cuda"):
        raise ConfigError(
            "megatron.recompute_modules",
            m.recompute_modules,
            "moe_act needs grouped GEMM",
            "use the module 'moe', or cluster.device: cuda, where experts have it",
        )


def _cpu_limits(config: RunConfig) -> None:
    """What needs CUDA kernels is refused by name when the device is set to cpu."""
    if config.cluster.device != "cpu":
        return
    m = config.megatron
    needs_cuda = {
        "moe_grouped_gemm": m.extra.get("moe_grouped_gemm"),
        "moe_router_fusion": m.extra.get("moe_router_fusion"),
        "apply_rope_fusion": m.extra.get("apply_rope_fusion"),
    }
    for key, value in needs_cuda.items():
        if value:
            raise ConfigError(f"megatron.{key}", value, "needs CUDA kernels, and cluster.device is cpu", "remove it")
    if m.moe_token_dispatcher_type == "flex":
        raise ConfigError(
            "megatron.moe_token_dispatcher_type", "flex", "DeepEP needs CUDA, and cluster.device is cpu", "use alltoall"
        )


def _overlap(config: RunConfig) -> None:
    m = config.megatron
    if m.overlap_param_gather and not (m.use_distributed_optimizer and m.overlap_grad_reduce):
        raise ConfigError(
            "megatron.overlap_param_gather",
            True,
            "needs use_distributed_optimizer and overlap_grad_reduce",
            "turn both on, or remove it",
        )


def _float32_offload(config: RunConfig) -> None:
    """megatron-core 0.16.1 hands its offloading optimizer views of float32 parameters, which torch refuses as no leaves
    (distrib_optimizer.py); of 16-bit ones it makes copies."""
    m = config.megatron
    if config.cluster.device == "cpu" or not _offloads(m):
        return
    if m.params_dtype == "float32":
        raise ConfigError(
            "megatron.optimizer_cpu_offload", True, f"{_OFFLOADED}, and megatron.params_dtype is float32",
            "set megatron.params_dtype: bfloat16, or remove it",
        )  # fmt: skip
    if config.has_critic:
        raise ConfigError(
            "megatron.optimizer_cpu_offload", True, f"{_OFFLOADED}, and a critic's value head is float32",
            "remove it, or choose an algorithm.advantage without a critic",
        )  # fmt: skip


_OFFLOADED = "megatron-core offloads the optimizer of 16-bit parameters alone"


def _offloads(megatron: MegatronConfig) -> bool:
    return bool(megatron.extra.get("optimizer_cpu_offload")) and megatron.use_distributed_optimizer


def _engine_on_its_machines(config: RunConfig) -> None:
    engine, cluster = config.sglang, config.cluster
    if not engine.urls:
        engine.check_machines(cluster.gpus_per_node if cluster.device == "cuda" else engine.tp_size)


def _shared_memory_on_one_node(config: RunConfig) -> None:
    cluster, wanted = config.cluster, claims(config)
    local = config.weights.transport in ("shm", "handles")
    if not local or cluster.device == "cpu" or count_gpus(wanted) <= cluster.gpus_per_node:
        return
    others = "disk or delta" if config.colocated else "broadcast, or disk or delta"
    raise ConfigError(
        "weights.transport",
        config.weights.transport,
        f"the run needs {describe_gpus(wanted)}, one machine has {cluster.gpus_per_node} (cluster.gpus_per_node), and "
        "machines share no memory",
        f"set {others} with a weights.directory that all machines share",
    )


def _tensor_parallel_on_one_node(config: RunConfig) -> None:
    tp, cluster = config.megatron.tensor_model_parallel_size, config.cluster
    if cluster.device == "cuda" and tp > cluster.gpus_per_node:
        raise ConfigError(
            "megatron.tensor_model_parallel_size",
            tp,
            f"a tensor-parallel group lives on one machine, which has {cluster.gpus_per_node} GPUs "
            "(cluster.gpus_per_node)",
            "lower it, and use more pipeline or expert parallelism",
        )


def _nccl_of_both_sides(config: RunConfig) -> None:
    """SGLang overrules the environment when these of its flags are on: the trainer would disagree."""
    for name, value in engine_nccl(config.sglang.extra).items():
        if value == "1" and config.cluster.env.get(name, value) != value:
            raise ConfigError(
                f"cluster.env.{name}",
                config.cluster.env[name],
                "sglang.enable_symm_mem or sglang.enable_nccl_nvls set it to 1 in the engines, and NCCL fails where "
                "trainer and engines disagree",
                "remove it, or those flags",
            )


_RULES: tuple[Callable[[RunConfig], None], ...] = (
    _pipeline_p2p,
    _sequence_parallel,
    _dropout,
    _fused_cross_entropy,
    _router_dispatch,
    _recompute,
    _cpu_limits,
    _overlap,
    _float32_offload,
    _engine_on_its_machines,
    _shared_memory_on_one_node,
    _tensor_parallel_on_one_node,
    _nccl_of_both_sides,
)


def check_model(
    megatron: MegatronConfig, device: Device, derived: Mapping[str, object], fp8: Fp8Recipe | None = None
) -> None:
    """Raise ConfigError when pipeline stages cannot share the layers, or a flag contradicts the checkpoint.

    Args:
        derived: every TransformerConfig field that mslime derives from the checkpoint's config.json.
        fp8: how linear layers multiply in FP8 (`train.fp8`).
    """
    megatron.stage_layers(cast("int", derived["num_layers"]))
    for key, value in megatron.extra.items():
        if key in derived and derived[key] != value:
            raise ConfigError(
                f"megatron.{key}",
                value,
                f"contradicts the checkpoint's config.json, which says {derived[key]!r}",
                "remove it; the architecture comes from the checkpoint",
            )
    _context_parallel_attention(megatron, device, derived)
    check_fp8_model(fp8, megatron, derived)
    if device != "cpu" and _offloads(megatron) and derived.get("experimental_attention_variant"):
        raise ConfigError(
            "megatron.optimizer_cpu_offload", True, f"{_OFFLOADED}, and this model's delta-nets have float32 ones",
            "remove it; megatron.use_precision_aware_optimizer with 16-bit moments takes less memory, too",
        )  # fmt: skip
    if derived.get("rotary_interleaved") and megatron.extra.get("apply_rope_fusion"):
        raise ConfigError(
            "megatron.apply_rope_fusion",
            True,
            "megatron-core's fused kernel for packed sequences rotates halves, this model rotates interleaved pairs",
            "remove it",
        )


def _context_parallel_attention(m: MegatronConfig, device: Device, derived: Mapping[str, object]) -> None:
    """Transformer Engine 2.20 has no kernel for sinks or sliding windows in a ring of context-parallel ranks."""
    special = derived.get("softmax_type") not in (None, "vanilla") or derived.get("window_size") is not None
    if device == "cuda" and special and m.context_parallel_size > 1 and m.extra.get("cp_comm_type") != "a2a":
        raise ConfigError(
            "megatron.context_parallel_size",
            m.context_parallel_size,
            "on GPUs, attention with sinks or a sliding window cannot be shared out in a ring (Transformer Engine 2.20 "
            "has no kernel for it)",
            "set it to 1, or set megatron.cp_comm_type: a2a, which no test of mslime has run",
        )
