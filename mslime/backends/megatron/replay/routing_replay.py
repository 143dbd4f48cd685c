"""Routing replay: the trainer's routers use the experts that were recorded elsewhere, in every pass of a step.

R3 replays what the generation engine used, in the old-log-prob pass and in the gradient pass (arXiv 2510.11370). R2
records the routers' own choice in the old-log-prob pass and replays it in the gradient pass (arXiv 2507.18071). Only
the choice of experts is forced: gate values come from the current logits on those experts, so routers keep their
gradients. Rows without a known route (newest token, padding), and in R3 those whose routes older weights computed than
`train.replay_max_age` allows, are routed naturally, row by row.

All of it hangs on one object per trainer rank, `RoutingReplay`, which puts its own `LayerReplay` into the
`router_replay` slot of megatron-core's routers. No environment variable, no global of ours, no patched function.

Which micro-batch a router is asked about is never guessed. A forward pass finds the rows that were laid out for it
and uses them up; a router that runs without any is recomputing inside a backward pass, and takes the rows of the oldest
of its own forward passes that is still to be recomputed. Layer by layer, every pipeline schedule runs backward passes
in the order of the forward passes, so this is exact with any number of micro-batches in flight. Rows used twice, never,
or by the wrong pass end the step with an error; nothing falls back silently to natural routing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import Router, TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor, nn

from mslime.backends.megatron.step.batches import SequenceSlicer
from mslime.config.errors import ConfigError, EngineError
from mslime.data.routes import Routes
from mslime.data.shard import TrainShard


@dataclass(frozen=True)
class RouteRows:
    """Routes of one micro-batch, cut and ordered like the tokens that this rank's routers see.

    Attributes:
        experts: [rows, layers, top-k], uint8 or int16 (a pipeline holds many of these at once); the layers are those
            of `RoutingReplay.layer_ids`, in that order.
        mask: [rows] bool; False where the router chooses by itself.
        scored: [rows] bool; rows whose logits enter the loss.
        too_old: [rows] bool; rows whose routes are not replayed for their age.
        keys: [rows] int64; identify a token over all ranks of the step (`token_keys`), 0 on padding.
    """

    experts: Tensor
    mask: Tensor
    scored: Tensor
    too_old: Tensor
    keys: Tensor

    def __post_init__(self) -> None:
        rows = self.experts.shape[:1]
        assert self.mask.shape == self.scored.shape == self.keys.shape == rows, (self.experts.shape, self.mask.shape)
        assert self.too_old.shape == rows, (self.experts.shape, self.too_old.shape)


@dataclass(frozen=True)
class ReplayReport:
    """What the routers of all ranks did during one pass.

    Attributes:
        coverage: of the (row, layer) pairs whose row's logits enter the loss, the fraction that was replayed.
        too_old: of the same pairs, the fraction that was left to the routers for its age; with `coverage` it makes 1.
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
        """Named as in `metrics.jsonl`; `agreement_min_layer` is the agreement of the layer that agrees least."""
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


def token_keys(shard: TrainShard) -> NDArray[np.int64]:
    """[N] int64: (sequence id, position) in one number; unique over all shards of a step, never 0."""
    positions = np.concatenate([np.arange(n) for n in shard.lengths]) if len(shard.lengths) else np.zeros(0, np.int64)
    return (np.repeat(shard.sequence_ids, shard.lengths) << 32) + positions + 1


def scored_rows(shard: TrainShard) -> NDArray[np.bool_]:
    """[N] bool: rows that predict a trained token (the next one of their sequence)."""
    scored = np.zeros(len(shard.tokens), np.bool_)
    scored[:-1] = shard.loss_mask[1:]
    scored[[stop - 1 for start, stop in shard.spans() if stop > start]] = False
    return scored


def row_ages(shard: TrainShard) -> NDArray[np.int32]:
    """[N] int32: weight versions between those that computed a row's route and those that are trained.

    A row is computed to sample the token after it. Versions never fall along a sequence, so the age of the next token
    that was sampled is the largest of all later ones; 0 where none is sampled after the row.
    """
    assert shard.segment_ages is not None, "rows have ages where the shard knows the version that is trained"
    ages = np.zeros(len(shard.tokens), np.int32)
    for start, stop in shard.spans():
        ages[start : stop - 1] = np.maximum.accumulate(shard.segment_ages[start + 1 : stop][::-1])[::-1]
    return ages


