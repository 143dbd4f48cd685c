"""A linear layer in FP8 worked out in float64, block by block, to compare Transformer Engine's with.

Written without the stand-in's kernels (`extension.fp8`), which are compared with the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mslime.config.base import Fp8Recipe

WHOLE = (1 << 30, 1 << 30)
LINE, SQUARE = (1, 128), (128, 128)
WITHOUT_FP8 = "without FP8"


class Scaling(NamedTuple):
    """How a recipe scales: blocks of (inputs and gradients, weights), numbers of gradients, powers of two."""

    lines: tuple[int, int]
    squares: tuple[int, int]
    of_gradients: torch.dtype
    powers: bool


RECIPES: dict[Fp8Recipe, Scaling] = {
    "blockwise": Scaling(LINE, SQUARE, torch.float8_e4m3fn, True),
    "tensorwise": Scaling(WHOLE, WHOLE, torch.float8_e5m2, False),
}


def rounded(x: Tensor, kind: torch.dtype, block: tuple[int, int], powers: bool) -> Tensor:
    """float64: each block scaled so that its largest number is FP8's largest, rounded, and scaled back. Factors are
    float32, and so is what they give, as in any kernel: bfloat16 often lies on the edge between two numbers of FP8.

    Args:
        x: [rows, columns].
        powers: whether factors are powers of two.
    """
    most = torch.finfo(kind).max
    out = torch.empty(x.shape, dtype=torch.float64)
    for top in range(0, x.shape[0], block[0]):
        for left in range(0, x.shape[1], block[1]):
            place = slice(top, top + block[0]), slice(left, left + block[1])
            tile = x[place].float()
            largest = tile.abs().max()
            scale = most / largest if largest else torch.ones(())
            if powers:
                scale = torch.tensor(2.0 ** math.floor(math.log2(scale)))
            out[place] = (tile * scale).to(kind).double() / scale.double()
    return out


def linear(x: Tensor, weight: Tensor, upstream: Tensor, recipe: Fp8Recipe | None) -> tuple[Tensor, Tensor, Tensor]:
    """(output, gradient of the input, gradient of the weight), float64.

    Args:
        x, weight, upstream: [rows, in], [out, in], [rows, out], on the CPU.
        recipe: None: nothing is rounded.
    """
    if recipe is None:
        x, weight, upstream = x.double(), weight.double(), upstream.double()
        return x @ weight.T, upstream @ weight, upstream.T @ x
    lines, squares, of_gradients, powers = RECIPES[recipe]
    plain = torch.float8_e4m3fn
    # Each product sums along rows of what it reads, and blocks of 1 x 128 lie along its sum.
    inputs = [rounded(each, plain, lines, powers) for each in (x, x.T)]
    upstreams = [rounded(each, of_gradients, lines, powers) for each in (upstream, upstream.T)]
    held = rounded(weight, plain, squares, powers)
    return inputs[0] @ held.T, upstreams[0] @ held, upstreams[1] @ inputs[1].T


def grouped(
    x: Tensor, weights: Sequence[Tensor], upstream: Tensor, rows: Sequence[int], recipe: Fp8Recipe | None
) -> list[Tensor]:
    """`linear` of each expert's rows, one below the other: outputs, gradients of the inputs, those of the weights."""
    parts = zip(x.split(list(rows)), weights, upstream.split(list(rows)), strict=True)
    return [torch.cat(each) for each in zip(*(linear(*part, recipe) for part in parts), strict=True)]


def differences(trainer: Any, recipe: Fp8Recipe) -> dict[str, dict[str, float]]:
    """Of attention's output layer, and of the second layer of a dense part or of experts: of output and gradients, the
    largest difference from what is worked out here, as a share of the largest number, by layer; and as
    `WITHOUT_FP8` the least that results without it differ by.

    Args:
        trainer: of one rank, on a GPU that is not there.
    """
    layer = trainer.chunks[0].decoder.layers[-1]
    mlp = layer.mlp
    layers = {"attention's output": (layer.self_attention.linear_proj, [])}
    if hasattr(mlp, "experts"):
        rows = [32, 0, 16, 144, 16, 16, 48, 0][: mlp.experts.num_local_experts]
        layers["experts"] = (mlp.experts.linear_fc2, rows)
    else:
        layers["dense"] = (mlp.linear_fc2, [])
    return {name: _differences(trainer, module, rows, recipe) for name, (module, rows) in layers.items()}


def _differences(trainer: Any, module: Any, rows: list[int], recipe: Fp8Recipe) -> dict[str, float]:
    from megatron.core.fp8_utils import get_fp8_context  # only where there is Transformer Engine

    weights = [getattr(module, f"weight{i}") for i in range(len(rows))] or [module.weight]
    draw = torch.Generator().manual_seed(0)
    count, (out, wide) = sum(rows) or 256, weights[0].shape
    sizes = ((count, wide), (count, out)) if rows else ((count, 1, wide), (count, 1, out))
    x, upstream = (torch.randn(size, generator=draw).bfloat16() for size in sizes)
    for chunk in trainer.wrapped:
        chunk.zero_grad_buffer()
    given = x.cuda().requires_grad_()
    with get_fp8_context(trainer.transformer):
        found, _ = module(given, *([rows] if rows else []))
    found.backward(upstream.cuda())
    ours = [found.detach(), given.grad, torch.cat([weight.main_grad for weight in weights])]
    for chunk in trainer.wrapped:
        chunk.zero_grad_buffer()
    held = [weight.detach().float().cpu() for weight in weights]
    flat = x.reshape(count, wide).float(), held, upstream.reshape(count, out).float(), rows or [count]
    expected, without = (grouped(*flat, each) for each in (recipe, None))
    names = ("output", "input's gradient", "weight's gradient")
    shares = {name: _share(mine, theirs) for name, mine, theirs in zip(names, ours, expected, strict=True)}
    return shares | {WITHOUT_FP8: min(_share(mine, theirs) for mine, theirs in zip(ours, without, strict=True))}


def _share(found: Tensor, expected: Tensor) -> float:
    return float((found.double().cpu().reshape(expected.shape) - expected).abs().max() / expected.abs().max())
