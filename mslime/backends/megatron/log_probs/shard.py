"""What the two ways of computing log-probs share: the rank's part of the vocabulary and the numbers of a row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

# exp(-1e4) is 0 in float32. Distances of minus infinity (padding, masked logits) are raised to it where they are
# factors, because 0 * -inf is not a number.
FAR = -1e4


@dataclass(frozen=True)
class Shard:
    """This rank's part of the vocabulary: real columns [0, columns), ids from `start` on, and how to work on it."""

    start: int
    columns: int
    temperature: float
    chunk: int
    group: dist.ProcessGroup | None
    fused: bool

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each id (0 where it is another rank's) and whether it is ours."""
        column = ids - self.start
        ours = (column >= 0) & (column < self.columns)
        return column.masked_fill_(~ours, 0), ours

    def part(self, first: int, last: int) -> Shard:
        """The shard of its own columns [first, last)."""
        return replace(self, start=self.start + first, columns=last - first)


@dataclass
class ShardSums:
    """Of one rank's columns of each row; [n] float32 each.

    Attributes:
        top: largest logit, before the temperature; -inf without columns.
        total: sum of exp(d), with d = (logit - top) / temperature.
        moment: sum of d exp(d); zeros when no entropy is asked for.
        label: the label's logit; any finite number where the label is another rank's.
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
            ours: [n] bool, whether the label is one of them.
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
        entropy: in nats; None when not asked for.
    """

    top: Tensor
    log_total: Tensor
    entropy: Tensor | None

    def only(self, rows: Tensor) -> Softmax:
        """With p = 0 everywhere outside `rows` [n] bool."""
        return Softmax(torch.where(rows, self.top, torch.inf), self.log_total, self.entropy)


@dataclass(frozen=True)
class Gradients:
    """Of the loss with respect to the log-probs and the entropy; [n] float32, None where it does not depend on them."""

    log_probs: Tensor | None
    entropy: Tensor | None

    def only(self, rows: Tensor) -> Gradients:
        """Zero outside `rows` [n] bool."""

        def keep(x: Tensor | None) -> Tensor | None:
            return None if x is None else torch.where(rows, x, 0)

        return Gradients(keep(self.log_probs), keep(self.entropy))
