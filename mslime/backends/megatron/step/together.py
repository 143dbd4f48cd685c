"""Optimizer steps of several adapters whose micro-batches go through the model in one pass.

The pipeline fills and drains once for all of them. Each micro-batch computes with its own adapter, forward, recomputed
and backward, and leaves its gradients in that adapter's buffers; reduction, clipping and step are each adapter's own.
So every number is that of its own run, bit for bit, as where adapters take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from mslime.algorithms.losses import LossOutput
from mslime.algorithms.statistics import LossStatistics
from mslime.backends.megatron.model.adapters import InOnePass
from mslime.backends.megatron.step.batches import MicroBatch
from mslime.backends.megatron.step.pipeline import Lane, RouteHooks, run_lanes
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.errors import TrainerError
from mslime.data.shard import TrainShard

Outcome = list[dict[str, float]] | TrainerError
"""What `MegatronTrainer.update` gives, or the error that every rank found alike."""


@dataclass(frozen=True)
class AdapterShare:
    """What an adapter has in a pass.

    Attributes:
        loss: of a micro-batch and the model's output for it, on the last stage.
        routes: that its routers follow.
    """

    trainer: MegatronTrainer
    shard: TrainShard
    loss: Callable[[MicroBatch, Tensor], LossOutput]
    routes: RouteHooks | None = None


@dataclass(frozen=True)
class _Part:
    """An adapter's part of a step."""

    trainer: MegatronTrainer
    shard: TrainShard
    statistics: LossStatistics
    seen: Tensor | None

    def end(self, began_at: float) -> dict[str, float]:
        """The optimizer step on what the pass has left; metrics of it."""
        trainer = self.trainer
        trainer.reduce_gradients()
        metrics = trainer.keep_gradients(self.statistics) | trainer.apply_gradients()
        metrics |= trainer.speed(len(self.shard.tokens), time.perf_counter() - began_at)
        return metrics | trainer.seen(self.shard, self.seen)


def update_together(
    trainers: Mapping[str, MegatronTrainer], prepared: Mapping[str, Sequence[TrainShard]]
) -> dict[str, Outcome]:
    """`MegatronTrainer.update` of several adapters: their first shards in one pass, then their second ones, and so on.

    An adapter whose loss or gradient is not finite takes no further part; the others' numbers are what they are without
    it. A collective.

    Args:
        trainers: by adapter, none of which is in the model, all on one base.
        prepared: by adapter, shards of its `prepare`.

    Raises:
        EngineError: the rollout's routes cannot be replayed; the ranks do not stand at the same place any more.
    """
    found: dict[str, Outcome] = {name: [] for name in trainers}
    for index in range(max(map(len, prepared.values()), default=0)):
        left = [n for n, outcome in found.items() if not isinstance(outcome, TrainerError) and index < len(prepared[n])]
        began_at = time.perf_counter()
        parts = _pass({name: (trainers[name], prepared[name][index]) for name in left}, index)
        for name, part in parts.items():
            outcome = _ended(part, began_at, len(parts))
            done = found[name]
            assert isinstance(done, list)
            found[name] = outcome if isinstance(outcome, TrainerError) else [*done, outcome]
    return found


def _pass(every: Mapping[str, tuple[MegatronTrainer, TrainShard]], index: int) -> dict[str, _Part]:
    """Forward and backward of these shards; gradients are in the buffers as this rank computed them."""
    seen: dict[str, Tensor | None] = {}
    shares: list[AdapterShare] = []
    for name, (trainer, shard) in every.items():
        seen[name] = trainer.watch.column(shard, trainer.device)
        loss = trainer.runner.loss_of(trainer.weight_scale(shard), seen[name])
        shares.append(AdapterShare(trainer, shard, loss, trainer.routing.gradient_routes(shard, index)))
    found = gradients_in_one_pass(shares)
    return {
        name: _Part(share.trainer, share.shard, statistics, seen[name])
        for name, share, statistics in zip(every, shares, found, strict=True)
    }


def gradients_in_one_pass(shares: Sequence[AdapterShare]) -> list[LossStatistics]:
    """Forward and backward of all shares in one pass. A collective.

    Each trainer's buffers hold its own gradients alone, as this rank computed them: `TrainedModel.reduce_gradients` and
    `keep_gradients` come next, one adapter after the other, with its modules in the model.

    Args:
        shares: of adapters none of which is in the model, all on one base.

    Returns:
        This rank's share of the statistics of each.
    """
    trainers = [share.trainer for share in shares]
    first = trainers[0]
    transformer, replay = first.transformer, first.base.replay
    # The schedule would reduce the gradients of the one model that it knows.
    transformer.finalize_model_grads_func = transformer.grad_scale_func = transformer.no_sync_func = None
    lanes: list[Lane] = []
    with ExitStack() as stack:
        at_once = stack.enter_context(InOnePass([t.placed for t in trainers if t.placed is not None]))
        stack.enter_context(nullcontext() if replay is None else replay.replaying(gradient=True))
        for share in shares:
            trainer = share.trainer
            assert trainer.placed is not None
            trainer.clear_gradients()
            enter = partial(at_once.choose, trainer.placed)
            lanes.append(trainer.runner.gradient_lane(share.shard, share.loss, share.routes, enter))
            for chunk in trainer.wrapped:
                stack.enter_context(chunk.no_sync())
        run_lanes(lanes, first.on_micro_batch, forward_only=False)
    return [lane.statistics for lane in lanes]


def _ended(part: _Part, began_at: float, together: int) -> dict[str, float] | TrainerError:
    part.trainer.put_in()
    try:
        return part.end(began_at) | {"perf/adapters_together": float(together)}
    except TrainerError as error:
        return error
    finally:
        part.trainer.take_out()
