"""From finished groups to the shards of a training step: advantages, packing, and one shard per rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mslime.algorithms.advantages import GroupRewards, group_rewards, process_advantages, rollout_advantages
from mslime.algorithms.advantages_tokens import advantage_metrics, is_token_level
from mslime.config.errors import RewardError
from mslime.config.schema import RunConfig
from mslime.data.packing import build_shards, chunks_per_group, packing_metrics
from mslime.data.sample import Group, Sample, check_invariants

if TYPE_CHECKING:
    from mslime.data.shard import TrainShard


@dataclass(frozen=True)
class Assembled:
    """One rollout step's work for the trainer.

    Attributes:
        shards: [optimizer steps][data-parallel ranks].
        metrics: `advantage/*`, `reward/*` by group and by source, `packing/*`.
        advantages: of each sample, groups one after the other: one number, or [T]. None when the trainer
            completes them.
        trained: the samples that became sequences 0, 1, ...
    """

    shards: list[list[TrainShard]]
    metrics: dict[str, float]
    advantages: Sequence[float | NDArray[np.floating]] | None
    trained: list[Sample]


class SourceNames:
    """Names of data sources for metrics: the first 32 of a run by name, all later ones together as `other`."""

    MOST = 32

    def __init__(self) -> None:
        self._known: set[str] = set()

    def __call__(self, name: str) -> str:
        """The name that a source's metrics have."""
        if name not in self._known and len(self._known) >= self.MOST:
            return "other"
        self._known.add(name)
        return name


def assemble(
    groups: Sequence[Group], config: RunConfig, version: int, source_name: Callable[[str], str] = str
) -> Assembled:
    """The shards of the groups of one rollout step, about to be trained by weights of `version`.

    Samples without a trainable token (masked as stale, or failed) still shape their group's advantages, but are not
    sent to the trainer.

    Args:
        source_name: under which name a data source is reported.

    Raises:
        RewardError: parts of one rollout have different rewards, or the advantage has no meaning for these rewards.
    """
    samples = [sample for group in groups for sample in group.samples]
    for sample in samples:
        check_invariants(sample)
        assert sample.reward is not None, f"group {sample.group_id} has unscored samples"
    grouped, advantages = _advantages(samples, config)
    trained = [i for i, sample in enumerate(samples) if sample.trainable_tokens]
    chosen, their_advantages = [samples[i] for i in trained], [advantages[i] for i in trained]
    shards = _pack(chosen, their_advantages, config, version)
    sources = [source_name(data_source(group, sample)) for group in groups for sample in group.samples]
    metrics = reward_metrics(grouped, sources) | _packing_metrics(shards, config)
    if is_token_level(config.algorithm):  # the trainer reports what became of them
        return Assembled(shards, metrics, None, chosen)
    every = [shard for step in shards for shard in step]
    metrics |= advantage_metrics([s.advantages for s in every], [s.loss_mask for s in every])
    return Assembled(shards, metrics, advantages, chosen)


def have_advantages(group: Group, config: RunConfig) -> bool:
    """Whether `assemble` can make something of a group's rewards."""
    try:
        _advantages(group.samples, config)
    except RewardError:
        return False
    return True


def _advantages(
    samples: Sequence[Sample], config: RunConfig
) -> tuple[GroupRewards, list[float | NDArray[np.floating]]]:
    grouped = group_rewards(
        [s.reward or 0.0 for s in samples], [s.group_id for s in samples], _rollout_numbers(samples)
    )
    return grouped, sample_advantages(samples, grouped, config)


def assemble_supervised(samples: Sequence[Sample], config: RunConfig) -> list[list[TrainShard]]:
    """Shards of a supervised batch: every trainable token weighs the same, there are no advantages."""
    return _pack(samples, [0.0] * len(samples), config, None)


def sample_advantages(
    samples: Sequence[Sample], grouped: GroupRewards, config: RunConfig
) -> list[float | NDArray[np.floating]]:
    """Each sample's advantage: one number, or [T] when its group has process rewards.

    Raises:
        RewardError: process rewards under an advantage that has no use for them.
    """
    algorithm = config.algorithm
    whole = rollout_advantages(grouped, algorithm.advantage, algorithm.normalise_std)
    if algorithm.advantage in ("reinforce_pp", "gae") or not any(s.process_rewards for s in samples):
        return whole.tolist()
    if algorithm.advantage != "grpo":
        raise RewardError(
            "algorithm.advantage", algorithm.advantage, "the reward gives process rewards, which have no place in it",
            "use grpo or reinforce_pp, or return the rollout's reward alone",
        )  # fmt: skip
    steps = process_advantages(
        [s.process_rewards for s in samples], [len(s) for s in samples], [s.group_id for s in samples],
        algorithm.normalise_std,
    )  # fmt: skip
    return [a + per_token for a, per_token in zip(whole, steps, strict=True)]


def data_source(group: Group, sample: Sample) -> str:
    """Where the prompt came from: the row's `data_source` in its metadata, or the name of its file."""
    named = sample.metadata.get("data_source")
    text = "" if named is None else str(named).strip()
    path = group.source.rpartition(":")[0]
    return re.sub(r"[/\s]+", "_", text or path.rpartition("/")[2] or "unknown")[:80]


def reward_metrics(grouped: GroupRewards, sources: Sequence[str]) -> dict[str, float]:
    """`reward/*` by group and by source; each rollout counts once.

    Args:
        sources: of each training sample.
    """
    shares = [bool(v) for v in grouped.zero_variance]
    by_source: dict[str, set[int]] = {}
    for source, rollout in zip(sources, grouped.of_sample.tolist(), strict=True):
        by_source.setdefault(source, set()).add(rollout)
    metrics = {
        "reward/group_std": float(
            np.sqrt(np.bincount(grouped.group, weights=grouped.centred**2) / grouped.sizes).mean()
        ),
        "reward/zero_variance_share": sum(shares) / len(shares),
        "rollout/rollouts": float(len(grouped.rewards)),
    }
    for source, rollouts in by_source.items():
        metrics[f"reward/source/{source}/mean"] = float(grouped.rewards[sorted(rollouts)].mean())
        metrics[f"reward/source/{source}/rollouts"] = float(len(rollouts))
    return metrics


def _rollout_numbers(samples: Sequence[Sample]) -> list[int]:
    """A number for each sample that the parts of its rollout share, and no others."""
    numbers: dict[tuple[int, int, bool], int] = {}
    return [numbers.setdefault(sample.rollout, len(numbers)) for sample in samples]


def _packing_metrics(shards: Sequence[Sequence[TrainShard]], config: RunConfig) -> dict[str, float]:
    train = config.train
    return packing_metrics(shards, config.layout, train.max_tokens_per_micro_batch, _quadratic_tokens(config))


def _quadratic_tokens(config: RunConfig) -> float | None:
    found = config.train.quadratic_tokens
    assert found != "auto", "`preflight.resolve` counts train.quadratic_tokens from the model"
    return found


def _pack(
    samples: Sequence[Sample],
    advantages: Sequence[float | NDArray[np.floating]],
    config: RunConfig,
    version: int | None,
) -> list[list[TrainShard]]:
    layout, train = config.layout, config.train
    return build_shards(
        samples,
        advantages,
        layout,
        train.max_tokens_per_micro_batch,
        loss_aggregation=config.algorithm.loss_aggregation,
        max_response_tokens=config.rollout.max_response_tokens,
        packed=train.packed,
        steps=1 if train.task == "sft" else train.optimizer_steps_per_rollout,
        multiple_of=chunks_per_group(layout),
        quadratic_tokens=_quadratic_tokens(config),
        version=version,
    )
