"""Several adapters on one base; each has its own trainer and takes its turn in the model.

An adapter's trainer has its own modules, gradient buffers, optimizer, schedule, step count, loss and recorded routes.
Only the frozen base is shared. While a trainer works, only its modules are in the model. So its results equal those of
a separate run bit for bit, regardless of the other adapters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TypeVar

from torch import Tensor

from mslime.algorithms.losses import LossOutput
from mslime.algorithms.statistics import LossStatistics
from mslime.backends.megatron.model.lora_layers import in_one_pass
from mslime.backends.megatron.step.base_model import Base
from mslime.backends.megatron.step.batches import MicroBatch
from mslime.backends.megatron.step.pipeline import Lane, RouteHooks, run_lanes
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.errors import ConfigError, TrainerError
from mslime.config.resolved import PolicySpec
from mslime.data.shard import TrainShard

SHARED = (
    "checkpoint", "layout", "megatron", "device", "replay", "teacher", "fp8", "asked_engine_dtype", "weights.senders",
    "train.logit_bytes",
)  # fmt: skip
"""Fields of a spec that belong to the base."""


class AdapterTrainers:
    """One rank's trainers of adapters, by name. All ranks call the same methods in the same order.

    Args:
        base: model of this rank, without adapters.
    """

    def __init__(self, base: Base) -> None:
        self.base = base
        self._trainers: dict[str, MegatronTrainer] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._trainers)

    def create(self, name: str, spec: PolicySpec) -> None:
        """Create an adapter and its trainer. A collective.

        Args:
            spec: the same as for a run of this adapter alone.

        Raises:
            ConfigError: the name is taken, or `spec` is not of an adapter on this base. The base stays unchanged.
            CheckpointError: the adapter to start from is of another model, rank, scale or targets.
        """
        if name in self._trainers:
            raise ConfigError("adapters.name", name, "already in use", "give each adapter another name")
        self._check(name, spec)
        trainer = MegatronTrainer.on(self.base, spec)
        trainer.take_out()
        self._trainers[name] = trainer

    def free(self, name: str) -> None:
        """Delete an adapter and free its memory."""
        self._of(name)
        del self._trainers[name]

    @contextmanager
    def placed(self, name: str) -> Iterator[MegatronTrainer]:
        """Context manager: the adapter's trainer with its modules in the model, usable like a single run's trainer.

        Raises:
            ConfigError: the adapter does not exist.
        """
        trainer = self._of(name)
        trainer.put_in()
        try:
            yield trainer
        finally:
            trainer.take_out()

    def of(self, names: Iterable[str]) -> dict[str, MegatronTrainer]:
        """Trainers of these adapters for a shared pass (`joint_pass`); none of the adapters is in the model.

        Raises:
            ConfigError: an adapter does not exist.
        """
        return {name: self._of(name) for name in names}

    def _of(self, name: str) -> MegatronTrainer:
        if name not in self._trainers:
            raise ConfigError(
                "adapters.name", name, f"unknown; there are {', '.join(self._trainers) or 'none'}", "use one of them"
            )
        return self._trainers[name]

    def _check(self, name: str, spec: PolicySpec) -> None:
        if not spec.lora.on:
            raise ConfigError(f"adapters.{name}.lora.rank", 0, "must be above 0", "set it; 8 and 16 are common")
        for field in SHARED:
            own, shared = attrgetter(field)(spec), attrgetter(field)(self.base.spec)
            if own != shared:
                raise ConfigError(f"adapters.{name}: {field}", str(own), f"must be the base's, {shared}", "remove it")
        if spec.reference not in (None, spec.checkpoint, self.base.spec.reference):
            raise ConfigError(
                f"adapters.{name}: model.reference_path", str(spec.reference), "the base does not have these weights",
                "use the base, or one reference for all adapters",
            )  # fmt: skip


# Passes that several adapters share: optimizer steps of runs, and gradients for clients of `mslime serve`.
#
# The pipeline fills and drains once for all of them. Each micro-batch computes with its own adapter, forward,
# recomputed and backward, and leaves its gradients in that adapter's buffers; reduction, clipping and step are per
# adapter. So results equal those of separate runs bit for bit, as if adapters took turns.


T = TypeVar("T")


@dataclass(frozen=True)
class AdapterShare:
    """An adapter's part in a pass.

    Attributes:
        loss: of a micro-batch and the model's output for it, on the last stage.
        routes: replayed by its routers.
    """

    trainer: MegatronTrainer
    shard: TrainShard
    loss: Callable[[MicroBatch, Tensor], LossOutput]
    routes: RouteHooks | None = None


def joint_update(
    trainers: Mapping[str, MegatronTrainer], prepared: Mapping[str, list[TrainShard]]
) -> dict[str, list[dict[str, float]] | TrainerError]:
    """`MegatronTrainer.update` of several adapters: their first shards in one pass, then their second ones, and so on.

    An adapter whose loss or gradient is not finite is removed; the others' results do not depend on it. A collective.

    Args:
        trainers: by adapter, none of which is in the model, all on one base.
        prepared: by adapter, shards of its `prepare`.

    Returns:
        By adapter what `update` returns, or the error that every rank found alike.

    Raises:
        EngineError: the rollout's routes cannot be replayed; the ranks are then no longer in step.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in prepared}
    failed: dict[str, TrainerError] = {}
    for index in range(max(map(len, prepared.values()), default=0)):
        left = {name: shards[index] for name, shards in prepared.items() if name not in failed and index < len(shards)}
        for name, metrics in _one_step(trainers, left, index).items():
            if isinstance(metrics, TrainerError):
                failed[name] = metrics
            else:
                found[name].append(metrics)
    return found | failed


