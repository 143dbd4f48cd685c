"""Transformer Engine's Triton permutation of tokens to experts (`transformer_engine.pytorch.triton.permutation`) by
torch's indexing, for steps: the interpreter takes minutes for one. `differences` compares the two on small shapes.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """[tokens, 2 x experts + 1]: destination rows, descending; then the experts that they belong to; how many."""
    routed = routing_map.bool()
    by_expert = routed.T.reshape(-1)  # rows lie expert after expert
    rows = (by_expert.cumsum(0) - 1).reshape(num_experts, num_tokens).T
    out = torch.zeros(num_tokens, 2 * num_experts + 1, dtype=torch.int32, device=routing_map.device)
    for token in range(num_tokens):
        experts = routed[token].nonzero().flatten().flip(0)  # later experts have later rows
        count = len(experts)
        out[token, :count] = rows[token, experts].int()
        out[token, num_experts : num_experts + count] = experts.int()
        out[token, -1] = count
    return out


def _pairs(row_id_map: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(token, expert, row) of everything that is routed."""
    slots = torch.arange(num_experts, device=row_id_map.device)
    token, slot = (slots[None] < row_id_map[:, -1:]).nonzero(as_tuple=True)
    return token, row_id_map[token, num_experts + slot].long(), row_id_map[token, slot].long()


def permute_with_mask_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, scale: Tensor | None, pad_offsets: Tensor | None,
    num_tokens: int, num_experts: int, num_out_tokens: int, hidden_size: int, scale_hidden_dim: int | None,
) -> tuple[Tensor, None, Tensor | None]:  # fmt: skip
    """([rows, hidden], nothing of scales, [rows] of probabilities)."""
    assert scale is None and pad_offsets is None, "these belong to FP8"
    token, expert, row = _pairs(row_id_map, num_experts)
    out = torch.zeros(num_out_tokens, hidden_size, dtype=inp.dtype, device=inp.device)
    out[row] = inp[token]
    if probs is None:
        return out, None, None
    permuted = torch.zeros(num_out_tokens, dtype=probs.dtype, device=inp.device)
    permuted[row] = probs[token, expert]
    return out, None, permuted


def unpermute_with_mask_map(
    inp: Tensor, row_id_map: Tensor, merging_probs: Tensor | None, permuted_probs: Tensor | None,
    pad_offsets: Tensor | None, num_tokens: int, num_experts: int, hidden_size: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """([tokens, hidden] sums over a token's rows, [tokens, experts] of probabilities)."""
    assert pad_offsets is None, "it belongs to FP8"
    token, expert, row = _pairs(row_id_map, num_experts)
    parts = inp[row].float()
    if merging_probs is not None:
        parts = parts * merging_probs[token, expert].float()[:, None]
    out = torch.zeros(num_tokens, hidden_size, device=inp.device).index_add(0, token, parts).to(inp.dtype)
    if permuted_probs is None:
        return out, None
    probs = torch.zeros(num_tokens, num_experts, dtype=permuted_probs.dtype, device=inp.device)
    probs[token, expert] = permuted_probs[row]
    return out, probs


def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int) -> Tensor:
    """[rows]: where each row goes when the chunks are put into the order of `sorted_indices`."""
    chunks = torch.arange(num_tokens, device=split_sizes.device).split(split_sizes.tolist())
    moved = torch.cat([chunks[i] for i in sorted_indices.tolist()])
    out = torch.empty(num_tokens, dtype=torch.int32, device=split_sizes.device)
    out[moved] = torch.arange(num_tokens, dtype=torch.int32, device=split_sizes.device)
    return out


def sort_chunks_by_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, num_tokens: int, hidden_size: int, is_forward: bool
) -> tuple[Tensor, Tensor | None]:
    """Rows (and their probabilities) moved as the map says, or back."""
    place = row_id_map.long()

    def moved(x: Tensor) -> Tensor:
        if not is_forward:
            return x[place]
        out = torch.empty_like(x)
        out[place] = x
        return out

    return moved(inp), None if probs is None else moved(probs)


REPLACED = (
    make_row_id_map, permute_with_mask_map, unpermute_with_mask_map, make_chunk_sort_map, sort_chunks_by_map,
)  # fmt: skip


def differences(module: SimpleNamespace, device: torch.device) -> dict[str, float]:
    """Largest differences of each function from the Triton kernels, which the interpreter runs; untuned.

    Args:
        module: Transformer Engine's functions.
    """
    draw = torch.Generator().manual_seed(0)
    tokens, experts, hidden = 7, 4, 16
    routed = torch.zeros(tokens, experts, dtype=torch.bool)
    for token in range(tokens):
        routed[token, torch.randperm(experts, generator=draw)[: token % 3]] = True
    rows = int(routed.sum())
    x, probs = (
        torch.randn(tokens, hidden, generator=draw).to(device),
        torch.rand(tokens, experts, generator=draw).to(device),
    )
    y, row_probs = torch.randn(rows, hidden, generator=draw).to(device), torch.rand(rows, generator=draw).to(device)
    sizes, order = torch.tensor([2, 0, 3, rows - 5]).to(device), torch.tensor([2, 0, 3, 1]).to(device)
    id_map = make_row_id_map(routed.to(device), tokens, experts)
    chunk_map = make_chunk_sort_map(sizes, order, rows, 4)
    arguments = {
        "permute_with_mask_map": (x, id_map, probs, None, None, tokens, experts, rows, hidden, None),
        "unpermute_with_mask_map": (y, id_map, None, row_probs, None, tokens, experts, hidden),
        "make_chunk_sort_map": (sizes, order, rows, 4),
        "sort_chunks_by_map": (y, chunk_map, row_probs, rows, hidden, True),
    }
    ours = {function.__name__: function for function in REPLACED}
    found = {
        "make_row_id_map": _map_difference(module.make_row_id_map(routed.to(device), tokens, experts), id_map, experts)
    }
    for name, given in arguments.items():
        found[name] = _largest(getattr(module, name)(*given), ours[name](*given))
    back = (y, chunk_map, row_probs, rows, hidden, False)
    found["sort_chunks_by_map, back"] = _largest(module.sort_chunks_by_map(*back), sort_chunks_by_map(*back))
    return found


def _map_difference(theirs: Tensor, ours: Tensor, experts: int) -> float:
    """Of what is read of two maps: columns behind a token's count hold anything."""
    return _largest(tuple(_pairs(theirs, experts)), tuple(_pairs(ours, experts)))


def _largest(theirs: object, ours: object) -> float:
    pairs = (
        zip(theirs, ours, strict=True) if isinstance(theirs, tuple) and isinstance(ours, tuple) else [(theirs, ours)]
    )
    worst = 0.0
    for a, b in pairs:
        assert (a is None) == (b is None)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            worst = max(worst, float((a.float() - b.float()).abs().max()))
    return worst