def check_routes(shard: TrainShard, num_experts: int, top_k: int) -> None:
    """Refuse routes that cannot be replayed, before any collective: looked at once a shard, on the host.

    Raises:
        EngineError: a trained token's row has no route, or a row has an expert twice or one that does not exist.
    """
    routes = shard.routes
    assert routes is not None, "replay from the rollout needs routes in the shard"
    missing = np.flatnonzero(scored_rows(shard) & ~routes.mask)
    if len(missing):
        raise EngineError(
            "routes", f"{len(missing)} trained tokens without a route, the first in {_place(shard, int(missing[0]))}",
            "with train.replay = r3 the engine reports the experts of every token that is trained on",
            "start the engine with enable_return_routed_experts, or set train.replay to r2 or off",
        )  # fmt: skip
    experts = np.sort(routes.experts[routes.mask], axis=-1)
    if routes.experts.shape[-1] != top_k or int(experts.max(initial=0)) >= num_experts:
        raise EngineError(
            "routes", f"top-{routes.experts.shape[-1]} of experts up to {int(experts.max(initial=0))}",
            f"the trained model routes to {top_k} of {num_experts} experts", "serve the checkpoint that is trained",
        )  # fmt: skip
    repeated = np.flatnonzero((experts[..., 1:] == experts[..., :-1]).any(axis=(1, 2)))
    if len(repeated):
        row = int(np.flatnonzero(routes.mask)[repeated[0]])
        raise EngineError(
            "routes", f"{routes.experts[row].tolist()} at {_place(shard, row)}",
            "the experts of one token and layer are distinct (an all-zero row means that the engine did not fill it)",
            "turn off what drops captured routes in the engine (pipeline stages, external prefix caches)",
        )  # fmt: skip


def _place(shard: TrainShard, row: int) -> str:
    sequence = int(np.searchsorted(np.cumsum(shard.lengths), row, side="right"))
    start = shard.spans()[sequence][0]
    return f"sequence {shard.sequence_ids[sequence]}, position {row - start}"


@dataclass(frozen=True)
class ShardRoutes:
    """What replay needs of a shard, as columns over its N tokens; made once a pass, cut for every micro-batch.

    Attributes:
        layer_ids: the stage's MoE layers.
        experts: [N, layers, top-k], uint8 or int16; None when the trainer records its own (r2).
        mask, scored, too_old, keys: [N], see `RouteRows`; without experts every token is in the mask.
    """

    layer_ids: tuple[int, ...]
    experts: NDArray[np.integer] | None
    mask: NDArray[np.bool_]
    scored: NDArray[np.bool_]
    too_old: NDArray[np.bool_]
    keys: NDArray[np.int64]

    @classmethod
    def from_rollout(cls, shard: TrainShard, layer_ids: Sequence[int], max_age: int | None = None) -> ShardRoutes:
        """R3: the routes that came with the shard, those of weights beyond `max_age` left out."""
        assert shard.routes is not None
        routes = _layers_of(shard.routes, layer_ids)
        narrow = np.uint8 if routes.experts.dtype == np.uint8 else np.int16
        experts = routes.experts.astype(narrow)
        too_old = np.zeros(len(shard.tokens), np.bool_) if max_age is None else row_ages(shard) > max_age
        return cls(tuple(layer_ids), experts, routes.mask & ~too_old, scored_rows(shard), too_old, token_keys(shard))

    @classmethod
    def to_record(cls, shard: TrainShard, layer_ids: Sequence[int]) -> ShardRoutes:
        """R2: the experts come from `RoutingReplay.recorded`."""
        every = np.ones(len(shard.tokens), np.bool_)
        return cls(tuple(layer_ids), None, every, scored_rows(shard), ~every, token_keys(shard))

    def rows(self, slicer: SequenceSlicer, device: torch.device, recorded: Tensor | None = None) -> RouteRows:
        """One micro-batch as the routers of this rank see it; `recorded` was recorded under the same slicer."""
        if self.experts is None:
            assert recorded is not None and len(recorded) == len(slicer.layer_rows), "recorded under another layout"
            experts = recorded
        else:
            experts = torch.from_numpy(slicer.at_layer_rows(self.experts, 0)).to(device)
        return RouteRows(
            experts=experts,
            mask=torch.from_numpy(slicer.at_layer_rows(self.mask, False)).to(device),
            scored=torch.from_numpy(slicer.at_layer_rows(self.scored, False)).to(device),
            too_old=torch.from_numpy(slicer.at_layer_rows(self.too_old, False)).to(device),
            keys=torch.from_numpy(slicer.at_layer_rows(self.keys, 0)).to(device),
        )

    def fingerprint(self) -> int:
        """What all ranks of a stage and data-parallel rank together must consume in one pass (r3)."""
        assert self.experts is not None
        hashes = row_hashes(torch.from_numpy(self.experts), torch.from_numpy(self.keys), self.layer_ids)
        return int(hashes[torch.from_numpy(self.mask)].sum())


def _layers_of(routes: Routes, layer_ids: Sequence[int]) -> Routes:
    return routes if routes.layer_ids == tuple(layer_ids) else routes.stage_slice(layer_ids)


