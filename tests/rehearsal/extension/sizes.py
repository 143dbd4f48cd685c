"""Functions of `transformer_engine_torch` that allocate what the real ones return, and compute nothing.

For tensors of full size (`tests.rehearsal.full_size`). `use` puts them in the place of those that compute, before
Transformer Engine is imported. What the real functions allocate for themselves and free again is not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import tests.rehearsal.extension as extension
from tests.rehearsal.extension.enums import TORCH_DTYPES


def generic_gemm(
    A: Tensor, transa: bool, B: Tensor, transb: bool, D: Tensor | None, quantizer: object, output_dtype: Any,
    bias: Tensor | None, bias_type: Any, gelu: bool, gelu_in: Tensor | None, grad: bool, *others: Any, **named: Any,
) -> tuple[Tensor, Tensor | None, None, Tensor | None]:  # fmt: skip
    """As `gemm.generic_gemm`."""
    assert quantizer is None and not gelu
    inner = (A.shape[-1] if transa else A.numel() // A.shape[-1]), (B.numel() // B.shape[-1] if transb else B.shape[-1])
    assert inner[0] == inner[1], (A.shape, transa, B.shape, transb)
    wide = A.numel() // A.shape[-1] if transa else A.shape[-1]
    shape = (B.shape[-1], wide) if transb else (*B.shape[:-1], wide)
    if D is None:
        D = B.new_empty(shape, dtype=TORCH_DTYPES[int(output_dtype)] if output_dtype is not None else A.dtype)
    assert D.numel() == torch.Size(shape).numel(), (D.shape, shape)
    bias_grad = torch.empty_like(bias) if grad and bias is not None and bias.numel() else None
    return D, bias_grad, None, named.get("extra_output")


def te_general_grouped_gemm(
    A: Sequence[Tensor], transa: bool, B: Sequence[Tensor], transb: bool, D: Sequence[Tensor], D_type: Any,
    m_splits: Sequence[int], bias: Sequence[Tensor], bias_type: Any, single_output: bool, *others: Any, **named: Any,
) -> list[Tensor | None]:  # fmt: skip
    """As `gemm.te_general_grouped_gemm`."""
    outs = list(D[0].split([int(rows) for rows in m_splits], 0)) if single_output else list(D)
    for a, b, out in zip(A, B, outs, strict=True):
        if b.numel():
            generic_gemm(a, transa, b, transb, out, None, None, None, None, False, None, False)
    return [bias[i] if i < len(bias) and bias[i] is not None and bias[i].numel() else None for i in range(len(outs))]


def rmsnorm_fwd(
    input: Tensor, weight: Tensor, eps: float, ln_out: Tensor | None, quantizer: object, otype: Any, *others: Any
) -> tuple[Tensor, None, Tensor]:
    """As `norms.rmsnorm_fwd`."""
    out = torch.empty_like(input, dtype=TORCH_DTYPES[int(otype)]) if ln_out is None else ln_out
    return out, None, input.new_empty(input.shape[:-1], dtype=torch.float32)


def rmsnorm_bwd(dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """As `norms.rmsnorm_bwd`."""
    return torch.empty_like(x), torch.empty_like(gamma)


def rmsnorm_bwd_add(
    dz: Tensor, x: Tensor, add: Tensor, rsigma: Tensor, gamma: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    """As `norms.rmsnorm_bwd_add`."""
    return torch.empty_like(x), torch.empty_like(gamma)


def fused_attn_fwd(*given: Any) -> list[Tensor]:
    """As `attention.fused_attn_fwd`."""
    layout, q, v, sink = given[6], given[16], given[18], given[27]
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if "THD" not in layout.name:
        lse = lse.permute(1, 2, 0).contiguous()
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    return [q.new_empty(*q.shape[:-1], v.shape[-1]), lse[..., None], state, *([] if sink is None else [sink])]


def fused_attn_bwd(*given: Any) -> list[Tensor | None]:
    """As `attention.fused_attn_bwd`."""
    q, k, v, aux = given[19], given[20], given[21], given[25]
    sink = aux[2] if len(aux) > 2 else None
    return [*(torch.empty_like(x) for x in (q, k, v)), None, None if sink is None else torch.empty_like(sink)]


def nothing(*given: Any) -> None:
    """An optimizer's kernel, which writes in place."""


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Norms of 0."""
    device = noop_flag.device
    return torch.zeros(1, device=device), torch.zeros(len(tensor_lists[0]) if per_tensor else 0, device=device)


IN_PLACE = (
    "multi_tensor_adam", "multi_tensor_adam_param_remainder", "multi_tensor_scale", "multi_tensor_scale_tensor",
    "multi_tensor_compute_scale_and_scale_inv",
)  # fmt: skip
ALLOCATING = (
    generic_gemm, te_general_grouped_gemm, rmsnorm_fwd, rmsnorm_bwd, rmsnorm_bwd_add, fused_attn_fwd, fused_attn_bwd,
    multi_tensor_l2norm,
)  # fmt: skip


def use() -> None:
    """Put these in the place of the functions that compute."""
    for function in ALLOCATING:
        setattr(extension, function.__name__, function)
    for name in IN_PLACE:
        setattr(extension, name, nothing)
