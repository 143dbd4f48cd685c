"""Per-token data from the engine beside the id: routed experts, and ids that survived truncated sampling.

Rows follow positions: row t holds the experts that the forward pass of token t used. The newest token of a sequence has
not been through the model yet: a sequence of T tokens carries at most T - 1 rows. A mask, not a sentinel id, marks rows
that must not be replayed: with 256 experts every uint8 value is a real expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


def narrowest_dtype(num_experts: int) -> np.dtype:
    """The narrowest unsigned dtype that holds expert ids 0..num_experts-1 (uint8 up to 256 experts)."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


@dataclass(eq=False)
class _RoutesBuffer:
    """Arrays with spare capacity behind the rows in use, which avoids a copy at each turn of a rollout.

    Attributes:
        experts: of the rows from `start` on. mask: of all rows.
        used: rows in use. Only routes that end there may grow in place.
    """

    experts: NDArray[np.unsignedinteger]
    start: int
    mask: NDArray[np.bool_]
    used: int = 0


class Routes:
    """Routed experts of consecutive tokens. Read-only.

    Attributes:
        pieces: the rows, [rows of the piece, MoE layers, top-k] each, uint8 or uint16; ids are global over
            expert-parallel ranks. At least one.
        mask: [rows] bool; False where the trainer must use its own router.
        layer_ids: global (0-based, dense layers counted) id of each MoE layer on axis 1.
    """

    def __init__(
        self,
        experts: NDArray[np.unsignedinteger] | tuple[NDArray[np.unsignedinteger], ...],
        mask: NDArray[np.bool_],
        layer_ids: tuple[int, ...],
        _buffer: _RoutesBuffer | None = None,
    ) -> None:
        self.pieces: tuple[NDArray[np.unsignedinteger], ...] = experts if isinstance(experts, tuple) else (experts,)
        self.mask, self.layer_ids, self._buffer = mask, layer_ids, _buffer
        shapes = [piece.shape for piece in self.pieces]
        assert all(len(shape) == 3 for shape in shapes), f"routes must be [rows, layers, top-k], got {shapes}"
        assert mask.shape == (sum(shape[0] for shape in shapes),), (mask.shape, shapes)
        assert all(len(layer_ids) == shape[1] for shape in shapes), (layer_ids, shapes)

    def __len__(self) -> int:
        return len(self.mask)

    def __reduce__(self) -> tuple[type[Routes], tuple[Any, ...]]:
        """Copies and pickles hold only the rows."""
        return Routes, (self.pieces, self.mask, self.layer_ids)

    @property
    def experts(self) -> NDArray[np.unsignedinteger]:
        """[rows, MoE layers, top-k] all rows as one array. The first call joins several pieces into one."""
        whole, *others = self.pieces
        if others:
            whole = np.concatenate(self.pieces)
            self.pieces, self._buffer = (whole,), None
        return whole

    @classmethod
    def empty(cls, layer_ids: Sequence[int], top_k: int, num_experts: int) -> Routes:
        """No rows yet, for a model with these MoE layers."""
        shape = (0, len(layer_ids), top_k)
        return cls(np.empty(shape, narrowest_dtype(num_experts)), np.empty(0, np.bool_), tuple(layer_ids))

    def placed(self) -> Iterator[tuple[int, NDArray[np.unsignedinteger]]]:
        """(first row, piece) of each piece."""
        start = 0
        for piece in self.pieces:
            yield start, piece
            start += len(piece)

    def first(self, rows: int) -> Routes:
        """The first `rows` rows, as a copy."""
        kept = [piece[: max(rows - start, 0)] for start, piece in self.placed()]
        return Routes(np.concatenate(kept), self.mask[:rows].copy(), self.layer_ids)

    def append(self, experts: NDArray[np.integer], mask: NDArray[np.bool_] | None = None) -> Routes:
        """These routes followed by `experts` [new rows, MoE layers, top-k]; rows may be replayed unless masked. The
        first ones may be stored without a copy: do not write to them afterwards.
        """
        old = self.pieces[0]
        assert experts.shape[1:] == old.shape[1:], (experts.shape, old.shape)
        if experts.dtype != old.dtype:
            top = int(experts.max(initial=0))
            assert int(experts.min(initial=0)) >= 0 and top <= np.iinfo(old.dtype).max, f"expert id {top}"
        if not len(self):  # most responses arrive whole, and their routes are large
            kept = np.ascontiguousarray(experts.astype(old.dtype, copy=False))
            return Routes(kept, np.ones(len(kept), np.bool_) if mask is None else mask, self.layer_ids)
        start, end = len(self), len(self) + len(experts)
        buffer, before = self._buffer, self.pieces[:-1]
        if buffer is None or buffer.used != start or end > len(buffer.mask):
            buffer, before = self._further(end), self.pieces
        buffer.experts[start - buffer.start : end - buffer.start] = experts
        buffer.mask[start:end] = True if mask is None else mask
        buffer.used = end
        return Routes((*before, buffer.experts[: end - buffer.start]), buffer.mask[:end], self.layer_ids, buffer)

    def _further(self, rows: int) -> _RoutesBuffer:
        """Buffer for up to `rows` rows and half as many again, behind the rows here, which stay in place. Untouched
        memory is not allocated by the system.
        """
        start, size = len(self), rows + rows // 2
        shape = (size - start, *self.pieces[0].shape[1:])
        buffer = _RoutesBuffer(np.empty(shape, self.pieces[0].dtype), start, np.empty(size, np.bool_))
        buffer.mask[:start] = self.mask
        return buffer

    def every(self, step: int) -> tuple[NDArray[np.unsignedinteger], NDArray[np.bool_]]:
        """(experts, mask) of the rows 0, step, 2 step and so on."""
        picked = [piece[-start % step :: step] for start, piece in self.placed()]
        return np.concatenate(picked) if len(picked) > 1 else picked[0], self.mask[::step]

    def stage_slice(self, layer_ids: Sequence[int]) -> Routes:
        """Routes of the given global layers only, in the given order, for one pipeline stage."""
        columns = [self.layer_ids.index(layer) for layer in layer_ids]
        return Routes(np.ascontiguousarray(self.experts[:, columns]), self.mask, tuple(layer_ids))


