"""From finished groups, or rows of a supervised run, to the shards of a training step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from numpy.typing import NDArray

from mslime.algorithms.advantages import (
    GroupRewards,
    TurnAdvantages,
    TurnRewards,
    function_advantages,
    group_rewards,
    process_advantages,
    rollout_advantages,
)
from mslime.algorithms.advantages_tokens import advantage_metrics, is_token_level
from mslime.checks.resolve import ResolvedRun
from mslime.config.algorithm import AlgorithmConfig
from mslime.config.base import is_function
from mslime.config.errors import CheckpointError, DataError, RewardError
from mslime.config.model_facts import ModelFacts
from mslime.config.schema import RunConfig
from mslime.config.train import TrainConfig
from mslime.data.expert_balance import loads_of
from mslime.data.packing import build_shards, chunks_per_group, expert_metrics, packing_metrics
from mslime.data.sample import Group, Sample, SequenceTime, TurnSpan, check_invariants, rollouts_in_time, sequence_times
from mslime.data.supervised import SupervisedSource
from mslime.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from mslime.config.layout import ParallelLayout
    from mslime.data.shard import TrainShard


Advantages = list[float | NDArray[np.floating]]
"""Of each sample: one number, or [T]."""


@dataclass(frozen=True)
class AssembledStep:
    """One rollout step's work for the trainer.

    Attributes:
        shards: [optimizer steps][data-parallel ranks].
        metrics: `advantage/*`, `reward/*` by group and by source, `packing/*`.
        advantages: of each sample, groups one after the other: one number, or [T]. None if the trainer completes them.
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
        """The name of a source in metrics."""
        if name not in self._known and len(self._known) >= self.MOST:
            return "other"
        self._known.add(name)
        return name


def assemble(
    groups: Sequence[Group],
    config: RunConfig,
    version: int,
    source_name: Callable[[str], str] = str,
    model: ModelFacts | None = None,
) -> AssembledStep:
    """The shards of the groups of one rollout step, to be trained by weights of `version`.

    Samples without a trainable token (masked as stale, or failed) still shape their group's advantages, but are not
    sent to the trainer.

    Args:
        source_name: maps a data source to its name in metrics.
        model: the trained model. If trainer ranks share its experts, and samples have routes, micro-batches are chosen
            to balance the work of these ranks (`train.balance_experts`).

    Raises:
        RewardError: parts of one rollout have different rewards, or the advantage has no meaning for these rewards.
    """
    samples = [sample for group in groups for sample in group.samples]
    for sample in samples:
        check_invariants(sample)
        assert sample.reward is not None, f"group {sample.group_id} has unscored samples"
    grouped = grouped_rewards(samples)
    advantages = sample_advantages(samples, grouped, config.algorithm)
    trained = [i for i, sample in enumerate(samples) if sample.trainable_tokens]
    chosen, their_advantages = [samples[i] for i in trained], [advantages[i] for i in trained]
    times = sequence_times(samples) if config.algorithm.credit == "turns" else None
    loads = _expert_loads(chosen, config.layout, model)
    shards = _pack(
        chosen, their_advantages, config, version, None if times is None else [times[i] for i in trained],
        loads if config.train.balance_experts else None,
    )  # fmt: skip
    sources = [source_name(data_source(group, sample)) for group in groups for sample in group.samples]
    metrics = reward_metrics(grouped, sources) | packing_metrics(
        shards, config.layout, config.train.max_tokens_per_micro_batch, _quadratic_tokens(config.train)
    )
    if loads is not None:
        metrics |= expert_metrics(shards, loads, config.layout)
    if is_token_level(config.algorithm):  # the trainer reports their advantages
        return AssembledStep(shards, metrics, None, chosen)
    every = [shard for step in shards for shard in step]
    metrics |= advantage_metrics([s.advantages for s in every], [s.loss_mask for s in every])
    return AssembledStep(shards, metrics, advantages, chosen)


def have_advantages(group: Group, algorithm: AlgorithmConfig) -> bool:
    """Whether `assemble` can use a group's rewards."""
    try:
        sample_advantages(group.samples, grouped_rewards(group.samples), algorithm)
    except RewardError:
        return False
    return True


def assemble_supervised(samples: Sequence[Sample], config: RunConfig) -> list[list[TrainShard]]:
    """Shards of a supervised batch: all trainable tokens have equal weight, and there are no advantages."""
    return _pack(samples, [0.0] * len(samples), config, None)


def grouped_rewards(samples: Sequence[Sample]) -> GroupRewards:
    """The rewards of the rollouts that these samples are parts of, and of their turns.

    Raises:
        RewardError: parts of one rollout have different rewards.
    """
    rollouts = rollouts_in_time(samples)
    numbers = {turn.sample: number for number, turns in enumerate(rollouts) for turn in turns}
    grouped = group_rewards(
        [s.reward or 0.0 for s in samples],
        [s.group_id for s in samples],
        [numbers[i] for i in range(len(samples))],
    )
    return replace(grouped, turns=_turn_rewards(samples, _as_grouped(rollouts, grouped), grouped))


