"""Linear layers of `transformer_engine_torch` in plain torch: products in float32, rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tests.rehearsal.extension.calls import counted
from tests.rehearsal.extension.enums import TORCH_DTYPES


@counted
def generic_gemm(
    A: Tensor, transa: bool, B: Tensor, transb: bool, D: Tensor | None, quantizer: object, output_dtype: Any,
    bias: Tensor | None, bias_type: Any, gelu: bool, gelu_in: Tensor | None, grad: bool, workspace: Tensor | None,
    workspace_size: int, accumulate: bool, use_split_accumulator: bool, comm_overlap: object = None,
    comm_type: object = None, extra_output: Tensor | None = None, bulk_overlap: bool = False, alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Tensor, Tensor | None, None, Tensor | None]:  # fmt: skip
    """(B or its transpose) times (A or its transpose), in row-major order, with a bias or, of `grad`, its gradient.

    Returns:
        (the product, the bias's gradient where `grad`, nothing of gelu, `extra_output`).
    """
    assert quantizer is None and not gelu and comm_overlap is None, "the stand-in computes no FP8, gelu or overlap"
    a, b = A.reshape(-1, A.shape[-1]), B.reshape(-1, B.shape[-1])
    left, right = (b.T if transb else b), (a.T if transa else a)
    assert left.shape[1] == right.shape[0], (A.shape, transa, B.shape, transb)
    out = (left.float() @ right.float()) * alpha
    bias_grad = None
    if bias is not None and bias.numel():
        if grad:
            bias_grad = b.float().sum(0).to(bias.dtype)
        else:
            out = out + bias.float()
    if not transb:
        out = out.reshape(*B.shape[:-1], out.shape[-1])
    if D is None:
        dtype = TORCH_DTYPES[int(output_dtype)] if output_dtype is not None else A.dtype
        return out.to(dtype), bias_grad, None, extra_output
    out = out.reshape(D.shape)
    D.copy_(D.float() + out if accumulate else out)
    return D, bias_grad, None, extra_output


@counted
def te_general_grouped_gemm(
    A: Sequence[Tensor], transa: bool, B: Sequence[Tensor], transb: bool, D: Sequence[Tensor], D_type: Any,
    m_splits: Sequence[int], bias: Sequence[Tensor], bias_type: Any, single_output: bool,
    pre_gelu_out: Sequence[Tensor], grad: bool, workspace: Sequence[Tensor], workspace_size: int, accumulate: bool,
    use_split_accumulator: bool, math_sm_count: int,
) -> list[Tensor | None]:  # fmt: skip
    """`generic_gemm` of every expert; with `grad`, `bias` is where the bias gradients go."""
    outs = list(D[0].split([int(rows) for rows in m_splits], 0)) if single_output else list(D)
    assert len(A) == len(B) == len(outs), (len(A), len(B), len(outs))
    found: list[Tensor | None] = []
    for i, (a, b, out) in enumerate(zip(A, B, outs, strict=True)):
        own = bias[i] if i < len(bias) and bias[i] is not None and bias[i].numel() else None
        found.append(own)
        if b.numel() == 0:  # an expert without tokens
            if not single_output and not accumulate:
                out.zero_()
            if grad and own is not None:
                own.zero_()
            continue
        _, bias_grad, _, _ = generic_gemm(
            a, transa, b, transb, out, None, None, own, None, False, None, grad, None, 0, accumulate, False
        )
        if grad and own is not None:
            assert bias_grad is not None
            own.copy_(bias_grad)
    return found


def get_num_cublas_streams() -> int:
    return 4


def get_cublasLt_version() -> int:
    return 130100
