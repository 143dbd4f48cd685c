"""Log-probabilities and entropy of vocabulary-parallel logits, without a float32 copy of the logits.

Every tensor-parallel rank holds some columns of the vocabulary; the returned values are the same on all of them. Two
implementations give the same result: on a CPU chunk by chunk over the tokens (`chunked`), on CUDA in one pass over the
logits (`fused`). Both recompute the softmax in the backward pass. Besides the gradient of the logits, which autograd
must return, they need

- kept for the backward pass: 8 bytes a token, 12 with the entropy;
- while it runs: at most 64 bytes a token, and for `chunked` two float32 blocks of [chunk, V_local] (at most 512 KiB on
  a CPU, or one row).

Two small collectives per call, of [n] and [3, n] float32. On CUDA the host never waits for the device, so a CUDA graph
can capture it.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mslime.backends.megatron.log_probs import chunked
from mslime.backends.megatron.log_probs.vocab_shard import Gradients, LabelSupport, ShardSums, Softmax, VocabShard

_log = logging.getLogger(__name__)

Way = Literal["auto", "chunked", "fused"]


@dataclass(frozen=True)
class LogProbs:
    """Log-probs of the labels under the policy.

    Attributes:
        log_probs: [n] float32, log pi(label | context) at the given temperature.
        entropy: [n] float32, in nats, None if not requested.
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
    support: LabelSupport | None = None,
    reuse_logits: bool = False,
    way: Way = "auto",
) -> LogProbs:
    """Log-probabilities (and entropy) of `labels` under softmax(logits / temperature).

    Gradients reach `logits` as if the loss were computed once: the upstream gradient must be the same on every rank of
    `tp_group`, as it is for any loss made from the returned values. The entropy has a gradient as well, which costs
    nothing when no loss uses it.

    Args:
        logits: [n, V_local], any float dtype; this rank's vocabulary columns, ids `vocab_start + column`.
        labels: [n] int64, ids over the whole vocabulary.
        tp_group: ranks that share the vocabulary; None if this rank holds all of it.
        vocab_start: id of the first local column.
        vocab_size: true size of the vocabulary; columns with larger ids are padding, outside the softmax.
        temperature: the temperature that the tokens were sampled with.
        with_entropy: also return the entropy.
        chunk: most tokens whose softmax is in memory at once, for `chunked`.
        support: the ids that each label was drawn from; the softmax of such a row is over these ids only.
        reuse_logits: write the gradient over the logits in the backward pass, which saves [n, V_local] elements. For
            callers that do not read the logits afterwards; autograd raises if another operation needs them.
        way: "auto" is `fused` on CUDA with Triton, else `chunked`; other values are for tests and benchmarks.

    Raises:
        AssertionError: shapes disagree, a label is outside the vocabulary, or outside its support. On CUDA the device
            checks the labels and reports errors at its next synchronisation.
    """
    assert logits.ndim == 2 and labels.shape == logits.shape[:1], (logits.shape, labels.shape)
    check_labels(labels, vocab_size, support)
    columns = min(max(vocab_size - vocab_start, 0), logits.shape[1])
    shard = VocabShard(vocab_start, columns, temperature, chunk, tp_group, is_fused(way, logits))
    assert not (reuse_logits and logits.is_leaf and logits.requires_grad), "the caller keeps a leaf's values"
    log_probs, entropy = _VocabParallelLogProbs.apply(logits, labels, shard, support, with_entropy, reuse_logits)
    return LogProbs(log_probs, entropy)


def check_labels(labels: Tensor, vocab_size: int, support: LabelSupport | None) -> None:
    """Check labels and their supports: on a CPU with a message; on CUDA with an assertion in the stream, because
    reading values would wait."""
    if labels.is_cuda:
        inside = ((labels >= 0) & (labels < vocab_size)).all()
        message = f"a label is outside the vocabulary, which has {vocab_size} ids"
        torch.ops.aten._assert_async.msg(inside, message)
    elif labels.numel():
        low, high = (int(x) for x in labels.aminmax())
        assert low >= 0 and high < vocab_size, f"labels span [{low}, {high}], the vocabulary has {vocab_size} ids"
    if support is not None:
        support.check(labels)


