"""Linear layers of `transformer_engine_torch` in plain torch: products in float32, rounded once, of FP8, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tests.rehearsal.extension.calls import CALLS, counted
from tests.rehearsal.extension.enums import TORCH_DTYPES
from tests.rehearsal.extension.fp8 import check_product, is_quantized, operand

IN_FP8 = "products of FP8"
"""Counted in `CALLS`."""


@counted
def generic_gemm(
    A: Any, transa: bool, B: Any, transb: bool, D: Tensor | None, quantizer: object, output_dtype: Any,
    bias: Tensor | None, bias_type: Any, gelu: bool, gelu_in: Tensor | None, grad: bool, workspace: Tensor | None,
    workspace_size: int, accumulate: bool, use_split_accumulator: bool, comm_overlap: object = None,
    comm_type: object = None, extra_output: Tensor | None = None, bulk_overlap: bool = False, alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Tensor, Tensor | None, None, Tensor | None]:  # fmt: skip
    """(B or its transpose) times (A or its transpose), in row-major order, with a bias or, of `grad`, its gradient.

    Returns:
        (the product, the bias's gradient where `grad`, nothing of gelu, `extra_output`).
    """
    assert quantizer is None and not gelu and comm_overlap is None, "the stand-in has no FP8 output, gelu or overlap"
    in_fp8 = is_quantized(A) or is_quantized(B)
    a, b = _matrix(A, transa), _matrix(B, not transb)
    left, right = (b.T if transb else b), (a.T if transa else a)
    assert left.shape[1] == right.shape[0], (A.shape, transa, B.shape, transb)
    if in_fp8:
        check_product(A, B, left, right, use_split_accumulator)
        CALLS[IN_FP8] += 1
    out = (left @ right) * alpha
    bias_grad = None
    if bias is not None and bias.numel():
        if grad:
            bias_grad = b.sum(0).to(bias.dtype)
        else:
            out = out + bias.float()
    if not transb:
        out = out.reshape(*B.shape[:-1], out.shape[-1])
    if D is None:
        dtype = TORCH_DTYPES[int(output_dtype)] if output_dtype is not None else A.dtype
        assert output_dtype is not None or not in_fp8, "the product of FP8 is of no dtype"
        return out.to(dtype), bias_grad, None, extra_output
    out = out.reshape(D.shape)
    D.copy_(D.float() + out if accumulate else out)
    return D, bias_grad, None, extra_output


def _matrix(x: Any, rowwise: bool) -> Tensor:
    """Rows of features, float32."""
    return operand(x, rowwise) if is_quantized(x) else x.reshape(-1, x.shape[-1]).float()


@counted
def te_general_grouped_gemm(
    A: Sequence[Any], transa: bool, B: Sequence[Any], transb: bool, D: Sequence[Tensor], D_type: Any,
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
        if 0 in b.shape:  # an expert without tokens
            if not single_output and not accumulate:
                out.zero_()
            if grad and own is not None:
                own.zero_()
            continue
        _, bias_grad, _, _ = generic_gemm(
            a,
            transa,
            b,
            transb,
            out,
            None,
            None,
            own,
            None,
            False,
            None,
            grad,
            None,
            0,
            accumulate,
            use_split_accumulator,
        )
        if grad and own is not None:
            assert bias_grad is not None
            own.copy_(bias_grad)
    return found


def get_num_cublas_streams() -> int:
    return 4


def get_cublasLt_version() -> int:
    return 130100
