"""A critic's last layer: one number for every token, in the place of megatron-core's output layer."""

from __future__ import annotations

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

_PREFIX = "output_layer."


class ValueHead(nn.Module):
    """Linear from hidden states to values; it starts at 0, so that the first returns are learnt from nothing.

    Every tensor-parallel rank holds the same float32 weights, whatever the model's dtype, and applies them to its piece
    of the sequence. megatron-core sums their gradients over the ranks because they are marked as sequence parallel.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden: Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[T / sp, 1, hidden] -> float32 [T, 1, 1], the same on every tensor-parallel rank; called by GPTModel."""
        assert weight is None, "a critic shares no weights between embedding and output"
        values = F.linear(hidden.float(), self.weight, self.bias)
        if self.sequence_parallel:
            # Every rank computes the same loss of all values, so each takes its own piece of the gradient.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def is_value_head(chunk: GPTModel, name: str) -> bool:
    """Whether the parameter `name` of a model chunk belongs to its value head."""
    return name.startswith(_PREFIX) and isinstance(chunk.output_layer, ValueHead)
