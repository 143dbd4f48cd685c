"""Row sums of a softmax and its gradient in plain torch, a chunk of tokens at a time: any device, any layout."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mslime.backends.megatron.log_probs.vocab_shard import FAR, Gradients, ShardSums, Softmax, VocabShard

# A CPU works on blocks that stay in its second-level cache: twice as fast as blocks of 1024 rows of a large vocabulary
# (benchmarks/log_probs.py). On an accelerator each block costs kernel launches, and large ones are better.
CPU_BLOCK_BYTES = 512 * 2**10


def row_sums(logits: Tensor, column: Tensor, shard: VocabShard, *, with_entropy: bool) -> ShardSums:
    """The sums of every row of `logits` [n, V_local].

    Two float32 blocks of a chunk are in memory at once, one without the entropy.

    Args:
        logits: [n, V_local], any float dtype.
        column: [n] int64, column of the label, any valid one if the label is another rank's.
        shard: which columns count, and the temperature.
        with_entropy: also sum d exp(d).
    """
    n = logits.shape[0]
    top = logits.new_full((n,), -torch.inf, dtype=torch.float32)
    total, moment, label = logits.new_zeros((3, n), dtype=torch.float32)
    for rows in _chunks(logits, shard):
        real = logits[rows, : shard.columns]
        top[rows] = real.amax(dim=1)
        label[rows] = real.gather(1, column[rows, None])[:, 0].float()
        total[rows], chunk_moment = _exponential_sums(_distances(real, top[rows], shard), with_moment=with_entropy)
        if chunk_moment is not None:
            moment[rows] = chunk_moment
    return ShardSums(top, total, moment, label)


def _exponential_sums(d: Tensor, *, with_moment: bool) -> tuple[Tensor, Tensor | None]:
    """Sums over the columns of exp(d) and of d exp(d); overwrites `d`."""
    if not with_moment:
        return d.exp_().sum(dim=1), None
    weight = d.exp()
    return weight.sum(dim=1), weight.mul_(d.clamp_(min=FAR)).sum(dim=1)


def write_gradient(
    out: Tensor, logits: Tensor, column: Tensor, softmax: Softmax, upstream: Gradients, shard: VocabShard
) -> None:
    """Write the gradient with respect to `logits` into `out`, both [n, V_local]; padding columns get zeros.

    One float32 block of a chunk is in memory, two with a gradient of the entropy.

    Args:
        out: receives the gradient, in the dtype of the logits.
        logits: as in the forward pass.
        column: [n] int64, column of the label, -1 if the label is another rank's.
        softmax: of the rows, over all ranks.
        upstream: gradients of the loss.
        shard: which columns count, and the temperature.
    """
    out[:, shard.columns :] = 0
    for rows in _chunks(logits, shard):
        out[rows, : shard.columns] = _chunk_gradient(rows, logits, column, softmax, upstream, shard)


def _chunk_gradient(
    rows: slice, logits: Tensor, column: Tensor, softmax: Softmax, upstream: Gradients, shard: VocabShard
) -> Tensor:
    """[chunk, columns] float32."""
    log_p = _distances(logits[rows, : shard.columns], softmax.top[rows], shard)
    log_p -= softmax.log_total[rows, None]
    if upstream.entropy is None:
        assert upstream.log_probs is not None
        grad = log_p.exp_().mul_(-upstream.log_probs[rows, None])
    else:
        assert softmax.entropy is not None
        p = log_p.exp()
        grad = log_p.clamp_(min=FAR).add_(softmax.entropy[rows, None]).mul_(-upstream.entropy[rows, None])
        if upstream.log_probs is not None:
            grad -= upstream.log_probs[rows, None]
        grad *= p
    if upstream.log_probs is not None:
        ours = column[rows] >= 0
        at_label = torch.where(ours, upstream.log_probs[rows], 0)
        grad.scatter_add_(1, column[rows].clamp(min=0)[:, None], at_label[:, None])
    return grad.div_(shard.temperature)


def _chunks(logits: Tensor, shard: VocabShard) -> Iterator[slice]:
    """Rows of each block: at most `shard.chunk`; none if this rank holds only padding."""
    if not shard.columns:
        return
    step, n = shard.chunk, logits.shape[0]
    if logits.device.type == "cpu":
        step = min(step, max(CPU_BLOCK_BYTES // (4 * shard.columns), 1))
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def _distances(logits: Tensor, top: Tensor, shard: VocabShard) -> Tensor:
    """[chunk, columns] float32, (logit - top) / temperature, in newly allocated memory."""
    d = logits.to(torch.float32, copy=True).sub_(top[:, None])
    return d if shard.temperature == 1 else d.div_(shard.temperature)
