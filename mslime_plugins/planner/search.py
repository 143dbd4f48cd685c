"""`mslime plan --search`: layouts of trainer and engines that fit, the fastest first.

Every combination is estimated with the plan's own memory arithmetic and with `times`. The best then get a full plan, so
the output equals that of `mslime plan`. The user's settings are kept, and the rest is searched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from mslime.config.cluster import GPUS, nominal
from mslime.config.engines import SGLangConfig
from mslime.config.errors import ConfigError, UserError
from mslime.config.layout import ParallelLayout
from mslime.config.loader import build, merge
from mslime.config.resolved import PolicySpec, engine_spec, policy_spec
from mslime.config.schema import RunConfig
from mslime.config.transports import for_shared_gpus
from mslime.convert.encoding import expected_weights
from mslime.convert.families import get_family
from mslime.convert.flops import read_widths
from mslime.convert.tensor_layouts import padded_vocab_size
from mslime.weights.weight_plan import Senders, WeightPlan
from mslime_plugins.planner.engine import RUNTIME_BYTES, EngineMemory, ServedWeights, engine_memory
from mslime_plugins.planner.parameters import StageParameters, stage_parameters
from mslime_plugins.planner.plan import RunPlan, make_plan, together
from mslime_plugins.planner.problems import GIB, TIGHT, USABLE, host_bytes
from mslime_plugins.planner.space import SearchSpace, engine_settings
from mslime_plugins.planner.stages import ENGINE_OFFLOADED_BYTES, TRAINER_OFFLOADED_BYTES, StagePlan, phases
from mslime_plugins.planner.sync_bytes import buckets_in_flight, rates_of
from mslime_plugins.planner.times import (
    ClusterSpeeds,
    StepWork,
    file_seconds,
    generate_seconds,
    sleep_seconds,
    speeds_of,
    step_seconds,
    train_seconds,
    work_of,
)
from mslime_plugins.planner.trainer_memory import (
    TrainerMemory,
    host_memory,
    longest_sequence,
    micro_batch_tokens,
    trainer_memory,
)

ENGINE_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
"""Fractions of all GPUs given to separate engines."""
SYNC_BUCKETS = 4
"""Most buckets that a sender holds: packed, gathered, converted, and the one in flight."""
TRIED = 6
"""Number of full plans per requested layout: the estimate omits little."""


class NothingFits(ConfigError):
    """No layout fits, for valid settings."""


@dataclass(frozen=True)
class FittingLayout:
    """A layout that fits.

    Attributes:
        settings: searched sections of the run, in the format of a file.
        measures: memory savings in use.
        seconds: of a step: `generate`, `train`, `sync`, `sleep`; `step` is the whole.
        training: of `train`, by activity.
        plan: its full plan.
    """

    settings: Mapping[str, Mapping[str, Any]]
    measures: str
    seconds: Mapping[str, float]
    training: Mapping[str, float]
    plan: RunPlan

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plan = self.plan
        return {
            "verdict": plan.verdict, "settings": self.settings, "measures": self.measures, "seconds": self.seconds,
            "training": self.training, "trainer_gpus": plan.trainer_gpus, "engine_gpus": plan.engine_gpus,
            "machines": plan.nodes, "fullest_bytes": plan.fullest, "gpu_bytes": plan.gpu_bytes,
            "host_bytes": plan.host.total, "layout": asdict(plan.layout),
        }  # fmt: skip


@dataclass(frozen=True)
class _Trainer:
    """A layout of the trainer with its memory savings."""

    spec: PolicySpec
    settings: Mapping[str, Any]
    measures: str
    held: tuple[StageParameters, ...]
    memory: tuple[TrainerMemory, ...]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class _Engines:
    """Engines of one kind."""

    settings: Mapping[str, Any]
    memory: EngineMemory
    seconds: float


@dataclass(frozen=True)
class _Weighed:
    """A trainer and its engines, before the full plan."""

    settings: Mapping[str, Mapping[str, Any]]
    measures: str
    seconds: Mapping[str, float]
    training: Mapping[str, float]
    tight: bool
    kind: tuple[Any, ...]


@dataclass(frozen=True)
class Search:
    """One search.

    Attributes:
        values: settings of a file and flags.
        gpus: of the run.
        hf_config: the model's config.json.
        gpu: name of the GPU in the table of `config/cluster.py`.
    """

    values: Mapping[str, Any]
    gpus: int
    hf_config: Mapping[str, object]
    gpu: str
    missed: list[tuple[float, str]] = field(default_factory=list)

    @cached_property
    def base(self) -> RunConfig:
        """The run with default values for everything that is searched."""
        kept = {name: section for name, section in self.values.items() if name not in ("megatron", "sglang")}
        apart = ("placement", "trainer_ranks", "offload_to", "offload_directory")
        cluster = {name: value for name, value in kept.get("cluster", {}).items() if name not in apart}
        config = build({**kept, "cluster": cluster, "sglang": engine_settings(self.values)})
        if config.train.task != "rl":
            raise ConfigError("--search", config.train.task, "needs a run with engines (train.task: rl)",
                              "plan a supervised run without --search")  # fmt: skip
        if config.sglang.urls:
            raise ConfigError("--search", config.sglang.urls[0], "attached engines have a fixed layout",
                              "remove sglang.urls")  # fmt: skip
        if config.sglang.pairs is not None:
            raise ConfigError("--search", config.sglang.pairs, "the speed of pairs is not estimated",
                              "remove sglang.pairs for the search")  # fmt: skip
        if config.has_critic or config.teacher.serves:
            raise ConfigError("--search", "a critic or a teacher", "only layouts of policy and engines are searched",
                              "plan without --search, or remove critic and teacher")  # fmt: skip
        return together(config)

    @cached_property
    def space(self) -> SearchSpace:
        """The combinations to try."""
        alone = build(dict(self.values), rules=False)
        return SearchSpace(alone, self.model, self.base.cluster.gpus_per_node, self.longest)

    @cached_property
    def speeds(self) -> ClusterSpeeds:
        """Speeds of the cluster."""
        return speeds_of(self.base.cluster, self.gpu)

    @cached_property
    def gpu_bytes(self) -> int:
        """Usable bytes of a GPU, as in the plan."""
        return int(self.base.cluster.gpu_memory_gb * GIB * USABLE)

    @cached_property
    def family(self) -> Any:
        """Family of the model."""
        return get_family(self.hf_config)

    @cached_property
    def model(self) -> Any:
        """Sizes of the model."""
        return self.family.model_fields(self.hf_config)

    @cached_property
    def table(self) -> Any:
        """Rules of the model."""
        return self.family.rules(self.hf_config)

    @cached_property
    def served(self) -> ServedWeights:
        """Its weights as engines hold them; mslime starts all engines of a search."""
        wire = engine_spec(self.base).dtype(self.hf_config)
        return ServedWeights(self.table, wire, expected_weights(self.table, self.hf_config))

    @cached_property
    def sent(self) -> int:
        """Bytes of a sync."""
        return self.served.sent

    @cached_property
    def widths(self) -> Any:
        """Widths of the model's layers."""
        return read_widths(self.family.transformer_fields(self.hf_config), self.model.moe_layer_ids)

    @cached_property
    def longest(self) -> int:
        """Tokens of a response with its prompt."""
        return min(self.model.max_positions, longest_sequence(self.base))

    @cached_property
    def work(self) -> StepWork:
        """Work of a step."""
        return work_of(self.base.rollout, policy_spec(self.base), self.table, self.model, self.longest, self.sent)

    # ------------------------------------------------------------------------------------------------ the trainer

    def trainers(self, ranks: int, usable: int, sleeps: bool = False) -> Iterator[_Trainer]:
        """Layouts on this number of ranks, each with the first measures that make it fit into `usable` bytes.

        Args:
            sleeps: whether the ranks' state is offloaded to host memory while engines generate.
        """
        for sizes in self.space.trainer_sizes(ranks):
            megatron = self.space.megatron(sizes)
            try:
                layout = megatron.layout(ranks)
                self.table.check_layout(layout)
                chunks = megatron.stage_layers(self.model.num_layers)
            except ConfigError:
                continue
            held = stage_parameters(self.table, layout, chunks)
            if (found := self._with_measures(sizes, layout, held, usable, sleeps)) is not None:
                yield found

    def _with_measures(
        self,
        sizes: dict[str, Any],
        layout: ParallelLayout,
        held: tuple[StageParameters, ...],
        usable: int,
        sleeps: bool,
    ) -> _Trainer | None:
        """The first measures that leave a margin; else the first that fit tightly."""
        rows = padded_vocab_size(self.model.vocab_size, layout.tp) // layout.tp
        tokens = micro_batch_tokens(self.base.train, layout, self.longest)
        unsent = WeightPlan(Senders.at_most(layout, 1), ())
        tight: _Trainer | None = None
        for words, measures in self.space.measures():
            spec = replace(policy_spec(self.base), layout=layout, megatron=self.space.megatron(sizes, measures))
            memory = tuple(
                trainer_memory(spec, self.widths, tokens, rows, stage, unsent, self.gpu_bytes) for stage in held
            )
            peak = max(each.peak for each in memory)
            self.missed.append((peak / usable, f"{layout.describe()} ({words})"))
            if peak > usable or (tight is not None and peak > TIGHT * usable):
                continue
            if not self._host_holds(spec, held, sleeps):
                continue
            count = -(-self.work.responses // self.work.optimizer_steps // layout.dp)
            budget = max(self.base.train.max_tokens_per_micro_batch * layout.cp, self.longest)
            micro_batches = max(1, -(-count * self.longest // budget))
            seconds = train_seconds(spec, self.widths, held, self.work, micro_batches, self.speeds)
            found = _Trainer(spec, sizes | dict(measures), words, held, memory, seconds)
            if peak <= TIGHT * usable:
                return found
            tight = tight or found
        return tight

    def _host_holds(self, spec: PolicySpec, held: tuple[StageParameters, ...], sleeps: bool) -> bool:
        cluster = self.base.cluster
        if cluster.host_memory_gb is None:
            return True
        host = host_memory(spec, cluster.gpus_per_node, held, sleeps=sleeps)
        return host.total <= host_bytes(cluster.host_memory_gb)

    # ------------------------------------------------------------------------------------------------- the engines

    def engines(self, gpus: int, shared: bool) -> list[_Engines]:
        """Engines on this number of GPUs that can hold a response, fastest first."""
        found = [
            engines
            for settings in self.space.engine_sizes(self.widths, gpus)
            if (engines := self._engine(settings, shared))
        ]
        return sorted(found, key=lambda engines: engines.seconds)

    def _engine(self, settings: dict[str, Any], shared: bool) -> _Engines | None:
        config = self.base
        sglang: SGLangConfig = config.sglang.model_copy(update=settings)
        transport = config.model_copy(update={"sglang": sglang}).transport
        held = buckets_in_flight(transport, config.weights, sglang, config.cluster)
        bucket = int(config.weights.bucket_mib * 2**20 * held)
        memory = engine_memory(
            sglang, self.served, self.widths, self.model.num_layers, bucket, self.gpu_bytes,
            TRAINER_OFFLOADED_BYTES if shared else 0,
        )  # fmt: skip
        if memory.tokens < self.longest or memory.runtime < bucket + RUNTIME_BYTES:
            return None
        number, tp = settings["num_engines"], settings["tp_size"]
        return _Engines(settings, memory, generate_seconds(memory, number, tp, self.work, self.speeds))

    # -------------------------------------------------------------------------------------------------- both of them

    def weighed(self) -> list[_Weighed]:
        """All combinations that fit by estimate, the best of each kind, best first."""
        best: dict[tuple[Any, ...], _Weighed] = {}
        for each in (*self._separate(), *self._colocated()):
            other = best.get(each.kind)
            if other is None or _order(each) < _order(other):
                best[each.kind] = each
        return sorted(best.values(), key=_order)

    def _separate(self) -> Iterator[_Weighed]:
        if self.space.given("cluster", "placement") == "colocated":
            return
        ahead = self.space.given("rollout", "max_staleness")
        rollout = {"max_staleness": 1} if ahead is None else {}
        sync = self.sent / self.speeds.network
        for ranks in self._trainer_ranks():
            engines = self.engines(self.gpus - ranks, shared=False)
            if not engines:
                continue
            for trainer in self.trainers(ranks, self.gpu_bytes):
                seconds = {"generate": engines[0].seconds, "train": sum(trainer.seconds.values()), "sync": sync}
                cluster = {"placement": "separate", "trainer_ranks": ranks}
                yield self._joined(
                    trainer, engines[0], seconds | {"sleep": 0.0}, ahead is None or ahead > 0, self.gpu_bytes,
                    {"cluster": cluster} | ({"rollout": rollout} if rollout else {}),
                )  # fmt: skip

    def _trainer_ranks(self) -> list[int]:
        """Possible numbers of trainer ranks: whole hosts if the run has several."""
        if (given := self.space.given("cluster", "trainer_ranks")) is not None:
            return [given] if given < self.gpus else []
        unit = self.base.cluster.gpus_per_node if self.gpus > self.base.cluster.gpus_per_node else 1
        engines = {max(unit, round(self.gpus * share / unit) * unit) for share in ENGINE_SHARES}
        return sorted({self.gpus - count for count in engines if self.gpus - count > 0})

    def _colocated(self) -> Iterator[_Weighed]:
        wanted = self.space.given("cluster", "placement")
        ahead = self.space.given("rollout", "max_staleness")
        if wanted == "separate" or (ahead or 0) > 1:
            return
        usable, machines = self.gpu_bytes - ENGINE_OFFLOADED_BYTES, -(-self.gpus // self.base.cluster.gpus_per_node)
        ranks = self.space.given("cluster", "trainer_ranks") or self.gpus
        transport = self.space.given("weights", "transport") or for_shared_gpus(machines)
        weights = {"transport": transport}  # files are below output_dir, unless weights.directory is set
        engines, offload_to = self.engines(ranks, shared=True), self.space.given("cluster", "offload_to") or "memory"
        for trainer in self.trainers(ranks, usable, sleeps=offload_to != "disk"):
            kind = next((each for each in engines if self._takes_turns(trainer, each)), None)
            if kind is None:
                continue
            moved = max(memory.weights + memory.optimizer for memory in trainer.memory)
            seconds = {
                "generate": kind.seconds, "train": sum(trainer.seconds.values()),
                "sync": file_seconds(transport, self.sent, machines, rates_of(self.base.cluster)),
                "sleep": sleep_seconds(
                    moved, max(memory.weights for memory in trainer.memory), self.speeds.host, offload_to == "disk"
                ),
            }  # fmt: skip
            cluster = {"placement": "colocated", "trainer_ranks": ranks}
            chosen = {"cluster": cluster, "weights": weights, "rollout": {"max_staleness": ahead or 0}}
            yield self._joined(trainer, kind, seconds, False, usable, chosen)

    def _takes_turns(self, trainer: _Trainer, engines: _Engines) -> bool:
        """Whether both fit in every phase."""
        sync = int(SYNC_BUCKETS * self.base.weights.bucket_mib * 2**20)
        stages = [
            StagePlan(held, replace(memory, sync=sync), 1.0)
            for held, memory in zip(trainer.held, trainer.memory, strict=True)
        ]
        return all(
            phase.total <= self.gpu_bytes for phase in phases(stages, engines.memory) if phase.phase != "generate"
        )

    def _joined(
        self, trainer: _Trainer, engines: _Engines, seconds: Mapping[str, float], ahead: bool, usable: int,
        chosen: Mapping[str, Mapping[str, Any]],
    ) -> _Weighed:  # fmt: skip
        layout, cluster = trainer.spec.layout, chosen["cluster"]
        megatron = {**self.space.unused(trainer.measures), **trainer.settings}
        settings = {**chosen, "megatron": megatron, "sglang": engines.settings}
        sizes = (layout.tp, layout.pp, layout.cp, layout.ep, layout.etp)
        tight = max(memory.peak for memory in trainer.memory) > TIGHT * usable
        whole = {**seconds, "step": step_seconds(seconds, ahead)}
        return _Weighed(settings, trainer.measures, whole, trainer.seconds, tight, (cluster["placement"], *sizes))


def _order(each: _Weighed) -> tuple[bool, float, float]:
    """Sort key: if engines take longer than the trainer beside them, prefer the trainer with more memory left."""
    return each.tight, each.seconds["step"], each.seconds["train"]


def search(
    values: Mapping[str, Any], gpus: int, hf_config: Mapping[str, object], top: int, gpu: str
) -> list[FittingLayout]:
    """Layouts that fit, the fastest first; those that fit tightly after all others.

    Args:
        values: settings of a file and flags, as for `plan_command.plan_config`.
        gpus: of the whole run.
        top: most layouts to return.
        gpu: its name.

    Raises:
        NothingFits: with the nearest miss.
        ConfigError: the GPU is unknown, or a setting is wrong.
    """
    wanted = Search(values, gpus, hf_config, gpu)
    if nominal(wanted.gpu) is None:
        raise ConfigError("--gpu", gpu, "unknown GPU", f"choose one of {', '.join(GPUS)}")
    found: list[FittingLayout] = []
    refused: UserError | None = None
    for each in wanted.weighed()[: TRIED * top]:
        if len(found) == top:
            break
        try:
            plan = make_plan(build(merge(dict(values), dict(each.settings))), hf_config)
        except UserError as error:  # a rule that the estimate ignores
            refused = error
            continue
        if plan.fits:
            found.append(_planned(each, plan))
    if not found:
        raise _nothing(wanted, refused)
    return sorted(found, key=lambda one: (one.plan.verdict != "fits", one.seconds["step"], one.seconds["train"]))


def _planned(each: _Weighed, plan: RunPlan) -> FittingLayout:
    """The result, with the plan's lower bound for the sync."""
    sync = plan.sync_seconds
    parts = {**each.seconds, "sync": sync}
    step = each.seconds["step"] - each.seconds["sync"] + sync
    return FittingLayout(each.settings, each.measures, {**parts, "step": step}, each.training, plan)


def _nothing(wanted: Search, refused: UserError | None) -> NothingFits:
    """The error, with the nearest miss as the distance to a fit."""
    if refused is not None:
        rule = f"every layout that fits is invalid: {refused.field} = {refused.value!r}: {refused.rule}"
        hint = refused.hint
    elif wanted.missed and min(wanted.missed)[0] > 1:
        share, nearest = min(wanted.missed)
        rule = f"no layout fits; the nearest, {nearest}, needs {share:.0%} of a GPU for the trainer"
        hint = "use more GPUs, GPUs with more memory, or lower train.max_tokens_per_micro_batch"
    else:
        rule = "no layout fits: engines have no room for the weights and one response, or no layout divides the GPUs"
        hint = "use more GPUs, lower rollout.max_response_tokens, or remove sizes of megatron.* and sglang.*"
    return NothingFits("--gpus", wanted.gpus, rule, hint)