def row_hashes(experts: Tensor, keys: Tensor, layer_ids: Sequence[int]) -> Tensor:
    """[rows, layers] int64 hash of (token, layer, experts in order), with wrapping arithmetic."""
    layers = torch.tensor([layer + 1 for layer in layer_ids], dtype=torch.int64, device=keys.device)
    hashed = _mix(_mix(keys)[:, None] + layers * 0x632BE59BD9B4E019)
    for column in experts.unbind(-1):
        hashed = _mix(hashed ^ (column.long() + 1))
    return hashed


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection on int64 that spreads every bit."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


class LayerReplay(RouterReplay):
    """What one router asks for its top-k; stands where megatron-core's own object stood."""

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
        """Begin a pass; `gradient` when forward passes will be followed by backward passes."""
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
        """The next forward pass uses these experts [rows, top-k] where mask [rows] is set."""
        assert self.experts_and_mask is None, f"layer {self.layer_id}: its router did not ask for the last routes"
        self.experts_and_mask = (experts, mask)

    def check_used_up(self) -> None:
        """Every row laid out was consumed by a forward pass, and by its recomputation where there is one."""
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
        """The rows this call is about; `natural` [rows, top-k] is compared with them when it is a forward pass."""
        if self.experts_and_mask is None:
            assert self.to_recompute, f"layer {self.layer_id}: its router ran without routes for the micro-batch"
            return self.to_recompute.popleft()
        experts, mask = self.experts_and_mask
        assert experts.shape == natural.shape, f"layer {self.layer_id}: routes {experts.shape}, router {natural.shape}"
        self.experts_and_mask = None
        if self.gradient and not torch.is_grad_enabled():  # inside an activation checkpoint: it will run again
            self.to_recompute.append((experts, mask))
        same = (natural.sort(-1).values == experts.long().sort(-1).values).all(-1)
        assert self.agreed is not None
        self.agreed += (same & mask).sum()
        return experts, mask


class RoutingReplay:
    """Replay (and recording) of routes in every router of one trainer rank.

    A pass is one run of the pipeline schedule:

        with replay.replaying(gradient=True):
            ... before each model forward of chunk c: replay.lay_out(c, rows)
        report = replay.report(expected)

    Attributes:
        layer_ids: global (0-based) ids of this rank's MoE layers, over its virtual pipeline chunks in order.
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
        self.records: dict[Hashable, Tensor] = {}
        self._totals = self._zero_totals()

    def _zero_totals(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros((), dtype=torch.int64, device=self.device)
            for name in ("rows", "scored", "covered", "too_old", "sum")
        }

    @contextmanager
    def replaying(self, *, gradient: bool) -> Iterator[None]:
        """A pass whose forward passes use the rows laid out for them; checks at the end that all were used."""
        self._totals = self._zero_totals()
        with self._action(RouterReplayAction.REPLAY_FORWARD, gradient):
            yield
            for layer in self.layers:
                layer.check_used_up()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A forward-only pass of natural routing; call `keep` after every model forward. Forgets older records."""
        self.records.clear()
        with self._action(RouterReplayAction.RECORD, gradient=False):
            yield

    @contextmanager
    def _action(self, action: RouterReplayAction, gradient: bool) -> Iterator[None]:
        for layer in self.layers:
            layer.start(action, gradient=gradient, device=self.device)
        try:
            yield
        finally:
            for layer in self.layers:
                layer.stop()

    def lay_out(self, chunk: int, rows: RouteRows) -> None:
        """Replay `rows` in the next forward pass of model chunk `chunk`."""
        columns = [self.layer_ids.index(layer.layer_id) for layer in self.chunks[chunk]]
        for column, layer in zip(columns, self.chunks[chunk], strict=True):
            layer.lay_out(rows.experts[:, column], rows.mask)
        replayed = rows.mask.sum() * len(columns)
        hashes = row_hashes(rows.experts[:, columns], rows.keys, [self.layer_ids[c] for c in columns])
        self._totals["rows"] += replayed
        self._totals["scored"] += rows.scored.sum() * len(columns)
        self._totals["covered"] += (rows.scored & rows.mask).sum() * len(columns)
        self._totals["too_old"] += (rows.scored & rows.too_old).sum() * len(columns)
        self._totals["sum"] += (hashes * rows.mask[:, None]).sum()

    def keep(self, chunk: int, micro_batch: Hashable) -> None:
        """R2: remember what the routers of `chunk` chose in the forward pass that just ended, as `micro_batch`."""
        for layer in self.chunks[chunk]:
            indices = layer.get_recorded_indices()
            assert indices is not None, f"layer {layer.layer_id}: its router bypassed the recording"
            if micro_batch not in self.records:
                shape = (len(indices), len(self.layer_ids), indices.shape[1])
                self.records[micro_batch] = torch.full(shape, -1, dtype=torch.int16, device=indices.device)
            self.records[micro_batch][:, self.layer_ids.index(layer.layer_id)] = indices.to(torch.int16)
            layer.clear_indices()

    def recorded(self, micro_batch: Hashable) -> Tensor:
        """R2: [rows, layers, top-k] int16, what was kept as `micro_batch`."""
        experts = self.records[micro_batch]
        assert experts.numel() == 0 or int(experts.min()) >= 0, "not recorded in every model chunk"
        return experts

    def report(self, expected: int | None, group: dist.ProcessGroup | None = None) -> ReplayReport:
        """Sum what happened in the last pass over all trainer ranks. A collective.

        Args:
            expected: this rank's share of what must have been consumed (`ShardRoutes.fingerprint` on one rank of each
                data-parallel rank and pipeline stage, 0 on the others); None to leave it unchecked (R2).
            group: all trainer ranks; None for the default group.

        Raises:
            AssertionError: rows were lost, used twice, or applied to another token than their own; a row whose logits
                enter the loss was not replayed, and is not too old either.
        """
        by_layer = torch.zeros(self.num_layers, 2, dtype=torch.int64, device=self.device)
        for layer in self.layers:
            assert layer.agreed is not None, "no pass has run"
            by_layer[layer.layer_id, 0] = layer.agreed
            by_layer[layer.layer_id, 1] = self._totals["rows"] // len(self.layers)
        totals = torch.stack([*self._totals.values(), torch.tensor(expected or 0, device=self.device)])
        if dist.is_initialized():
            dist.all_reduce(by_layer, group=group)
            dist.all_reduce(totals, group=group)
        rows, scored, covered, too_old, fingerprint, due = totals.tolist()
        assert covered + too_old == scored, f"{scored} rows are scored, {covered} replayed and {too_old} too old for it"
        assert expected is None or fingerprint == due, (
            "the routes consumed are not those of the step, each exactly once"
        )
        counts = by_layer.tolist()
        return ReplayReport(
            coverage=covered / scored if scored else 1.0,
            too_old=too_old / scored if scored else 0.0,
            agreement={layer: agreed / n for layer, (agreed, n) in enumerate(counts) if n},
            fingerprint=fingerprint,
            rows=rows,
        )


