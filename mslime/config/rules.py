"""Rules that span sections of the run configuration. Each refuses one silent corruption or one senseless pair.

megatron.training used to guard some of these before megatron-core started; megatron-core 0.16.1 alone does not, and
trains on silently wrong gradients. The corruptions that mslime works around instead of refusing (experts marked
`allreduce=False`, forced parameter sync before export, duplicated MLA down-projections) live in the trainer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from mslime.config.algorithm import GROUP_RELATIVE
from mslime.config.choices import check_choice
from mslime.config.cluster import claims, count_gpus, describe_gpus, engine_nccl
from mslime.config.colocated import check_colocated
from mslime.config.engines import MASK_LIMIT, check_teacher
from mslime.config.environments import check_environment_settings
from mslime.config.errors import ConfigError
from mslime.config.lora import check_lora
from mslime.config.reward import check_reward

if TYPE_CHECKING:
    from mslime.config.choices import Device
    from mslime.config.megatron import MegatronConfig
    from mslime.config.schema import RunConfig


def check_run(config: RunConfig) -> None:
    """Raise ConfigError for the first broken rule."""
    config.megatron.layout(config.cluster.trainer_ranks)
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
    grouped = m.extra.get("moe_grouped_gemm", config.cluster.device == "cuda")  # on a GPU it is the default
    if "moe_act" in (m.recompute_modules or []) and not grouped:
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
        "fp8": m.extra.get("fp8"),
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


def _engine_on_its_machines(config: RunConfig) -> None:
    engine, cluster = config.sglang, config.cluster
    if not engine.urls:
        engine.check_machines(cluster.gpus_per_node if cluster.device == "cuda" else engine.tp_size)


def _shared_memory_on_one_node(config: RunConfig) -> None:
    cluster, wanted = config.cluster, claims(config)
    if config.weights.transport != "shm" or cluster.device == "cpu" or count_gpus(wanted) <= cluster.gpus_per_node:
        return
    others = "disk or delta" if config.colocated else "broadcast, or disk or delta"
    raise ConfigError(
        "weights.transport",
        "shm",
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


def _group_size(config: RunConfig) -> None:
    advantage = config.algorithm.advantage
    if config.train.task == "rl" and advantage in GROUP_RELATIVE and config.rollout.group_size < 2:
        raise ConfigError(
            "rollout.group_size",
            config.rollout.group_size,
            f"{advantage} compares the responses of a group; in a group of one every advantage is 0",
            "use at least 2 (8 is common), or algorithm.advantage: reinforce_pp",
        )


def _filtered_groups(config: RunConfig) -> None:
    r = config.rollout
    if config.train.task == "rl" and r.dynamic_filter == "zero_variance" and r.group_size == 1:
        raise ConfigError(
            "rollout.dynamic_filter",
            r.dynamic_filter,
            "the rewards of a group of one are all equal, so every group would be dropped and no step would ever fill",
            "use none, or a rollout.group_size of at least 2",
        )


def _advantage(config: RunConfig) -> None:
    algorithm = config.algorithm
    if algorithm.advantage == "none" and algorithm.opd_coef == 0:
        raise ConfigError(
            "algorithm.advantage",
            "none",
            "every advantage would be 0, so nothing would be learnt from rewards",
            "distil a teacher (algorithm.opd_coef), or choose another advantage",
        )


def _critic(config: RunConfig) -> None:
    critic, train = config.critic, config.train
    if not config.has_critic:
        defaults = type(critic)()
        given = [name for name in type(critic).model_fields if getattr(critic, name) != getattr(defaults, name)]
        if given:
            raise ConfigError(
                f"critic.{given[0]}",
                getattr(critic, given[0]),
                f"algorithm.advantage {config.algorithm.advantage} and train.task {train.task} have no critic",
                "set algorithm.advantage: gae, or remove the section",
            )
        return
    if critic.warmup_steps >= train.num_steps:
        raise ConfigError(
            "critic.warmup_steps",
            critic.warmup_steps,
            f"must be below train.num_steps = {train.num_steps}, or the policy is never trained",
            "shorten the warm-up, or raise train.num_steps",
        )
    if critic.min_lr > critic.lr:
        raise ConfigError("critic.min_lr", critic.min_lr, f"must not exceed critic.lr = {critic.lr}", "lower it")
    total = train.num_steps * train.optimizer_steps_per_rollout
    if critic.lr_warmup_steps >= total > 1:
        raise ConfigError(
            "critic.lr_warmup_steps",
            critic.lr_warmup_steps,
            f"must be below the run's {total} optimizer steps",
            "shorten it, or raise train.num_steps",
        )


def _sampling(config: RunConfig) -> None:
    """What SGLang 0.5.23 reports of a draw from a part of the vocabulary (managers/scheduler.py, layers/sampler.py)."""
    r, sglang = config.rollout, config.sglang.extra
    if r.top_k == 0:
        raise ConfigError("rollout.top_k", 0, "no token would be left to draw", "use -1 to turn it off")
    if r.top_k == 1:
        raise ConfigError(
            "rollout.top_k", 1, "the only token left always has probability 1, so nothing would be learnt",
            "use 2 or more, or -1 to turn it off",
        )  # fmt: skip
    if not r.truncated:
        return
    if r.top_k == -1:
        given, value = ("top_p", r.top_p) if r.top_p < 1 else ("min_p", r.min_p)
        raise ConfigError(
            "rollout.top_k", -1,
            f"with {given}: {value:g} the trainer needs the ids that each token was drawn from, and SGLang returns "
            "them only where their number is bounded",
            f"set rollout.top_k, for example to {MASK_LIMIT}: {given} then decides in nearly every draw",
        )  # fmt: skip
    limit = sglang.get("sampling_mask_max_tokens") or MASK_LIMIT
    if r.top_k > limit:
        raise ConfigError(
            "rollout.top_k", r.top_k, f"SGLang returns at most {limit} of the ids that a token was drawn from",
            "lower it, or raise sglang.sampling_mask_max_tokens",
        )  # fmt: skip
    fixed = next((n for n in ("enable_deterministic_inference", "rl_on_policy_target") if sglang.get(n)), None)
    if r.min_p > 0 and fixed is not None:
        raise ConfigError(
            "rollout.min_p", r.min_p, f"SGLang has no min-p draws from a seed, which sglang.{fixed} asks for",
            f"set it to 0, or remove sglang.{fixed}",
        )  # fmt: skip


def _named_functions(config: RunConfig) -> None:
    check_choice("rollout.dynamic_filter", config.rollout.dynamic_filter, ("none", "zero_variance"))
    check_choice("rollout.function", config.rollout.function, ("single_turn", "environment"))
    for setting, named in (("data.source", config.data.source), ("hooks.step", config.hooks.step)):
        if named is not None:
            check_choice(setting, named, ())
    if config.data.source is not None and config.train.task == "sft":
        raise ConfigError("data.source", config.data.source, "supervised training reads files",
                          "write the rows to a file, and name it in data.prompts")  # fmt: skip


def _steps(config: RunConfig) -> None:
    t, r = config.train, config.rollout
    if t.min_lr > t.lr:
        raise ConfigError("train.min_lr", t.min_lr, f"must not exceed train.lr = {t.lr}", "lower it")
    total = config.policy_steps * t.optimizer_steps_per_rollout
    if t.lr_warmup_steps >= total > 1:
        raise ConfigError(
            "train.lr_warmup_steps",
            t.lr_warmup_steps,
            f"must be below the policy's {total} optimizer steps",
            "shorten the warm-up, or raise train.num_steps",
        )
    if t.task == "rl" and r.groups_per_step % t.optimizer_steps_per_rollout:
        raise ConfigError(
            "train.optimizer_steps_per_rollout",
            t.optimizer_steps_per_rollout,
            f"must divide rollout.groups_per_step = {r.groups_per_step}",
            "choose a divisor",
        )


def _sets(config: RunConfig) -> None:
    if not config.data.prompts and config.data.source is None:
        raise ConfigError(
            "data.prompts",
            [],
            "at least one file of prompts is needed",
            "name a .jsonl or .parquet file in the run's file, or give --data.prompts",
        )
    names = [s.name for s in config.data.eval_sets]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise ConfigError("data.eval_sets", twice, "names of evaluation sets must differ", "rename one of them")
    for i, s in enumerate(config.data.eval_sets):
        if re.fullmatch(r"[\w.@+-]+", s.name) is None:
            raise ConfigError(
                f"data.eval_sets[{i}].name",
                s.name,
                "a name is letters, digits and _ . @ + -",
                "it becomes the metrics eval/NAME/...; write for example "
                + (re.sub(r"[^a-zA-Z0-9_.@+-]+", "_", s.name) or "test"),
            )
        if s.samples_per_prompt > 1 and s.temperature == 0:
            raise ConfigError(
                f"data.eval_sets.{s.name}.temperature",
                0.0,
                f"{s.samples_per_prompt} greedy responses would be equal, so pass@k means nothing",
                "set a temperature, or samples_per_prompt: 1",
            )


def _supervised(config: RunConfig) -> None:
    """Settings of rows of messages that would change nothing."""
    data, train = config.data, config.train
    if data.tools_key is not None and data.messages_key is None and not data.apply_chat_template:
        rule = "tools are offered by a chat template, and none is used"
        raise ConfigError("data.tools_key", data.tools_key, rule, "set data.apply_chat_template, or remove it")
    if data.messages_key is None:
        if train.sft_loss_on != "all":
            rule = "acts on conversations, and data.messages_key names none"
            raise ConfigError("train.sft_loss_on", train.sft_loss_on, rule, "set data.messages_key, or remove it")
        return
    if train.task == "rl":
        raise ConfigError(
            "data.messages_key", data.messages_key, "conversations are for train.task: sft",
            "name the prompt's messages with data.prompt_key, and set data.apply_chat_template: true",
        )  # fmt: skip
    if data.max_prompt_tokens is not None:
        raise ConfigError(
            "data.max_prompt_tokens", data.max_prompt_tokens, "a conversation has no prompt to measure",
            "set train.sft_too_long, and rollout.max_total_tokens",
        )  # fmt: skip


def _keep_best(config: RunConfig) -> None:
    """A metric of a held-out set that is never evaluated would keep nothing, in silence."""
    metric, sets = config.checkpoint.keep_best, [s.name for s in config.data.eval_sets]
    if metric is None or not metric.startswith("eval/"):
        return
    name = metric.removeprefix("eval/").rpartition("/")[0]
    if name not in sets:
        raise ConfigError(
            "checkpoint.keep_best", metric, f"names no set of data.eval_sets: {sets}",
            f"write for example eval/{sets[0] if sets else 'NAME'}/accuracy",
        )  # fmt: skip
    losses, minimum = ("nll", "perplexity"), config.checkpoint.keep_best_is == "min"
    is_loss, supervised = metric.rpartition("/")[2] in losses, config.train.task == "sft"
    if is_loss != supervised:
        rule = f"train.task {config.train.task} measures no such thing on held-out sets"
        best = f"eval/{name}/nll and checkpoint.keep_best_is: min" if supervised else f"eval/{name}/accuracy"
        raise ConfigError("checkpoint.keep_best", metric, rule, f"write for example {best}")
    if is_loss and not minimum:
        raise ConfigError("checkpoint.keep_best_is", "max", f"the best {metric} is the lowest", "set it to min")
    if config.observe.eval_every == 0:
        raise ConfigError(
            "checkpoint.keep_best", metric, "needs evaluations, and observe.eval_every is 0", "set observe.eval_every"
        )


def _managers(config: RunConfig) -> None:
    """Each rollout manager has engines of its own, and a port if there is a fixed one."""
    managers, server = config.rollout.managers, config.rollout.server
    if managers > config.sglang.servers:
        raise ConfigError(
            "rollout.managers",
            managers,
            f"each manager needs an engine, and there are {config.sglang.servers}",
            "lower it, or raise sglang.num_engines",
        )
    if server.port and server.port + managers - 1 > 65535:
        raise ConfigError(
            "rollout.server.port",
            server.port,
            f"each of the {managers} managers (rollout.managers) takes the next port, and there is none after 65535",
            "choose a lower port, or 0 for free ones",
        )


def _comparison(config: RunConfig) -> None:
    asked = config.weights.verify
    if asked in ("first", "always") and config.train.task == "rl" and not config.compares_weights:
        raise ConfigError(
            "weights.verify", asked, "engines say what they hold by what they recorded, and weights.loader is model",
            "set weights.verify: probe, or leave weights.loader alone",
        )  # fmt: skip


_RULES: tuple[Callable[[RunConfig], None], ...] = (
    _supervised,
    check_colocated,
    _keep_best,
    _pipeline_p2p,
    _sequence_parallel,
    _dropout,
    _fused_cross_entropy,
    _router_dispatch,
    _recompute,
    _cpu_limits,
    _overlap,
    _engine_on_its_machines,
    _shared_memory_on_one_node,
    _comparison,
    _tensor_parallel_on_one_node,
    _nccl_of_both_sides,
    _group_size,
    _filtered_groups,
    _advantage,
    check_teacher,
    _critic,
    check_lora,
    _sampling,
    _managers,
    _named_functions,
    check_reward,
    check_environment_settings,
    _steps,
    _sets,
)


def check_model(megatron: MegatronConfig, device: Device, derived: Mapping[str, object]) -> None:
    """Raise ConfigError when pipeline stages cannot share the layers, or a flag contradicts the checkpoint.

    Args:
        derived: every TransformerConfig field that mslime derives from the checkpoint's config.json.
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
