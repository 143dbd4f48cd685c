"""FP8 of `transformer_engine_torch` in plain torch: numbers are torch's `float8_e4m3fn` and `float8_e5m2`, scales are
those of Transformer Engine's kernels, and what a tensor is allocated as is said by its quantizer's own Python.

Two recipes. Current scaling: one scale for a tensor, which ranks that gather it agree on. Block scaling: one for each
1 x 128 (inputs and gradients) or 128 x 128 (weights), by default a power of two; the transposed copy, which sums along
the other dimension, is quantised from the original with scales of its own. Tensors and quantizers are known by their
attributes, so that this is tried without Transformer Engine, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.rehearsal.extension.calls import counted
from tests.rehearsal.extension.enums import TORCH_DTYPES, DType

BLOCK = 128
NUMBERS = {int(DType.kFloat8E4M3): torch.float8_e4m3fn, int(DType.kFloat8E5M2): torch.float8_e5m2}
Blocks = tuple[int, int]


def scales_of(amax: Tensor, quantizer: Any) -> Tensor:
    """float32 factors that make the largest number of each block the largest that FP8 has; 1 where all are 0.

    Args:
        amax: float32, largest absolute number of each block.
        quantizer: says which FP8 (`dtype`), a floor of `amax`, and whether factors are powers of two.
    """
    largest = torch.finfo(NUMBERS[int(quantizer.dtype)]).max
    scale = largest / amax.clamp(min=quantizer.amax_epsilon)
    scale = torch.where(scale.isinf(), torch.finfo(torch.float32).max, scale)
    if quantizer.force_pow_2_scales:  # the mantissa is dropped
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.full_like(mantissa, 0.5), exponent)
    return torch.where((amax == 0) | amax.isinf(), 1.0, scale)


def spread(scale: Tensor, block: Blocks, shape: Sequence[int]) -> Tensor:
    """[blocks of rows, blocks of columns] -> a factor for each number of a matrix of this shape."""
    rows = scale.repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def in_blocks(wide: Tensor, block: Blocks, quantizer: Any) -> tuple[Tensor, Tensor]:
    """(uint8 numbers of a float32 matrix, float32 [blocks of rows, blocks of columns] factors they were scaled by)."""
    rows, columns = (math.ceil(size / each) for size, each in zip(wide.shape, block, strict=True))
    missing = (0, columns * block[1] - wide.shape[1], 0, rows * block[0] - wide.shape[0])
    tiles = torch.nn.functional.pad(wide.abs(), missing).reshape(rows, block[0], columns, block[1])
    scale = scales_of(tiles.amax((1, 3)), quantizer)
    return numbers(wide * spread(scale, block, wide.shape), quantizer), scale


def numbers(scaled: Tensor, quantizer: Any) -> Tensor:
    """float32 -> FP8 as bytes; what is too large is the largest number there is."""
    kind = NUMBERS[int(quantizer.dtype)]
    most = torch.finfo(kind).max
    return scaled.clamp(-most, most).to(kind).view(torch.uint8)


def plain(data: Tensor, kind: Any) -> Tensor:
    """Bytes of FP8 -> float32."""
    return data.contiguous().view(NUMBERS[int(kind)]).float()


def padded(scale: Tensor, columns: int) -> Tensor:
    """With further columns of zeros, as kernels want their factors."""
    return torch.nn.functional.pad(scale, (0, columns - scale.shape[1]))


# ------------------------------------------------------------------------------------------------- quantised tensors


@counted
def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """A quantised tensor of whatever the memory held."""
    told = quantizer.create_metadata(shape, dtype=dtype)
    return told["cls"].__tensor_unflatten__(quantizer.alloc_tensors(shape, device=device), told, shape, None)


@counted
def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """A tensor in FP8, new or written into `output`, which stays as it is where `noop` holds 1."""
    if output is None:
        output = create_empty_quantized_tensor(quantizer, tensor.shape, tensor.dtype, tensor.device, False)
    elif noop is not None and bool(noop):
        return output
    wide = tensor.reshape(-1, tensor.shape[-1]).float()
    in_one = not hasattr(quantizer, "block_scaling_dim")
    for name, value in (_with_one_scale if in_one else _with_blocks)(wide, tensor.shape, quantizer).items():
        held = getattr(output, name)
        if held is None or value is None or held.shape != value.shape:
            setattr(output, name, value)
        else:
            held.copy_(value)
    if in_one:
        output._transpose_invalid = output._transpose is None
    output._fp8_dtype = quantizer.dtype
    return output


def _with_one_scale(wide: Tensor, shape: Sequence[int], quantizer: Any) -> dict[str, Tensor | None]:
    assert hasattr(quantizer, "force_pow_2_scales"), f"the stand-in has no {type(quantizer).__name__}"
    amax = wide.abs().amax().reshape(1) if wide.numel() else wide.new_zeros(1)
    if quantizer.with_amax_reduction:
        dist.all_reduce(amax, dist.ReduceOp.MAX, quantizer.amax_reduction_group)
    scale = scales_of(amax, quantizer)
    data = numbers(wide * scale, quantizer)
    return {
        "_data": data.reshape(shape) if quantizer.rowwise_usage else None,
        "_transpose": data.T.reshape(shape[-1], *shape[:-1]).contiguous() if quantizer.columnwise_usage else None,
        "_scale_inv": 1 / scale,
    }


def _with_blocks(wide: Tensor, shape: Sequence[int], quantizer: Any) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = dict.fromkeys(
        ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
    )
    if not wide.numel():
        return {}
    square = quantizer.block_scaling_dim == 2
    for across, side, wanted in ((False, "row", quantizer.rowwise_usage), (True, "column", quantizer.columnwise_usage)):
        if not wanted:
            continue
        data, scale = in_blocks(wide.T if across else wide, (BLOCK if square else 1, BLOCK), quantizer)
        factors = 1 / (scale if square else scale.T)
        width = quantizer.get_scale_shape(shape, columnwise=across)
        assert factors.shape[0] == width[0], (factors.shape, width)
        found[f"_{side}wise_data"] = data.reshape((shape[-1], *shape[:-1]) if across else tuple(shape))
        found[f"_{side}wise_scale_inv"] = padded(factors, width[1])
    return found


def split_quantize(
    tensor: Tensor, split_sections: Sequence[int], quantizer_list: Sequence[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    """`quantize` of each expert's rows."""
    parts = tensor.reshape(-1, tensor.shape[-1]).split([int(rows) for rows in split_sections])
    return [quantize(part, one) for part, one in zip(parts, quantizer_list, strict=True)]


