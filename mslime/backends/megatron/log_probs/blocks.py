"""Log-probs and entropy from hidden states: logits are made for a block of the vocabulary at a time, in both passes.

A softmax over blocks is that over tensor-parallel ranks again: sums of a block, moved to a common maximum and added.
In the backward pass a row's softmax is known, so that a block alone gives its part of the gradients: the rows of the
weight that are its own, in one product over all tokens as without blocks, and a share of the hidden states'.

With a limit of L bytes, memory that grows with the tokens n and not with the vocabulary is all there is:

- one block of logits, at most L bytes, over which its gradient is written; the block that the forward pass made last
  waits for the backward pass, which therefore makes all blocks but one again: (blocks - 1) / blocks of a product more;
- of a token: what `vocab_parallel` says, 4 bytes for each id of a support, and the gradient of the hidden states, in
  float32 while it is summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mslime.backends.megatron.log_probs.vocab_parallel import (
    LogProbs,
    Way,
    check_labels,
    dense_way,
    is_fused,
    softmax_of,
)
from mslime.backends.megatron.log_probs.vocab_shard import Gradients, LabelSupport, Shard, ShardSums, Softmax

COLUMNS = 128
"""Blocks are a multiple of so many columns wide, and so many at least: rows of logits then begin where matrix products
and loads of 16 bytes like them to."""


def hidden_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    tp_group: dist.ProcessGroup | None,
    vocab_start: int,
    vocab_size: int,
    most_bytes: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk: int = 1024,
    support: LabelSupport | None = None,
    way: Way = "auto",
) -> LogProbs:
    """`vocab_parallel_log_probs(hidden @ weight.T, labels, ...)`, whose logits never are in memory as a whole.

    The gradient of `hidden` is that of this rank's part of the vocabulary: its sum over `tp_group` is the caller's, as
    it is where a product with `weight` is made without this function.

    Args:
        hidden: [n, H], any float dtype, the same on every rank of `tp_group`.
        weight: [V_local, H] of the same dtype, this rank's rows; row r gives the logit of id `vocab_start + r`.
        labels, vocab_start, vocab_size, temperature, with_entropy, chunk, support, way: as of
            `vocab_parallel_log_probs`.
        most_bytes: of a block of logits; but a block has `COLUMNS` columns at least.

    Raises:
        AssertionError: as of `vocab_parallel_log_probs`.
    """
    assert hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1], (hidden.shape, weight.shape)
    assert labels.shape == hidden.shape[:1] and hidden.dtype == weight.dtype, (labels.shape, hidden.dtype, weight.dtype)
    assert temperature > 0 and chunk > 0, (temperature, chunk)
    check_labels(labels, vocab_size)
    if support is not None:
        support.check(labels)
    columns = min(max(vocab_size - vocab_start, 0), weight.shape[0])
    shard = Shard(vocab_start, columns, temperature, chunk, tp_group, is_fused(way, hidden))
    width = block_columns(columns, hidden.shape[0] * hidden.element_size(), most_bytes)
    log_probs, entropy = _BlockedLogProbs.apply(hidden, weight, labels, _Asked(shard, width, support, with_entropy))
    return LogProbs(log_probs, entropy)


def block_columns(columns: int, column_bytes: int, most_bytes: int) -> int:
    """How many columns blocks of at most `most_bytes` have, all alike but for the last; a multiple of `COLUMNS`."""
    widest = max(most_bytes // max(column_bytes, 1) // COLUMNS, 1) * COLUMNS
    blocks = -(-columns // widest)
    return min(widest, -(-columns // max(blocks, 1) // COLUMNS) * COLUMNS) or COLUMNS


@dataclass(frozen=True)
class _Asked:
    """What the two passes do beside tensors: over which columns, in blocks of which width, what is asked of them."""

    shard: Shard
    width: int
    support: LabelSupport | None
    with_entropy: bool

    def blocks(self) -> Iterator[tuple[slice, Shard]]:
        """(rows of the weight, shard) of every block."""
        for first in range(0, self.shard.columns, self.width):
            last = min(first + self.width, self.shard.columns)
            yield slice(first, last), self.shard.part(first, last)


class _BlockedLogProbs(torch.autograd.Function):
    """`vocab_parallel._VocabParallelLogProbs`, the product with the output weights included."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, asked: _Asked
    ) -> tuple[Tensor, Tensor | None]:
        shard, support = asked.shard, asked.support
        largest = hidden.new_full((hidden.shape[0],), -torch.inf, dtype=torch.float32)
        sums = ShardSums(largest, *hidden.new_zeros((3, hidden.shape[0]), dtype=torch.float32))
        x = None if support is None else torch.full(support.ids.shape, -torch.inf, device=hidden.device)
        logits = None
        for rows, block in reversed(list(asked.blocks())):  # the first one, which is of full width, is left for later
            logits = None  # before the next one is made
            logits = hidden @ weight[rows].t()
            column, ours = block.local(labels)
            part = dense_way(shard).row_sums(logits, column, block, with_entropy=asked.with_entropy)
            sums.absorb(part, ours, shard.temperature)
            if support is not None and x is not None:
                x = torch.maximum(x, support.read(logits, block))
        if support is not None and x is not None:
            support.replace(sums, x, shard)
        _, ours = shard.local(labels)
        log_probs, softmax = softmax_of(sums, ours, shard, with_entropy=asked.with_entropy)
        ctx.save_for_backward(hidden, weight, labels, softmax.top, softmax.log_total, softmax.entropy, x)
        ctx.asked, ctx.last_logits = asked, logits
        ctx.set_materialize_grads(False)
        return log_probs, softmax.entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradient of a block's logits (`_VocabParallelLogProbs.backward`), and through its product."""
        hidden, weight, labels, top, log_total, entropy, x = ctx.saved_tensors
        asked: _Asked = ctx.asked
        logits, ctx.last_logits = ctx.last_logits, None  # a second backward pass makes it again
        upstream, softmax = Gradients(*grads), Softmax(top, log_total, entropy)
        if upstream.log_probs is None and upstream.entropy is None:
            return (None,) * 4
        sparse = None
        if asked.support is not None:
            sparse = asked.support.gradient(x, labels, softmax, upstream, asked.shard)
            dense = asked.support.is_unrestricted()
            softmax, upstream = softmax.only(dense), upstream.only(dense)
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for rows, block in asked.blocks():
            if logits is None:
                logits = hidden @ weight[rows].t()
            column, ours = block.local(labels)
            column.masked_fill_(~ours, -1)
            dense_way(asked.shard).write_gradient(logits, logits, column, softmax, upstream, block)
            if sparse is not None:
                sparse.add_to(logits, block)
            if of_weight is not None:
                torch.mm(logits.t(), hidden, out=of_weight[rows])
            _add_product(of_hidden, logits, weight[rows])
            logits = None
        if of_weight is not None:
            of_weight[asked.shard.columns :] = 0
            _is_whole(weight)
        return of_hidden.to(hidden.dtype), of_weight, None, None


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out [n, H] float32 += a @ b, which are of the model's dtype."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        out += a @ b


def _is_whole(weight: Tensor) -> None:
    """Tell megatron-core that the weight's gradient is what is returned.

    With `gradient_accumulation_fusion` its own linear layer, which makes smaller micro-batches' logits, adds to the
    gradient buffer itself and marks the weight; the wrapper then takes what is returned for a dummy.
    """
    if "grad_added_to_main_grad" in vars(weight):
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