def refuse_bypass(config: TransformerConfig) -> None:
    """Refuse settings whose routers do not (only) use the replayed experts.

    Raises:
        ConfigError: naming the setting.
    """
    bypasses: list[tuple[str, object, bool, str]] = [
        ("moe_enable_routing_replay", config.moe_enable_routing_replay, not config.moe_enable_routing_replay,
         "routers have a replay slot only when it is on"),
        ("moe_router_fusion", config.moe_router_fusion, bool(config.moe_router_fusion),
         "the fused router kernel computes its own top-k and never asks the replay"),
        ("moe_router_load_balancing_type", config.moe_router_load_balancing_type,
         "sinkhorn" in config.moe_router_load_balancing_type, "sinkhorn assigns experts without asking the replay"),
        ("moe_expert_capacity_factor", config.moe_expert_capacity_factor, config.moe_expert_capacity_factor is not None,
         "a capacity drops replayed experts from tokens"),
        ("moe_router_force_load_balancing", config.moe_router_force_load_balancing,
         bool(config.moe_router_force_load_balancing), "gate values would come from random logits"),
        ("cuda_graph_impl", config.cuda_graph_impl, config.cuda_graph_impl != "none",
         "a captured graph replays the routes of its capture"),
        ("sequence_parallel", config.sequence_parallel,
         config.tensor_model_parallel_size > 1 and not config.sequence_parallel,
         "with tensor parallelism each rank routes its own rows only when sequence parallelism is on"),
        ("mtp_num_layers", config.mtp_num_layers, bool(config.mtp_num_layers),
         "the engine reports no routes for multi-token-prediction layers"),
    ]  # fmt: skip
    for name, value, bypassed, why in bypasses:
        if bypassed:
            raise ConfigError(
                f"megatron.{name}",
                value,
                f"routing replay needs it otherwise: {why}",
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
                "train.replay", type(router).__name__, f"the router of layer {layer.layer_number - 1} cannot replay",
                "use megatron-core's TopKRouter, or set train.replay to off",
            )  # fmt: skip
        router.router_replay = LayerReplay(layer.layer_number - 1, router.router_replay)
        attached += 1
        yield router.router_replay
    routers = sum(isinstance(module, Router) for module in chunk.modules())
    assert routers == attached, f"{routers} routers in the model chunk, {attached} of them replay"
