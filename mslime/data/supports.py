"""The sampling support of every sampled token: which ids survived top-p/top-k when it was drawn.

Kept as ragged CSR arrays, because a support has between one and a few thousand ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Supports:
    """Token ids kept by the sampler, one ragged row per position of the sequence.

    Attributes:
        ids: [sum of support sizes] int32, rows laid end to end.
        offsets: [rows + 1] int64; row t is `ids[offsets[t]:offsets[t + 1]]`. An empty row means the token was
            not sampled, or was drawn from the full vocabulary.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        assert self.offsets.ndim == 1 and self.offsets[0] == 0 and self.offsets[-1] == len(self.ids)
        assert (np.diff(self.offsets) >= 0).all(), "support offsets must not decrease"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, position: int) -> NDArray[np.int32]:
        """The ids that the token at `position` was drawn from; empty for the full vocabulary."""
        return self.ids[self.offsets[position] : self.offsets[position + 1]]

    @classmethod
    def empty(cls, rows: int = 0) -> Supports:
        """`rows` positions without a recorded support."""
        return cls(np.empty(0, np.int32), np.zeros(rows + 1, np.int64))

    def append(self, rows: Sequence[Sequence[int]]) -> Supports:
        """These supports followed by one row per new position."""
        sizes = np.asarray([len(row) for row in rows], np.int64)
        new = np.concatenate([np.asarray(row, np.int32) for row in rows]) if len(rows) else np.empty(0, np.int32)
        return Supports(
            np.concatenate([self.ids, new]), np.concatenate([self.offsets, self.offsets[-1] + np.cumsum(sizes)])
        )
