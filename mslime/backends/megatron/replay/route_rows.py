"""Routes of a shard as routing replay needs them: a row for each token, cut and ordered as a rank's routers see them.

This module decides which rows are replayed and which are scored, how old their routes are, and what identifies a row on
all ranks of a step. `routing_replay` only follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mslime.backends.megatron.step.batches import SequenceSlicer, on_device
from mslime.config.errors import EngineError
from mslime.data.routes import Routes
from mslime.data.shard import TrainShard

ROWS_AT_ONCE = 512
"""Rows whose experts are checked at once: they fit into a CPU's cache."""
HASHES_AT_ONCE = {"cuda": 1 << 22, "cpu": 1 << 15}
"""Rows times layers that are hashed at once: few launches on a GPU, and a block that fits into a CPU's cache."""


@dataclass(frozen=True)
class RouteRows:
    """Routes of one micro-batch, cut and ordered like the tokens that this rank's routers see.

    Attributes:
        experts: [rows, layers, top-k], uint8 or int16, as a pipeline holds many of these at once; the layers are those
            of `RoutingReplay.layer_ids`, in that order.
        mask: [rows] bool; False if the router chooses by itself.
        scored: [rows] bool; rows whose logits enter the loss.
        too_old: [rows] bool; rows whose routes are too old to be replayed.
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
    """[N] int32: weight versions between the one that computed a row's route and the one being trained.

    A row is computed to sample the token after it. Versions never decrease along a sequence, so the next sampled token
    has the largest age of all later ones; 0 if no token is sampled after the row.
    """
    assert shard.segment_ages is not None, "rows have ages if the shard has the trained version"
    ages = np.zeros(len(shard.tokens), np.int32)
    for start, stop in shard.spans():
        ages[start : stop - 1] = np.maximum.accumulate(shard.segment_ages[start + 1 : stop][::-1])[::-1]
    return ages


def check_routes(shard: TrainShard, num_experts: int, top_k: int) -> None:
    """Reject routes that cannot be replayed, before any collective; checked once a shard, on the host.

    Raises:
        EngineError: a trained token's row has no route, or a row has an expert twice or one that does not exist.
    """
    routes = shard.routes
    assert routes is not None, "replay from the rollout needs routes in the shard"
    missing = np.flatnonzero(scored_rows(shard) & ~routes.mask)
    if len(missing):
        raise EngineError(
            "routes", f"{len(missing)} trained tokens without a route, the first in {_place(shard, int(missing[0]))}",
            "train.replay: r3 needs the experts of every trained token",
            "start the engine with enable_return_routed_experts, or set train.replay to r2 or off",
        )  # fmt: skip
    largest, row = _largest_and_first_repeated(routes)
    if routes.experts.shape[-1] != top_k or largest >= num_experts:
        raise EngineError(
            "routes", f"top-{routes.experts.shape[-1]} of experts up to {largest}",
            f"the trained model routes to {top_k} of {num_experts} experts", "serve the trained checkpoint",
        )  # fmt: skip
    if row is not None:
        raise EngineError(
            "routes", f"{routes.experts[row].tolist()} at {_place(shard, row)}",
            "the experts of one token and layer are distinct (an all-zero row means that the engine did not fill it)",
            "turn off engine features that drop captured routes (pipeline stages, external prefix caches)",
        )  # fmt: skip


def _largest_and_first_repeated(routes: Routes) -> tuple[int, int | None]:
    """The largest expert id of all masked rows, and the first of these rows with an expert twice.

    Choices are compared in pairs, column by column: ten times faster than sorting each row.
    """
    largest, first = 0, None
    for start in range(0, len(routes), ROWS_AT_ONCE):
        known = start + np.flatnonzero(routes.mask[start : start + ROWS_AT_ONCE])
        experts = np.ascontiguousarray(np.moveaxis(routes.experts[known], -1, 0))  # [top-k, rows, layers]
        largest = max(largest, int(experts.max(initial=0)))
        if first is None:
            twice = np.zeros(experts.shape[1:], np.bool_)
            for later in range(1, len(experts)):
                for earlier in experts[:later]:
                    twice |= earlier == experts[later]
            if len(rows := np.flatnonzero(twice.any(axis=1))):
                first = int(known[rows[0]])
    return largest, first


def _place(shard: TrainShard, row: int) -> str:
    sequence = int(np.searchsorted(np.cumsum(shard.lengths), row, side="right"))
    start = shard.spans()[sequence][0]
    return f"sequence {shard.sequence_ids[sequence]}, position {row - start}"


@dataclass(frozen=True)
class ShardRoutes:
    """Replay data of a shard, as columns over its N tokens; made once a pass, cut for every micro-batch.

    Attributes:
        layer_ids: the stage's MoE layers.
        experts: [N, layers, top-k], uint8 or int16; None if the trainer records its own (r2).
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
        """R3: the routes that came with the shard, without those of weights older than `max_age`."""
        assert shard.routes is not None
        routes, layers = shard.routes, tuple(layer_ids)
        routes = routes if routes.layer_ids == layers else routes.stage_slice(layers)
        narrow = np.uint8 if routes.experts.dtype == np.uint8 else np.int16
        experts = routes.experts.astype(narrow, copy=False)
        too_old = np.zeros(len(shard.tokens), np.bool_) if max_age is None else row_ages(shard) > max_age
        return cls(layers, experts, routes.mask & ~too_old, scored_rows(shard), too_old, token_keys(shard))

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
            experts = on_device(slicer.at_layer_rows(self.experts), device)
        return RouteRows(
            experts=experts,
            mask=on_device(slicer.at_layer_rows(self.mask), device),
            scored=on_device(slicer.at_layer_rows(self.scored), device),
            too_old=on_device(slicer.at_layer_rows(self.too_old), device),
            keys=on_device(slicer.at_layer_rows(self.keys), device),
        )

    def fingerprint(self, device: torch.device) -> int:
        """Fingerprint of the rows that all ranks of a stage and data-parallel rank must consume in one pass (r3).

        Args:
            device: that computes it, while all other ranks wait.
        """
        assert self.experts is not None
        total = torch.zeros((), dtype=torch.int64, device=device)
        layer_ids = torch.tensor(self.layer_ids, dtype=torch.int64, device=device)
        rows = max(HASHES_AT_ONCE.get(device.type, HASHES_AT_ONCE["cuda"]) // max(len(self.layer_ids), 1), 1)
        for start in range(0, len(self.keys), rows):
            here = slice(start, start + rows)
            experts, keys, mask = (on_device(c[here], device) for c in (self.experts, self.keys, self.mask))
            total += (row_hashes(experts, keys, layer_ids) * mask[:, None]).sum()
        return int(total)


def row_hashes(experts: Tensor, keys: Tensor, layer_ids: Tensor) -> Tensor:
    """[rows, layers] int64 hash of (token, layer, experts in order), with wrapping arithmetic.

    Args:
        experts: [rows, layers, top-k] integers. keys, layer_ids: [rows] and [layers] int64.
    """
    hashed = _mix(_mix(keys)[:, None] + (layer_ids + 1) * 0x632BE59BD9B4E019)
    for column in experts.unbind(-1):
        hashed = _mix(hashed ^ (column.long() + 1))
    return hashed


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection on int64 that spreads every bit."""
    x = (x >> 30).bitwise_and_(0x3FFFFFFFF).bitwise_xor_(x).mul_(-0x40A7B892E31B1A47)
    x = (x >> 27).bitwise_and_(0x1FFFFFFFFF).bitwise_xor_(x).mul_(-0x6B2FB644ECCEEE15)
    return (x >> 31).bitwise_and_(0x1FFFFFFFF).bitwise_xor_(x)
