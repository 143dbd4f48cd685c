"""What one trainer rank needs for one optimizer step, as columns.

Index t of a column belongs to token t: `loss_mask[t]`, `advantages[t]` and `behaviour_log_probs[t]` are about token t,
which the model predicts at position t - 1. The trainer shifts; nobody else does. Denominators are already inside
`weights`, computed over the whole step before the split, so that the loss is

    sum over all shards, micro-batches and tokens of weights[t] * token_loss[t]

for every (DP, CP, micro-batch) layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mslime.data.routes import Routes


@dataclass(frozen=True)
class TrainShard:
    """Columns over N tokens of B sequences laid end to end, for one data-parallel rank (and pipeline stage).

    Attributes:
        tokens: [N] int32.
        lengths: [B] int64, sum N.
        sequence_ids: [B] int64, unique within the step over all shards.
        loss_mask: [N] bool.
        weights: [N] float32, 0 outside the mask.
        advantages: [N] float32, of the token's rollout; the trainer completes them when they depend on log-probs.
        behaviour_log_probs: [N] float32.
        rewards: [N] float32: the rollout's on its sequence's last trained token, process rewards where a step ends;
            None in supervised training.
        segment_index: [N] int32: which of its sequence's weight versions sampled the token, counted from 0 in order; 0
            where none did. None: not known.
        segment_ages: [N] int32: weight versions between the one that sampled the token and the one being trained; 0
            where none did. None: not known.
        old_log_probs, reference_log_probs: [N] float32 once computed, else None.
        teacher_log_probs: [N] float32; from the rollouts when the teacher is served, else computed like those before.
        values, returns: [N] float32, the critic's and what it is to learn, once computed, else None.
        routes: N rows (rows without a route are masked), None when replay is off or recorded by the trainer.
        micro_batches: indices into the B sequences; every rank of the step has the same number of micro-batches. An
            empty tuple is a micro-batch that only keeps the ranks in step.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int64]
    sequence_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    weights: NDArray[np.float32]
    advantages: NDArray[np.float32]
    behaviour_log_probs: NDArray[np.float32]
    micro_batches: tuple[tuple[int, ...], ...]
    old_log_probs: NDArray[np.float32] | None = None
    reference_log_probs: NDArray[np.float32] | None = None
    teacher_log_probs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    rewards: NDArray[np.float32] | None = None
    segment_index: NDArray[np.int32] | None = None
    segment_ages: NDArray[np.int32] | None = None
    routes: Routes | None = None

    def __post_init__(self) -> None:
        n = int(self.lengths.sum())
        for name in ("tokens", "loss_mask", "weights", "advantages", "behaviour_log_probs"):
            assert getattr(self, name).shape == (n,), f"{name} has {getattr(self, name).shape}, expected ({n},)"
        assert self.routes is None or len(self.routes) == n, "routes must have one row per token"
        used = sorted(i for mb in self.micro_batches for i in mb)
        assert used == list(range(len(self.lengths))), "every sequence belongs to exactly one micro-batch"

    def spans(self) -> list[tuple[int, int]]:
        """Token range [start, end) of every sequence."""
        ends = np.cumsum(self.lengths)
        return [(int(e - n), int(e)) for e, n in zip(ends, self.lengths, strict=True)]

    def stage_slice(self, layer_ids: Sequence[int]) -> TrainShard:
        """This shard with the routes of the given layers only."""
        return self if self.routes is None else replace(self, routes=self.routes.stage_slice(layer_ids))
