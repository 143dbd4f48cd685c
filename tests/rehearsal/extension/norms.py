"""Norms of `transformer_engine_torch` in plain torch, forward and backward, computed in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.rehearsal.extension.calls import counted
from tests.rehearsal.extension.enums import TORCH_DTYPES
from tests.rehearsal.extension.fp8 import quantize


def _scale(weight: Tensor, zero_centered_gamma: bool) -> Tensor:
    return weight.float() + 1 if zero_centered_gamma else weight.float()


@counted
def rmsnorm_fwd(
    input: Tensor, weight: Tensor, eps: float, ln_out: Tensor | None, quantizer: object, otype: Any, sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, None, Tensor]:  # fmt: skip
    """(output, in FP8 where there is a quantizer; nothing; 1 / root mean square: float32 of the leading dimensions)."""
    wide = input.float()
    rsigma = torch.rsqrt(wide.square().mean(-1) + eps)
    out = (wide * rsigma[..., None] * _scale(weight, zero_centered_gamma)).to(TORCH_DTYPES[int(otype)])
    if quantizer is not None:
        return quantize(out, quantizer, ln_out, None), None, rsigma
    if ln_out is not None:
        out = ln_out.copy_(out)
    return out, None, rsigma


@counted
def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of (input, weight)."""
    inverse, upstream = rsigma.reshape(*x.shape[:-1], 1), dz.reshape(x.shape).float()
    normal = x.float() * inverse
    of_weight = (upstream * normal).flatten(0, -2).sum(0).to(gamma.dtype)
    of_normal = upstream * _scale(gamma, zero_centered_gamma)
    of_input = inverse * (of_normal - normal * (of_normal * normal).mean(-1, keepdim=True))
    return of_input.to(x.dtype), of_weight


@counted
def rmsnorm_bwd_add(
    dz: Tensor, x: Tensor, add: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """`rmsnorm_bwd`, with another gradient added to the input's."""
    of_input, of_weight = rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma)
    return of_input + add.reshape(of_input.shape), of_weight