# Sampling support of every sampled token: the ids that survived top-k, top-p and min-p at its draw.
#
# Ragged CSR arrays, because a support has between one and a few thousand ids: 4 bytes an id and 8 a position, in
# memory, in files and on the way to the trainer.


@dataclass(eq=False)
class _SupportsBuffer:
    """Arrays with spare capacity behind the rows in use, which avoids a copy at each turn of a rollout.

    Attributes:
        used: rows in use. Only supports that end there may grow in place.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    used: int = 0


@dataclass(frozen=True)
class Supports:
    """Token ids kept by the sampler, one ragged row per position of the sequence. Read-only.

    Attributes:
        ids: [sum of support sizes] int32, rows laid end to end.
        offsets: [rows + 1] int64; row t is `ids[offsets[t]:offsets[t + 1]]`. An empty row means the token was
            not sampled, or was drawn from the full vocabulary.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    _buffer: _SupportsBuffer | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.offsets.ndim == 1 and self.offsets[0] == 0 and self.offsets[-1] == len(self.ids)
        if self._buffer is None:  # with a buffer they are already checked
            assert (np.diff(self.offsets) >= 0).all(), "support offsets must not decrease"

    def __reduce__(self) -> tuple[type[Supports], tuple[Any, ...]]:
        """Copies and pickles hold only the rows."""
        return Supports, (self.ids, self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[rows] ids of each row."""
        return np.diff(self.offsets)

    def row(self, position: int) -> NDArray[np.int32]:
        """The ids that the token at `position` was drawn from; empty for the full vocabulary."""
        return self.ids[self.offsets[position] : self.offsets[position + 1]]

    @classmethod
    def empty(cls, rows: int = 0) -> Supports:
        """`rows` positions without a recorded support."""
        return cls(np.empty(0, np.int32), np.zeros(rows + 1, np.int64))

    @classmethod
    def of_sizes(cls, ids: NDArray[np.int32], sizes: NDArray[np.integer]) -> Supports:
        """Supports from rows laid end to end and their sizes."""
        return cls(ids, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)]))

    @classmethod
    def joined(cls, parts: Sequence[Supports]) -> Supports:
        """Positions of all parts, one part after the other."""
        empty = cls.empty()
        ids = np.concatenate([empty.ids, *(part.ids for part in parts)])
        return cls.of_sizes(ids, np.concatenate([empty.sizes, *(part.sizes for part in parts)]))

    def first(self, rows: int) -> Supports:
        """The first `rows` positions, as a copy."""
        return Supports(self.ids[: self.offsets[rows]].copy(), self.offsets[: rows + 1].copy())

    def append(self, new: Supports) -> Supports:
        """These supports followed by those of new positions."""
        rows, ids = len(self) + len(new), len(self.ids) + len(new.ids)
        buffer = self._buffer
        if buffer is None or buffer.used != len(self) or rows >= len(buffer.offsets) or ids > len(buffer.ids):
            # Half as many again: untouched memory is not allocated by the system.
            buffer = _SupportsBuffer(np.empty(ids + ids // 2, np.int32), np.empty(rows + rows // 2 + 1, np.int64))
            buffer.ids[: len(self.ids)], buffer.offsets[: len(self) + 1] = self.ids, self.offsets
        buffer.ids[len(self.ids) : ids] = new.ids
        buffer.offsets[len(self) + 1 : rows + 1] = new.offsets[1:] + len(self.ids)
        buffer.used = rows
        return Supports(buffer.ids[:ids], buffer.offsets[: rows + 1], buffer)

    def take(self, positions: NDArray[np.integer]) -> Supports:
        """One row for each of `positions` [n]; an empty one where the position is negative."""
        known = positions >= 0
        sizes = np.zeros(len(positions), np.int64)
        sizes[known] = self.offsets[positions[known] + 1] - self.offsets[positions[known]]
        starts = np.zeros(len(positions), np.int64)
        starts[known] = self.offsets[positions[known]]
        before = np.cumsum(sizes) - sizes  # ids of earlier rows
        at = np.arange(int(sizes.sum())) + np.repeat(starts - before, sizes)
        return Supports.of_sizes(self.ids[at], sizes)

    def hold(self, tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
        """[rows] whether a row is empty, or has the token [rows] at its position exactly once."""
        assert tokens.shape == (len(self),), f"{len(tokens)} tokens for {len(self)} supports"
        places = np.flatnonzero(self.ids == np.repeat(tokens, self.sizes))
        found = np.bincount(np.searchsorted(self.offsets, places, "right") - 1, minlength=len(self))
        return (found == 1) | (self.sizes == 0)

    def repeats(self) -> bool:
        """Whether a row repeats an id, whose probability would then be counted twice."""
        keys = np.repeat(np.arange(len(self)) << 32, self.sizes)
        keys += self.ids
        keys.sort()
        return bool((keys[1:] == keys[:-1]).any())
