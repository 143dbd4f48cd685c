"""Memory of a GPU that trainer and engines share (`cluster.placement: colocated`), phase by phase.

`run/sharing.py` defines the memory in use in each phase; this module sums it. Generating engines use all memory except
that of an offloaded trainer, because SGLang sizes its cache accordingly. So that phase always fits, and its plan is the
engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mslime.config.resolved import Role
from mslime_plugins.planner.engine import EngineMemory
from mslime_plugins.planner.stages import StagePlan
from mslime_plugins.planner.trainer_memory import CONTEXT_BYTES, TrainerMemory

TRAINER_ASLEEP_BYTES = CONTEXT_BYTES
"""Memory of an offloaded trainer on its GPU: CUDA context and NCCL's buffers."""
ENGINE_ASLEEP_BYTES = 3 * 2**30
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
    found = [PhaseMemory("generate", stages[0].held.stage, TRAINER_ASLEEP_BYTES, _serving(engine))]
    if teacher is not None:
        found.append(replace(found[0], engine=_serving(teacher), server="teacher"))
    loaded = ENGINE_ASLEEP_BYTES + engine.weights
    for phase, of_trainer, of_engine in (
        ("train", _training, ENGINE_ASLEEP_BYTES),
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
