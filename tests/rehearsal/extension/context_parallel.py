"""What `transformer_engine_torch` does for context parallelism over packed sequences, in plain torch.

Every rank holds two pieces of each sequence, of equal length: the rank-th from the front and the rank-th from the back.
Lengths (`cu_seqlens`) are those of padded sequences, on one rank unless said otherwise; log denominators are packed, as
[h, t].
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tests.rehearsal.extension.calls import counted


def _halves(cu_seqlens: Tensor, half: int) -> Tensor:
    """Rows of the first (0) or second (1) halves of all sequences, in order."""
    ends = cu_seqlens.tolist()
    pieces = []
    for start, end in pairwise(ends):
        middle = (start + end) // 2
        pieces.append(torch.arange(start, middle) if half == 0 else torch.arange(middle, end))
    return torch.cat(pieces).to(cu_seqlens.device)


def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int) -> Tensor:
    """Rows of whole sequences that a rank holds; `cu_seqlens` are those of whole sequences."""
    ends = cu_seqlens.tolist()
    rows: list[int] = []
    for start, end in pairwise(ends):
        piece = (end - start) // (2 * world_size)
        rows += [*range(start + rank * piece, start + (rank + 1) * piece)]
        rows += [*range(end - (rank + 1) * piece, end - rank * piece)]
    return torch.tensor(rows, dtype=torch.int32, device=cu_seqlens.device)


def _rank_order(cu_seqlens: Tensor, world_size: int, total: int) -> Tensor:
    """Rows of whole sequences, rank after rank."""
    rows = [thd_get_partitioned_indices(cu_seqlens, total, world_size, rank) for rank in range(world_size)]
    return torch.cat(rows).long()


@counted
def thd_sequence_order_to_cp_rank_order(tensor: Tensor, cu_seqlens: Tensor, cp_size: int, total_tokens: int) -> Tensor:
    return tensor[_rank_order(cu_seqlens, cp_size, total_tokens)]


@counted
def thd_cp_rank_order_to_sequence_order(tensor: Tensor, cu_seqlens: Tensor, cp_size: int, total_tokens: int) -> Tensor:
    out = torch.empty_like(tensor)
    out[_rank_order(cu_seqlens, cp_size, total_tokens)] = tensor
    return out


@counted
def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """[t, h, d] -> [t / 2, h, d], or, of keys and values together, [2, t, h, d] -> [2, t / 2, h, d]."""
    return tensor.index_select(tensor.dim() - 3, _halves(cu_seqlens, half_idx))


@counted
def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int) -> Tensor:
    """[h, t] -> [h, t / 2]."""
    assert lse_packed, "the stand-in's log denominators are packed"
    found = lse[:, _halves(cu_seqlens, 1)]
    assert found.shape[1] == second_half_lse_seqlen, (found.shape, second_half_lse_seqlen)
    return found


@counted
def thd_second_half_lse_correction(lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool) -> None:
    """Adds a step's denominators, of second halves, to the total, in place."""
    assert lse_packed and lse.dtype == lse_per_step.dtype == torch.float32
    rows = _halves(cu_seqlens, 1)
    lse[:, rows] = torch.logaddexp(lse[:, rows], lse_per_step)


@counted
def thd_out_correction(
    out: Tensor, out_per_step: Tensor, old_lse: Tensor, lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor,
    only_second_half: bool, lse_packed: bool,
) -> None:  # fmt: skip
    """Adds a step's output to what was computed before it, each weighted by its share of the denominator, in place."""
    assert lse_packed and out.dtype == out_per_step.dtype
    rows = _halves(cu_seqlens, 1) if only_second_half else torch.arange(len(out), device=out.device)
    old, own = ((x - lse[:, rows]).exp().T[..., None] for x in (old_lse[:, rows], lse_per_step))
    total = out[rows].float() * old + out_per_step.reshape(len(rows), *out.shape[1:]).float() * own
    out[rows] = total.to(out.dtype)


@counted
def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str
) -> None:
    """Brings a step's gradient into the total, in place: each half by "add", "copy", "zero" or "none".

    The step has computed one half alone where the other's word is "none" or "zero".
    """
    whole = {first_half, second_half} <= {"add", "copy"}
    for half, word in enumerate((first_half, second_half)):
        rows = _halves(cu_seqlens, half)
        own = grad_per_step[rows] if whole else grad_per_step
        if word == "add":
            grad[rows] = grad[rows] + own
        elif word == "copy":
            grad[rows] = own
        elif word == "zero":
            grad[rows] = torch.zeros_like(grad[rows])
        else:
            assert word == "none", word
