"""Rotary embeddings of packed sequences, without device synchronisation or a loop over sequences.

megatron-core 0.16.1 reads the sequences' lengths from the device twice in every layer and slices the angles one
sequence at a time. Here row positions are computed on the device of the lengths, and the layers of a micro-batch share
cosines and sines. Results are the same, bit for bit.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


def packed_positions(cumulative: Tensor, rows: int, cp: int, rank: int) -> Tensor:
    """[rows] int64: the position within its sequence of every row that a context-parallel rank holds.

    Each sequence is cut into 2 x CP chunks, of which the rank holds numbers `rank` and `2 x CP - 1 - rank`.

    Args:
        cumulative: [sequences + 1] int32, cumulative lengths over all context-parallel ranks.
    """
    starts = cumulative.long() // cp
    row = torch.arange(rows, device=cumulative.device)
    sequence = torch.searchsorted(starts, row, right=True) - 1
    within = row - starts[sequence]
    if cp == 1:
        return within
    length = starts.diff()[sequence]  # of the rows that this rank holds
    half = length // 2
    late = cp * length - (rank + 2) * half
    return within + torch.where(within < half, rank * half, late)


@dataclass(frozen=True)
class _Angles:
    """Cosines and sines [T, 1, d] of a micro-batch's rows, and the inputs they were made from."""

    lengths: weakref.ref[Tensor]
    freqs: Tensor
    others: tuple[Any, ...]
    cos: Tensor
    sin: Tensor


_newest: list[_Angles] = []
"""The newest angles, at most one entry. It is freed with the micro-batch, so an offloaded trainer keeps no memory of
it."""


def rotate_packed(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """megatron-core's `_apply_rotary_pos_emb_thd`, with the same arguments.

    Args:
        t: [T, heads, d], rows of this context-parallel rank.
        cu_seqlens: [sequences + 1] int32, over all context-parallel ranks.
        freqs: [positions, 1, 1, r], r <= d: angles, at least as many as the longest sequence has positions.
        mscale: factor on cosines and sines.

    Returns:
        [T, heads, d]; features from r on are not rotated.
    """
    assert cp_group is not None, "the context-parallel group decides which rows are here"
    angles = _angles_of(cu_seqlens, freqs, t.shape[0], t.dtype, mscale, cp_group)
    turned, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    if multi_latent_attention:
        turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1)
    half = rope_utils._rotate_half(turned[:, None], rotary_interleaved)[:, 0]
    turned = turned * angles.cos + half * angles.sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _angles_of(
    cumulative: Tensor, freqs: Tensor, rows: int, dtype: torch.dtype, mscale: float, group: dist.ProcessGroup
) -> _Angles:
    others = (rows, dtype, mscale, group.size(), group.rank())
    for known in _newest:
        if known.lengths() is cumulative and known.freqs is freqs and known.others == others:
            return known
    _newest.clear()
    with torch.no_grad():
        position = packed_positions(cumulative, rows, group.size(), group.rank())
        packed = freqs[:, 0].index_select(0, position)
        cos, sin = ((f(packed) * mscale).to(dtype) for f in (torch.cos, torch.sin))
    made = _Angles(weakref.ref(cumulative, lambda _: _newest.clear()), freqs, others, cos, sin)
    _newest.append(made)
    return made


_exact_length = RotaryEmbedding.get_rotary_seq_len


def table_length(
    self: RotaryEmbedding, inference_context: Any, transformer: Any, transformer_input: Any, transformer_config: Any,
    packed_seq_params: PackedSeqParams | None = None, **others: Any,
) -> int:  # fmt: skip
    """megatron-core's `get_rotary_seq_len`, with the same arguments; of packed sequences the next power of two.

    megatron-core caches tables of angles for the last 32 lengths, and the longest sequence differs in nearly every
    micro-batch. Rows index the table by position, so a longer table is valid.
    """
    length = _exact_length(
        self, inference_context, transformer, transformer_input, transformer_config, packed_seq_params, **others
    )
    return length if packed_seq_params is None else 1 << (length - 1).bit_length()


def use_packed_rotary() -> None:
    """Make attention layers call `rotate_packed` in this process. Fused kernels (`apply_rope_fusion`) take
    precedence."""
    rope_utils._apply_rotary_pos_emb_thd = rotate_packed
    RotaryEmbedding.get_rotary_seq_len = table_length  # type: ignore[method-assign]
