"""A language model's last layer: megatron-core's own, which makes logits only where they are small enough.

The logits of a long micro-batch would be the largest tensor of the step. Above a limit the layer makes none: it hands
on the hidden states, from which `log_probs.blocks` reads what the loss needs, a block of the vocabulary at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from torch import Tensor


class OutputLayer(ColumnParallelLinear):
    """megatron-core's output layer with a limit.

    Attributes:
        most_bytes: of the logits of a micro-batch on this rank.
    """

    most_bytes: int

    def makes_logits(self, tokens: int) -> bool:
        """Whether the logits of so many tokens are within the limit."""
        weight_bytes = self.config.params_dtype.itemsize
        return tokens * self.output_size_per_partition * weight_bytes <= self.most_bytes

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[T / sp, 1, H] -> logits [T, 1, V / TP] or, above the limit, the hidden states [T, 1, H] of all T tokens.

        Gradients of hidden states are summed over the tensor-parallel ranks, as they are of logits.
        """
        ranks = self.output_size // self.output_size_per_partition
        if self.makes_logits(input_.shape[0] * input_.shape[1] * (ranks if self.sequence_parallel else 1)):
            return super().forward(input_, weight, runtime_gather_output)
        if ranks == 1:
            return input_, None
        assert self.sequence_parallel, "tensor parallelism without sequence parallelism is refused"
        return gather_from_sequence_parallel_region(input_, group=self.tp_group), None


def limit_logits(chunks: Sequence[GPTModel], most_bytes: int) -> None:
    """Give the output layer of these model chunks, if one of them has it, the limit.

    GPTModel names the class of its output layer itself and takes no other, so the layer changes its class.
    """
    for chunk in chunks:
        if chunk.post_process:
            assert type(chunk.output_layer) in (ColumnParallelLinear, OutputLayer), type(chunk.output_layer)
            chunk.output_layer.__class__ = OutputLayer
            output_layer(chunk).most_bytes = most_bytes


def output_layer(chunk: GPTModel) -> OutputLayer:
    """The output layer of a chunk of the last stage, which `limit_logits` has seen."""
    return cast("OutputLayer", chunk.output_layer)


def output_weight(chunk: GPTModel) -> Tensor:
    """[V / TP, H], what the output layer of a chunk of the last stage multiplies with: tied to the embedding or not."""
    if chunk.share_embeddings_and_output_weights:
        return chunk.shared_embedding_or_output_weight()
    weight = chunk.output_layer.weight
    assert weight is not None
    return weight