def is_fused(way: Way, logits: Tensor) -> bool:
    if way != "auto":
        return way == "fused"
    return logits.is_cuda and logits.stride(1) == 1 and _triton_is_installed()


@cache
def _triton_is_installed() -> bool:
    """Whether Triton is installed; on CUDA only. Logs a missing Triton once."""
    found = importlib.util.find_spec("triton") is not None
    if not found:
        _log.warning("triton is not installed: log-probs are computed chunk by chunk, slower and with more memory")
    return found


def dense_way(shard: VocabShard) -> Any:
    """The module that reads whole rows; both have `row_sums` and `write_gradient` with the same signatures."""
    if not shard.fused:
        return chunked
    from mslime.backends.megatron.log_probs import fused  # imports triton

    return fused


def softmax_of(sums: ShardSums, ours: Tensor, shard: VocabShard, *, with_entropy: bool) -> tuple[Tensor, Softmax]:
    """Log-probs [n] and the softmax's description, from this rank's sums. Runs the two collectives."""
    group, top = shard.group, sums.top
    if group is not None and group.size() > 1:
        top = sums.top.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        sums.move_to(top, shard.temperature)
    totals = torch.stack((sums.total, sums.moment, ((sums.label - top) / shard.temperature).masked_fill_(~ours, 0)))
    if group is not None and group.size() > 1:
        dist.all_reduce(totals, group=group)
    log_total = totals[0].log()
    entropy = log_total - totals[1] / totals[0] if with_entropy else None
    return totals[2] - log_total, Softmax(top, log_total, entropy)


class _VocabParallelLogProbs(torch.autograd.Function):
    """With x = logits / T, m = max x, Z = sum exp(x - m): log p[j] = x[j] - m - log Z, H = log Z - sum p (x - m).

    The sums use distances from the maximum, never x itself: float32 then keeps full precision for logits of any size.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        shard: VocabShard,
        support: LabelSupport | None,
        with_entropy: bool,
        reuse_logits: bool,
    ) -> tuple[Tensor, Tensor | None]:
        column, ours = shard.local(labels)
        sums: ShardSums = dense_way(shard).row_sums(logits, column, shard, with_entropy=with_entropy)
        if support is not None:
            support.replace(sums, support.read(logits, shard), shard)
        log_probs, softmax = softmax_of(sums, ours, shard, with_entropy=with_entropy)
        ctx.save_for_backward(logits, labels, softmax.top, softmax.log_total, softmax.entropy)
        ctx.shard, ctx.support, ctx.reuse_logits = shard, support, reuse_logits
        ctx.set_materialize_grads(False)
        return log_probs, softmax.entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """d log p[label] / dx = onehot - p;  dH / dx = -p (log p + H);  dx / dlogits = 1 / T."""
        logits, labels, top, log_total, entropy = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        support: LabelSupport | None = ctx.support
        softmax, upstream = Softmax(top, log_total, entropy), Gradients(*grads)
        if upstream.log_probs is None and upstream.entropy is None:
            return (None,) * 6
        column, ours = shard.local(labels)
        column.masked_fill_(~ours, -1)
        out = logits.detach() if ctx.reuse_logits else torch.empty_like(logits)
        if support is None:
            dense_way(shard).write_gradient(out, logits, column, softmax, upstream, shard)
        else:
            x = support.read(logits, shard)  # before `out`, which may be the logits
            sparse = support.gradient(x, labels, softmax, upstream, shard)
            dense = support.is_unrestricted()
            dense_way(shard).write_gradient(out, logits, column, softmax.only(dense), upstream.only(dense), shard)
            sparse.add_to(out, shard)
        if ctx.reuse_logits:
            torch.autograd.graph.increment_version(logits)  # a kernel's writes do not increment the version
        return (out,) + (None,) * 5
