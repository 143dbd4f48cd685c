"""From finished groups to the shards of a training step: advantages, packing, and one shard per rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mslime.algorithms.advantages import grpo_advantages
from mslime.config.schema import RunConfig
from mslime.data.packing import build_shards
from mslime.data.sample import Group, Sample, check_invariants

if TYPE_CHECKING:
    from mslime.data.shard import TrainShard


def assemble(groups: Sequence[Group], config: RunConfig) -> list[list[TrainShard]]:
    """[optimizer steps][data-parallel ranks] shards of the groups of one rollout step.

    Samples without a trainable token (masked as stale, or failed) still shape their group's advantages, but are not
    sent to the trainer.
    """
    samples: list[Sample] = []
    advantages: list[float] = []
    for group in groups:
        for sample in group.samples:
            check_invariants(sample)
        for sample, advantage in zip(group.samples, _advantages(group, config), strict=True):
            if sample.trainable_tokens:
                samples.append(sample)
                advantages.append(advantage)
    return _pack(samples, advantages, config)


def assemble_supervised(samples: Sequence[Sample], config: RunConfig) -> list[list[TrainShard]]:
    """Shards of a supervised batch: every trainable token weighs the same, there are no advantages."""
    return _pack(samples, [0.0] * len(samples), config)


def _advantages(group: Group, config: RunConfig) -> list[float]:
    rewards = [s.reward for s in group.samples if s.reward is not None]
    assert len(rewards) == len(group.samples), f"group {group.group_id} has unscored samples"
    return grpo_advantages([rewards], config.algorithm.normalise_std)[0].tolist()


def _pack(samples: Sequence[Sample], advantages: Sequence[float], config: RunConfig) -> list[list[TrainShard]]:
    layout, train = config.layout, config.train
    return build_shards(
        samples,
        advantages,
        layout,
        train.max_tokens_per_micro_batch,
        loss_aggregation=config.algorithm.loss_aggregation,
        packed=train.packed,
        steps=1 if train.task == "sft" else train.optimizer_steps_per_rollout,
        multiple_of=layout.pp if layout.vpp > 1 else 1,
    )
