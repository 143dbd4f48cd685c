"""The sampling support of every sampled token: which ids survived top-k, top-p and min-p when it was drawn.

Kept as ragged CSR arrays, because a support has between one and a few thousand ids: 4 bytes an id and 8 a position, in
memory, in files and on the way to the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(eq=False)
class _SupportsBuffer:
    """Arrays with room behind what supports have of them: a rollout of many turns is not copied at each.

    Attributes:
        used: rows that some supports have. Only those that end there may grow in place.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    used: int = 0


@dataclass(frozen=True)
class Supports:
    """Token ids kept by the sampler, one ragged row per position of the sequence. Nobody writes to them.

    Attributes:
        ids: [sum of support sizes] int32, rows laid end to end.
        offsets: [rows + 1] int64; row t is `ids[offsets[t]:offsets[t + 1]]`. An empty row means the token was
            not sampled, or was drawn from the full vocabulary.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    _room: _SupportsBuffer | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.offsets.ndim == 1 and self.offsets[0] == 0 and self.offsets[-1] == len(self.ids)
        if self._room is None:  # else they are of two supports that were looked at
            assert (np.diff(self.offsets) >= 0).all(), "support offsets must not decrease"

    def __reduce__(self) -> tuple[type[Supports], tuple[Any, ...]]:
        """Copies and pickles hold the rows alone."""
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
        """From rows laid end to end and how many ids each has."""
        return cls(ids, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)]))

    @classmethod
    def joined(cls, parts: Sequence[Supports]) -> Supports:
        """The positions of all parts, one part after the other."""
        empty = cls.empty()
        ids = np.concatenate([empty.ids, *(part.ids for part in parts)])
        return cls.of_sizes(ids, np.concatenate([empty.sizes, *(part.sizes for part in parts)]))

    def first(self, rows: int) -> Supports:
        """The first `rows` positions, as a copy."""
        return Supports(self.ids[: self.offsets[rows]].copy(), self.offsets[: rows + 1].copy())

    def append(self, new: Supports) -> Supports:
        """These supports followed by those of new positions."""
        rows, ids = len(self) + len(new), len(self.ids) + len(new.ids)
        room = self._room
        if room is None or room.used != len(self) or rows >= len(room.offsets) or ids > len(room.ids):
            # Half as many again: memory that is not touched is not taken.
            room = _SupportsBuffer(np.empty(ids + ids // 2, np.int32), np.empty(rows + rows // 2 + 1, np.int64))
            room.ids[: len(self.ids)], room.offsets[: len(self) + 1] = self.ids, self.offsets
        room.ids[len(self.ids) : ids] = new.ids
        room.offsets[len(self) + 1 : rows + 1] = new.offsets[1:] + len(self.ids)
        room.used = rows
        return Supports(room.ids[:ids], room.offsets[: rows + 1], room)

    def take(self, positions: NDArray[np.integer]) -> Supports:
        """One row for each of `positions` [n]; an empty one where the position is negative."""
        known = positions >= 0
        sizes = np.zeros(len(positions), np.int64)
        sizes[known] = self.offsets[positions[known] + 1] - self.offsets[positions[known]]
        starts = np.zeros(len(positions), np.int64)
        starts[known] = self.offsets[positions[known]]
        before = np.cumsum(sizes) - sizes  # ids of the rows above
        at = np.arange(int(sizes.sum())) + np.repeat(starts - before, sizes)
        return Supports.of_sizes(self.ids[at], sizes)

    def hold(self, tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
        """[rows] whether a row has the token [rows] at its position exactly once, or is empty."""
        assert tokens.shape == (len(self),), f"{len(tokens)} tokens for {len(self)} supports"
        places = np.flatnonzero(self.ids == np.repeat(tokens, self.sizes))
        found = np.bincount(np.searchsorted(self.offsets, places, "right") - 1, minlength=len(self))
        return (found == 1) | (self.sizes == 0)

    def repeats(self) -> bool:
        """Whether a row has an id twice, so that its probability would be counted twice."""
        keys = np.repeat(np.arange(len(self)) << 32, self.sizes)
        keys += self.ids
        keys.sort()
        return bool((keys[1:] == keys[:-1]).any())
