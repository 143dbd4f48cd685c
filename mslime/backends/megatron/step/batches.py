"""From a shard's columns to one rank's rows of one micro-batch.

`SequenceSlicer` alone maps local rows to tokens. It applies padding, packing, the zigzag split of context parallelism
and the split of sequence parallelism, so tokens, routes and log-probs cannot disagree. Columns about token t (labels,
weights, advantages, log-probs) also move to the row that predicts it, the one of token t - 1. Padding is at the end of
sequences, where causal attention ignores it. Padding rows hold varied tokens of the micro-batch: rows with one same
token would overload a few experts, and all ranks would wait for these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mslime.backends.megatron.log_probs.vocab_shard import LabelSupport
from mslime.data.packing import padded_lengths
from mslime.data.routes import Supports
from mslime.data.shard import TrainShard

PADDING = -1
"""In index arrays: this row is padding, or predicts no token."""

_GOLDEN = 0.6180339887498949
"""Multiples of the golden ratio's fraction fill [0, 1) evenly for any count."""


@dataclass(frozen=True)
class RowLayout:
    """Distribution of one micro-batch's rows over ranks.

    Attributes:
        cp, cp_rank: context-parallel size and rank; each sequence is cut into 2 x cp chunks, two for each rank.
        sp, sp_rank: sequence-parallel size and rank (the tensor-parallel group, or 1 and 0 when it is off); inside the
            layers each rank holds one contiguous piece of the local rows.
        multiple: the row count of such a piece is a multiple of this.
    """

    cp: int = 1
    cp_rank: int = 0
    sp: int = 1
    sp_rank: int = 0
    multiple: int = 1


def zigzag_positions(length: int, cp: int, rank: int) -> NDArray[np.int64]:
    """Positions, in a sequence of `length` (a multiple of 2 x cp), of the tokens that a context-parallel rank holds.

    Chunks `rank` and `2 x cp - 1 - rank` of 2 x cp: every rank then has the same share of causal attention.
    """
    if cp == 1:
        return np.arange(length)
    assert length % (2 * cp) == 0, (length, cp)
    chunks = np.arange(length).reshape(2 * cp, -1)
    return np.concatenate([chunks[rank], chunks[2 * cp - 1 - rank]])


