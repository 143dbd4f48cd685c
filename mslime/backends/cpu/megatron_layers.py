"""Layers of machines without Transformer Engine: routed experts with one activation for all of them, and an RMS norm.

A small expert's two matrix products take less time than the dozen small operations around them, forward and backward.
So each expert computes its own products, and the elementwise operations between them run once for the tokens of all
experts. Results do not change. Import it after `backends.cpu.megatron_patches.install()`.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.experts import SequentialMLP


class CpuExperts(SequentialMLP):
    """SequentialMLP with a shared activation; parameters, names and checkpoints are unchanged."""

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            permuted_local_hidden_states: [t, H], the tokens of the first expert, then those of the next one.
            tokens_per_expert: [experts].
            permuted_probs: [t], the router's weight of each.

        Returns:
            [t, H], and no bias.
        """
        config = self.config
        if config.add_bias_linear or not config.gated_linear_unit or config.moe_apply_probs_on_input:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        counts = tokens_per_expert.tolist()
        experts = list(self.local_experts)

        def products(name: str, x: torch.Tensor) -> torch.Tensor:
            layers = (expert.get_submodule(name) for expert in experts)
            return torch.cat([layer(part)[0] for layer, part in zip(layers, x.split(counts), strict=True)])

        gate, linear = products("linear_fc1", permuted_local_hidden_states).chunk(2, dim=-1)
        if (largest := config.activation_func_clamp_value) is not None:
            gate, linear = gate.clamp(max=largest), linear.clamp(min=-largest, max=largest)
        if config.glu_linear_offset:
            linear = linear + config.glu_linear_offset
        inner = config.activation_func(gate) * linear
        weighted = (inner * permuted_probs.unsqueeze(-1)).to(inner.dtype)
        return products("linear_fc2", weighted), None


# A zero-centred RMS norm for machines without Transformer Engine; megatron-core has none of its own.


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
