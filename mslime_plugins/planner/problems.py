"""Parts of a plan that do not fit, with advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mslime.config.engines import SGLangConfig
from mslime.config.resolved import PolicySpec, Role
from mslime.config.rollout import RolloutConfig
from mslime_plugins.planner.engine import RUNTIME_BYTES, EngineMemory
from mslime_plugins.planner.rollouts import RolloutBytes
from mslime_plugins.planner.stages import PhaseMemory, StagePlan
from mslime_plugins.planner.trainer_memory import HostMemory, offloaded_share

Verdict = Literal["fits", "tight", "does not fit"]
GIB = 2**30
USABLE = 0.99
"""Usable fraction of a GPU's nominal GB: N GiB without the driver's part (H100 80 GB: 79.6 GiB, H200 141 GB: 140.4
GiB)."""
TIGHT = 0.95
"""Fraction of a GPU's or a host's memory above which a plan is tight: it ignores kernels' workspaces and uneven
routing."""
HOST_USABLE = 0.9
"""Usable fraction of a host's memory: the system, Ray's object store and file caches take the rest. An assumption."""


def verdict_of(share: float) -> Verdict:
    """Verdict on needed over available memory."""
    return "does not fit" if share > 1 else "tight" if share > TIGHT else "fits"


@dataclass(frozen=True)
class Problem:
    """Something that does not fit.

    Attributes:
        where: which GPU.
        needs, has: bytes.
        component: the largest part that can be made smaller.
        hint: advice.
    """

    where: str
    needs: int
    has: int
    component: str
    hint: str


def phase_problems(tp: int, ranks: int, taking_turns: tuple[PhaseMemory, ...], gpu_bytes: int) -> list[Problem]:
    """Phases in which the weights of an engine of `tp` GPUs do not fit beside a trainer of so many ranks that sends or
    saves."""
    return [
        Problem(
            f"shared GPU of stage {phase.stage}, phase {phase.phase}", phase.total, gpu_bytes,
            "the engine's weights" if phase.engine > phase.trainer else "the trainer's state",
            f"raise sglang.tp_size ({tp}), or divide the trainer's state over more ranks: cluster.trainer_ranks "
            f"({ranks}) or the sizes under megatron.*",
        )
        for phase in taking_turns
        if phase.phase in ("send", "save") and phase.total > gpu_bytes
    ]  # fmt: skip


def host_bytes(memory: float) -> int:
    """Usable bytes of a host with `memory` GiB."""
    return int(memory * GIB * HOST_USABLE)


def host_problems(
    spec: PolicySpec, memory: float | None, host: HostMemory, rollouts: RolloutBytes | None, settings: RolloutConfig
) -> list[Problem]:
    """Problems with host memory; `memory`: of a host, in GiB."""
    if memory is None:
        return []
    has, problems = host_bytes(memory), list[Problem]()
    if host.total > has:
        component = host.largest
        more = f"spread it over more machines: raise cluster.trainer_ranks ({spec.layout.world_size})"
        less = {
            "sync": f"set weights.transport other than {spec.weights.transport}",
            "optimizer": f"lower megatron.optimizer_offload_fraction ({offloaded_share(spec.megatron.extra):g})",
            "copies": "remove algorithm.kl_coef or model.teacher_path",
            "offloaded": "set cluster.offload_to: disk",
            "teacher": "give the teacher its own GPUs (teacher.placement: separate)",
            "checkpoint": "raise megatron.tensor_model_parallel_size, or keep Adam's moments in float32 or bfloat16",
            "shards": f"lower rollout.groups_per_step ({settings.groups_per_step})",
        }[component]
        problems.append(Problem("trainer machine, host memory", host.total, has, component, f"{less}, or {more}"))
    if rollouts is not None and rollouts.held.total + rollouts.store.total > has:
        component, groups = rollouts.held.largest, f"lower rollout.groups_per_step ({settings.groups_per_step})"
        less = {
            "columns": groups,
            "routes": f"{groups}, or replay no engine routes: train.replay r2 or off",
            "supports": f"{groups}, or sample from fewer ids: rollout.top_p ({settings.top_p:g}), top_k "
            f"({settings.top_k}), min_p ({settings.min_p:g})",
        }[component]
        needs = rollouts.held.total + rollouts.store.total
        problems.append(Problem("machine of the rollout managers, host memory", needs, has, component, less))
    return problems


def trainer_problems(spec: PolicySpec, who: str, stages: tuple[StagePlan, ...], gpu_bytes: int) -> list[Problem]:
    if not stages:
        return []
    worst = max(stages, key=lambda stage: stage.memory.peak)
    if worst.memory.peak <= gpu_bytes:
        return []
    memory = worst.memory
    sizes = {name: size for name, size in memory.components().items() if name != "reserve"}
    if memory.sync < memory.step:
        del sizes["sync"]
    component = max(sizes, key=lambda name: sizes[name])
    where = f"{who}, stage {worst.held.stage}"
    return [Problem(where, memory.peak, gpu_bytes, component, _hint(spec, component))]


def _hint(spec: PolicySpec, component: str) -> str:
    m, layout = spec.megatron, spec.layout
    grid = (
        f"raise the expert-parallel size ({layout.ep}), pipeline stages ({layout.pp}) or "
        f"tensor-parallel size ({layout.tp}) under megatron.*"
    )
    full = "set megatron.recompute_granularity: full" if m.recompute_granularity != "full" else ""
    tokens = f"lower train.max_tokens_per_micro_batch ({spec.train.max_tokens_per_micro_batch})"
    sharing = "set megatron.use_distributed_optimizer" if not m.use_distributed_optimizer else (
        f"divide it over more data-parallel ranks: raise cluster.trainer_ranks ({layout.world_size})"
    )  # fmt: skip
    return {
        "weights": grid,
        "gradients": grid,
        "optimizer": f"{sharing}; or {grid}",
        "activations": full or tokens,
        "working": f"{tokens}, or raise megatron.tensor_model_parallel_size ({layout.tp})",
        "logits": f"lower train.logits_mib ({spec.train.logits_mib:g}), then {tokens}, or raise "
        f"megatron.tensor_model_parallel_size ({layout.tp})",
        "critic": f"set critic.placement: separate ({layout.world_size} more GPUs)",
        "sync": f"lower weights.bucket_mib ({spec.weights.bucket_mib:g})",
    }[component]


def engine_problems(
    settings: SGLangConfig, bucket_mib: float, longest: int, engine: EngineMemory | None, gpu_bytes: int,
    who: Role = "engine",
) -> list[Problem]:  # fmt: skip
    """Problems with an engine's memory.

    `bucket_mib`: of a weight update; `longest`: tokens of a response with its prompt; `who`: role of the server.
    """
    if engine is None:
        return []
    section = settings.section or settings.engine
    problems: list[Problem] = []
    if engine.tokens < longest:
        component = "weights" if engine.cache < engine.weights else "cache"
        problems.append(
            Problem(
                who,
                engine.weights + longest * engine.token_bytes + engine.runtime,
                gpu_bytes,
                component,
                f"raise {section}.tp_size ({settings.tp_size}) or {section}.mem_fraction_static: the cache holds "
                f"{engine.tokens:,} tokens, and one response may have {longest:,}",
            )
        )
    if engine.runtime < engine.bucket + RUNTIME_BYTES:
        problems.append(
            Problem(
                f"{who}, outside mem_fraction_static",
                engine.bucket + RUNTIME_BYTES,
                engine.runtime,
                "bucket",
                f"lower {section}.mem_fraction_static"
                + (f", or weights.bucket_mib ({bucket_mib:g})" if engine.bucket else ""),
            )
        )
    return problems