@dataclass(frozen=True)
class SequenceSlicer:
    """Map from this rank's T rows of one micro-batch to the shard's N tokens.

    Attributes:
        rows: [T] int64, flat index of the row's own token in the shard's columns; PADDING for padding.
        targets: [T] int64, flat index of the token that the row predicts; PADDING for padding and for last tokens.
        positions: [T] int64, position within the sequence.
        padded_lengths: padded length of every sequence, over all context-parallel ranks.
        layout: distribution of rows over ranks.
    """

    rows: NDArray[np.int64]
    targets: NDArray[np.int64]
    positions: NDArray[np.int64]
    padded_lengths: tuple[int, ...]
    layout: RowLayout

    @classmethod
    def build(cls, spans: list[tuple[int, int]], layout: RowLayout) -> SequenceSlicer:
        """The slicer of a micro-batch that holds the sequences at the given token ranges of the shard.

        Without sequences it holds only padding, as few rows as the layout allows.
        """
        lengths = padded_lengths([stop - start for start, stop in spans], layout.cp, layout.sp, layout.multiple)
        rows, targets, positions = [], [], []
        for (start, stop), padded in zip(spans or [(0, 0)], lengths, strict=True):
            position = zigzag_positions(padded, layout.cp, layout.cp_rank)
            rows.append(np.where(position < stop - start, start + position, PADDING))
            targets.append(np.where(position + 1 < stop - start, start + position + 1, PADDING))
            positions.append(position)
        return cls(np.concatenate(rows), np.concatenate(targets), np.concatenate(positions), tuple(lengths), layout)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def layer_rows(self) -> NDArray[np.int64]:
        """[T / sp]: `rows` of this tensor-parallel rank's transformer layers (for routes)."""
        piece = len(self.rows) // self.layout.sp
        return self.rows[self.layout.sp_rank * piece : (self.layout.sp_rank + 1) * piece]

    @property
    def owners(self) -> NDArray[np.int64]:
        """[T]: index of each row's sequence, also for padding at its end."""
        return np.repeat(np.arange(len(self.padded_lengths)), np.array(self.padded_lengths) // self.layout.cp)

    def at_rows(self, column: NDArray[Any]) -> NDArray[Any]:
        """[N, ...] -> [T, ...]: each row's own entry, 0 for padding."""
        return _gather(column, self.rows)

    def at_targets(self, column: NDArray[Any]) -> NDArray[Any]:
        """[N, ...] -> [T, ...]: the entry of the token that each row predicts, 0 if it predicts none."""
        return _gather(column, self.targets)

    def at_layer_rows(self, column: NDArray[Any]) -> NDArray[Any]:
        """[N, ...] -> [T / sp, ...]: own entry of each row of this rank's layers, 0 for padding."""
        return _gather(column, self.layer_rows)

    def scatter_targets(self, values: Tensor, out: Tensor) -> None:
        """Write per-row values [T] to the predicted tokens in `out` [N], in place.

        Other context-parallel ranks write the other tokens: start from zeros and sum over the group at the end.
        """
        known = np.flatnonzero(self.targets != PADDING)
        out[on_device(self.targets[known], out.device)] = values[on_device(known, values.device)].to(out.dtype)


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy the array to the device that computes with it next; on a CPU the result may share its memory.

    A GPU receives it through pinned memory. A copy from any other memory returns only after all work queued before it
    on the stream, so the GPU would wait for the host in every micro-batch. torch reuses a pinned block only after the
    copies from it (`CachingHostAllocator`, `record_event` in ATen/native/cuda/Copy.cu), so no wait is needed here.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _gather(column: NDArray[Any], index: NDArray[np.int64]) -> NDArray[Any]:
    if not len(column):
        assert (index == PADDING).all(), "rows of an empty shard are padding"
        return np.zeros((len(index), *column.shape[1:]), column.dtype)
    out = np.take(column, index, axis=0)  # PADDING takes the last row; a boolean index takes several times as long
    out[index == PADDING] = 0
    return out


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on one rank: T rows, the per-token columns at the row that predicts the token.

    Attributes:
        index: position in the shard's list of micro-batches.
        slicer: map from rows to tokens.
        tokens, position_ids: [1, T] int64; rows of padding hold tokens of the micro-batch.
        cumulative_lengths: [sequences + 1] int32, padded and over all context-parallel ranks; None when not packed.
        labels: [T] int64, 0 if the row predicts nothing.
        loss_mask: [T] bool.
        weights, advantages, behaviour_log_probs: [T] float32.
        old_log_probs, reference_log_probs, values, returns: [T] float32, None if the shard has none.
        sequence_index: [T] int64 in [0, num_sequences), numbered alike on all context-parallel ranks; 0 for padding.
        num_sequences: sequences of the micro-batch, at least 1.
        segment_index: [T] int64 in [0, num_segments), likewise for weight-version segments; None if unknown.
        num_segments: segments of the micro-batch.
        ages: [T] int64, versions since the predicted token's segment was sampled; None if the shard has no segments.
        positions: [T] int64, distance of the predicted token to the first trained one of its sequence; 0 for others.
        support: T rows, the ids that the predicted token was drawn from; None if all are drawn from the whole
            vocabulary.
    """

    index: int
    slicer: SequenceSlicer
    tokens: Tensor
    position_ids: Tensor
    cumulative_lengths: Tensor | None
    labels: Tensor
    loss_mask: Tensor
    weights: Tensor
    advantages: Tensor
    behaviour_log_probs: Tensor
    old_log_probs: Tensor | None
    reference_log_probs: Tensor | None
    values: Tensor | None
    returns: Tensor | None
    sequence_index: Tensor
    num_sequences: int
    segment_index: Tensor | None
    num_segments: int
    ages: Tensor | None
    positions: Tensor
    support: LabelSupport | None


def build_micro_batch(
    shard: TrainShard, index: int, layout: RowLayout, *, packed: bool, device: torch.device
) -> MicroBatch:
    """Micro-batch `index` of the shard, for the rank at `layout`.

    Raises:
        AssertionError: not packed, and the micro-batch holds more than one sequence.
    """
    members = shard.micro_batches[index]
    assert packed or len(members) <= 1, f"unpacked micro-batch {index} has {len(members)} sequences"
    ends = np.cumsum(shard.lengths)
    spans = [(int(ends[i] - shard.lengths[i]), int(ends[i])) for i in members]
    slicer = SequenceSlicer.build(spans, layout)

    def tensor(column: NDArray[Any]) -> Tensor:
        wide = column.astype(np.int64) if np.issubdtype(column.dtype, np.integer) else column
        return on_device(wide, device)

    def predicted(column: NDArray[Any]) -> Tensor:
        return tensor(slicer.at_targets(column))

    def if_known(column: NDArray[Any] | None) -> Tensor | None:
        return None if column is None else predicted(column)

    cumulative = np.concatenate([[0], np.cumsum(slicer.padded_lengths)])
    segments, first = None, first_segments(shard, spans)
    if first is not None and shard.segment_index is not None:
        own = slicer.at_targets(shard.segment_index) + first[slicer.owners]
        segments = tensor(np.where(slicer.targets != PADDING, own, 0))
    return MicroBatch(
        index=index,
        slicer=slicer,
        tokens=tensor(_with_padding(slicer, shard.tokens, spans))[None],
        position_ids=tensor(slicer.positions)[None],
        cumulative_lengths=on_device(cumulative.astype(np.int32), device) if packed else None,
        labels=tensor(slicer.at_targets(shard.tokens)),
        loss_mask=tensor(slicer.at_targets(shard.loss_mask)),
        weights=predicted(shard.weights),
        advantages=predicted(shard.advantages),
        behaviour_log_probs=predicted(shard.behaviour_log_probs),
        old_log_probs=if_known(shard.old_log_probs),
        reference_log_probs=if_known(shard.reference_log_probs),
        values=if_known(shard.values),
        returns=if_known(shard.returns),
        sequence_index=tensor(np.where(slicer.rows != PADDING, slicer.owners, 0)),
        num_sequences=max(len(members), 1),
        segment_index=segments,
        num_segments=0 if first is None else max(int(first[-1]), 1),
        ages=if_known(shard.segment_ages),
        positions=tensor(_response_positions(shard, spans, slicer)),
        support=_support_of_targets(shard.supports, slicer, device),
    )


def _with_padding(slicer: SequenceSlicer, tokens: NDArray[np.int32], spans: list[tuple[int, int]]) -> NDArray[np.int32]:
    """[T] int32: each row's token. Rows of padding get varied tokens of `spans`, different ones on each
    context-parallel rank. Without spans they are tokens of the whole shard, in an empty shard 0."""
    held = slicer.at_rows(tokens)
    padding = np.flatnonzero(slicer.rows == PADDING)
    around = np.concatenate([tokens[:0], *(tokens[start:stop] for start, stop in spans)]) if spans else tokens
    if len(around):
        turns = (np.arange(1, len(padding) + 1) * slicer.layout.cp + slicer.layout.cp_rank) * _GOLDEN
        held[padding] = around[(turns % 1.0 * len(around)).astype(np.int64)]
    return held


def first_segments(shard: TrainShard, spans: Sequence[tuple[int, int]]) -> NDArray[np.int64] | None:
    """[sequences + 1]: index of each sequence's first segment among the segments of all these sequences, then their
    count. None if the shard has no segments."""
    if shard.segment_index is None:
        return None
    return np.cumsum([0, *(int(shard.segment_index[start:stop].max()) + 1 for start, stop in spans)])


def _support_of_targets(supports: Supports | None, slicer: SequenceSlicer, device: torch.device) -> LabelSupport | None:
    """One row for each of the slicer's T rows, empty if it predicts nothing. None if all are empty."""
    found = Supports.empty() if supports is None else supports.take(slicer.targets)
    if not len(found.ids):
        return None
    return LabelSupport(on_device(found.ids, device), on_device(found.offsets, device))


def _response_positions(
    shard: TrainShard, spans: Sequence[tuple[int, int]], slicer: SequenceSlicer
) -> NDArray[np.int64]:
    """[T] distance of each predicted token to the first trained one of its sequence; 0 before that, and if none is
    predicted."""
    firsts = np.array([start + int(shard.loss_mask[start:stop].argmax()) for start, stop in spans] or [0])
    return np.where(slicer.targets != PADDING, np.maximum(slicer.targets - firsts[slicer.owners], 0), 0)
