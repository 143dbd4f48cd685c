"""Steps that clients of `mslime serve` put together themselves: a loss by name, an optimizer's step by its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mslime.algorithms.client_losses import client_loss
from mslime.algorithms.losses import LossOutput
from mslime.algorithms.statistics import LossStatistics, finalise
from mslime.backends.megatron.step.adapter_slots import AdapterTrainers
from mslime.backends.megatron.step.batches import MicroBatch, on_device
from mslime.backends.megatron.step.optimizer import parts_of
from mslime.backends.megatron.step.reductions import over_all_ranks
from mslime.backends.megatron.step.together import AdapterShare, gradients_in_one_pass
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.errors import TrainerError
from mslime.config.serve import AdamParams
from mslime.data.client_batch import ClientShard


@dataclass(frozen=True)
class RankPassResult:
    """What a pass found.

    Attributes:
        loss: of the data of all ranks.
        log_probs: [N] float32 of the targets of this rank's shard, 0 where there is none; the same on all ranks of a
            data-parallel rank.
    """

    loss: float
    log_probs: NDArray[np.float32]


class ClientTrainers(AdapterTrainers):
    """One rank's trainers of clients' adapters. All ranks call the same methods in the same order."""

    def pass_over(self, name: str, part: ClientShard, *, backward: bool) -> RankPassResult:
        """A forward pass, and with `backward` one that adds the gradient of the loss to the adapter's. A collective.

        Raises:
            TrainerError: the loss is not finite; gradients since the last step are dropped then.
        """
        with self.placed(name) as trainer:
            out = _column(trainer, part)
            if backward:
                return RankPassResult(self._add_gradients(trainer, part, out), _whole(trainer, out))
            with torch.no_grad(), trainer.weights_in_place():
                loss = finalise(over_all_ranks(self._forward(trainer, part, out)))["loss/total"]
            return RankPassResult(loss, out.cpu().numpy())

    def add_together(self, parts: Mapping[str, ClientShard]) -> dict[str, RankPassResult | TrainerError]:
        """`pass_over` with `backward` of several adapters in one pass (`gradients_in_one_pass`): each one's numbers are
        those of a pass of its own, bit for bit, whatever becomes of the others. A collective.

        Returns:
            By name what was found, or the error that every rank found alike.
        """
        shares: list[AdapterShare] = []
        asides: list[list[Tensor]] = []
        outs: list[Tensor] = []
        for name, part in parts.items():
            trainer = self._of(name)
            out = _column(trainer, part)
            shares.append(AdapterShare(trainer, part.shard, partial(_loss, trainer, part, out=out)))
            asides.append(trainer.gradients_aside())
            outs.append(out)
        statistics = gradients_in_one_pass(shares)
        found: dict[str, RankPassResult | TrainerError] = {}
        for name, own, aside, out in zip(parts, statistics, asides, outs, strict=True):
            with self.placed(name) as trainer:
                trainer.reduce_gradients()
                try:
                    loss = trainer.keep_gradients(own)["loss/total"]
                except TrainerError as error:
                    found[name] = error
                    continue
                trainer.take_back(aside)
                found[name] = RankPassResult(loss, _whole(trainer, out))
        return found

    def _add_gradients(self, trainer: MegatronTrainer, part: ClientShard, out: Tensor) -> float:
        loss = partial(_loss, trainer, part, out=out)
        try:
            metrics = trainer.accumulate(lambda: trainer.runner.add_gradients(part.shard, loss))
        except TrainerError:
            trainer.forget_gradients()  # the buffers hold what is not finite
            raise
        return metrics["loss/total"]

    def _forward(self, trainer: MegatronTrainer, part: ClientShard, out: Tensor) -> LossStatistics:
        total = LossStatistics.zeros(trainer.device)

        def read(batch: MicroBatch, output: Tensor) -> Tensor:
            nonlocal total
            batch = _with_targets(part, batch, trainer.device)
            found = trainer.runner.target_log_probs(batch, output)
            if trainer.parallel.counts:
                total = total.merge(_of(part, batch, found).statistics)
            return found

        out.copy_(trainer.runner.per_token(part.shard, read))
        return total

    def adam_step(self, name: str, params: AdamParams) -> dict[str, float]:
        """One optimizer step on the adapter's gradients, with these numbers. A collective.

        Returns:
            `grad_norm` before clipping, and `lr`, equal on all ranks.

        Raises:
            TrainerError: there are no gradients, or one is not finite.
        """
        with self.placed(name) as trainer:
            trainer.schedule.max_lr = trainer.schedule.min_lr = params.lr
            trainer.schedule.start_wd = trainer.schedule.end_wd = params.weight_decay
            for part in parts_of(trainer.optimizer):
                part.config.clip_grad = params.clip or math.inf
            for group in trainer.optimizer.param_groups:
                group["max_lr"] = group["min_lr"] = params.lr
                group["betas"], group["eps"] = (params.beta1, params.beta2), params.eps
            return trainer.apply_gradients()

    def load_state(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Continue from a saved adapter; without `optimizer` from its factors alone. A collective."""
        self.load(name, directory, new_run=True)
        if not optimizer:
            with self.placed(name) as trainer:
                _forget_moments(trainer)


def _forget_moments(trainer: MegatronTrainer) -> None:
    """Adam's moments and counts as before the first step."""
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
    """What the last stage's ranks have written, on all ranks. A collective."""
    if trainer.parallel.is_last_stage:
        trainer.parallel.sum_over_context_ranks(out)
    return trainer.parallel.broadcast_from_last_stage(out).cpu().numpy()


def _with_targets(part: ClientShard, batch: MicroBatch, device: torch.device) -> MicroBatch:
    labels = batch.slicer.at_targets(part.targets, 0).astype(np.int64)
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
