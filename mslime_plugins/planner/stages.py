"""Pipeline stages of the trainer: parameters, memory and work of a rank of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mslime.config.megatron import check_model
from mslime.config.resolved import CriticSpec, PolicySpec, Role, TrainingSpec
from mslime.convert.families import get_family
from mslime.convert.flops import read_widths
from mslime.convert.lora_rules import make_adapters
from mslime.convert.table import RuleTable
from mslime.convert.tensor_layouts import padded_vocab_size
from mslime.weights.weight_plan import Senders, WeightPlan
from mslime_plugins.planner.engine import EngineMemory
from mslime_plugins.planner.parameters import StageParameters, stage_parameters, work_per_token
from mslime_plugins.planner.trainer_memory import CONTEXT_BYTES, TrainerMemory, micro_batch_tokens, trainer_memory


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage, representing all of its ranks.

    Attributes:
        held: parameters of one rank.
        memory: of one GPU.
        work: multiplications of one rank for a token, over the mean of the stages.
        adapters: parameters of one rank's adapters, if only these are trained; None if the model is.
    """

    held: StageParameters
    memory: TrainerMemory
    work: float
    adapters: StageParameters | None = None

    @property
    def trained(self) -> int:
        """Elements of one rank with a gradient."""
        return (self.held if self.adapters is None else self.adapters).trained


def with_critic(
    critic: CriticSpec | None,
    stages: tuple[StagePlan, ...],
    hf_config: Mapping[str, object],
    limit: int,
    senders: Senders,
    gpu_bytes: int,
    *,
    shared: bool,
) -> tuple[tuple[StagePlan, ...], tuple[StagePlan, ...], tuple[StagePlan, ...]]:
    """The stages of the policy, of a critic on separate GPUs, and of one on the policy's GPUs.

    Args:
        hf_config: the critic's config.json.
        limit: tokens of the longest sequence.
        shared: whether it is on the policy's GPUs.
    """
    if critic is None:
        return stages, (), ()
    unsent = WeightPlan(senders, ())
    valued = make_stages(critic, hf_config, limit, unsent, gpu_bytes, values=True)
    if not shared:
        return stages, valued, ()
    pairs = zip(stages, valued, strict=True)
    return tuple(replace(one, memory=one.memory.beside(other.memory)) for one, other in pairs), (), valued


def make_stages(
    spec: TrainingSpec, hf_config: Mapping[str, object], limit: int, sync: WeightPlan, gpu_bytes: int, *, values: bool
) -> tuple[StagePlan, ...]:
    """The stages of the policy, or of a critic with a value head; sequences have at most `limit` tokens."""
    family, layout = get_family(hf_config), spec.layout
    fields, model, table = (
        family.transformer_fields(hf_config), family.model_fields(hf_config), family.rules(hf_config),
    )  # fmt: skip
    table.check_layout(layout)
    check_model(spec.megatron, spec.device, fields, spec.fp8)
    widths = read_widths(fields, model.moe_layer_ids)
    chunks = spec.megatron.stage_layers(model.num_layers)
    held = stage_parameters(table, layout, chunks, widths.hidden + 1 if values else 0)
    adapters = [None] * len(held) if values else _adapters(spec, table, chunks)
    rows = 0 if values else padded_vocab_size(model.vocab_size, layout.tp) // layout.tp
    work = [work_per_token(stage, layout, model.top_k, model.num_experts) for stage in held]
    mean = sum(work) / len(work)
    tokens = micro_batch_tokens(spec.train, layout, min(model.max_positions, limit))
    return tuple(
        StagePlan(stage, trainer_memory(spec, widths, tokens, rows, stage, sync, gpu_bytes, own), each / mean, own)
        for stage, own, each in zip(held, adapters, work, strict=True)
    )


def _adapters(
    spec: TrainingSpec, table: RuleTable, chunks: Sequence[tuple[tuple[int, ...], ...]]
) -> Sequence[StageParameters | None]:
    """Parameters of each stage that one rank trains instead of the model; None if it trains the model."""
    if not isinstance(spec, PolicySpec) or not spec.lora.on:
        return [None] * len(chunks)
    adapters = make_adapters(table, spec.lora)
    adapters.table.check_layout(spec.layout)
    return stage_parameters(adapters.table, spec.layout, chunks)


# Memory of a GPU that trainer and engines share (`cluster.placement: colocated`), phase by phase.
#
# `run/sharing.py` defines the memory in use in each phase; here it is summed. Generating engines use all memory except
# that of an offloaded trainer, because SGLang sizes its cache accordingly. So that phase always fits, and its plan is
# the engine's.

TRAINER_OFFLOADED_BYTES = CONTEXT_BYTES
"""Memory of an offloaded trainer on its GPU: CUDA context and NCCL's buffers."""
ENGINE_OFFLOADED_BYTES = 3 * 2**30
"""Memory of an engine after its release: CUDA context, NCCL's buffers, CUDA graphs. An assumption, not measured on
GPUs."""


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes on the fullest GPU in a phase.

    Attributes:
        phase: generate, train, send or save.
        stage: pipeline stage of the trainer rank on it.
        trainer, engine: bytes of each side.
        server: the owner of `engine`: an engine or a teacher.
    """

    phase: str
    stage: int
    trainer: int
    engine: int
    server: Role = "engine"

    @property
    def total(self) -> int:
        """Bytes of both."""
        return self.trainer + self.engine


def phases(
    stages: Sequence[StagePlan], engine: EngineMemory, teacher: EngineMemory | None = None
) -> tuple[PhaseMemory, ...]:
    """The phases of a step, each on its fullest stage. A teacher on GPUs without an engine has all its memory while
    engines generate, and less than an engine in the other phases."""
    found = [PhaseMemory("generate", stages[0].held.stage, TRAINER_OFFLOADED_BYTES, _serving(engine))]
    if teacher is not None:
        found.append(replace(found[0], engine=_serving(teacher), server="teacher"))
    loaded = ENGINE_OFFLOADED_BYTES + engine.weights
    for phase, of_trainer, of_engine in (
        ("train", _training, ENGINE_OFFLOADED_BYTES),
        ("send", _sending, loaded + engine.bucket),
        ("save", _saving, loaded),
    ):
        fullest = max(stages, key=lambda stage: of_trainer(stage.memory))
        found.append(PhaseMemory(phase, fullest.held.stage, of_trainer(fullest.memory), of_engine))
    return tuple(found)


def _serving(engine: EngineMemory) -> int:
    return engine.weights + engine.cache + engine.state + engine.runtime


def _training(memory: TrainerMemory) -> int:
    return memory.states + memory.step + memory.critic + memory.reserve


def _sending(memory: TrainerMemory) -> int:
    return memory.weights + memory.sync + memory.reserve


def _saving(memory: TrainerMemory) -> int:
    """Bytes while saving. A critic is counted whole: with its gradients, which it does not need."""
    return memory.weights + memory.optimizer + memory.critic + memory.reserve
