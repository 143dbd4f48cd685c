"""Fused attention of `transformer_engine_torch` in plain torch: causal or not, packed (thd) or not (sbhd), grouped
queries, values narrower than keys, sliding windows, learnable sinks. The backward pass is cuDNN's: from the output and
the log of the softmax's denominator that it is handed, which context parallelism has corrected in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.rehearsal.extension.calls import counted
from tests.rehearsal.extension.enums import NVTE_Fused_Attn_Backend

LEARNABLE = 2


@dataclass(frozen=True)
class Mask:
    """What a query may look at, and how scores are scaled.

    Attributes:
        window: keys to the left and to the right of the own position; below 0: all of them.
        sink: [h] further logits of every softmax, None without.
    """

    scale: float
    causal: bool
    window: tuple[int, int]
    sink: Tensor | None

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """[q, h, d] and [k, h, d] -> [h, q, k], -inf where a query may not look."""
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        rows, columns = torch.arange(len(q))[:, None], torch.arange(len(k))[None]
        hidden = torch.zeros(len(q), len(k), dtype=torch.bool)
        if self.causal:
            hidden |= columns > rows
        if self.window[0] >= 0:
            hidden |= columns < rows - self.window[0]
        if self.window[1] >= 0:
            hidden |= columns > rows + self.window[1]
        return scores.masked_fill(hidden.to(scores.device)[None], float("-inf"))

    def log_denominators(self, scores: Tensor) -> Tensor:
        """[h, q, k] -> [h, q]."""
        if self.sink is None:
            return scores.logsumexp(-1)
        sink = self.sink.float().reshape(-1, 1, 1).expand(*scores.shape[:2], 1)
        return torch.cat([scores, sink], -1).logsumexp(-1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """([q, h, d] output, [q, h] log denominators) of one sequence, float32."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = mask.scores(q, k)
    denominators = mask.log_denominators(scores)
    weights = (scores - denominators[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights, v), denominators.T


def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, upstream: Tensor, denominators: Tensor, mask: Mask
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of (q, k, v, sink) of one sequence, float32."""
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(groups, 1) for x in (k, v))
    weights = (mask.scores(q, wide_k) - denominators.T[..., None]).exp()
    mean = (upstream * out).sum(-1).T  # [h, q]
    of_scores = weights * (torch.einsum("qhd,khd->hqk", upstream, wide_v) - mean[..., None]) * mask.scale
    of_q = torch.einsum("hqk,khd->qhd", of_scores, wide_k)
    of_k = torch.einsum("hqk,qhd->khd", of_scores, q).unflatten(1, (-1, groups)).sum(2)
    of_v = torch.einsum("hqk,qhd->khd", weights, upstream).unflatten(1, (-1, groups)).sum(2)
    of_sink = None
    if mask.sink is not None:
        of_sink = -((mask.sink.float().reshape(-1, 1) - denominators.T).exp() * mean).sum(1)
    return of_q, of_k, of_v, of_sink


@dataclass(frozen=True)
class Sequences:
    """Where the sequences of a batch lie: rows of thd tensors, columns of sbhd ones."""

    packed: bool
    queries: tuple[Any, ...]
    keys: tuple[Any, ...]

    @classmethod
    def of(
        cls, layout: Any, q: Tensor, cu_q: Tensor, cu_kv: Tensor, padded_q: Tensor | None, padded_kv: Tensor | None
    ) -> Sequences:
        if "THD" in layout.name:
            return cls(True, tuple(_rows(cu_q, padded_q)), tuple(_rows(cu_kv, padded_kv)))
        assert layout.name == "NVTE_SBHD_SBHD_SBHD", f"the stand-in has no {layout.name}"
        columns = tuple((slice(None), i) for i in range(q.shape[1]))
        return cls(False, columns, columns)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter(zip(self.queries, self.keys, strict=True))


def _rows(lengths: Tensor, padded: Tensor | None) -> Iterator[slice]:
    ends = lengths.tolist()
    starts = ends if padded is None else padded.tolist()
    for i, start in enumerate(starts[:-1]):
        yield slice(start, start + ends[i + 1] - ends[i])


def get_fused_attn_backend(params: Any) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """Says yes to everything: which shapes cuDNN takes is not rehearsed."""
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""


@counted
def fused_attn_fwd(
    max_seqlen_q: int, max_seqlen_kv: int, is_training: bool, attn_scale: float, p_dropout: float, set_zero: bool,
    qkv_layout: Any, o_format: Any, qkv_scale_inv_format: Any, bias_type: Any, attn_mask_type: Any, softmax_type: Any,
    window_size: Sequence[int], bottom_right_diagonal: bool, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, Q: Tensor,
    K: Tensor, V: Tensor, fake_dtype: torch.dtype, cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None, page_table_k: Tensor | None, page_table_v: Tensor | None, s_quantizer: object,
    o_quantizer: object, Bias: Tensor | None, SoftmaxOffset: Tensor | None, rng_gen: object, rng_elts_per_thread: int,
    return_max_logit: bool, cuda_graph: bool,
) -> list[Tensor]:  # fmt: skip
    """[output, log denominators ([t, h, 1] packed, else [b, h, s, 1]), a random state, the sinks if there are any]."""
    assert Bias is None and page_table_k is None and not return_max_logit and p_dropout == 0
    packed = "THD" in qkv_layout.name
    assert not packed or "PADDING" in attn_mask_type.name, (qkv_layout, attn_mask_type)
    mask = Mask(attn_scale, "CAUSAL" in attn_mask_type.name, tuple(window_size), SoftmaxOffset)
    where = Sequences.of(qkv_layout, Q, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
    out = Q.new_zeros(*Q.shape[:-1], V.shape[-1])
    denominators = Q.new_zeros(Q.shape[:-1], dtype=torch.float32)
    for rows, keys in where:
        found, lse = attend(Q[rows].float(), K[keys].float(), V[keys].float(), mask)
        out[rows].copy_(found)
        denominators[rows].copy_(lse)
    if not packed:  # [s, b, h] -> [b, h, s]
        denominators = denominators.permute(1, 2, 0).contiguous()
    state = torch.zeros(2, dtype=torch.int64, device=Q.device)
    return [out, denominators[..., None], state, *([] if SoftmaxOffset is None else [SoftmaxOffset])]


@counted
def fused_attn_bwd(
    max_seqlen_q: int, max_seqlen_kv: int, attn_scale: float, p_dropout: float, set_zero: bool, qkv_layout: Any,
    o_format: Any, do_format: Any, dqkv_layout: Any, qkv_scale_inv_format: Any, do_scale_inv_format: Any,
    bias_type: Any, attn_mask_type: Any, softmax_type: Any, window_size: Sequence[int], bottom_right_diagonal: bool,
    deterministic: bool, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, Q: Tensor, K: Tensor, V: Tensor, O: Tensor,
    dO: Tensor, fake_dtype: torch.dtype, Aux_CTX_Tensors: Sequence[Tensor], cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None, s_quantizer: object, dp_quantizer: object, dqkv_quantizer: object,
    cuda_graph: bool,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of [q, k, v, bias (None), sinks (None without)]."""
    sink = Aux_CTX_Tensors[2] if int(softmax_type) == LEARNABLE else None
    mask = Mask(attn_scale, "CAUSAL" in attn_mask_type.name, tuple(window_size), sink)
    where = Sequences.of(qkv_layout, Q, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
    denominators = Aux_CTX_Tensors[0].squeeze(-1)
    if not where.packed:
        denominators = denominators.permute(2, 0, 1)
    grads = [torch.zeros_like(x) for x in (Q, K, V)]
    of_sink = None if sink is None else torch.zeros(sink.numel(), device=sink.device)
    out, upstream = O.reshape(*Q.shape[:-1], -1), dO.reshape(*Q.shape[:-1], -1)
    for rows, keys in where:
        parts = (Q[rows], K[keys], V[keys], out[rows], upstream[rows], denominators[rows])
        *found, own_sink = attend_backward(*(part.float() for part in parts), mask)
        for grad, part, place in zip(grads, found, (rows, keys, keys), strict=True):
            grad[place].copy_(part)
        if of_sink is not None:
            of_sink += own_sink
    return [*grads, None, None if sink is None or of_sink is None else of_sink.reshape(sink.shape).to(sink.dtype)]


def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int) -> Tensor:
    """[t, ...] of packed sequences -> [b, s, ...], zeros behind their ends."""
    out = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    for i, rows in enumerate(_rows(cu_seqlens, None)):
        out[i, : rows.stop - rows.start].copy_(tensor[rows])
    return out


def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, t: int) -> Tensor:
    """The way back."""
    out = tensor.new_zeros(t, *tensor.shape[2:])
    for i, rows in enumerate(_rows(cu_seqlens, None)):
        out[rows].copy_(tensor[i, : rows.stop - rows.start])
    return out
