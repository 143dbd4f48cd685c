"""A zero-centred RMS norm for machines without Transformer Engine, which alone has one in megatron-core."""

from __future__ import annotations

import torch


class ZeroCentredRMSNorm(torch.nn.Module):
    """RMS norm scaled by 1 + weight, computed in float32 (transformers `Qwen3NextRMSNorm`)."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        wide = x.float()
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normal * (1.0 + self.weight.float())).type_as(x)