def sample_advantages(samples: Sequence[Sample], grouped: GroupRewards, algorithm: AlgorithmConfig) -> Advantages:
    """Each sample's advantage: one number, or [T] when its group has process rewards, or turns have their own.

    Raises:
        RewardError: process rewards under an advantage that does not use them.
    """
    if is_function(algorithm.advantage):
        found = function_advantages(grouped, algorithm.advantage)
        if isinstance(found, TurnAdvantages):
            return _over_turns(samples, grouped, found)
    whole = rollout_advantages(grouped, algorithm.advantage, algorithm.normalise_std)
    if algorithm.advantage in ("reinforce_pp", "gae") or not any(s.process_rewards for s in samples):
        return whole.tolist()
    if algorithm.advantage != "grpo":
        raise RewardError(
            "algorithm.advantage", algorithm.advantage, "does not support the process rewards that the reward returned",
            "use grpo or reinforce_pp, or return the rollout's reward alone",
        )  # fmt: skip
    return [a + per_token for a, per_token in zip(whole, _of_steps(samples, algorithm), strict=True)]


def _of_steps(samples: Sequence[Sample], algorithm: AlgorithmConfig) -> list[NDArray[np.float32]]:
    """[T] of each sample, from process rewards: within the sequence, or along the turns of its rollout."""
    if algorithm.credit == "sequences":
        steps, lengths = [s.process_rewards for s in samples], [len(s) for s in samples]
        return process_advantages(steps, lengths, [s.group_id for s in samples], algorithm.normalise_std)
    rollouts = rollouts_in_time(samples)
    laid_out = [_laid_end_to_end(samples, turns) for turns in rollouts]
    found = process_advantages(
        [steps for steps, _ in laid_out], [length for _, length in laid_out],
        [samples[turns[0].sample].group_id for turns in rollouts], algorithm.normalise_std,
    )  # fmt: skip
    result = [np.zeros(len(s), np.float32) for s in samples]
    for turns, values in zip(rollouts, found, strict=True):
        at = 0
        for turn in turns:
            result[turn.sample][turn.start : turn.stop] = values[at : at + turn.stop - turn.start]
            at += turn.stop - turn.start
    return result


def _laid_end_to_end(samples: Sequence[Sample], turns: Sequence[TurnSpan]) -> tuple[list[tuple[int, float]], int]:
    """(Process rewards by position, length) of the sequence of a rollout's turns in their order."""
    steps, length = list[tuple[int, float]](), 0
    for turn in turns:
        steps += [(at - turn.start + length, reward) for at, reward in _steps_of(samples, turn)]
        length += turn.stop - turn.start
    return steps, length


def _steps_of(samples: Sequence[Sample], turn: TurnSpan) -> list[tuple[int, float]]:
    return [step for step in samples[turn.sample].process_rewards if turn.start <= step[0] < turn.stop]


def _as_grouped(rollouts: Sequence[list[TurnSpan]], grouped: GroupRewards) -> list[list[TurnSpan]]:
    """The rollouts in the order of `GroupRewards`."""
    return sorted(rollouts, key=lambda turns: int(grouped.of_sample[turns[0].sample]))


def _turn_rewards(samples: Sequence[Sample], rollouts: Sequence[list[TurnSpan]], grouped: GroupRewards) -> TurnRewards:
    counts = [len(turns) for turns in rollouts]
    rewards = [sum(reward for _, reward in _steps_of(samples, turn)) for turns in rollouts for turn in turns]
    return TurnRewards(
        np.repeat(np.arange(len(rollouts)), counts),
        np.asarray([index for count in counts for index in range(count)], np.int64),
        np.asarray(rewards, np.float64),
    )


def _over_turns(samples: Sequence[Sample], grouped: GroupRewards, found: TurnAdvantages) -> Advantages:
    """[T] float32 of each sample: every token has the advantage of its turn."""
    result = [np.zeros(len(s), np.float32) for s in samples]
    turns = [turn for rollout in _as_grouped(rollouts_in_time(samples), grouped) for turn in rollout]
    for turn, value in zip(turns, found.values.tolist(), strict=True):
        result[turn.sample][turn.start : turn.stop] = value
    return list(result)


def data_source(group: Group, sample: Sample) -> str:
    """Source of the prompt: the row's `data_source` in its metadata, or the name of its file."""
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


def _quadratic_tokens(train: TrainConfig) -> float | None:
    found = train.quadratic_tokens
    assert found != "auto", "`checks.resolve` counts train.quadratic_tokens from the model"
    return found


def _pack(
    samples: Sequence[Sample],
    advantages: Sequence[float | NDArray[np.floating]],
    config: RunConfig,
    version: int | None,
    times: Sequence[SequenceTime] | None = None,
    loads: NDArray[np.float32] | None = None,
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
        quadratic_tokens=_quadratic_tokens(train),
        version=version,
        times=times,
        loads=loads,
    )


