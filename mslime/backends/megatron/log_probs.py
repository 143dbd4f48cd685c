"""Log-probabilities and entropy of vocabulary-parallel logits, without a float32 copy of all logits.

Every tensor-parallel rank holds some columns of the vocabulary; what comes back is the same on all of them. The
softmax is computed chunk by chunk over the tokens, in float32 whatever the dtype of the logits, and recomputed in the
backward pass, so the extra memory is one chunk. Two small collectives per call, of [n] and [3, n] float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class LogProbs:
    """What the policy says about the labels.

    Attributes:
        log_probs: [n] float32, log pi(label | context) at the given temperature.
        entropy: [n] float32, in nats, None when not asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None


def vocab_parallel_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    tp_group: dist.ProcessGroup | None,
    vocab_start: int,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk: int = 1024,
) -> LogProbs:
    """Log-probabilities (and entropy) of `labels` under softmax(logits / temperature).

    Gradients reach `logits` as if the loss were computed once: the upstream gradient must be the same on every rank
    of `tp_group`, as it is for any loss made from the returned values. The entropy has a gradient as well, which costs
    nothing when no loss uses it.

    Args:
        logits: [n, V_local], any float dtype; this rank's vocabulary columns, ids `vocab_start + column`.
        labels: [n] int64, ids over the whole vocabulary.
        tp_group: ranks that share the vocabulary; None when this rank holds all of it.
        vocab_start: id of the first local column.
        vocab_size: true size of the vocabulary; columns with larger ids are padding, outside the softmax.
        temperature: the temperature that the tokens were sampled with.
        with_entropy: also return the entropy.
        chunk: tokens whose softmax is in memory at once.

    Raises:
        AssertionError: a label is outside the vocabulary, or shapes disagree.
    """
    assert logits.ndim == 2 and labels.shape == logits.shape[:1], (logits.shape, labels.shape)
    assert temperature > 0 and chunk > 0, (temperature, chunk)
    if labels.numel():
        low, high = (int(x) for x in labels.aminmax())
        assert low >= 0 and high < vocab_size, f"labels span [{low}, {high}], the vocabulary has {vocab_size} ids"
    shard = _Shard(vocab_start, min(max(vocab_size - vocab_start, 0), logits.shape[1]), temperature, chunk)
    log_probs, entropy = _VocabParallelLogProbs.apply(logits, labels, tp_group, shard, with_entropy)
    return LogProbs(log_probs, entropy)


@dataclass(frozen=True)
class _Shard:
    """This rank's part of the vocabulary: real columns [0, columns), ids from `start` on."""

    start: int
    columns: int
    temperature: float
    chunk: int

    def rows(self, n: int) -> list[slice]:
        return [slice(i, min(i + self.chunk, n)) for i in range(0, n, self.chunk)]

    def scaled(self, logits: Tensor, rows: slice) -> Tensor:
        """[chunk, columns] float32: real columns over the temperature."""
        return logits[rows, : self.columns].float() / self.temperature

    def local(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each label (0 where it is another rank's) and whether it is ours."""
        column = labels - self.start
        ours = (column >= 0) & (column < self.columns)
        return column.masked_fill(~ours, 0), ours


class _VocabParallelLogProbs(torch.autograd.Function):
    """With x = logits / T, Z = sum exp(x), p = exp(x) / Z: log p[label] = x[label] - log Z, H = log Z - sum p x."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, shard: _Shard, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        n = logits.shape[0]
        top = logits.new_full((n,), -torch.inf, dtype=torch.float32)
        sums = logits.new_zeros((3, n), dtype=torch.float32)  # sum exp(x - top), sum x exp(x - top), x[label]
        column, ours = shard.local(labels)
        for rows in shard.rows(n) if shard.columns else []:
            x = shard.scaled(logits, rows)
            top[rows] = x.amax(dim=1)
            sums[2, rows] = x.gather(1, column[rows, None])[:, 0] * ours[rows]
            weight = (x - top[rows, None]).exp_()
            sums[0, rows] = weight.sum(dim=1)
            if with_entropy:
                sums[1, rows] = weight.mul_(x).sum(dim=1)
        if group is not None and group.size() > 1:
            local_top = top.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            sums[:2] *= (local_top - top).exp()  # 0 where this rank holds padding only
            dist.all_reduce(sums, group=group)
        log_z = top + sums[0].log()
        entropy = log_z - sums[1] / sums[0] if with_entropy else None
        ctx.save_for_backward(logits, labels, log_z, entropy)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        return sums[2] - log_z, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:  # type: ignore[override]
        """d log p[label] / dx = onehot - p;  dH / dx = -p (log p + H);  dx / dlogits = 1 / T."""
        logits, labels, log_z, entropy = ctx.saved_tensors
        shard: _Shard = ctx.shard
        grad_log_probs, grad_entropy = grads
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None, None
        grad_logits = torch.zeros_like(logits)
        column, ours = shard.local(labels)
        for rows in shard.rows(logits.shape[0]) if shard.columns else []:
            log_p = shard.scaled(logits, rows).sub_(log_z[rows, None])
            p = log_p.exp()
            grad = torch.zeros_like(p)
            if grad_log_probs is not None:
                upstream = grad_log_probs[rows, None]
                grad -= upstream * p
                grad.scatter_add_(1, column[rows, None], upstream * ours[rows, None])
            if grad_entropy is not None:
                grad -= grad_entropy[rows, None] * p * (log_p + entropy[rows, None])
            grad_logits[rows, : shard.columns] = (grad / shard.temperature).to(logits.dtype)
        return grad_logits, None, None, None, None
