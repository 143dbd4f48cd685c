"""Row sums of a softmax and its gradient as two Triton kernels: each reads the logits once, in any float dtype.

Sums are float32 in registers, rescaled when a larger logit appears (the online softmax of Milakov and Gimelshein, 2018,
arXiv:1805.02867), so only the gradient is as large as the logits. Exponents are of base 2, as in hardware: one
multiplication by log2(e) / temperature serves both.

The forward kernel has one program per row, the backward kernel one per row and block of columns. Importing this module
imports triton; only `log_probs` does so, for logits on CUDA (or on a CPU under TRITON_INTERPRET=1, for tests).
"""

# Triton's types do not show that kernels are launched by subscript, and types are also checked without Triton.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mslime.backends.megatron.log_probs.vocab_shard import Gradients, ShardSums, Softmax, VocabShard

BLOCK = 4096  # columns in a program's registers: 16 a thread
WARPS = 8
LOG2_E = math.log2(math.e)


def row_sums(logits: Tensor, column: Tensor, shard: VocabShard, *, with_entropy: bool) -> ShardSums:
    """The sums of every row of `logits` [n, V_local]: `chunked.row_sums` in one pass.

    Allocates 16 bytes a row.
    """
    n = logits.shape[0]
    assert logits.stride(1) == 1, f"the columns of a row must be adjacent, strides are {logits.stride()}"
    top, total, moment, label = torch.empty((4, n), dtype=torch.float32, device=logits.device)
    if n:
        _row_sums[(n,)](
            logits, column, top, total, moment, label, logits.stride(0), shard.columns, LOG2_E / shard.temperature,
            WITH_ENTROPY=with_entropy, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return ShardSums(top, total, moment, label)


def write_gradient(
    out: Tensor, logits: Tensor, column: Tensor, softmax: Softmax, upstream: Gradients, shard: VocabShard
) -> None:
    """Write the gradient with respect to `logits` into `out`: `chunked.write_gradient` in one pass.

    Allocates nothing. Rows whose upstream gradients are zero (prompts, padding) are not read.
    """
    n, width = logits.shape
    if not n or not width:
        return
    absent = softmax.top  # a pointer that the kernel does not dereference
    _write_gradient[(n, triton.cdiv(width, BLOCK))](
        out, logits, column, softmax.top, softmax.log_total,
        absent if softmax.entropy is None else softmax.entropy,
        absent if upstream.log_probs is None else upstream.log_probs.contiguous(),
        absent if upstream.entropy is None else upstream.entropy.contiguous(),
        out.stride(0), logits.stride(0), width, shard.columns, LOG2_E / shard.temperature, 1 / shard.temperature,
        OF_LOG_PROBS=upstream.log_probs is not None, OF_ENTROPY=upstream.entropy is not None,
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


# Triton interprets annotations of a kernel: only compile-time constants have one.


@triton.jit
def _absorb(logit, top, total, moment, scale, WITH_ENTROPY: tl.constexpr):
    """The running top, total and moment (in bits) of a row after another block of it."""
    new_top = tl.maximum(top, tl.max(logit, axis=0))
    # If all logits are -inf there is no distance from the top; from 0, all are -inf.
    origin = tl.where(new_top == float("-inf"), 0.0, new_top)
    shift = (top - origin) * scale
    factor = tl.exp2(shift)
    d = (logit - origin) * scale
    weight = tl.exp2(d)
    if WITH_ENTROPY:
        # -1e4 stands for -inf, see shard.FAR.
        block_moment = tl.sum(weight * tl.maximum(d, -1.0e4), axis=0)
        moment = (moment + tl.maximum(shift, -1.0e4) * total) * factor + block_moment
    total = total * factor + tl.sum(weight, axis=0)
    return new_top, total, moment


@triton.jit
def _row_sums(
    logits, column, top_out, total_out, moment_out, label_out,
    stride, columns, scale, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: top, total, moment (in nats) and the label's logit."""
    row = tl.program_id(0)
    x = logits + row.to(tl.int64) * stride
    offsets = tl.arange(0, BLOCK)
    top = float("-inf")
    total = 0.0
    moment = 0.0
    whole = columns // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        logit = tl.load(x + start + offsets).to(tl.float32)
        top, total, moment = _absorb(logit, top, total, moment, scale, WITH_ENTROPY)
    if whole < columns:
        inside = whole + offsets < columns
        logit = tl.load(x + whole + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        top, total, moment = _absorb(logit, top, total, moment, scale, WITH_ENTROPY)
    tl.store(top_out + row, top)
    tl.store(total_out + row, total)
    tl.store(moment_out + row, moment * 0.6931471805599453)  # ln 2
    label = tl.load(column + row)
    tl.store(label_out + row, tl.load(x + label, mask=label < columns, other=0.0).to(tl.float32))


@triton.jit
def _write_gradient(
    out, logits, column, top_in, log_total_in, entropy_in,
    of_log_probs, of_entropy, out_stride, stride, width, columns, scale,
    inverse_temperature, OF_LOG_PROBS: tl.constexpr, OF_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row: [ g (onehot - p) - h p (log p + H) ] / T, 0 in padding columns."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = out + row.to(tl.int64) * out_stride + at
    g = 0.0
    h = 0.0
    if OF_LOG_PROBS:
        g = tl.load(of_log_probs + row)
    if OF_ENTROPY:
        h = tl.load(of_entropy + row)
    if (g == 0.0) & (h == 0.0):
        tl.store(target, tl.zeros([BLOCK], tl.float32).to(out.dtype.element_ty), mask=at < width)
    else:
        x = logits + row.to(tl.int64) * stride + at
        logit = tl.load(x, mask=at < columns, other=float("-inf")).to(tl.float32)
        log2_p = (logit - tl.load(top_in + row)) * scale - tl.load(log_total_in + row) * 1.4426950408889634
        p = tl.exp2(log2_p)
        factor = tl.zeros([BLOCK], tl.float32) + g
        if OF_ENTROPY:
            factor += h * (tl.maximum(log2_p, -1.0e4) * 0.6931471805599453 + tl.load(entropy_in + row))
        grad = -p * factor
        if OF_LOG_PROBS:
            grad = tl.where(at == tl.load(column + row), grad + g, grad)
        tl.store(target, (grad * inverse_temperature).to(out.dtype.element_ty), mask=at < width)