def _expert_loads(
    samples: Sequence[Sample], layout: ParallelLayout, model: ModelFacts | None
) -> NDArray[np.float32] | None:
    """See `loads_of`; None if there is nothing to balance, or no loads are known."""
    if layout.ep == 1 or model is None or not samples or samples[0].routes is None:
        return None
    return loads_of([s.routes for s in samples], [len(s) for s in samples], model.num_experts, layout.ep)


def references(
    per_step: Sequence[Sequence[TrainShard]], layout: ParallelLayout, layers: Sequence[tuple[int, ...]]
) -> list[list[ray.ObjectRef]]:
    """[ranks][optimizer steps] of shards in Ray's store. Each (optimizer step, data-parallel rank, pipeline stage) is
    stored once; ranks of a stage share it.

    Args:
        per_step: [optimizer steps][data-parallel ranks].
        layers: global MoE layer ids of every rank's pipeline stage.
    """
    stored: dict[tuple[int, int, int], ray.ObjectRef] = {}
    ranks: list[list[ray.ObjectRef]] = []
    for rank in range(layout.world_size):
        mine: list[ray.ObjectRef] = []
        for index, shards in enumerate(per_step):
            key = (index, layout.dp_rank(rank), layout.pp_rank(rank))
            if key not in stored:
                last = layout.pp_rank(rank) == layout.pp - 1
                stored[key] = ray.put(shards[key[1]].stage_slice(layers[rank], has_logits=last))
            mine.append(stored[key])
        ranks.append(mine)
    return ranks


# The rows of a supervised run: batches and held-out sets as shards for every rank.

Shards = Sequence[Sequence[Any]]
"""[ranks][optimizer steps] of Ray references to TrainShard."""

HeldOutLoss = Callable[[Shards], tuple[float, int]]
"""(sum of the negative log-likelihood, tokens) of shards, over all ranks."""


class SupervisedRows:
    """Training rows in their order, and held-out rows, which are tokenised once."""

    def __init__(self, run: ResolvedRun) -> None:
        """Raises DataError for unreadable files, and for held-out rows that cannot be trained on."""
        config = self._config = run.config
        limit = config.rollout.longest(run.model.max_positions)
        tokenizer = load_tokenizer(config.model.tokenizer)
        self.source = SupervisedSource(config.data.prompts, config.data, config.train, config.seed, tokenizer, limit)
        self._held_out: dict[str, list[Sample]] = {}
        for index, held_out in enumerate(config.data.eval_sets):
            samples = SupervisedSource(
                [held_out.path], config.data, config.train, config.seed, tokenizer, limit, shuffle=False
            ).samples()
            if not samples:
                raise DataError(f"data.eval_sets[{index}].path", held_out.path, "every row is too long",
                                "raise rollout.max_total_tokens, or use shorter rows")  # fmt: skip
            self._held_out[held_out.name] = samples

    def batch(self) -> Shards:
        """The next `train.sft_batch_size` rows."""
        return self._shards([s for i in range(self._config.train.sft_batch_size) for s in self.source.next(i)])

    def evaluate(self, held_out_loss: HeldOutLoss) -> dict[str, float]:
        """`eval/NAME/nll`, `perplexity` and `tokens` of every held-out set, a batch at a time."""
        metrics, size = dict[str, float](), self._config.train.sft_batch_size
        for name, samples in self._held_out.items():
            batches = (samples[start : start + size] for start in range(0, len(samples), size))
            found = [held_out_loss(self._shards(batch)) for batch in batches]
            tokens = sum(n for _, n in found)
            nll = math.fsum(total for total, _ in found) / tokens
            head = f"eval/{name}"
            perplexity = math.exp(min(nll, 700.0))  # larger exponents overflow a float
            metrics |= {f"{head}/nll": nll, f"{head}/perplexity": perplexity, f"{head}/tokens": float(tokens)}
        return metrics

    def resume(self, directory: Path | None, extra: Mapping[str, Any]) -> None:
        """Continue at the position in a checkpoint. Raises CheckpointError if the checkpoint is of another kind of run,
        and DataError if the rows differ."""
        if not isinstance(extra.get("source"), dict):
            raise CheckpointError(
                str(directory), "no position in the prompts",
                "is not a checkpoint of supervised training (train.task: sft)",
                "give the run another name, and set checkpoint.load to this checkpoint",
            )  # fmt: skip
        self.source.load_state_dict(extra["source"])

    def _shards(self, samples: Sequence[Sample]) -> Shards:
        shards, layout = assemble_supervised(samples, self._config), self._config.layout
        refs = [[ray.put(shard) for shard in step] for step in shards]
        return [[step[layout.dp_rank(rank)] for step in refs] for rank in range(layout.world_size)]
