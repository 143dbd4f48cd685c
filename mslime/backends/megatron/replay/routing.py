"""Routes of each pass of a step: the rollout's (r3), the trainer's own from its first pass (r2), or none.

Binds `RoutingReplay` to shards and passes. In r3 and r2 a shard's old-log-prob pass and gradient pass use the same
experts; a reference policy always routes by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mslime.backends.megatron.parallel import ParallelState
from mslime.backends.megatron.replay.route_rows import RouteRows, ShardRoutes, check_routes
from mslime.backends.megatron.replay.routing_replay import ReplayReport, RoutingReplay, Tally, complete
from mslime.backends.megatron.step.batches import PADDING, MicroBatch, SequenceSlicer
from mslime.backends.megatron.step.pipeline import RouteHooks
from mslime.config.base import ReplayMode
from mslime.convert.families import ModelFields
from mslime.data.probe import RoutedRows
from mslime.data.shard import TrainShard

Records = dict[Hashable, Tensor]


@dataclass(frozen=True)
class _LayOut(RouteHooks):
    """Replays the rows that `rows_of` gives for each micro-batch."""

    replay: RoutingReplay
    rows_of: Callable[[MicroBatch], RouteRows]
    tally: Tally

    def before_forward(self, chunk: int, batch: MicroBatch) -> None:
        self.replay.lay_out(chunk, self.rows_of(batch), self.tally)


@dataclass(frozen=True)
class _Keep(RouteHooks):
    """Keeps the routers' choices for each micro-batch."""

    replay: RoutingReplay

    def after_forward(self, chunk: int, batch: MicroBatch) -> None:
        self.replay.keep(chunk, batch.index)


@dataclass(frozen=True)
class _Observe(RouteHooks):
    """Keeps the routers' choices for each token."""

    replay: RoutingReplay
    slicers: dict[Hashable, SequenceSlicer] = field(default_factory=dict[Hashable, SequenceSlicer])

    def after_forward(self, chunk: int, batch: MicroBatch) -> None:
        self.replay.keep(chunk, batch.index)
        self.slicers[batch.index] = batch.slicer

    def chosen(self) -> RoutedRows:
        """Choices for the tokens of this rank's routers."""
        tokens, experts = [], []
        for index, slicer in self.slicers.items():
            known = np.flatnonzero(slicer.layer_rows != PADDING)
            tokens.append(slicer.layer_rows[known])
            experts.append(complete(self.replay.records[index]).cpu().numpy()[known])
        return RoutedRows(np.concatenate(tokens), self.replay.layer_ids, np.concatenate(experts))


@dataclass
class Routing:
    """The routes of one rank's passes.

    Attributes:
        mode: as configured; off for a model without routers and for supervised training.
        replay: attached to the routers; None when off.
        model: number of experts and top-k, to check routes against.
        parallel: this rank's parallel state.
        device: device of the rows.
        max_age: in weight versions; r3 does not replay older routes. None: replays all.
    """

    mode: ReplayMode
    replay: RoutingReplay | None
    model: ModelFields
    parallel: ParallelState
    device: torch.device
    max_age: int | None = None
    _recorded: dict[int, Records] = field(default_factory=dict)
    _tally: Tally | None = None

    @contextmanager
    def old_log_prob_pass(self, shard: TrainShard, step: int) -> Iterator[RouteHooks | None]:
        """Routes of the pass before the shard's first gradient; r2 records them for `step`."""
        if self.replay is None:
            yield None
        elif self.mode == "r3":
            with self.replay.replaying(gradient=False):
                yield self._laid_out(self.replay, shard, step)
        else:
            with self.replay.recording():
                yield _Keep(self.replay)
                self._recorded[step] = dict(self.replay.records)

    @contextmanager
    def observed_pass(self) -> Iterator[tuple[RouteHooks | None, Callable[[], RoutedRows | None]]]:
        """A pass in which the routers choose by themselves: its hooks, and a function that returns their choice after
        it (None if nothing is attached to them, or this stage has none)."""
        if self.replay is None or not self.replay.layers:
            yield None, lambda: None
            return
        with self.replay.recording():
            observed = _Observe(self.replay)
            yield observed, observed.chosen

    @contextmanager
    def gradient_pass(self, shard: TrainShard, step: int) -> Iterator[RouteHooks | None]:
        """Routes of the shard's gradient pass, the same as in its old-log-prob pass."""
        if self.replay is None:
            yield None
            return
        with self.replay.replaying(gradient=True):
            yield self.gradient_routes(shard, step)

    def gradient_routes(self, shard: TrainShard, step: int) -> RouteHooks | None:
        """Routes of `gradient_pass`, for one of several that share a pass: inside `RoutingReplay.replaying`."""
        return None if self.replay is None else self._laid_out(self.replay, shard, step)

    def _laid_out(self, replay: RoutingReplay, shard: TrainShard, step: int) -> RouteHooks:
        records: Records = {}
        if self.mode == "r3":
            check_routes(shard, self.model.num_experts, self.model.top_k)
            routes = ShardRoutes.from_rollout(shard, replay.layer_ids, self.max_age)
        else:
            records = self._recorded.pop(step)
            routes = ShardRoutes.to_record(shard, replay.layer_ids)

        def rows_of(batch: MicroBatch) -> RouteRows:
            recorded = complete(records[batch.index]) if self.mode == "r2" else None
            return routes.rows(batch.slicer, self.device, recorded)

        self._tally = replay.tally()
        return _LayOut(replay, rows_of, self._tally)

    def report(self, shard: TrainShard) -> ReplayReport | None:
        """Replay statistics of this trainer's last pass, over all ranks; None when off. A collective.

        Raises:
            AssertionError: the consumed routes are not exactly those of the step.
        """
        if self.replay is None:
            return None
        assert self._tally is not None, "no pass has run"
        if self.mode == "r2":
            return self.replay.report(self._tally, None)
        speaks = self.parallel.tp_rank == 0 and self.parallel.rows.cp_rank == 0
        routes = ShardRoutes.from_rollout(shard, self.replay.layer_ids, self.max_age)
        return self.replay.report(self._tally, routes.fingerprint(self.device) if speaks else 0)