def _one_step(
    trainers: Mapping[str, MegatronTrainer], shards: Mapping[str, TrainShard], index: int
) -> dict[str, dict[str, float] | TrainerError]:
    began_at = time.perf_counter()
    seen: dict[str, Tensor | None] = {}
    shares: dict[str, AdapterShare] = {}
    for name, shard in shards.items():
        trainer = trainers[name]
        seen[name] = trainer.watch.column(shard, trainer.device)
        loss = partial(trainer.runner.loss, weight_scale=trainer.weight_scale(shard), seen=seen[name])
        shares[name] = AdapterShare(trainer, shard, loss, trainer.routing.laid_out(shard, index))

    def step(name: str, statistics: LossStatistics) -> dict[str, float]:
        trainer, shard = trainers[name], shards[name]
        metrics = trainer.keep_gradients(statistics) | trainer.apply_gradients()
        metrics |= trainer.speed(len(shard.tokens), time.perf_counter() - began_at)
        return metrics | trainer.seen(shard, seen[name]) | {"perf/adapters_together": float(len(shards))}

    return joint_pass(shares, step)


def joint_pass(
    shares: Mapping[str, AdapterShare], finish: Callable[[str, LossStatistics], T]
) -> dict[str, T | TrainerError]:
    """Forward and backward of all shares in one pass. A collective.

    Args:
        shares: by adapter; all adapters are on one base and none is in the model.
        finish: called for each adapter in turn, with its modules in the model and its reduced gradients alone in its
            buffers, with this rank's share of its statistics. `TrainedModel.keep_gradients` comes first.

    Returns:
        By adapter what `finish` returned, or the TrainerError that it raised on every rank alike.
    """
    found: dict[str, T | TrainerError] = {}
    for (name, share), statistics in zip(shares.items(), _gradients([*shares.values()]), strict=True):
        share.trainer.put_in()
        try:
            share.trainer.reduce_gradients()
            found[name] = finish(name, statistics)
        except TrainerError as error:
            found[name] = error
        finally:
            share.trainer.take_out()
    return found


def _gradients(shares: list[AdapterShare]) -> list[LossStatistics]:
    """Run the pass and return this rank's statistics of each share; unreduced gradients are in each trainer's
    buffers."""
    trainers = [share.trainer for share in shares]
    first = trainers[0]
    transformer, replay = first.transformer, first.base.replay
    # The schedule would reduce the gradients of only one model.
    transformer.finalize_model_grads_func = transformer.grad_scale_func = transformer.no_sync_func = None
    lanes: list[Lane] = []
    with ExitStack() as stack:
        choose = stack.enter_context(in_one_pass([t.placed for t in trainers if t.placed is not None]))
        stack.enter_context(nullcontext() if replay is None else replay.replaying(gradient=True))
        for share in shares:
            trainer = share.trainer
            assert trainer.placed is not None
            trainer.clear_gradients()
            enter = partial(choose, trainer.placed)
            lanes.append(trainer.runner.gradient_lane(share.shard, share.loss, share.routes, enter))
            for chunk in trainer.wrapped:
                stack.enter_context(chunk.no_sync())
        run_lanes(lanes, first.on_micro_batch, forward_only=False)
    return [lane.statistics for lane in lanes]
