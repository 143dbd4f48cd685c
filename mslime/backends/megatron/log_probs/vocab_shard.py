"""Types shared by `chunked` and `fused`: a rank's part of the vocabulary, sums of a row, supports."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

# exp(-1e4) is 0 in float32. Distances of minus infinity (padding, masked logits) are raised to it before a
# multiplication, because 0 * -inf is NaN.
FAR = -1e4


@dataclass(frozen=True)
class VocabShard:
    """This rank's part of the vocabulary: real columns [0, columns), ids from `start` on, and computation options."""

    start: int
    columns: int
    temperature: float
    chunk: int
    group: dist.ProcessGroup | None
    fused: bool

    def __post_init__(self) -> None:
        assert self.temperature > 0 and self.chunk > 0, (self.temperature, self.chunk)

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each id (0 if it is another rank's) and whether it is ours."""
        column = ids - self.start
        ours = (column >= 0) & (column < self.columns)
        return column.masked_fill_(~ours, 0), ours

    def part(self, first: int, last: int) -> VocabShard:
        """The shard of columns [first, last) of this one."""
        return replace(self, start=self.start + first, columns=last - first)


@dataclass
class ShardSums:
    """Sums over one rank's columns of each row; [n] float32 each.

    Attributes:
        top: largest logit, before the temperature; -inf without columns.
        total: sum of exp(d), with d = (logit - top) / temperature.
        moment: sum of d exp(d); zeros if no entropy is requested.
        label: the label's logit; any finite number if the label is another rank's.
    """

    top: Tensor
    total: Tensor
    moment: Tensor
    label: Tensor

    def move_to(self, top: Tensor, temperature: float) -> None:
        """Measure distances from `top` [n], at least ours: exp(d + s) = exp(s) exp(d)."""
        shift = ((self.top - top) / temperature).clamp_(min=FAR)
        factor = shift.exp()
        self.moment = (self.moment + shift * self.total) * factor
        self.total = self.total * factor
        self.top = top

    def absorb(self, part: ShardSums, ours: Tensor, temperature: float) -> None:
        """Add the sums of further columns of the same rank.

        Args:
            ours: [n] bool, whether the label is in these columns.
        """
        top = torch.maximum(self.top, part.top)
        for sums in (self, part):
            sums.move_to(top, temperature)
        self.total, self.moment = self.total + part.total, self.moment + part.moment
        self.label = torch.where(ours, part.label, self.label)


@dataclass(frozen=True)
class Softmax:
    """A row's softmax over all ranks; [n] float32 each.

    Attributes:
        top: largest logit, before the temperature.
        log_total: log of sum exp((logit - top) / temperature).
        entropy: in nats; None if not requested.
    """

    top: Tensor
    log_total: Tensor
    entropy: Tensor | None

    def only(self, rows: Tensor) -> Softmax:
        """With p = 0 everywhere outside `rows` [n] bool."""
        return Softmax(torch.where(rows, self.top, torch.inf), self.log_total, self.entropy)


@dataclass(frozen=True)
class Gradients:
    """Gradients of the loss with respect to log-probs and entropy; [n] float32, None if it does not depend on them."""

    log_probs: Tensor | None
    entropy: Tensor | None

    def only(self, rows: Tensor) -> Gradients:
        """Zero outside `rows` [n] bool."""

        def keep(x: Tensor | None) -> Tensor | None:
            return None if x is None else torch.where(rows, x, 0)

        return Gradients(keep(self.log_probs), keep(self.entropy))


# The softmax of tokens that were drawn from a part of the vocabulary (top-k, top-p), over that part alone.
#
# The supports of a batch are one ragged array, and all work is on gathered logits, without a mask of the logits' size.
# `chunked` and `fused` use it unchanged; the forward pass also reads a row's whole logits, but does not use them.


@dataclass(frozen=True)
class SparseGradient:
    """Values [k] float32 of the gradient with respect to the logits of `ids` [k] in the rows `row` [k]."""

    row: Tensor
    ids: Tensor
    value: Tensor

    def add_to(self, out: Tensor, shard: VocabShard) -> None:
        """Add the values of the shard's ids to `out` [n, columns or more], which is zero in rows with a support."""
        column, ours = shard.local(self.ids)
        value = self.value.masked_fill(~ours, 0).to(out.dtype)  # added at column 0 for other ids
        out.index_put_((self.row, column), value, accumulate=True)


@dataclass(frozen=True)
class LabelSupport:
    """The ids that each row's label was drawn from, as the engine reports them (`data.routes.Supports`).

    It needs at most 64 bytes per id while it is used.

    Attributes:
        ids: [k] int32 or int64, rows end to end; distinct within a row, over the whole vocabulary.
        offsets: [n + 1] int64; row t is `ids[offsets[t]:offsets[t + 1]]`. An empty row means the full vocabulary.
    """

    ids: Tensor
    offsets: Tensor

    def check(self, labels: Tensor) -> None:
        """Check that every non-empty support contains its label exactly once. On CUDA the device checks, without
        waiting."""
        assert self.offsets.shape == (labels.shape[0] + 1,), (self.offsets.shape, labels.shape)
        found = torch.zeros(labels.shape[0] + 1, dtype=torch.int32, device=labels.device)
        row = self._row()
        found.index_add_(0, row, (self.ids == labels[row]).int())
        right = ((found[:-1] == 1) | self.is_unrestricted()).all()
        message = "a label is not, or not once, among the ids of its support"
        if labels.is_cuda:
            torch.ops.aten._assert_async.msg(right, message)
        else:
            assert bool(right), message

    def is_unrestricted(self) -> Tensor:
        """[n] bool: rows over the full vocabulary."""
        return self.offsets[1:] == self.offsets[:-1]

    def read(self, logits: Tensor, shard: VocabShard) -> Tensor:
        """[k] float32: the logits of the ids; -inf for ids of other shards."""
        column, ours = shard.local(self.ids)
        return logits[self._row(), column].float().masked_fill_(~ours, -torch.inf)

    def replace(self, sums: ShardSums, x: Tensor, shard: VocabShard) -> None:
        """Replace the sums of rows with a support by sums over it, from its logits `x` (`read`)."""
        row, (_, ours) = self._row(), shard.local(self.ids)
        top = self._reduce(x, "max", -torch.inf)
        d = ((x - top[row]) / shard.temperature).masked_fill_(~ours, -torch.inf)
        weight = d.exp()
        total = self._reduce(weight, "sum", 0.0)
        moment = self._reduce(weight * d.clamp_(min=FAR), "sum", 0.0)
        dense = self.is_unrestricted()
        sums.top = torch.where(dense, sums.top, top)
        sums.total = torch.where(dense, sums.total, total)
        sums.moment = torch.where(dense, sums.moment, moment)

    def gradient(
        self, x: Tensor, labels: Tensor, softmax: Softmax, upstream: Gradients, shard: VocabShard
    ) -> SparseGradient:
        """Gradient with respect to the support's logits `x` (`read`), for rows with a support."""
        row = self._row()
        log_p = (x - softmax.top[row]) / shard.temperature - softmax.log_total[row]
        p = log_p.exp()
        grad = torch.zeros_like(p)
        if upstream.log_probs is not None:
            grad += upstream.log_probs[row] * ((self.ids == labels[row]).float() - p)
        if upstream.entropy is not None:
            assert softmax.entropy is not None
            grad -= upstream.entropy[row] * p * (log_p.clamp_(min=FAR) + softmax.entropy[row])
        return SparseGradient(row, self.ids, grad / shard.temperature)

    def _row(self) -> Tensor:
        """[k] int64: the row of every id."""
        n = self.offsets.shape[0] - 1
        rows = torch.arange(n, device=self.offsets.device)
        return rows.repeat_interleave(self.offsets.diff(), output_size=self.ids.shape[0])

    def _reduce(self, x: Tensor, how: str, empty: float) -> Tensor:
        """[n] float32 from [k]: per row; `empty` where a row has no ids. The order of summation is fixed."""
        return torch.segment_reduce(x, how, offsets=self.offsets, initial=empty, unsafe=True)
