"""Where the trainer completes advantages: those made of token rewards, of log-probs or of sums over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mslime.algorithms.advantages_tokens import (
    Reduce,
    TokenColumns,
    advantage_metrics,
    is_token_level,
    needs_policy_log_probs,
    token_advantages,
)
from mslime.config.algorithm import AlgorithmConfig
from mslime.data.shard import TrainShard


def with_token_advantages(
    shards: Sequence[TrainShard], algorithm: AlgorithmConfig, device: torch.device, group: dist.ProcessGroup
) -> tuple[list[TrainShard], dict[str, float]]:
    """(the shards of a rollout with their final advantages and returns, `advantage/*` metrics equal on all ranks).

    Every rank of a data-parallel rank's model holds the whole columns and computes the same numbers. A collective,
    except when the advantages of whole rollouts are all there is: then the shards come back as they are.

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
    bypass = algorithm.correction.reference == "rollout"  # then the old policy is the one that sampled
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
