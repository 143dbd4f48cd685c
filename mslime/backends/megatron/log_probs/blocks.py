"""Log-probs and entropy from hidden states, with logits made for one block of the vocabulary at a time in both passes.

A softmax over blocks works like one over tensor-parallel ranks: sums of each block are moved to a common maximum and
added. In the backward pass a row's softmax is known, so each block yields its part of the gradients alone: its own rows
of the weight, in one product over all tokens, and a summand of the hidden states' gradient.

With a limit of L bytes, memory grows with the tokens n and not with the vocabulary:

- one block of logits, at most L bytes, overwritten by its gradient. The forward pass keeps its last block for the
  backward pass, which recomputes all others: (blocks - 1) / blocks of an additional product;
- per token: the memory of `vocab_parallel`, 4 bytes for each id of a support, and the gradient of the hidden states, in
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
from mslime.backends.megatron.log_probs.vocab_shard import Gradients, LabelSupport, ShardSums, Softmax, VocabShard

COLUMNS = 128
"""Block widths are multiples of this many columns: rows of logits are then aligned for matrix products and 16-byte
loads."""


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
    """`vocab_parallel_log_probs(hidden @ weight.T, labels, ...)` without the whole logits in memory.

    The gradient of `hidden` is that of this rank's part of the vocabulary: the caller sums it over `tp_group`, as after
    an ordinary product with `weight`.

    Args:
        hidden: [n, H], any float dtype, the same on every rank of `tp_group`.
        weight: [V_local, H] of the same dtype, this rank's rows; row r gives the logit of id `vocab_start + r`.
        labels, vocab_start, vocab_size, temperature, with_entropy, chunk, support, way: as in
            `vocab_parallel_log_probs`.
        most_bytes: limit of a block of logits; a block has at least `COLUMNS` columns.

    Raises:
        AssertionError: as in `vocab_parallel_log_probs`.
    """
    assert hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1], (hidden.shape, weight.shape)
    assert labels.shape == hidden.shape[:1] and hidden.dtype == weight.dtype, (labels.shape, hidden.dtype, weight.dtype)
    check_labels(labels, vocab_size, support)
    columns = min(max(vocab_size - vocab_start, 0), weight.shape[0])
    shard = VocabShard(vocab_start, columns, temperature, chunk, tp_group, is_fused(way, hidden))
    width = block_columns(columns, hidden.shape[0] * hidden.element_size(), most_bytes)
    log_probs, entropy = _BlockedLogProbs.apply(hidden, weight, labels, _Options(shard, width, support, with_entropy))
    return LogProbs(log_probs, entropy)


def block_columns(columns: int, column_bytes: int, most_bytes: int) -> int:
    """Columns of a block of at most `most_bytes`, a multiple of `COLUMNS`; all blocks but the last have this width."""
    widest = max(most_bytes // max(column_bytes, 1) // COLUMNS, 1) * COLUMNS
    blocks = -(-columns // widest)
    return min(widest, -(-columns // max(blocks, 1) // COLUMNS) * COLUMNS) or COLUMNS


@dataclass(frozen=True)
class _Options:
    """Non-tensor arguments of the two passes: columns, block width, requested outputs."""

    shard: VocabShard
    width: int
    support: LabelSupport | None
    with_entropy: bool

    def blocks(self) -> Iterator[tuple[slice, VocabShard]]:
        """(rows of the weight, shard) of every block."""
        for first in range(0, self.shard.columns, self.width):
            last = min(first + self.width, self.shard.columns)
            yield slice(first, last), self.shard.part(first, last)


class _BlockedLogProbs(torch.autograd.Function):
    """`vocab_parallel._VocabParallelLogProbs`, including the product with the output weights."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor | None]:
        shard, support = options.shard, options.support
        largest = hidden.new_full((hidden.shape[0],), -torch.inf, dtype=torch.float32)
        sums = ShardSums(largest, *hidden.new_zeros((3, hidden.shape[0]), dtype=torch.float32))
        x = None if support is None else torch.full(support.ids.shape, -torch.inf, device=hidden.device)
        logits = None
        for rows, block in reversed(list(options.blocks())):  # last is block 0, of full width: backward reuses it
            logits = None  # free it before the next one is made
            logits = hidden @ weight[rows].t()
            column, ours = block.local(labels)
            part = dense_way(shard).row_sums(logits, column, block, with_entropy=options.with_entropy)
            sums.absorb(part, ours, shard.temperature)
            if support is not None and x is not None:
                x = torch.maximum(x, support.read(logits, block))
        if support is not None and x is not None:
            support.replace(sums, x, shard)
        _, ours = shard.local(labels)
        log_probs, softmax = softmax_of(sums, ours, shard, with_entropy=options.with_entropy)
        ctx.save_for_backward(hidden, weight, labels, softmax.top, softmax.log_total, softmax.entropy, x)
        ctx.options, ctx.last_logits = options, logits
        ctx.set_materialize_grads(False)
        return log_probs, softmax.entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradient of a block's logits (`_VocabParallelLogProbs.backward`), and through its product."""
        hidden, weight, labels, top, log_total, entropy, x = ctx.saved_tensors
        options: _Options = ctx.options
        logits, ctx.last_logits = ctx.last_logits, None  # a second backward pass recomputes it
        upstream, softmax = Gradients(*grads), Softmax(top, log_total, entropy)
        if upstream.log_probs is None and upstream.entropy is None:
            return (None,) * 4
        sparse = None
        if options.support is not None:
            sparse = options.support.gradient(x, labels, softmax, upstream, options.shard)
            dense = options.support.is_unrestricted()
            softmax, upstream = softmax.only(dense), upstream.only(dense)
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for rows, block in options.blocks():
            if logits is None:
                logits = hidden @ weight[rows].t()
            column, ours = block.local(labels)
            column.masked_fill_(~ours, -1)
            dense_way(options.shard).write_gradient(logits, logits, column, softmax, upstream, block)
            if sparse is not None:
                sparse.add_to(logits, block)
            if of_weight is not None:
                torch.mm(logits.t(), hidden, out=of_weight[rows])
            if logits.dtype == of_hidden.dtype:
                of_hidden.addmm_(logits, weight[rows])
            else:
                of_hidden += logits @ weight[rows]
            logits = None
        if of_weight is not None:
            of_weight[options.shard.columns :] = 0
            # Mark it as the weight's whole gradient for megatron-core. With `gradient_accumulation_fusion` its own
            # linear layer, which makes the logits of smaller micro-batches, adds to the gradient buffer itself and
            # marks the weight; the wrapper then treats the returned gradient as a dummy.
            if "grad_added_to_main_grad" in vars(weight):
                weight.grad_added_to_main_grad = False
        return of_hidden.to(hidden.dtype), of_weight, None, None
