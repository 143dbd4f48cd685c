"""The plan of a run: memory by component and stage, balance, weight-sync traffic, and whether it all fits.

Reads config.json and the configuration; no weights, tokenizer or data, no torch, no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mslime.config.cluster import ClusterConfig, usual_gpu
from mslime.config.engines import SGLangConfig
from mslime.config.layout import ParallelLayout
from mslime.config.lora import LoraConfig
from mslime.config.model_facts import export_dtype
from mslime.config.resolved import (
    PolicySpec,
    ServerSpec,
    TrainingSpec,
    critic_spec,
    engine_spec,
    policy_spec,
    teacher_spec,
)
from mslime.config.schema import RunConfig
from mslime.config.transports import traits_of
from mslime.config.weights import WeightsConfig
from mslime.convert.encoding import expected_weights
from mslime.convert.families import get_family, refuse_unread
from mslime.convert.families.family import ModelFields
from mslime.convert.flops import read_widths
from mslime.convert.lora_rules import make_adapters
from mslime.convert.table import RuleTable
from mslime.weights.weight_plan import DTYPE_BYTES, Senders, WeightPlan, build_plan, encoded_plan
from mslime_plugins.planner.engine import EngineMemory, ServedWeights, adapter_bytes, engine_memory
from mslime_plugins.planner.parameters import model_parameters
from mslime_plugins.planner.problems import (
    GIB,
    USABLE,
    Problem,
    Verdict,
    engine_problems,
    host_bytes,
    host_problems,
    phase_problems,
    trainer_problems,
    verdict_of,
)
from mslime_plugins.planner.rollouts import RolloutBytes, rollout_bytes
from mslime_plugins.planner.saving import CheckpointBytes, saved_bytes
from mslime_plugins.planner.stages import (
    ENGINE_OFFLOADED_BYTES,
    TRAINER_OFFLOADED_BYTES,
    PhaseMemory,
    StagePlan,
    make_stages,
    phases,
    with_critic,
)
from mslime_plugins.planner.sync_bytes import (
    LinkRates,
    SenderSync,
    bounds,
    buckets_in_flight,
    near_ranks,
    rates_of,
    receiving_of,
    relayed,
    sender_syncs,
)
from mslime_plugins.planner.times import (
    generate_seconds,
    sleep_seconds,
    speeds_of,
    step_seconds,
    train_seconds,
    work_of,
)
from mslime_plugins.planner.trainer_memory import HostMemory, host_memory, longest_sequence


@dataclass(frozen=True)
class RunPlan:
    """Everything that `mslime plan` prints.

    Attributes:
        model, fields: name of the family and fields of its config.json.
        parameters: of the whole model, without multi-token prediction.
        layout: of the trainer.
        gpu_bytes: usable memory of a GPU.
        trainer_gpus, engine_gpus, nodes: of the run, including externally started engines.
        stages: the trainer, by pipeline stage; including a critic on its GPUs.
        critic_stages: likewise a critic on separate GPUs, as many as the trainer's.
        engine: a GPU of an engine; None for supervised training.
        near_ranks: those of them on one machine.
        sent_share: see `Receiving.sent`.
        engine_dtype: of its weights, and how they are quantised, for people.
        responses: of a step, on the data-parallel ranks with the fewest and the most.
        micro_batches: most of an optimizer step, with all responses of maximal length.
        transport: of the weight sync, even if chosen only when engines connect; `adapters in files` if engines get
            adapters alone.
        syncs: weight-sync traffic by sender.
        host: memory of the fullest trainer host.
        rollouts: bytes of a step's responses; None for supervised training.
        rates: of the links and copies of a sync, as set.
        bounds: lower bounds of one sync in seconds, by limiting link; for a user's transport those of `broadcast`.
        problems: parts that do not fit.
        remarks: sentences about slow or unused parts.
        phases: of a step, if trainer and engines share their GPUs; else none.
        saved: bytes written to disks.
        seconds: of a step: `generate`, `train`, `sync`, `sleep`, and `step` of the whole, as estimated by a search
            (`times`); empty if not predicted.
        host_usable: usable bytes of a host's memory; None: unknown.
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
    near_ranks: int
    sent_share: float
    engine_dtype: str
    responses: tuple[int, int]
    micro_batches: int
    transport: str
    syncs: tuple[SenderSync, ...]
    host: HostMemory
    rollouts: RolloutBytes | None
    rates: LinkRates
    bounds: Mapping[str, float]
    problems: tuple[Problem, ...]
    remarks: tuple[str, ...]
    saved: CheckpointBytes
    seconds: Mapping[str, float]
    phases: tuple[PhaseMemory, ...] = ()
    host_usable: int | None = None

    @property
    def experts_per_rank(self) -> int:
        """Experts of a trainer rank."""
        return self.fields.num_experts // self.layout.ep

    @property
    def bubble(self) -> float:
        """Fraction of a step in which a stage waits, with `micro_batches` (arXiv:2104.04473, section 2.2)."""
        return (self.layout.pp - 1) / (self.micro_batches * self.layout.vpp + self.layout.pp - 1)

    @property
    def fits(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    @property
    def fullest(self) -> int:
        """Peak bytes of the fullest GPU of trainer and critic. With an engine on it, the fullest phase counts, except
        generation, in which engines fill it on purpose."""
        shared = [phase.total for phase in self.phases if phase.phase != "generate"]
        apart = self.critic_stages if shared else (*self.stages, *self.critic_stages)
        return max([*shared, *(stage.memory.peak for stage in apart)])

    @property
    def fullest_phase(self) -> str:
        """The phase of `fullest`, if trainer and engines share their GPUs; else empty."""
        shared = [phase for phase in self.phases if phase.phase != "generate"]
        return next((phase.phase for phase in shared if phase.total == self.fullest), "")

    @property
    def save_share(self) -> float | None:
        """Seconds of a checkpoint over those of the steps between two; None if either is unknown."""
        steps = self.saved.every * self.seconds.get("step", 0.0)
        return self.saved.seconds / steps if steps else None

    @property
    def host_share(self) -> float:
        """Fraction of the fullest trainer host's memory in use; 0 if its size is unknown."""
        return self.host.total / self.host_usable if self.host_usable else 0.0

    @property
    def verdict(self) -> Verdict:
        """Tight: it fits by the numbers, with a margin below their possible error."""
        if not self.fits:
            return "does not fit"
        return verdict_of(max(self.fullest / self.gpu_bytes, self.host_share))

    @property
    def sync_bytes(self) -> int:
        """Bytes that every engine GPU receives in one sync."""
        return sum(sender.sent for sender in self.syncs)

    @property
    def sync_seconds(self) -> float:
        """Lower bound of one sync."""
        return max(self.bounds.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        summed = {"sync_bytes": self.sync_bytes, "sync_seconds": self.sync_seconds, "host_bytes": self.host.total}
        summed |= {"experts_per_rank": self.experts_per_rank, "bubble": self.bubble}
        summed |= {
            "checkpoint_bytes": self.saved.checkpoint,
            "disk_bytes": self.saved.total,
            "save_share": self.save_share,
        }
        values = {"fits": self.fits, "verdict": self.verdict, "host_verdict": verdict_of(self.host_share)} | summed
        for name, stages in (("stages", self.stages), ("critic_stages", self.critic_stages)):
            values[name] = [
                asdict(stage)
                | {"trained": stage.trained, "peak": stage.memory.peak, "verdict": self.verdict_of(stage.memory.peak)}
                for stage in stages
            ]
        values["phases"] = [
            asdict(phase) | {"total": phase.total, "verdict": self.phase_verdict(phase)} for phase in self.phases
        ]
        return asdict(self) | values

    def verdict_of(self, size: int) -> Verdict:
        """Verdict on bytes on one GPU."""
        return verdict_of(size / self.gpu_bytes)

    def phase_verdict(self, phase: PhaseMemory) -> Verdict:
        """Verdict on a phase; generating engines fill the GPU on purpose."""
        return "fits" if phase.phase == "generate" else self.verdict_of(phase.total)


def make_plan(
    config: RunConfig, hf_config: Mapping[str, object], critic: Mapping[str, object] | None = None,
    teacher: Mapping[str, object] | None = None,
) -> RunPlan:  # fmt: skip
    """The plan of a run.

    Args:
        hf_config: the model's config.json.
        critic: the critic's, if it differs.
        teacher: a served teacher's, if it shares the trainer's GPUs.

    Raises:
        ConfigError: the layout does not divide the model, or a setting contradicts config.json.
        CheckpointError: the architecture or a setting of it is not supported.
    """
    family = get_family(hf_config)
    refuse_unread(family, hf_config, config.model.ignored_config_fields)
    model, table = family.model_fields(hf_config), family.rules(hf_config)
    held_adapters, alive, config = served_adapters(config), config.adapters_alive, together(config)
    spec, cluster, servers = policy_spec(config), config.cluster, config.sglang
    gpu_bytes, per_node = int(cluster.gpu_memory_gb * GIB * USABLE), cluster.gpus_per_node
    layout, limit, serves = spec.layout, longest_sequence(config), spec.train.task == "rl"
    table.check_layout(layout)
    wire = engine_spec(config).dtype(hf_config) if serves else export_dtype(hf_config)
    # Engines that mslime starts hold the same quantised weights as the checkpoint.
    served = ServedWeights(table, wire, expected_weights(table, hf_config) if serves and not servers.urls else None)
    factors = make_adapters(table, held_adapters).table if config.syncs_adapters else None
    sync = _sync(
        config.weights, layout, served, factors, config.megatron.stage_layers(model.num_layers) if serves else ()
    )
    stages = make_stages(spec, hf_config, limit, sync, gpu_bytes, values=False)
    stages, apart, beside = with_critic(
        critic_spec(config) if config.has_critic else None, stages, critic or hf_config, limit, sync.senders, gpu_bytes,
        shared=config.shares_critic,
    )  # fmt: skip
    longest, shared = min(model.max_positions, limit), serves and config.colocated
    rollouts = rollout_bytes(config, model, longest) if serves else None
    of_adapters = adapter_bytes(factors, alive, servers.tp_size, wire) if factors else 0
    held = buckets_in_flight(config.transport, config.weights, servers, cluster)
    engine = _engine(servers, hf_config, served, sync, held, gpu_bytes, of_adapters, shared=shared) if serves else None
    taught = _teacher(teacher_spec(config), teacher, gpu_bytes) if teacher is not None else None
    host = _host(cluster, spec, stages, beside, sync, rollouts, taught, config.teacher.gpus)
    taking_turns = phases(stages, engine, taught) if shared and engine is not None else ()
    engines = servers.gpus if serves else 0
    nodes, idle = _machines(
        per_node, layout.world_size + config.critic_ranks, (0 if shared else engines, servers.tp_size),
        (0 if config.teacher_shares else config.teacher.launched * config.teacher.tp_size, config.teacher.tp_size),
    )  # fmt: skip
    unused = layout.world_size - engines - config.teacher_gpus if shared else 0
    responses, micro_batches = _tokens(spec, config.rollout.groups_per_step * config.rollout.group_size, longest)
    receiving = receiving_of(config.weights, servers, sync, engine) if engine is not None else None
    sent = sync if receiving is None or not traits_of(config.transport).passes_on else relayed(sync, receiving)
    syncs, rates = sender_syncs(sent, cluster), rates_of(cluster)
    least = bounds(config.transport, config.weights, syncs, receiving, cluster)
    adapted = make_adapters(table, spec.lora).table if spec.lora.on else table
    valued = get_family(critic or hf_config).rules(critic or hf_config) if config.has_critic else None
    saved = saved_bytes(
        config.checkpoint, spec, adapted, valued, DTYPE_BYTES[export_dtype(hf_config)],
        sum(sender.sent for sender in syncs), rates.directory,
    )  # fmt: skip
    late = saved.seconds if saved.seconds > config.deadlines.checkpoint_s else 0.0
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
        near_ranks=near_ranks(servers.tp_size, per_node),
        sent_share=receiving.sent(near_ranks(servers.tp_size, per_node)) if receiving is not None else 1.0,
        engine_dtype=served.label,
        responses=responses,
        micro_batches=micro_batches,
        transport="adapters in files" if factors else config.transport,
        syncs=syncs,
        host=host,
        rollouts=rollouts,
        rates=rates,
        bounds=least,
        problems=(
            *trainer_problems(spec, "trainer", stages, gpu_bytes - (ENGINE_OFFLOADED_BYTES if shared else 0)),
            *phase_problems(servers.tp_size, layout.world_size, taking_turns, gpu_bytes),
            *trainer_problems(spec, "critic", apart, gpu_bytes),
            *engine_problems(servers, spec.weights.bucket_mib, longest, engine, gpu_bytes),
            *engine_problems(config.teacher, 0, longest, taught, gpu_bytes, "teacher"),
            *host_problems(spec, cluster.host_memory_gb, host, rollouts, config.rollout),
        ),
        remarks=tuple(_remarks(layout, model, per_node, idle, unused, late)),
        saved=saved,
        seconds=_seconds(config, spec, hf_config, served, stages, engine, max(least.values()), longest, micro_batches),
        phases=taking_turns,
        host_usable=host_bytes(memory) if (memory := cluster.host_memory_gb) is not None else None,
    )


def _sync(
    weights: WeightsConfig, layout: ParallelLayout, served: ServedWeights, factors: RuleTable | None,
    stages: Sequence[Sequence[Sequence[int]]],
) -> WeightPlan:  # fmt: skip
    """The weight plan of a sync, and its traffic by sender.

    Args:
        factors: of adapters, if these are sent alone.
        stages: layers of each chunk of each stage; empty if no engine generates, so nothing is sent.
    """
    # For adapters alone, one rank of each stage writes them.
    senders = Senders(layout) if factors is not None else Senders.at_most(layout, weights.senders)
    if not stages:
        return WeightPlan(senders, ())
    flat = [[layer for chunk in stage for layer in chunk] for stage in stages]
    limit = int(weights.bucket_mib * 2**20)
    plan = build_plan(factors or served.table, senders, flat, served.dtype, limit)
    return plan if factors or served.encoded is None else encoded_plan(plan, served.encoded)


def _host(
    cluster: ClusterConfig, spec: PolicySpec, stages: Sequence[StagePlan], beside: Sequence[StagePlan],
    sync: WeightPlan, rollouts: RolloutBytes | None, taught: EngineMemory | None, teacher_gpus: int,
) -> HostMemory:  # fmt: skip
    """Memory of the fullest trainer host.

    Args:
        beside: of a critic on the same GPUs.
        rollouts: of a step, in Ray's store.
        taught: memory of one GPU that a teacher shares with the trainer.
        teacher_gpus: of the teacher.
    """
    held, adapted = [stage.held for stage in stages], [stage.adapters or stage.held for stage in stages]
    sleeps = cluster.colocated and spec.train.task == "rl" and spec.offload_directory is None
    critic = [stage.held for stage in beside]
    host = host_memory(spec, cluster.gpus_per_node, held, critic, sync, adapted, sleeps=sleeps)
    return replace(
        host, shards=rollouts.machine if rollouts is not None else 0,
        teacher=min(teacher_gpus, cluster.gpus_per_node) * taught.weights if taught is not None else 0,
    )  # fmt: skip


def _engine(
    settings: SGLangConfig, hf_config: Mapping[str, object], served: ServedWeights, sync: WeightPlan, buckets: float,
    gpu_bytes: int, of_adapters: int, *, shared: bool,
) -> EngineMemory:  # fmt: skip
    """Memory of one GPU of an engine, with the buckets that it holds while it receives weights.

    Args:
        buckets: number of these buckets.
        of_adapters: bytes of the adapters that it serves at once. With adapters, no buckets are sent.
        shared: whether it shares the GPU with the trainer.
    """
    largest = max((bucket.hf_bytes for bucket in sync.buckets), default=0)
    held = 0 if of_adapters else int(largest * buckets)
    return _serving(settings, hf_config, served, held, gpu_bytes, TRAINER_OFFLOADED_BYTES if shared else 0, of_adapters)


def _teacher(spec: ServerSpec, hf_config: Mapping[str, object], gpu_bytes: int) -> EngineMemory:
    """Memory of one GPU that a teacher shares with the trainer. Raises CheckpointError if its family is unknown."""
    table = get_family(hf_config).rules(hf_config)
    served = ServedWeights(table, spec.dtype(dict(hf_config)), expected_weights(table, hf_config))
    return _serving(spec.settings, hf_config, served, 0, gpu_bytes, TRAINER_OFFLOADED_BYTES)


def _serving(
    settings: SGLangConfig, hf_config: Mapping[str, object], served: ServedWeights, held: int,
    gpu_bytes: int, offloaded: int, of_adapters: int = 0,
) -> EngineMemory:  # fmt: skip
    """Memory of one GPU of a server, for the model of a config.json; see `engine_memory`."""
    family = get_family(hf_config)
    model = family.model_fields(hf_config)
    widths = read_widths(family.transformer_fields(hf_config), model.moe_layer_ids)
    return engine_memory(settings, served, widths, model.num_layers, held, gpu_bytes, offloaded, of_adapters)


def _machines(per_node: int, trained: int, engines: tuple[int, int], teachers: tuple[int, int]) -> tuple[int, int]:
    """(number of hosts, unused GPUs of the last ones).

    Trainer and critic fill hosts in order; an engine or teacher is within one host, or on whole ones.

    Args:
        per_node: GPUs of a host.
        trained: GPUs of trainer and critic.
        engines, teachers: (GPUs of all beside the trainer's, GPUs of one).
    """
    nodes, free = -(-trained // per_node), -trained % per_node
    for gpus, tp in (engines, teachers):
        servers = gpus // tp
        if tp > per_node:
            nodes += servers * -(-tp // per_node)
            continue
        rest = max(servers - free // tp, 0)
        more = -(-rest // (per_node // tp))
        nodes, free = nodes + more, free + more * per_node - servers * tp
    return nodes, nodes * per_node - trained - engines[0] - teachers[0]


def _seconds(
    config: RunConfig, spec: PolicySpec, hf_config: Mapping[str, object], served: ServedWeights,
    stages: Sequence[StagePlan], engine: EngineMemory | None, sync_s: float, longest: int,
    micro_batches: int,
) -> dict[str, float]:  # fmt: skip
    """Seconds of a step, as estimated by a search; empty for configurations that a search rejects, and on CPUs."""
    unknown = config.sglang.urls or config.sglang.pairs is not None or config.has_critic or config.teacher.serves
    if engine is None or unknown or config.cluster.device == "cpu":
        return {}
    family = get_family(hf_config)
    model = family.model_fields(hf_config)
    work = work_of(config.rollout, spec, served.table, model, longest, served.sent)
    speeds = speeds_of(config.cluster, usual_gpu(config.cluster.gpu_memory_gb))
    widths, tp = read_widths(family.transformer_fields(hf_config), model.moe_layer_ids), config.sglang.tp_size
    held, memory = [stage.held for stage in stages], [stage.memory for stage in stages]
    parts = {
        "generate": generate_seconds(engine, config.sglang.gpus // tp, tp, work, speeds),
        "train": sum(train_seconds(spec, widths, held, work, micro_batches, speeds).values()),
        "sync": sync_s,
        "sleep": sleep_seconds(
            max(each.weights + each.optimizer for each in memory), max(each.weights for each in memory), speeds.host,
            spec.offload_directory is not None,
        ) if config.colocated else 0.0,
    }  # fmt: skip
    return parts | {"step": step_seconds(parts, config.rollout.max_staleness > 0 and not config.colocated)}


def _remarks(
    layout: ParallelLayout, model: ModelFields, per_node: int, idle: int, without_engine: int, saving: float
) -> list[str]:
    group, notes = layout.expert_size, list[str]()
    if model.num_experts and layout.ep > 1 and layout.world_size > per_node and (group > per_node or per_node % group):
        notes.append(
            f"expert-parallel groups of {group} ranks (EP{layout.ep} ETP{layout.etp}) span several machines of "
            f"{per_node}: the all-to-all of every layer uses the network"
        )
    if idle and layout.world_size >= per_node:
        notes.append(f"{idle} GPUs of the last machines are not used")
    if without_engine:
        notes.append(f"{without_engine} of the trainer's GPUs have no engine and are idle during generation")
    if saving:
        notes.append(f"a checkpoint takes {saving:,.0f} s, more than deadlines.checkpoint_s allows: raise it")
    return notes


def _tokens(spec: TrainingSpec, responses: int, longest: int) -> tuple[tuple[int, int], int]:
    """Responses of an optimizer step on the emptiest and fullest data-parallel rank; micro-batches at full length.

    Args:
        responses: of a rollout.
        longest: tokens of the longest response with its prompt.
    """
    t, dp = spec.train, spec.layout.dp
    step = responses // t.optimizer_steps_per_rollout if t.task == "rl" else t.sft_batch_size
    few, many = step // dp, -(-step // dp)
    budget = t.max_tokens_per_micro_batch * spec.layout.cp
    return (few, many), max(1, -(-many * longest // max(budget, longest)))


# Plan several adapters as one run with at least their combined needs.


def together(config: RunConfig) -> RunConfig:
    """The run of the adapter with the largest steps, with adapters as large as all together: on every layer with an
    adapter of any of them, with the sum of their ranks. Trainers keep all of them, and take turns. A run of one
    adapter, or of none, is unchanged."""
    runs = [*config.adapter_runs.values()]
    if not runs:
        return config
    largest = max(runs, key=lambda run: run.rollout.groups_per_step * run.rollout.group_size * longest_sequence(run))
    lora = _lora(config.lora, [run.lora for run in runs], sum(run.lora.rank for run in runs))
    return largest.model_copy(update={"name": config.name, "output_dir": config.output_dir, "lora": lora})


def served_adapters(config: RunConfig) -> LoraConfig:
    """The adapters that an engine reserves memory for, each of the largest rank; for a run of one adapter, its own."""
    loras = [run.lora for run in config.adapter_runs.values()]
    return _lora(config.lora, loras, max(lora.rank for lora in loras)) if loras else config.lora


def _lora(shared: LoraConfig, loras: list[LoraConfig], rank: int) -> LoraConfig:
    """An adapter on every layer that has any of the given adapters."""
    targets = dict.fromkeys(target for lora in loras for target in lora.targets)
    return shared.model_copy(update={"rank": rank, "targets": tuple(targets)})
