"""Log-probs of a few sequences as the trainer computed them, for people to read beside the sampler's.

They are taken where a step has them anyway, so nothing is computed or sent for them: of the pass before the first
update where there is one, else of the gradient pass. A rank of the last stage has those of its own rows, and the ranks
of a context-parallel group together have all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mslime.backends.megatron.parallel import ParallelState
from mslime.data.shard import TrainShard


@dataclass
class Watch:
    """Sequences whose log-probs are wanted, and what this rank found.

    Attributes:
        parallel: where this rank stands.
        sequences: ids of the step's sequences (`TrainShard.sequence_ids`).
        found: by id, [T] float32; NaN for tokens that another context-parallel rank has, and for first tokens.
    """

    parallel: ParallelState
    sequences: frozenset[int] = frozenset()
    found: dict[int, NDArray[np.float32]] = field(default_factory=dict[int, NDArray[np.float32]])

    def begin(self, sequences: Iterable[int]) -> None:
        """Watch these sequences, and forget what was found of others."""
        self.sequences, self.found = frozenset(sequences), {}

    def column(self, shard: TrainShard, device: torch.device) -> Tensor | None:
        """[N] float32 for what the gradient pass finds of the shard; None where nothing is to be kept of it."""
        if shard.old_log_probs is not None or not self._held(shard):
            return None
        return torch.full((len(shard.tokens),), torch.nan, device=device)

    def keep(self, shard: TrainShard, column: Tensor | None) -> None:
        """Keep what is known of the shard: its old log-probs, or `column` after the gradient pass."""
        known = shard.old_log_probs if column is None else column.cpu().numpy()
        if known is None:
            return
        spans = shard.spans()
        for place in self._held(shard):
            start, stop = spans[place]
            self.found[int(shard.sequence_ids[place])] = known[start:stop].copy()

    def _held(self, shard: TrainShard) -> list[int]:
        """Places of the watched sequences in the shard; none on ranks that leave it to another one."""
        if not self.parallel.counts:
            return []
        return [place for place, number in enumerate(shard.sequence_ids.tolist()) if number in self.sequences]
