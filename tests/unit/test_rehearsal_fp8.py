"""The rehearsal's FP8 (`tests/rehearsal/extension/fp8.py`) beside numbers that are worked out one by one."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.rehearsal import extension
from tests.rehearsal.extension import fp8, gemm
from tests.rehearsal.extension.calls import CALLS
from tests.rehearsal.extension.enums import DType
from tests.rehearsal.fp8_by_hand import LINE, SQUARE, WHOLE, rounded

E4M3, E5M2 = int(DType.kFloat8E4M3), int(DType.kFloat8E5M2)
SHAPE = (24, 272)  # blocks of 128 do not fill it


def quantizer(kind: int = E4M3, block: int | None = None, rowwise: bool = True, columnwise: bool = True) -> Any:
    """As Transformer Engine's, without what allocates.

    Args:
        block: 1 or 2 dimensional blocks; None: one scale for a tensor.
    """
    found = SimpleNamespace(
        dtype=kind, amax_epsilon=0.0, rowwise_usage=rowwise, columnwise_usage=columnwise,
        force_pow_2_scales=block is not None, with_amax_reduction=False,
    )  # fmt: skip
    if block is not None:
        found.block_scaling_dim = block

        def get_scale_shape(shape: tuple[int, ...], columnwise: bool) -> tuple[int, int]:
            rows, columns = reversed(shape) if columnwise else shape
            long = math.ceil(columns / 128)
            if block == 2:
                return math.ceil(rows / 128), math.ceil(long / 4) * 4
            return long, math.ceil(rows / 4) * 4

        found.get_scale_shape = get_scale_shape
    return found


def quantized(x: torch.Tensor, how: Any) -> Any:
    """`fp8.quantize` into a tensor that holds nothing yet."""
    blocks = hasattr(how, "block_scaling_dim")
    names = ["_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"]
    empty = SimpleNamespace(**dict.fromkeys(names if blocks else ["_data", "_transpose", "_scale_inv"]))
    empty.shape, empty.dtype, empty._transpose_invalid = x.shape, x.dtype, True
    empty._is_2D_scaled = blocks and how.block_scaling_dim == 2
    return fp8.quantize(x, how, empty, None)


def matrix(columns: int = SHAPE[1], rows: int = SHAPE[0], seed: int = 0) -> torch.Tensor:
    """bfloat16 whose blocks are of very different size, one of them zeros."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=draw) * torch.logspace(-6, 3, columns)
    x[3, :128] = 0
    return x.bfloat16()


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("block", [None, 1, 2])
def test_numbers_are_rounded_block_by_block_as_they_are_and_transposed(kind: int, block: int | None) -> None:
    x = matrix()
    size = {None: WHOLE, 1: LINE, 2: SQUARE}[block]
    found = quantized(x, quantizer(kind, block))
    expected = rounded(x, fp8.NUMBERS[kind], size, block is not None)
    transposed = rounded(x.T, fp8.NUMBERS[kind], size, block is not None).T
    # Not to the last digit: factors are float32 where they are no powers of two.
    torch.testing.assert_close(fp8.operand(found, True).double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(fp8.operand(found, False).double(), transposed, rtol=1e-6, atol=0)
    if kind == E4M3:  # e5m2 has a range that hides which power of two it was scaled by
        assert torch.equal(expected, transposed) == (block != 1)
    assert 0 < float((expected - x.double()).abs().max()) < 0.07 * float(x.abs().max()) * (2 if kind == E5M2 else 1)


@pytest.mark.parametrize("block", [None, 1])
@pytest.mark.parametrize(("transa", "transb"), [(True, False), (False, False), (False, True)])
def test_a_product_reads_the_copy_that_lies_along_its_sum(block: int | None, transa: bool, transb: bool) -> None:
    """Forward (TN), of the input's gradient (NN), of the weight's (NT): with the other copy missing, too."""
    rows, wide, out = 32, 272, 144
    shapes = {
        (True, False): ((out, wide), (rows, wide)), (False, False): ((out, wide), (rows, out)),
        (False, True): ((rows, wide), (rows, out)),
    }[transa, transb]  # fmt: skip
    of_a, of_b = (matrix(columns, height, seed) for seed, (height, columns) in enumerate(shapes))
    square = block and (1 if transb else 2)  # a weight is scaled in squares
    a = quantized(of_a, quantizer(E4M3, square, rowwise=transa, columnwise=not transa))
    b = quantized(of_b, quantizer(E4M3, block, rowwise=not transb, columnwise=transb))
    before = CALLS[gemm.IN_FP8]
    found = extension.generic_gemm(
        a, transa, b, transb, None, None, DType.kFloat32, None, None, False, None, transb, None, 0, False, True
    )[0]
    size = {None: WHOLE, 1: LINE, 2: SQUARE}
    sides = [
        rounded(x if along else x.T, torch.float8_e4m3fn, size[dims], dims is not None)
        for x, along, dims in ((of_b, not transb, block), (of_a, transa, square))
    ]
    expected = sides[0] @ sides[1].T
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert CALLS[gemm.IN_FP8] == before + 1
    with pytest.raises(AssertionError, match="not there"):
        fp8.operand(b, transb)


def test_what_cublas_does_not_take_is_not_taken() -> None:
    def product(a: Any, b: Any, split: bool = True) -> None:
        extension.generic_gemm(
            a, True, b, False, None, None, DType.kFloat32, None, None, False, None, False, None, 0, False, split
        )

    one, square = quantizer(E4M3, 1), quantizer(E4M3, 2)
    x, weight = matrix(64, 16), matrix(64, 32)
    product(quantized(weight, square), quantized(x, one))
    for a, b, split in (
        (quantized(weight, square), quantized(x, square), True),
        (quantized(weight, square), quantized(x, one), False),
        (quantized(weight, square), quantized(x[:12], one), True),
        (quantized(weight[:12], square), quantized(x, one), True),
        (quantized(weight[:, :40], square), quantized(x[:, :40], one), True),
        (quantized(weight, quantizer(E5M2)), quantized(x, quantizer(E5M2)), True),
        (quantized(weight, square), x, True),
    ):
        with pytest.raises(AssertionError):
            product(a, b, split)


def test_a_copy_is_written_where_it_lies_and_stays_where_it_is_to_stay() -> None:
    held = quantized(matrix(), how := quantizer(E4M3, 2))
    where, before = held._rowwise_data.data_ptr(), held._rowwise_data.clone()
    fp8.quantize(matrix(seed=1), how, held, torch.ones(1))
    assert torch.equal(held._rowwise_data, before)
    fp8.quantize(matrix(seed=1), how, held, None)
    assert held._rowwise_data.data_ptr() == where and not torch.equal(held._rowwise_data, before)
    assert torch.equal(held._rowwise_data, quantized(matrix(seed=1), how)._rowwise_data)


def test_every_experts_rows_are_padded_with_zeros_and_come_back() -> None:
    x, padded, back = matrix(8, 7), torch.full((48, 8), 9.0).bfloat16(), torch.empty(7, 8).bfloat16()
    extension.fused_multi_row_padding(x, padded, [5, 0, 2], [16, 0, 32])
    assert torch.equal(padded[:5], x[:5]) and torch.equal(padded[16:18], x[5:])
    assert not padded[5:16].any() and not padded[18:].any()
    extension.fused_multi_row_unpadding(padded, back, [16, 0, 32], [5, 0, 2])
    assert torch.equal(back, x)
