"""Routing replay: the trainer's routers use the experts that were recorded elsewhere, in every pass of a step.

R3 replays the generation engine's experts in the old-log-prob pass and in the gradient pass (arXiv 2510.11370). R2
records the routers' own choice in the old-log-prob pass and replays it in the gradient pass (arXiv 2507.18071). Only
the choice of experts is forced: gate values come from the current logits on those experts, so routers keep their
gradients. Rows without a known route (newest token, padding), and in R3 rows with routes older than
`train.replay_max_age`, are routed naturally, row by row.

One object per trainer rank, `RoutingReplay`, puts its own `LayerReplay` into the `router_replay` slot of
megatron-core's routers. There is no environment variable, global or patched function.

The micro-batch of a router's call is never guessed. A forward pass consumes the rows that were laid out for it; a
router that runs without any is recomputing inside a backward pass, and takes the rows of the oldest of its own forward
passes that is still to be recomputed. Layer by layer, every pipeline schedule runs backward passes in the order of the
forward passes, so this is exact with any number of micro-batches in flight. Rows used twice, never, or by the wrong
pass end the step with an error; nothing falls back silently to natural routing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import Router, TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mslime.backends.megatron.parallel import ParallelState
from mslime.backends.megatron.replay.route_rows import RouteRows, ShardRoutes, check_routes, row_hashes
from mslime.backends.megatron.step.batches import PADDING, MicroBatch, SequenceSlicer
from mslime.backends.megatron.step.pipeline import RouteHooks
from mslime.config.base import ReplayMode
from mslime.config.errors import ConfigError
from mslime.convert.families import ModelFields
from mslime.data.probe import RoutedRows
from mslime.data.routes import Routes
from mslime.data.shard import TrainShard


@dataclass
class RouterCounts:
    """Counts of this rank's routers in a trainer's part of a pass: int64 scalars.

    Attributes:
        rows: replayed (row, layer) pairs; `scored`, `covered`, `too_old`: those whose row's logits enter the loss, and
            of these the replayed ones and the ones too old to be replayed.
        fingerprint: sum of the hashes of replayed rows (`row_hashes`).
        agreed: by layer, replayed rows whose natural choice was the same set of experts; added to in place.
    """

    rows: Tensor
    scored: Tensor
    covered: Tensor
    too_old: Tensor
    fingerprint: Tensor
    agreed: dict[int, Tensor]


@dataclass(frozen=True)
class ReplayReport:
    """Replay statistics of all ranks' routers in one pass.

    Attributes:
        coverage: of the (row, layer) pairs whose row's logits enter the loss, the fraction that was replayed.
        too_old: of the same pairs, the fraction too old to be replayed; with `coverage` it sums to 1.
        agreement: by global layer id, the fraction of replayed rows whose natural choice was the same set of experts.
        fingerprint: order-independent sum over replayed rows and layers; the same in every layout.
        rows: replayed (row, layer) pairs.
    """

    coverage: float
    too_old: float
    agreement: dict[int, float]
    fingerprint: int
    rows: int

    def metrics(self) -> dict[str, float]:
        """Metrics by their names in `metrics.jsonl`; `agreement_min_layer` is the smallest agreement of a layer."""
        by_layer = list(self.agreement.values())
        mean, least = (float(np.mean(by_layer)), min(by_layer)) if by_layer else (1.0, 1.0)
        named = {f"replay/agreement_layer_{layer}": value for layer, value in self.agreement.items()}
        return {
            "replay/coverage": self.coverage,
            "replay/too_old": self.too_old,
            "replay/agreement": mean,
            "replay/agreement_min_layer": least,
            **named,
        }


class LayerReplay(RouterReplay):
    """Source of one router's top-k, in place of megatron-core's own object."""

    def __init__(self, layer_id: int, replaced: RouterReplay) -> None:
        super().__init__()
        instances = RouterReplay.global_router_replay_instances
        instances.pop()
        instances[instances.index(replaced)] = self
        self.layer_id = layer_id
        self.gradient = False
        self.experts_and_mask: tuple[Tensor, Tensor] | None = None
        self.to_recompute: deque[tuple[Tensor, Tensor]] = deque()
        self.agreed: Tensor | None = None

    def start(self, action: RouterReplayAction, *, gradient: bool, device: torch.device) -> None:
        """Begin a pass; `gradient` if backward passes follow the forward passes."""
        self.stop()
        self.set_router_replay_action(action)
        self.gradient = gradient
        self.agreed = torch.zeros((), dtype=torch.int64, device=device)

    def stop(self) -> None:
        """Natural routing again, nothing pending."""
        self.clear_router_replay_action()
        self.clear_indices()
        self.experts_and_mask = None
        self.to_recompute.clear()

    def lay_out(self, experts: Tensor, mask: Tensor) -> None:
        """Set the experts [rows, top-k] of the next forward pass, used where mask [rows] is set."""
        assert self.experts_and_mask is None, f"layer {self.layer_id}: its router did not request the last routes"
        self.experts_and_mask = (experts, mask)

    def check_used_up(self) -> None:
        """Check that a forward pass, and its recomputation if any, consumed every laid-out row."""
        assert self.experts_and_mask is None, f"layer {self.layer_id}: its router bypassed the replay"
        assert not self.to_recompute, f"layer {self.layer_id}: {len(self.to_recompute)} micro-batches never recomputed"

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Megatron-core calls this for its top-k: scores [rows, experts] -> values and indices [rows, top-k]."""
        assert default_compute_topk is not None
        if self.router_replay_action is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        if self.router_replay_action == RouterReplayAction.RECORD:
            values, indices = default_compute_topk(scores, topk, num_groups, group_topk)
            self.record_indices(indices.detach())
            return values, indices
        with torch.no_grad():
            _, natural = default_compute_topk(scores, topk, num_groups, group_topk)
        experts, mask = self._next_rows(natural)
        experts = experts.long()
        indices = torch.where(mask[:, None], experts, natural)
        return scores.gather(1, indices), indices

    def _next_rows(self, natural: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of this call; a forward pass compares `natural` [rows, top-k] with them."""
        if self.experts_and_mask is None:
            assert self.to_recompute, f"layer {self.layer_id}: its router ran without routes for the micro-batch"
            return self.to_recompute.popleft()
        experts, mask = self.experts_and_mask
        assert experts.shape == natural.shape, f"layer {self.layer_id}: routes {experts.shape}, router {natural.shape}"
        self.experts_and_mask = None
        if self.gradient and not torch.is_grad_enabled():  # inside an activation checkpoint: it will be recomputed
            self.to_recompute.append((experts, mask))
        # Experts of a replayed row are distinct, as are natural ones: equal sets without a sort.
        same = (natural[:, :, None] == experts[:, None]).any(-1).all(-1)
        assert self.agreed is not None
        self.agreed += (same & mask).sum()
        return experts, mask


class RoutingReplay:
    """Replay (and recording) of routes in every router of one trainer rank.

    A pass is one run of the pipeline schedule; several trainers may share it, each with its own tally:

        with replay.replaying(gradient=True):
            tally = replay.tally()
            ... before each model forward of chunk c: replay.lay_out(c, rows, tally)
        report = replay.report(tally, expected)

    Attributes:
        layer_ids: global (0-based) ids of this rank's MoE layers, over its virtual pipeline chunks in order.
        records: R2: [rows, layers, top-k] int16 by micro-batch, the routers' choices in the last recorded pass.
    """

    def __init__(self, chunks: Sequence[nn.Module], config: TransformerConfig) -> None:
        """Attach to the routers of these model chunks (unwrapped `GPTModel`s, in virtual-stage order).

        Raises:
            ConfigError: a router would route past the replay.
        """
        refuse_bypass(config)
        self.num_layers = config.num_layers
        self.chunks = [list(_attach(chunk)) for chunk in chunks]
        self.layers = [layer for chunk in self.chunks for layer in chunk]
        self.layer_ids = tuple(layer.layer_id for layer in self.layers)
        self.device = next(chunks[0].parameters()).device
        # Made here: a copy from the host in each micro-batch would wait for all work queued before it.
        self._layers_on_device = torch.tensor(self.layer_ids, dtype=torch.int64, device=self.device)
        self.records: dict[Hashable, Tensor] = {}

    def tally(self) -> RouterCounts:
        def zero() -> Tensor:
            return torch.zeros((), dtype=torch.int64, device=self.device)

        return RouterCounts(zero(), zero(), zero(), zero(), zero(), {layer: zero() for layer in self.layer_ids})

    @contextmanager
    def replaying(self, *, gradient: bool) -> Iterator[None]:
        """A pass whose forward passes use the rows laid out for them; checks at the end that all were used."""
        with self._action(RouterReplayAction.REPLAY_FORWARD, gradient):
            yield
            for layer in self.layers:
                layer.check_used_up()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A forward-only pass of natural routing; call `keep` after every model forward. Drops older records.

        Checks at the end that each micro-batch was recorded in every model chunk: a check of each would wait for it.
        """
        self.records.clear()
        with self._action(RouterReplayAction.RECORD, gradient=False):
            yield
            least = [experts.min() for experts in self.records.values() if experts.numel()]
            assert not least or int(torch.stack(least).min()) >= 0, "not recorded in every model chunk"

    @contextmanager
    def _action(self, action: RouterReplayAction, gradient: bool) -> Iterator[None]:
        for layer in self.layers:
            layer.start(action, gradient=gradient, device=self.device)
        try:
            yield
        finally:
            for layer in self.layers:
                layer.stop()

    def lay_out(self, chunk: int, rows: RouteRows, tally: RouterCounts) -> None:
        """Replay `rows` in the next forward pass of model chunk `chunk`, and count them in `tally`."""
        layers, first = self.chunks[chunk], sum(map(len, self.chunks[:chunk]))
        columns = slice(first, first + len(layers))
        experts = rows.experts[:, columns]
        for layer, of_layer in zip(layers, experts.unbind(1), strict=True):
            layer.agreed = tally.agreed[layer.layer_id]
            layer.lay_out(of_layer, rows.mask)
        hashes = row_hashes(experts, rows.keys, self._layers_on_device[columns])
        tally.rows += rows.mask.sum() * len(layers)
        tally.scored += rows.scored.sum() * len(layers)
        tally.covered += (rows.scored & rows.mask).sum() * len(layers)
        tally.too_old += (rows.scored & rows.too_old).sum() * len(layers)
        tally.fingerprint += (hashes * rows.mask[:, None]).sum()

    def keep(self, chunk: int, micro_batch: Hashable) -> None:
        """R2: record the routers' choices of `chunk` in the forward pass that just ended, as `micro_batch`."""
        for layer in self.chunks[chunk]:
            indices = layer.get_recorded_indices()
            assert indices is not None, f"layer {layer.layer_id}: its router bypassed the recording"
            if micro_batch not in self.records:
                shape = (len(indices), len(self.layer_ids), indices.shape[1])
                self.records[micro_batch] = torch.full(shape, -1, dtype=torch.int16, device=indices.device)
            self.records[micro_batch][:, self.layer_ids.index(layer.layer_id)] = indices.to(torch.int16)
            layer.clear_indices()

    def report(self, tally: RouterCounts, expected: int | None, group: dist.ProcessGroup | None = None) -> ReplayReport:
        """Sum the statistics of a pass over all trainer ranks. A collective.

        Args:
            expected: this rank's share of the rows to be consumed (`ShardRoutes.fingerprint` on one rank of each
                data-parallel rank and pipeline stage, 0 on the others); None to leave it unchecked (R2).
            group: all trainer ranks; None for the default group.

        Raises:
            AssertionError: rows were lost, used twice, or applied to another token than their own; a row whose logits
                enter the loss was neither replayed nor too old.
        """
        by_layer = torch.zeros(self.num_layers, 2, dtype=torch.int64, device=self.device)
        for layer in self.layers:
            by_layer[layer.layer_id, 0] = tally.agreed[layer.layer_id]
            by_layer[layer.layer_id, 1] = tally.rows // len(self.layers)
        counts = (tally.rows, tally.scored, tally.covered, tally.too_old, tally.fingerprint)
        totals = torch.stack([*counts, torch.tensor(expected or 0, device=self.device)])
        if dist.is_initialized():
            dist.all_reduce(by_layer, group=group)
            dist.all_reduce(totals, group=group)
        rows, scored, covered, too_old, fingerprint, due = totals.tolist()
        assert covered + too_old == scored, f"{scored} rows are scored, {covered} replayed and {too_old} too old"
        assert expected is None or fingerprint == due, (
            "the routes consumed are not those of the step, each exactly once"
        )
        of_layers = by_layer.tolist()
        return ReplayReport(
            coverage=covered / scored if scored else 1.0,
            too_old=too_old / scored if scored else 0.0,
            agreement={layer: agreed / n for layer, (agreed, n) in enumerate(of_layers) if n},
            fingerprint=fingerprint,
            rows=rows,
        )


def refuse_bypass(config: TransformerConfig) -> None:
    """Reject settings whose routers do not use only the replayed experts.

    Raises:
        ConfigError: naming the setting.
    """
    bypasses: list[tuple[str, object, bool, str]] = [
        ("moe_enable_routing_replay", config.moe_enable_routing_replay, not config.moe_enable_routing_replay,
         "routers have a replay slot only if it is on"),
        ("moe_router_fusion", config.moe_router_fusion, bool(config.moe_router_fusion),
         "the fused router kernel computes its own top-k and ignores the replay"),
        ("moe_router_load_balancing_type", config.moe_router_load_balancing_type,
         "sinkhorn" in config.moe_router_load_balancing_type, "sinkhorn bypasses the replay"),
        ("moe_expert_capacity_factor", config.moe_expert_capacity_factor, config.moe_expert_capacity_factor is not None,
         "a capacity drops replayed experts from tokens"),
        ("moe_router_force_load_balancing", config.moe_router_force_load_balancing,
         bool(config.moe_router_force_load_balancing), "gate values would come from random logits"),
        ("cuda_graph_impl", config.cuda_graph_impl, config.cuda_graph_impl != "none",
         "a captured graph replays the routes of its capture"),
        ("sequence_parallel", config.sequence_parallel,
         config.tensor_model_parallel_size > 1 and not config.sequence_parallel,
         "with tensor parallelism each rank routes its own rows only if sequence parallelism is on"),
        ("mtp_num_layers", config.mtp_num_layers, bool(config.mtp_num_layers),
         "the engine reports no routes for multi-token-prediction layers"),
    ]  # fmt: skip
    for name, value, bypassed, why in bypasses:
        if bypassed:
            raise ConfigError(
                f"megatron.{name}",
                value,
                f"not supported with routing replay: {why}",
                "change it, or set train.replay to off",
            )


def _attach(chunk: nn.Module) -> Iterator[LayerReplay]:
    """A `LayerReplay` in every router of a model chunk, in layer order. Raises ConfigError for unknown routers."""
    attached = 0
    for layer in chunk.decoder.layers:  # type: ignore[union-attr]
        if not isinstance(layer.mlp, MoELayer):
            continue
        router = layer.mlp.router
        if not isinstance(router, TopKRouter) or router.router_replay is None:
            raise ConfigError(
                "train.replay", type(router).__name__,
                f"the router of layer {layer.layer_number - 1} does not support replay",
                "use megatron-core's TopKRouter, or set train.replay to off",
            )  # fmt: skip
        router.router_replay = LayerReplay(layer.layer_number - 1, router.router_replay)
        attached += 1
        yield router.router_replay
    routers = sum(isinstance(module, Router) for module in chunk.modules())
    assert routers == attached, f"{routers} routers in the model chunk, {attached} of them replay"


# Routes of each pass of a step: the rollout's (r3), the trainer's own from its first pass (r2), or none.
#
# `Routing` binds `RoutingReplay` to shards and passes. In r3 and r2 a shard's old-log-prob pass and gradient pass use
# the same experts; a reference policy always routes by itself.


Records = dict[Hashable, Tensor]


@dataclass(frozen=True)
class _LayOut(RouteHooks):
    """Replays the rows that `rows_of` gives for each micro-batch."""

    replay: RoutingReplay
    rows_of: Callable[[MicroBatch], RouteRows]
    tally: RouterCounts

    def before_forward(self, chunk: int, batch: MicroBatch) -> None:
        self.replay.lay_out(chunk, self.rows_of(batch), self.tally)


@dataclass(frozen=True)
class _Keep(RouteHooks):
    """Keeps the routers' choices for each micro-batch."""

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
            experts.append(self.replay.records[index].cpu().numpy()[known])
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
    _checked: WeakSet[Routes] = field(default_factory=WeakSet[Routes])
    _tally: RouterCounts | None = None

    @contextmanager
    def old_log_prob_pass(self, shard: TrainShard, step: int) -> Iterator[RouteHooks | None]:
        """Routes of the pass before the shard's first gradient; r2 records them for `step`."""
        if self.replay is None:
            yield None
        elif self.mode == "r3":
            with self.replay.replaying(gradient=False):
                yield self.laid_out(shard, step)
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
            observed = _Keep(self.replay)
            yield observed, observed.chosen

    @contextmanager
    def gradient_pass(self, shard: TrainShard, step: int) -> Iterator[RouteHooks | None]:
        """Routes of the shard's gradient pass, the same as in its old-log-prob pass."""
        with nullcontext() if self.replay is None else self.replay.replaying(gradient=True):
            yield self.laid_out(shard, step)

    def laid_out(self, shard: TrainShard, step: int) -> RouteHooks | None:
        """Routes of a pass, or of a trainer's part in it: inside `RoutingReplay.replaying`."""
        replay = self.replay
        if replay is None:
            return None
        records: Records = {}
        if self.mode == "r3":
            assert shard.routes is not None, "replay from the rollout needs routes in the shard"
            if shard.routes not in self._checked:  # a step's passes share them
                check_routes(shard, self.model.num_experts, self.model.top_k)
                self._checked.add(shard.routes)
            routes = ShardRoutes.from_rollout(shard, replay.layer_ids, self.max_age)
        else:
            records = self._recorded.pop(step)
            routes = ShardRoutes.to_record(shard, replay.layer_ids)

        def rows_of(batch: MicroBatch) -> RouteRows:
            recorded = records[batch.index] if self.mode == "r2" else None
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
