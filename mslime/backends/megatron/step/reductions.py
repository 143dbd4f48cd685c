"""Reduce each rank's numbers of a step to values equal on every rank: advantages and metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mslime.algorithms.advantages_tokens import (
    Reduce,
    TokenColumns,
    advantage_metrics,
    is_token_level,
    needs_policy_log_probs,
    token_advantages,
)
from mslime.algorithms.losses import PolicyLossInputs, policy_loss
from mslime.algorithms.statistics import LossStatistics, mean_weight, other_metrics
from mslime.backends.megatron.step.batches import first_segments
from mslime.config.algorithm import AlgorithmConfig
from mslime.config.errors import TrainerError
from mslime.data.shard import TrainShard


def over_all_ranks(statistics: LossStatistics, group: dist.ProcessGroup | None = None) -> LossStatistics:
    """Sum and maximise over `group` (default: all trainer ranks), in place. A collective."""
    dist.all_reduce(statistics.sums, group=group)
    dist.all_reduce(statistics.maxima, op=dist.ReduceOp.MAX, group=group)
    if statistics.reports_user_metrics:  # on every rank, or on none
        names: list[tuple[str, ...] | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(names, statistics.user_names, group=group)
        reported = sorted({found for found in names if found})
        if len(reported) > 1:
            raise other_metrics(reported[0], reported[1])
        (statistics.user_names,) = reported
    return statistics


def refuse_not_finite(quantity: str, value: float, step: int, own: float, rank: int, device: torch.device) -> None:
    """Stop every rank if a number of the step is NaN or infinite. A collective only in that case.

    Args:
        value: the number, equal on all ranks.
        own: this rank's share of it.

    Raises:
        TrainerError: naming the step and the first rank whose share is not finite.
    """
    if math.isfinite(value):
        return
    first = torch.tensor(dist.get_world_size() if math.isfinite(own) else rank, device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    culprit = int(first)
    where = f"on rank {culprit}" if culprit < dist.get_world_size() else "although every rank's share is finite"
    raise TrainerError(
        quantity, value, f"not finite in optimizer step {step}, {where}",
        "resume from the last checkpoint with a lower train.lr, and inspect that step's samples and mismatch metrics",
    )  # fmt: skip


def normalising_scale(
    shard: TrainShard, algorithm: AlgorithmConfig, device: torch.device, group: dist.ProcessGroup
) -> float:
    """1 / mean correction weight over the step if the correction normalises, else 1. A collective in the first case.

    Every rank of a data-parallel rank's model holds the whole columns, so each sums its sequences in one piece.

    Args:
        group: the data-parallel group.
    """
    if not algorithm.correction.normalise:
        return 1.0
    assert shard.old_log_probs is not None, "a normalised correction needs the old log-probs of the whole step"

    def column(values: object) -> Tensor:
        return torch.as_tensor(values, device=device)

    old = column(shard.old_log_probs)
    lengths = column(shard.lengths)
    segments, first = shard.segment_index, first_segments(shard, shard.spans())
    if first is not None and segments is not None:
        segments = segments + np.repeat(first[:-1], shard.lengths)
    inputs = PolicyLossInputs(
        log_probs=old,
        behaviour_log_probs=column(shard.behaviour_log_probs),
        advantages=column(shard.advantages),
        mask=column(shard.loss_mask),
        weights=column(shard.weights),
        sequence_index=torch.arange(len(lengths), device=device).repeat_interleave(lengths),
        num_sequences=len(lengths),
        old_log_probs=old,
        segment_index=None if segments is None else column(segments),
        num_segments=0 if first is None else max(int(first[-1]), 1),
        ages=None if shard.segment_ages is None else column(shard.segment_ages),
    )
    statistics = policy_loss(inputs, algorithm).statistics
    return 1.0 / mean_weight(over_all_ranks(statistics, group))


# Advantages completed by the trainer: those from token rewards, log-probs or sums over all ranks.


def with_token_advantages(
    shards: Sequence[TrainShard], algorithm: AlgorithmConfig, device: torch.device, group: dist.ProcessGroup
) -> tuple[list[TrainShard], dict[str, float]]:
    """(the shards of a rollout with their final advantages and returns, `advantage/*` metrics equal on all ranks).

    Every rank of a data-parallel rank's model holds the whole columns and computes the same numbers. A collective,
    unless there are only advantages of whole rollouts: then the shards are returned unchanged.

    Args:
        shards: of all optimizer steps, with the log-probs that the advantages need.
        group: the data-parallel group.
    """
    if not is_token_level(algorithm):
        return list(shards), {}
    return completed(
        shards, algorithm, _over(group, dist.ReduceOp.SUM, device), _over(group, dist.ReduceOp.MAX, device)
    )


def completed(
    shards: Sequence[TrainShard], algorithm: AlgorithmConfig, add: Reduce, highest: Reduce
) -> tuple[list[TrainShard], dict[str, float]]:
    """`with_token_advantages`, given the sums and maxima over data-parallel ranks."""
    found = token_advantages([_columns(shard, algorithm) for shard in shards], algorithm, add)
    final = [replace(s, advantages=f.advantages, returns=f.returns) for s, f in zip(shards, found, strict=True)]
    masks = [shard.loss_mask for shard in final]
    return final, advantage_metrics([shard.advantages for shard in final], masks, add, highest)


def _columns(shard: TrainShard, algorithm: AlgorithmConfig) -> TokenColumns:
    bypass = algorithm.correction.reference == "rollout"  # the old policy is the sampling policy in this case
    policy = shard.behaviour_log_probs if bypass else shard.old_log_probs
    return TokenColumns(
        lengths=shard.lengths,
        mask=shard.loss_mask,
        advantages=shard.advantages,
        rewards=shard.rewards,
        policy_log_probs=policy if needs_policy_log_probs(algorithm) else None,
        reference_log_probs=shard.reference_log_probs,
        teacher_log_probs=shard.teacher_log_probs,
        values=shard.values,
        pieces=shard.pieces,
        num_pieces=shard.num_pieces,
    )


def _over(group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType, device: torch.device) -> Reduce:
    def reduce(values: NDArray[np.float64]) -> NDArray[np.float64]:
        tensor = torch.as_tensor(values, dtype=torch.float64, device=device).clone()
        dist.all_reduce(tensor, op=operation, group=group)
        return tensor.cpu().numpy()

    return reduce
