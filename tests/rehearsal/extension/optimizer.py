"""Optimizer kernels of `transformer_engine_torch` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.rehearsal.extension.calls import counted

Lists = Sequence[Sequence[Tensor]]


@counted
def multi_tensor_adam(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, lr: float, beta1: float, beta2: float, epsilon: float,
    step: float, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Adam (`mode` 0: decay in the gradient) or AdamW (1) over lists of gradients, parameters, both moments and, where
    there are five, float32 main parameters."""
    for gradient, parameter, first, second, *main in zip(*tensor_lists, strict=True):
        target, wide = main[0] if main else parameter, gradient.float()
        powers = (beta1 ** float(step), beta2 ** float(step)) if bias_correction else (0.0, 0.0)
        if not mode:
            wide = wide + weight_decay * target.float()
        first.mul_(beta1).add_(wide, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
        update = (first / (1 - powers[0])) / ((second / (1 - powers[1])).sqrt() + epsilon)
        if mode:
            update = update + weight_decay * target.float()
        target.add_(update.to(target.dtype), alpha=-float(lr))
        if main:
            parameter.copy_(target)


@counted
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float) -> None:
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source.float() * float(scale))


def multi_tensor_scale_tensor(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: Tensor) -> None:
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, float(scale))


@counted
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """([1] norm of all, [n] norm of each, empty unless asked for)."""
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else torch.zeros(0, device=norms.device)
