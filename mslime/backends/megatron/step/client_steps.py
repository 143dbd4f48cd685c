"""Training steps that clients of `mslime serve` compose themselves: a loss by name, an optimizer step by its
numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mslime.algorithms.losses import LossOutput, client_loss
from mslime.algorithms.statistics import LossStatistics, finalise
from mslime.backends.megatron.step.adapters import AdapterShare, joint_pass
from mslime.backends.megatron.step.batches import MicroBatch, on_device
from mslime.backends.megatron.step.optimizer import parts_of
from mslime.backends.megatron.step.reductions import over_all_ranks
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.errors import TrainerError
from mslime.config.serve import AdamParams
from mslime.data.client_batch import ClientShard


@dataclass(frozen=True)
class RankPassResult:
    """Loss and log-probs of a pass.

    Attributes:
        loss: of the data of all ranks.
        log_probs: [N] float32 of the targets of this rank's shard, 0 if there is none; the same on all ranks of a
            data-parallel rank.
    """

    loss: float
    log_probs: NDArray[np.float32]


def forward(trainer: MegatronTrainer, part: ClientShard) -> RankPassResult:
    """Losses and log-probs of a client's data. A collective; the adapter must be in the model, as for the next one."""
    out = _column(trainer, part)
    total = LossStatistics.zeros(trainer.device)

    def read(batch: MicroBatch, output: Tensor) -> Tensor:
        nonlocal total
        batch = _with_targets(part, batch, trainer.device)
        found = trainer.runner.target_log_probs(batch, output)
        if trainer.parallel.counts:
            total = total.merge(_of(part, batch, found).statistics)
        return found

    with torch.no_grad(), trainer.weights_in_place():
        out.copy_(trainer.runner.per_token(part.shard, read))
        return RankPassResult(finalise(over_all_ranks(total))["loss/total"], out.cpu().numpy())


def forward_backward(trainer: MegatronTrainer, part: ClientShard) -> RankPassResult:
    """`forward`, then add the gradient of the loss to the adapter's. A collective.

    Raises:
        TrainerError: the loss is not finite; gradients since the last step are dropped then.
    """
    out = _column(trainer, part)
    loss = partial(_loss, trainer, part, out=out)
    try:
        metrics = trainer.accumulate(lambda: trainer.runner.add_gradients(part.shard, loss))
    except TrainerError:
        trainer.forget_gradients()  # the buffers contain non-finite values
        raise
    return RankPassResult(metrics["loss/total"], _whole(trainer, out))


def joint_forward_backward(
    trainers: Mapping[str, MegatronTrainer], parts: Mapping[str, ClientShard]
) -> dict[str, RankPassResult | TrainerError]:
    """`forward_backward` of several adapters in one pass (`joint_pass`); none of them is in the model. A collective.

    Each adapter's results equal those of a separate pass bit for bit, even if another one fails.

    Returns:
        By name the result, or the error that every rank found alike.
    """
    shares: dict[str, AdapterShare] = {}
    asides: dict[str, list[Tensor]] = {}
    outs: dict[str, Tensor] = {}
    for name, part in parts.items():
        trainer = trainers[name]
        outs[name] = out = _column(trainer, part)
        shares[name] = AdapterShare(trainer, part.shard, partial(_loss, trainer, part, out=out))
        asides[name] = trainer.gradients_aside()

    def keep(name: str, statistics: LossStatistics) -> RankPassResult:
        trainer = trainers[name]
        loss = trainer.keep_gradients(statistics)["loss/total"]
        trainer.take_back(asides[name])
        return RankPassResult(loss, _whole(trainer, outs[name]))

    return joint_pass(shares, keep)


def adam_step(trainer: MegatronTrainer, params: AdamParams) -> dict[str, float]:
    """One optimizer step on the adapter's gradients, with these numbers. A collective.

    Returns:
        `grad_norm` before clipping, and `lr`, equal on all ranks.

    Raises:
        TrainerError: there are no gradients, or one is not finite.
    """
    trainer.schedule.max_lr = trainer.schedule.min_lr = params.lr
    trainer.schedule.start_wd = trainer.schedule.end_wd = params.weight_decay
    for part in parts_of(trainer.optimizer):
        part.config.clip_grad = params.clip or math.inf
    for group in trainer.optimizer.param_groups:
        group["max_lr"] = group["min_lr"] = params.lr
        group["betas"], group["eps"] = (params.beta1, params.beta2), params.eps
    return trainer.apply_gradients()


def forget_moments(trainer: MegatronTrainer) -> None:
    """Reset Adam's moments and counts to those before the first step."""
    for part in parts_of(trainer.optimizer):
        if part.optimizer is None:
            continue
        for state in part.optimizer.state.values():
            for moment in ("exp_avg", "exp_avg_sq", "step"):
                if isinstance(held := state.get(moment), Tensor):
                    held.zero_()
                elif held is not None:
                    state[moment] = 0
        for group in part.optimizer.param_groups:
            if isinstance(count := group.get("step"), Tensor):
                count.zero_()
            elif count is not None:
                group["step"] = 0
    trainer.schedule.num_steps = trainer.step = 0


def _column(trainer: MegatronTrainer, part: ClientShard) -> Tensor:
    """[N] float32 zeros, for log-probs of the targets."""
    return torch.zeros(len(part.targets), dtype=torch.float32, device=trainer.device)


def _whole(trainer: MegatronTrainer, out: Tensor) -> NDArray[np.float32]:
    """The values written by the last stage's ranks, on all ranks. A collective."""
    if trainer.parallel.is_last_stage:
        trainer.parallel.sum_over_context_ranks(out)
    return trainer.parallel.broadcast_from_last_stage(out).cpu().numpy()


def _with_targets(part: ClientShard, batch: MicroBatch, device: torch.device) -> MicroBatch:
    labels = batch.slicer.at_targets(part.targets).astype(np.int64)
    return replace(batch, labels=on_device(labels, device))


def _of(part: ClientShard, batch: MicroBatch, log_probs: Tensor) -> LossOutput:
    return client_loss(
        part.loss, log_probs, batch.loss_mask, batch.weights, batch.advantages, batch.behaviour_log_probs
    )


def _loss(trainer: MegatronTrainer, part: ClientShard, batch: MicroBatch, output: Tensor, out: Tensor) -> LossOutput:
    batch = _with_targets(part, batch, trainer.device)
    found = trainer.runner.target_log_probs(batch, output)
    batch.slicer.scatter_targets(found.detach(), out)
    return _of(part, batch, found)
