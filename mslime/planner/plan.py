"""The plan of a run: memory by component and stage, balance, weight-sync traffic, and whether it all fits.

Reads config.json and the configuration; no weights, tokenizer or data, no torch, no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from mslime.config.dtypes import engine_dtype, export_dtype
from mslime.config.engines import SGLangConfig, TeacherConfig
from mslime.config.layout import ParallelLayout
from mslime.config.rules import check_model
from mslime.config.schema import RolloutConfig, RunConfig
from mslime.config.training import PolicySpec, TrainingSpec, critic_spec, policy_spec
from mslime.convert.adapters import make_adapters
from mslime.convert.families import get_family
from mslime.convert.families.family import ModelFields
from mslime.convert.kinds import padded_vocab_size
from mslime.convert.table import RuleTable
from mslime.planner.activations import read_widths
from mslime.planner.engine import RUNTIME_BYTES, EngineMemory, engine_memory
from mslime.planner.parameters import StageParameters, model_parameters, stage_parameters, work_per_token
from mslime.planner.phases import ENGINE_ASLEEP_BYTES, TRAINER_ASLEEP_BYTES, PhaseMemory, phases
from mslime.planner.receiving import bounds_of, buckets_held, prediction_of, receiving_of
from mslime.planner.rollouts import RolloutBytes, rollout_bytes
from mslime.planner.sync import Rates, SenderSync, SyncPrediction, near_ranks, rates_of, sender_syncs
from mslime.planner.trainer import (
    HostMemory,
    TrainerMemory,
    host_memory,
    longest_sequence,
    micro_batch_tokens,
    offloaded_share,
    trainer_memory,
)
from mslime.weights.plan import WeightPlan, build_plan
from mslime.weights.senders import Senders

GIB = 2**30
USABLE = 0.99
"""Of a GPU sold as N GB: N GiB less what the driver keeps (H100 80 GB: 79.6 GiB, H200 141 GB: 140.4 GiB)."""
TIGHT = 0.9
"""Share of a GPU above which a plan is tight: it does not know kernels' workspaces, nor how uneven routing is."""
HOST_USABLE = 0.9
"""Of a machine's memory: the system, Ray's object store and file caches take the rest. An assumption."""


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage, which stands for all of its ranks.

    Attributes:
        held: parameters of one rank.
        memory: of one GPU.
        work: multiplications of one rank for a token, over the mean of the stages.
        adapters: parameters of one rank's adapters, which alone are trained; None where the model is.
    """

    held: StageParameters
    memory: TrainerMemory
    work: float
    adapters: StageParameters | None = None

    @property
    def trained(self) -> int:
        """Elements of one rank with a gradient."""
        return (self.held if self.adapters is None else self.adapters).trained


@dataclass(frozen=True)
class Problem:
    """Something that does not fit.

    Attributes:
        where: which GPU.
        needs, has: bytes.
        component: the largest thing there that can be made smaller.
        way_out: what to change.
    """

    where: str
    needs: int
    has: int
    component: str
    way_out: str


@dataclass(frozen=True)
class RunPlan:
    """Everything that `mslime plan` says.

    Attributes:
        model, fields: name of the family and what its config.json says.
        parameters: of the whole model, multi-token prediction left out.
        layout: of the trainer.
        gpu_bytes: usable memory of a GPU.
        trainer_gpus, engine_gpus, nodes: of the run; engines that were started elsewhere are counted.
        stages: the trainer, by pipeline stage; with a critic that shares its GPUs.
        critic_stages: likewise a critic on GPUs of its own, as many as the trainer's.
        engine: a GPU of an engine; None for supervised training.
        engine_ranks: GPUs of an engine.
        near_ranks: those of them on one machine.
        engine_dtype: of its weights.
        experts_per_rank: of a trainer rank.
        responses: of a step on the data-parallel rank that has fewest, and most.
        micro_batches: of an optimizer step at most, when every response is as long as it may be.
        bubble: share of a step that a stage waits, with that many micro-batches (arXiv:2104.04473, section 2.2).
        transport: of the weight sync.
        syncs: weight-sync traffic by sender.
        host: memory of the trainer machine that needs most.
        rollouts: bytes of a step's responses; None for supervised training.
        rates: of the links and copies of a sync, as set.
        bounds: lower bounds of one sync in seconds, by what it would be limited by: those of `relay`, or else of
            `broadcast`.
        prediction: of one sync after the first two; None without engines, and for transports not in `PREDICTED`.
        problems: what does not fit.
        remarks: what is slow or left over, in sentences.
        phases: of a step, where trainer and engines share their GPUs; else none.
    """

    model: str
    fields: ModelFields
    parameters: int
    layout: ParallelLayout
    gpu_bytes: int
    trainer_gpus: int
    engine_gpus: int
    nodes: int
    stages: tuple[StagePlan, ...]
    critic_stages: tuple[StagePlan, ...]
    engine: EngineMemory | None
    engine_ranks: int
    near_ranks: int
    engine_dtype: str
    experts_per_rank: int
    responses: tuple[int, int]
    micro_batches: int
    bubble: float
    transport: str
    syncs: tuple[SenderSync, ...]
    host: HostMemory
    rollouts: RolloutBytes | None
    rates: Rates
    bounds: Mapping[str, float]
    prediction: SyncPrediction | None
    problems: tuple[Problem, ...]
    remarks: tuple[str, ...]
    phases: tuple[PhaseMemory, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether nothing stands in the way."""
        return not self.problems

    @property
    def fullest(self) -> int:
        """Bytes at the peak of the fullest GPU of trainer and critic; with an engine on it, in the phase that needs
        most, without that in which engines generate, since they fill it on purpose."""
        shared = [phase.total for phase in self.phases if phase.phase != "generate"]
        apart = self.critic_stages if shared else (*self.stages, *self.critic_stages)
        return max([*shared, *(stage.memory.peak for stage in apart)])

    @property
    def verdict(self) -> Literal["fits", "tight", "does not fit"]:
        """Tight: it fits by the numbers, with less left than they may be wrong by."""
        if not self.fits:
            return "does not fit"
        return "tight" if self.fullest > TIGHT * self.gpu_bytes else "fits"

    @property
    def sync_bytes(self) -> int:
        """What every engine GPU receives in one sync."""
        return sum(sender.sent for sender in self.syncs)

    @property
    def sync_seconds(self) -> float:
        """Lower bound of one sync."""
        return max(self.bounds.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        summed = {"sync_bytes": self.sync_bytes, "sync_seconds": self.sync_seconds, "host_bytes": self.host.total}
        if self.prediction is not None:
            summed["prediction"] = asdict(self.prediction) | {
                "seconds": self.prediction.seconds, "limit": self.prediction.limit
            }  # fmt: skip
        return asdict(self) | {"fits": self.fits, "verdict": self.verdict} | summed | {
            name: [asdict(stage) | {"trained": stage.trained, "peak": stage.memory.peak} for stage in stages]
            for name, stages in (("stages", self.stages), ("critic_stages", self.critic_stages))
        } | {"phases": [asdict(phase) | {"total": phase.total} for phase in self.phases]}  # fmt: skip


def make_plan(
    config: RunConfig, hf_config: Mapping[str, object], critic: Mapping[str, object] | None = None
) -> RunPlan:
    """The plan of a run.

    Args:
        hf_config: the model's config.json.
        critic: the critic's, where it is another.

    Raises:
        ConfigError: the layout does not divide the model, or a setting contradicts config.json.
        CheckpointError: the architecture or a setting of it is not supported.
    """
    family = get_family(hf_config)
    model, table = family.model_fields(hf_config), family.rules(hf_config)
    spec, gpu_bytes = policy_spec(config), int(config.cluster.gpu_memory_gb * GIB * USABLE)
    layout, limit, serves = spec.layout, longest_sequence(config), spec.train.task == "rl"
    table.check_layout(layout)
    wire = engine_dtype(config, hf_config) if serves else export_dtype(hf_config)
    bucket = int(config.weights.bucket_mib * 2**20)
    flat = [[layer for chunk in stage for layer in chunk] for stage in config.megatron.stage_layers(model.num_layers)]
    senders = Senders.at_most(layout, config.weights.senders)
    sync = build_plan(table, senders, flat, wire, bucket) if serves else WeightPlan(senders, ())
    stages = _stages(spec, hf_config, limit, sync, gpu_bytes, values=False)
    stages, apart, beside = _with_critic(config, stages, critic or hf_config, senders, gpu_bytes)
    per_node = config.cluster.gpus_per_node
    longest = min(model.max_positions, limit)
    rollouts = rollout_bytes(config, model, longest) if serves else None
    shared = serves and config.colocated
    host = _host(config, spec, stages, beside, sync, rollouts.machine if rollouts is not None else 0)
    held = int(max((each.hf_bytes for each in sync.buckets), default=0) * buckets_held(config))
    widths = read_widths(family.transformer_fields(hf_config), model.moe_layer_ids)
    engine = None
    if serves:
        taken = TRAINER_ASLEEP_BYTES if shared else 0
        engine = engine_memory(config.sglang, table, widths, model.num_layers, wire, held, gpu_bytes, taken)
    taking_turns = phases(stages, engine) if shared and engine is not None else ()
    engines = config.sglang.gpus if serves else 0
    beyond = 0 if shared else engines  # GPUs beside the trainer's
    nodes, idle = _machines(per_node, layout.world_size + config.critic_ranks, beyond, config.sglang, config.teacher)
    responses, micro_batches = _tokens(spec, config.rollout.groups_per_step * config.rollout.group_size, longest)
    syncs, rates = sender_syncs(sync, config.cluster), rates_of(config.cluster)
    receiving = receiving_of(config, sync, engine) if engine is not None else None
    return RunPlan(
        model=family.architecture,
        fields=model,
        parameters=model_parameters(table),
        layout=layout,
        gpu_bytes=gpu_bytes,
        trainer_gpus=layout.world_size,
        engine_gpus=engines,
        nodes=nodes,
        stages=stages,
        critic_stages=apart,
        engine=engine,
        engine_ranks=config.sglang.tp_size,
        near_ranks=near_ranks(config.sglang.tp_size, per_node),
        engine_dtype=wire,
        experts_per_rank=model.num_experts // layout.ep,
        responses=responses,
        micro_batches=micro_batches,
        bubble=(layout.pp - 1) / (micro_batches * layout.vpp + layout.pp - 1),
        transport=config.weights.transport,
        syncs=syncs,
        host=host,
        rollouts=rollouts,
        rates=rates,
        bounds=bounds_of(config, syncs, receiving, rates),
        prediction=prediction_of(config, sync, receiving, rates),
        problems=(
            *_trainer_problems(spec, "trainer", stages, gpu_bytes - (ENGINE_ASLEEP_BYTES if shared else 0)),
            *_phase_problems(config, taking_turns, gpu_bytes),
            *_trainer_problems(spec, "critic", apart, gpu_bytes),
            *_engine_problems(config.sglang, spec.weights.bucket_mib, longest, engine, gpu_bytes),
            *_host_problems(spec, config.cluster.host_memory_gb, host, rollouts, config.rollout),
        ),
        remarks=tuple(_remarks(layout, model, per_node, idle, layout.world_size - engines if shared else 0)),
        phases=taking_turns,
    )


def _host(
    config: RunConfig, spec: PolicySpec, stages: Sequence[StagePlan], beside: Sequence[StagePlan], sync: WeightPlan,
    shards: int,
) -> HostMemory:  # fmt: skip
    """Of the trainer machine that needs most.

    Args:
        beside: of a critic on the same GPUs.
        shards: bytes of a step in Ray's store.
    """
    held, adapted = [stage.held for stage in stages], [stage.adapters or stage.held for stage in stages]
    sleeps = config.colocated and spec.train.task == "rl" and spec.asleep is None
    critic = [stage.held for stage in beside]
    host = host_memory(spec, config.cluster.gpus_per_node, held, critic, sync, adapted, sleeps=sleeps)
    return replace(host, shards=shards)


def _with_critic(
    config: RunConfig, stages: tuple[StagePlan, ...], hf_config: Mapping[str, object], senders: Senders, gpu_bytes: int
) -> tuple[tuple[StagePlan, ...], tuple[StagePlan, ...], tuple[StagePlan, ...]]:
    """The policy's stages, those of a critic with GPUs of its own, those of one on the policy's GPUs.

    Args:
        hf_config: the critic's config.json.
    """
    if not config.has_critic:
        return stages, (), ()
    unsent, limit = WeightPlan(senders, ()), longest_sequence(config)
    valued = _stages(critic_spec(config), hf_config, limit, unsent, gpu_bytes, values=True)
    if config.critic.placement != "shared":
        return stages, valued, ()
    pairs = zip(stages, valued, strict=True)
    return tuple(replace(one, memory=one.memory.beside(other.memory)) for one, other in pairs), (), valued


def _stages(
    spec: TrainingSpec, hf_config: Mapping[str, object], limit: int, sync: WeightPlan, gpu_bytes: int, *, values: bool
) -> tuple[StagePlan, ...]:
    """The stages of the policy, or of a critic with a value head; sequences have at most `limit` tokens."""
    family, layout = get_family(hf_config), spec.layout
    fields, model, table = (
        family.transformer_fields(hf_config), family.model_fields(hf_config), family.rules(hf_config),
    )  # fmt: skip
    table.check_layout(layout)
    check_model(spec.megatron, spec.device, fields)
    widths = read_widths(fields, model.moe_layer_ids)
    chunks = spec.megatron.stage_layers(model.num_layers)
    held = stage_parameters(table, layout, chunks, widths.hidden + 1 if values else 0)
    adapters = [None] * len(held) if values else _adapters(spec, table, chunks)
    rows = 0 if values else padded_vocab_size(model.vocab_size, layout.tp) // layout.tp
    work = [work_per_token(stage, layout, model.top_k, model.num_experts) for stage in held]
    mean = sum(work) / len(work)
    tokens = micro_batch_tokens(spec.train, layout.cp, min(model.max_positions, limit))
    return tuple(
        StagePlan(stage, trainer_memory(spec, widths, tokens, rows, stage, sync, gpu_bytes, own), each / mean, own)
        for stage, own, each in zip(held, adapters, work, strict=True)
    )


def _adapters(
    spec: TrainingSpec, table: RuleTable, chunks: Sequence[tuple[tuple[int, ...], ...]]
) -> Sequence[StageParameters | None]:
    """What one rank of every stage trains in the place of the model; None where it trains the model."""
    if not isinstance(spec, PolicySpec) or not spec.lora.on:
        return [None] * len(chunks)
    adapters = make_adapters(table, spec.lora)
    adapters.table.check_layout(spec.layout)
    return stage_parameters(adapters.table, spec.layout, chunks)


def _machines(
    per_node: int, trained: int, engine_gpus: int, engine: SGLangConfig, teacher: TeacherConfig
) -> tuple[int, int]:
    """(machines, GPUs of the last ones that nothing uses).

    Trainer and critic, `trained` ranks, fill them in order; engines and teachers lie within one or over whole ones.
    """
    nodes, free = -(-trained // per_node), -trained % per_node
    for servers, tp in ((engine_gpus // engine.tp_size, engine.tp_size), (teacher.launched, teacher.tp_size)):
        if tp > per_node:
            nodes += servers * -(-tp // per_node)
            continue
        rest = max(servers - free // tp, 0)
        more = -(-rest // (per_node // tp))
        nodes, free = nodes + more, free + more * per_node - servers * tp
    return nodes, nodes * per_node - trained - engine_gpus - teacher.launched * teacher.tp_size


def _remarks(layout: ParallelLayout, model: ModelFields, per_node: int, idle: int, without_engine: int) -> list[str]:
    group, said = layout.expert_size, list[str]()
    if model.num_experts and layout.ep > 1 and layout.world_size > per_node and (group > per_node or per_node % group):
        said.append(
            f"expert-parallel groups of {group} ranks (EP{layout.ep} ETP{layout.etp}) lie over several machines of "
            f"{per_node}: the all-to-all of every layer goes over the network"
        )
    if idle and layout.world_size >= per_node:
        said.append(f"{idle} GPUs of the last machines are not used")
    if without_engine:
        said.append(f"{without_engine} of the trainer's GPUs have no engine on them, and idle while others generate")
    return said


def _phase_problems(config: RunConfig, taking_turns: tuple[PhaseMemory, ...], gpu_bytes: int) -> list[Problem]:
    """Where an engine's weights do not fit beside what a trainer needs to send them, or to be saved."""
    tp = config.sglang.tp_size
    return [
        Problem(
            f"shared GPU of stage {phase.stage}, phase {phase.phase}", phase.total, gpu_bytes,
            "the engine's weights" if phase.engine > phase.trainer else "the trainer's state",
            f"raise sglang.tp_size ({tp}), or share the trainer's state over more ranks: cluster.trainer_ranks "
            f"({config.layout.world_size}) or the sizes under megatron.*",
        )
        for phase in taking_turns
        if phase.phase in ("send", "save") and phase.total > gpu_bytes
    ]  # fmt: skip


def _host_problems(
    spec: PolicySpec, memory: float | None, host: HostMemory, rollouts: RolloutBytes | None, settings: RolloutConfig
) -> list[Problem]:
    """`memory`: of a machine, in GiB."""
    if memory is None:
        return []
    has, problems = int(memory * GIB * HOST_USABLE), list[Problem]()
    if host.total > has:
        component = host.largest
        more = f"spread it over more machines: raise cluster.trainer_ranks ({spec.layout.world_size})"
        less = {
            "sync": f"set weights.transport other than {spec.weights.transport}",
            "optimizer": f"lower megatron.optimizer_offload_fraction ({offloaded_share(spec.megatron.extra):g})",
            "copies": "do without algorithm.kl_coef or model.teacher_path",
            "asleep": "set cluster.asleep_in: disk",
            "shards": f"lower rollout.groups_per_step ({settings.groups_per_step})",
        }[component]
        problems.append(Problem("trainer machine, host memory", host.total, has, component, f"{less}, or {more}"))
    if rollouts is not None and rollouts.held.total + rollouts.store.total > has:
        component, groups = rollouts.held.largest, f"lower rollout.groups_per_step ({settings.groups_per_step})"
        less = {
            "columns": groups,
            "routes": f"{groups}, or do without routes: train.replay r2 or off",
            "supports": f"{groups}, or draw from fewer ids: rollout.top_p ({settings.top_p:g}), top_k "
            f"({settings.top_k}), min_p ({settings.min_p:g})",
        }[component]
        needs = rollouts.held.total + rollouts.store.total
        problems.append(Problem("machine of the rollout managers, host memory", needs, has, component, less))
    return problems


def _tokens(spec: TrainingSpec, responses: int, longest: int) -> tuple[tuple[int, int], int]:
    """Responses of an optimizer step on the emptiest and fullest data-parallel rank; micro-batches at full length.

    Args:
        responses: of a rollout.
        longest: tokens of one, with its prompt.
    """
    t, dp = spec.train, spec.layout.dp
    step = responses // t.optimizer_steps_per_rollout if t.task == "rl" else t.sft_batch_size
    few, many = step // dp, -(-step // dp)
    budget = t.max_tokens_per_micro_batch * spec.layout.cp
    return (few, many), max(1, -(-many * longest // max(budget, longest)))


def _trainer_problems(spec: PolicySpec, who: str, stages: tuple[StagePlan, ...], gpu_bytes: int) -> list[Problem]:
    if not stages:
        return []
    worst = max(stages, key=lambda stage: stage.memory.peak)
    if worst.memory.peak <= gpu_bytes:
        return []
    memory = worst.memory
    sizes = {name: size for name, size in memory.components().items() if name != "reserve"}
    if memory.sync < memory.activations + memory.working + memory.logits:
        del sizes["sync"]
    component = max(sizes, key=lambda name: sizes[name])
    where = f"{who}, stage {worst.held.stage}"
    return [Problem(where, memory.peak, gpu_bytes, component, _way_out(spec, component))]


def _way_out(spec: PolicySpec, component: str) -> str:
    m, layout = spec.megatron, spec.layout
    grid = (
        f"raise the expert-parallel size ({layout.ep}), pipeline stages ({layout.pp}) or "
        f"tensor-parallel size ({layout.tp}) under megatron.*"
    )
    full = "set megatron.recompute_granularity: full" if m.recompute_granularity != "full" else ""
    tokens = f"lower train.max_tokens_per_micro_batch ({spec.train.max_tokens_per_micro_batch})"
    sharing = "set megatron.use_distributed_optimizer" if not m.use_distributed_optimizer else (
        f"share it over more data-parallel ranks: raise cluster.trainer_ranks ({layout.world_size})"
    )  # fmt: skip
    return {
        "weights": grid,
        "gradients": grid,
        "optimizer": f"{sharing}; or {grid}",
        "activations": full or tokens,
        "working": f"{tokens}, or raise megatron.tensor_model_parallel_size ({layout.tp})",
        "logits": f"{tokens}, or raise megatron.tensor_model_parallel_size ({layout.tp})",
        "critic": f"set critic.placement: separate ({layout.world_size} more GPUs)",
        "sync": f"lower weights.bucket_mib ({spec.weights.bucket_mib:g})",
    }[component]


def _engine_problems(
    settings: SGLangConfig, bucket_mib: float, longest: int, engine: EngineMemory | None, gpu_bytes: int
) -> list[Problem]:
    """`bucket_mib`: of a weight update; `longest`: tokens of a response with its prompt."""
    if engine is None:
        return []
    problems: list[Problem] = []
    if engine.tokens < longest:
        component = "weights" if engine.cache < engine.weights else "cache"
        problems.append(
            Problem(
                "engine",
                engine.weights + longest * engine.token_bytes + engine.runtime,
                gpu_bytes,
                component,
                f"raise sglang.tp_size ({settings.tp_size}) or sglang.mem_fraction_static: "
                f"the cache has room for {engine.tokens:,} tokens, and one response may have {longest:,}",
            )
        )
    if engine.runtime < engine.bucket + RUNTIME_BYTES:
        problems.append(
            Problem(
                "engine, outside mem_fraction_static",
                engine.bucket + RUNTIME_BYTES,
                engine.runtime,
                "bucket",
                f"lower sglang.mem_fraction_static, or weights.bucket_mib ({bucket_mib:g})",
            )
        )
    return problems
