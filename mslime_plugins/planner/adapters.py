"""Plan several adapters as one run with at least their combined needs."""

from __future__ import annotations

from mslime.config.lora import LoraConfig
from mslime.config.schema import RunConfig
from mslime_plugins.planner.trainer_memory import longest_sequence


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