@counted
def bgrad_quantize(grad_output: Tensor, quantizer: Any) -> list[Any]:
    """[the sum over rows, which is a bias's gradient; the gradient in FP8]."""
    rows = grad_output.reshape(-1, grad_output.shape[-1])
    return [rows.float().sum(0).to(grad_output.dtype), quantize(grad_output, quantizer)]


@counted
def dequantize(input: Any, otype: Any) -> Tensor:
    """A tensor with one scale in another dtype."""
    return (plain(input._data, input._fp8_dtype) * input._scale_inv).to(TORCH_DTYPES[int(otype)])


@counted
def fp8_transpose(input: Tensor, otype: Any, out: Tensor | None = None) -> Tensor:
    """Bytes [..., n] -> [n, ...], the leading dimensions taken as one."""
    found = input.reshape(-1, input.shape[-1]).T.reshape(input.shape[-1], *input.shape[:-1]).contiguous()
    return found if out is None else out.copy_(found)


@counted
def swap_first_dims(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """[a, b, ...] -> [b, a, ...]."""
    found = tensor.transpose(0, 1).contiguous()
    return found if out is None else out.copy_(found)


@counted
def fused_multi_row_padding(
    input: Tensor, output: Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]
) -> None:
    """Each expert's rows, and zeros behind them."""
    for part, place in zip(input.split(list(input_row_list)), output.split(list(padded_input_row_list)), strict=True):
        place.zero_()
        place[: len(part)].copy_(part)


@counted
def fused_multi_row_unpadding(
    input: Tensor, output: Tensor, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]
) -> None:
    """The way back."""
    for part, place in zip(input.split(list(input_row_list)), output.split(list(unpadded_input_row_list)), strict=True):
        place.copy_(part[: len(place)])


# ---------------------------------------------------------------------------------------------------------- products


def is_quantized(tensor: Any) -> bool:
    """Whether it holds FP8."""
    return hasattr(tensor, "_fp8_dtype")


def operand(tensor: Any, rowwise: bool) -> Tensor:
    """What a product reads, as a float32 matrix: Hopper sums along rows alone, so one of the two copies.

    Args:
        rowwise: the copy as it is; else the transposed one, given back as the matrix that it was.
    """
    usage = "as it is" if rowwise else "transposed"
    if hasattr(tensor, "_scale_inv"):
        data = tensor._data if rowwise else (None if tensor._transpose_invalid else tensor._transpose)
        assert data is not None, f"a product sums along a tensor that is not there {usage}"
        wide = plain(data, tensor._fp8_dtype) * tensor._scale_inv
    else:
        side = "row" if rowwise else "column"
        data, factors = getattr(tensor, f"_{side}wise_data"), getattr(tensor, f"_{side}wise_scale_inv")
        assert data is not None and factors is not None, f"a product sums along a tensor that is not there {usage}"
        wide = plain(data, tensor._fp8_dtype)
    matrix = wide.reshape(-1, wide.shape[-1]) if rowwise else wide.reshape(wide.shape[0], -1)
    if not hasattr(tensor, "_scale_inv"):
        square, count = tensor._is_2D_scaled, math.ceil(matrix.shape[1] / BLOCK)
        scale = factors[:, :count] if square else factors[:, : matrix.shape[0]].T
        matrix = matrix * spread(scale, (BLOCK if square else 1, BLOCK), matrix.shape)
    return matrix if rowwise else matrix.T


def check_product(A: Any, B: Any, left: Tensor, right: Tensor, split: bool) -> None:
    """What cuBLAS asks of a product of FP8 on Hopper, as Transformer Engine's C++ checks it.

    Args:
        left, right: [n, k] and [k, m], of B and of A.
        split: `use_split_accumulator`.
    """
    assert is_quantized(A) and is_quantized(B), "a product of FP8 with something else"
    (n, k), m = left.shape, right.shape[1]
    assert k % 16 == 0 and m % 8 == 0, f"cuBLAS takes no product of FP8 of {n} x {k} with {k} x {m}"
    kinds = {int(A._fp8_dtype), int(B._fp8_dtype)}
    assert kinds != {int(DType.kFloat8E5M2)}, "cuBLAS takes no product of two e5m2"
    if not hasattr(A, "_scale_inv"):
        assert split and not (A._is_2D_scaled and B._is_2D_scaled), "one of two with blocks of 1 x 128, summed in parts"
        assert B._is_2D_scaled or n % 8 == 0, f"{n} rows with blocks of 1 x 128 are no multiple of 8"
