"""The experts that every token was routed to, as the engine reported them.

Rows follow positions: row t holds the experts that the forward pass of token t used. The newest token of a
sequence has not been through the model yet, so a sequence of T tokens carries at most T - 1 rows. Whether a
row may be replayed is kept in a mask, not in a sentinel id: with 256 experts every uint8 value is a real expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


def narrowest_dtype(num_experts: int) -> np.dtype:
    """The narrowest unsigned dtype that holds expert ids 0..num_experts-1 (uint8 up to 256 experts)."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


@dataclass(eq=False)
class _Room:
    """Arrays that routes are the beginning of, with room behind them: a rollout of many turns is not copied at each.

    Attributes:
        used: rows that some routes have. Only those that end there may grow in place.
    """

    experts: NDArray[np.unsignedinteger]
    mask: NDArray[np.bool_]
    used: int = 0


@dataclass(frozen=True)
class Routes:
    """Routed experts of consecutive tokens.

    Attributes:
        experts: [rows, MoE layers, top-k], uint8 or uint16; ids are global over expert-parallel ranks.
        mask: [rows] bool; False where the trainer must route by itself.
        layer_ids: global (0-based, dense layers counted) id of each MoE layer on axis 1.
    """

    experts: NDArray[np.unsignedinteger]
    mask: NDArray[np.bool_]
    layer_ids: tuple[int, ...]
    _room: _Room | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.experts.ndim == 3, f"routes must be [rows, layers, top-k], got {self.experts.shape}"
        assert self.mask.shape == self.experts.shape[:1], (self.mask.shape, self.experts.shape)
        assert len(self.layer_ids) == self.experts.shape[1], (self.layer_ids, self.experts.shape)

    def __len__(self) -> int:
        return self.experts.shape[0]

    def __reduce__(self) -> tuple[type[Routes], tuple[Any, ...]]:
        """Copies and pickles hold the rows alone."""
        return Routes, (self.experts, self.mask, self.layer_ids)

    @classmethod
    def empty(cls, layer_ids: Sequence[int], top_k: int, num_experts: int) -> Routes:
        """No rows yet, for a model with these MoE layers."""
        shape = (0, len(layer_ids), top_k)
        return cls(np.empty(shape, narrowest_dtype(num_experts)), np.empty(0, np.bool_), tuple(layer_ids))

    def first(self, rows: int) -> Routes:
        """The first `rows` rows, as a copy."""
        return Routes(self.experts[:rows].copy(), self.mask[:rows].copy(), self.layer_ids)

    def append(self, experts: NDArray[np.integer], mask: NDArray[np.bool_] | None = None) -> Routes:
        """These routes followed by `experts` [new rows, MoE layers, top-k]; rows may be replayed unless masked.
        The first ones may be kept as they are, so nobody writes to them afterwards."""
        assert experts.shape[1:] == self.experts.shape[1:], (experts.shape, self.experts.shape)
        if experts.dtype != self.experts.dtype:
            top = int(experts.max(initial=0))
            assert int(experts.min(initial=0)) >= 0 and top <= np.iinfo(self.experts.dtype).max, f"expert id {top}"
        if not len(self):  # most responses come whole, and their routes are large
            kept = np.ascontiguousarray(experts.astype(self.experts.dtype, copy=False))
            return Routes(kept, np.ones(len(kept), np.bool_) if mask is None else mask, self.layer_ids)
        start, end = len(self), len(self) + len(experts)
        room = self._room
        if room is None or room.used != start or end > len(room.mask):
            room = self._moved(end)
        room.experts[start:end] = experts
        room.mask[start:end] = True if mask is None else mask
        room.used = end
        return Routes(room.experts[:end], room.mask[:end], self.layer_ids, room)

    def _moved(self, rows: int) -> _Room:
        """A copy with room for `rows`, and for more where these are not the first: memory that is not touched is not
        taken."""
        size = rows + rows // 2 if len(self) else rows
        room = _Room(np.empty((size, *self.experts.shape[1:]), self.experts.dtype), np.empty(size, np.bool_))
        room.experts[: len(self)], room.mask[: len(self)] = self.experts, self.mask
        return room

    def stage_slice(self, layer_ids: Sequence[int]) -> Routes:
        """Only the given global layers, in the given order: what one pipeline stage needs."""
        columns = [self.layer_ids.index(layer) for layer in layer_ids]
        return Routes(np.ascontiguousarray(self.experts[:, columns]), self.mask, tuple(layer_ids))
