"""Arithmetic of quantised weights: FP8 with a scale per block, INT4 in groups, MXFP4. Pure tensor functions.

Dequantisation works on bands of rows, which keeps its temporaries small. Its bits equal those of the engines: the
product in float32, rounded once to the result's dtype. Quantisation for a weight sync on a GPU processes an expert's
whole weight at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FP8_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""
FP8_BLOCK = (128, 128)
_INT4_HALF_RANGE = 7.5  # compressed-tensors: symmetric scales are max|w| / ((7 - -8) / 2)
_BAND = 128
AT_ONCE = {"cuda": 1 << 24, "cpu": 1 << 20}
"""Elements that are quantised at once, with three temporary float32 copies: on a GPU each operation is one kernel
launch, on a CPU they stay in its cache.
"""
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def blocks(size: int, block: int) -> int:
    """Number of blocks that cover `size`, the last one perhaps cut off."""
    return -(-size // block)


def fp8_quantise(weight: Tensor, block: tuple[int, int] = FP8_BLOCK, *, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """FP8 weights with one scale per block.

    Args:
        weight: [out, in], any float dtype.
        power_of_two: round scales up to a power of two (UE8M0, for DeepGEMM's kernels on Blackwell and DeepSeek-V3.1);
            else the exact float32 quotient max|w| / 448.

    Returns:
        float8_e4m3fn [out, in], and float32 scales [ceil(out / block), ceil(in / block)] that multiply it.
    """
    import torch

    rows, columns = weight.shape
    scales = torch.empty(blocks(rows, block[0]), blocks(columns, block[1]), device=weight.device)
    quantised = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    height = blocks(_rows_at_once(weight), block[0])
    for index, band in _bands(rows, height * block[0]):
        values = _padded(weight[band].float(), block)
        tiles = values.view(values.shape[0] // block[0], block[0], -1, block[1])
        largest = tiles.abs().amax(dim=(1, 3))
        scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
        if power_of_two:
            scale = _power_of_two_above(scale)
        scales[index * height : index * height + len(scale)] = scale
        divided = (tiles / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).view(values.shape)
        quantised[band] = divided[: len(weight[band]), :columns].to(torch.float8_e4m3fn)
    return quantised, scales


def fp8_dequantise(
    quantised: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype, first: tuple[int, int] = (0, 0)
) -> Tensor:
    """The weight in `dtype`, equal to the result of SGLang's `block_quant_dequant`.

    Args:
        quantised: float8 [rows, columns], a part of a whole tensor.
        scales: of the blocks that the part touches.
        first: row and column of the part within its first block.
    """
    import torch

    rows, columns = quantised.shape
    weight = torch.empty(rows, columns, dtype=dtype)
    scales = scales.float()
    at = 0
    for scale in scales:
        size = min(block[0] - first[0] if at == 0 else block[0], rows - at)
        wide = scale.repeat_interleave(block[1])[first[1] : first[1] + columns]
        weight[at : at + size] = quantised[at : at + size].float() * wide
        at += size
    assert at == rows, (quantised.shape, scales.shape, first)
    return weight


def int4_quantise(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Symmetric INT4 with one scale for `group` consecutive inputs, packed as in compressed-tensors.

    Args:
        weight: [out, in], `in` a multiple of `group`, and of 8.

    Returns:
        int32 [out, in / 8], eight values of 4 bits in a word, the first in the lowest bits, each plus 8; and scales
        [out, in / group] in the weight's dtype.
    """
    import torch

    rows, columns = weight.shape
    assert columns % group == 0 and columns % 8 == 0, (weight.shape, group)
    packed = torch.empty(rows, columns // 8, dtype=torch.int32, device=weight.device)
    scales = torch.empty(rows, columns // group, dtype=weight.dtype, device=weight.device)
    smallest = torch.finfo(weight.dtype).eps
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=weight.device)
    for _, band in _bands(rows, _rows_at_once(weight)):
        grouped = weight[band].float().view(-1, columns // group, group)
        scale = (grouped.abs().amax(2) / _INT4_HALF_RANGE).to(weight.dtype)
        scale = scales[band] = torch.where(scale == 0, smallest, scale)
        values = (grouped / scale.float()[:, :, None]).round().clamp(-8, 7).to(torch.int32) + 8
        packed[band] = (values.view(-1, columns // 8, 8) << shifts).sum(2, dtype=torch.int32)
    return packed, scales


def int4_dequantise(packed: Tensor, scales: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in `dtype`, from the output of `int4_quantise` or compressed-tensors."""
    import torch

    rows, columns = packed.shape[0], packed.shape[1] * 8
    weight = torch.empty(rows, columns, dtype=dtype)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    for _, band in _bands(rows, _BAND):
        values = ((packed[band][:, :, None] >> shifts) & 15).view(-1, columns) - 8
        weight[band] = values.float() * scales[band].float().repeat_interleave(group, 1)
    return weight


def mxfp4_dequantise(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """MXFP4 as GPT-OSS stores it (OCP Microscaling Formats 1.0: E2M1 values, one E8M0 scale for 32 of them).

    Args:
        packed: uint8 [out, groups, 16], two values a byte, the first in the low bits.
        scales: uint8 [out, groups], exponents with bias 127.

    Returns:
        [out, groups * 32] in `dtype`.
    """
    import torch

    table = torch.tensor(_FP4_VALUES + tuple(-value for value in _FP4_VALUES))
    weight = torch.empty(packed.shape[0], packed.shape[1] * 32, dtype=dtype)
    for _, band in _bands(packed.shape[0], _BAND):
        part = packed[band]
        values = table[torch.stack([part & 15, part >> 4], -1).view(*part.shape[:2], 32).int()]
        exponent = (scales[band].int() - 127)[:, :, None]
        weight[band] = torch.ldexp(values, exponent).view(part.shape[0], -1).to(dtype)
    return weight


def _rows_at_once(weight: Tensor) -> int:
    return max(AT_ONCE.get(weight.device.type, AT_ONCE["cuda"]) // max(weight.shape[1], 1), 1)


def _bands(rows: int, height: int) -> Iterator[tuple[int, slice]]:
    return ((i, slice(start, min(start + height, rows))) for i, start in enumerate(range(0, rows, height)))


def _padded(values: Tensor, block: tuple[int, int]) -> Tensor:
    import torch

    below, beside = -values.shape[0] % block[0], -values.shape[1] % block[1]
    return torch.nn.functional.pad(values, (0, beside, 0, below)) if below or beside else values


def _power_of_two_above(scale: Tensor) -> Tensor:
    """The smallest power of two that is not smaller; exact, by the float's own exponent."""
    import torch

    mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2**exponent, 0.5 <= mantissa < 1
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(scale), exponent)
