"""Layers that megatron-core 0.16.1 does not build: norms, a last layer without large logits, a critic's last layer.

Joint query-key norms (OLMoE, MiniMax-M2): one RMS norm over all heads of the query and one over all heads of the key;
each tensor-parallel rank holds the part of its heads. Post-norms (GLM-4): outputs of attention and MLP are normed
before they are added to the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

Residual = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


class JointNorm(torch.nn.Module):
    """RMS norm of one token's features over all heads of all tensor-parallel ranks.

    Replaces `SelfAttention`'s norm of single heads. `TransformerConfig.qk_layernorm` must stay off: megatron-core would
    sum the gradients of the ranks' different weights.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int) -> None:
        """
        Args:
            hidden_size: features of one head.
            heads: over all ranks; these share them evenly.
        """
        super().__init__()
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        assert heads % ranks == 0, f"{heads} heads on {ranks} ranks"
        self.features, self.eps = heads * hidden_size, eps
        self.weight = torch.nn.Parameter(torch.ones(self.features // ranks, dtype=config.params_dtype))
        # Marked to be counted on every rank in the gradient norm, and saved as parts of one tensor.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, heads of this rank, features of a head] -> same shape, in the dtype of `x`; computed in float32."""
        whole = x.float()
        squares = whole.square().sum((-2, -1), keepdim=True)
        # Every rank's output depends on every rank's squares, so both directions sum over the ranks.
        squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = whole * torch.rsqrt(squares / self.features + self.eps)
        return normed.to(x.dtype) * self.weight.view(x.shape[-2:])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The weight, saved as one tensor of all ranks' parts."""
        tensor: Any = parallel_state.get_tensor_model_parallel_group()
        data: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
        whole = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            whole, prefix, {"weight": 0}, sharded_offsets, tp_group=tensor, dp_cp_group=data
        )


class NormedResidual(torch.nn.Module):
    """Adds a norm of the output to the residual stream, in place of megatron-core's bias-dropout-add."""

    def __init__(self, config: TransformerConfig, norm: Any) -> None:
        super().__init__()
        self.norm = build_module(norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Residual:
        """The addition, without dropout and without a fused kernel."""
        return self._add

    def _add(self, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_and_bias
        assert bias is None and dropout == 0.0, "post-norms come without biases and dropout"
        return residual + self.norm(output)


def use_joint_qk_norms(block: TransformerBlockSubmodules, config: TransformerConfig) -> None:
    """Put joint norms of queries and keys into every layer of the spec."""
    assert not config.qk_layernorm and config.num_query_groups is not None
    for layer in block.layer_specs or []:
        attention: Any = layer.submodules.self_attention.submodules  # type: ignore[union-attr]
        attention.q_layernorm = ModuleSpec(JointNorm, params={"heads": config.num_attention_heads})
        attention.k_layernorm = ModuleSpec(JointNorm, params={"heads": config.num_query_groups})


def use_post_norms(block: TransformerBlockSubmodules, config: TransformerConfig) -> None:
    """Put a norm before each addition to the residual stream in every layer of the spec."""
    for layer in block.layer_specs or []:
        modules: Any = layer.submodules
        addition = ModuleSpec(NormedResidual, params={"config": config, "norm": block.layer_norm})
        modules.self_attn_bda = modules.mlp_bda = addition


# A language model's last layer: megatron-core's own, which makes logits only up to a size limit.
#
# The logits of a long micro-batch would be the largest tensor of the step. Above the limit the layer returns the hidden
# states, and `log_probs.blocks` computes the loss from them, one block of the vocabulary at a time.


class OutputLayer(ColumnParallelLinear):
    """megatron-core's output layer with a limit on the size of logits.

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
    """Set the limit on the output layer of these model chunks, if one of them has it.

    GPTModel hard-codes the class of its output layer, so this replaces the layer's `__class__`.
    """
    for chunk in chunks:
        if chunk.post_process:
            assert type(chunk.output_layer) in (ColumnParallelLinear, OutputLayer), type(chunk.output_layer)
            chunk.output_layer.__class__ = OutputLayer
            output_layer(chunk).most_bytes = most_bytes


def output_layer(chunk: GPTModel) -> OutputLayer:
    """The output layer of a chunk of the last stage, prepared by `limit_logits`."""
    return cast("OutputLayer", chunk.output_layer)


def output_weight(chunk: GPTModel) -> Tensor:
    """[V / TP, H]: weight of the output layer of a chunk of the last stage, tied to the embedding or not."""
    if chunk.share_embeddings_and_output_weights:
        return chunk.shared_embedding_or_output_weight()
    weight = chunk.output_layer.weight
    assert weight is not None
    return weight


# A critic's last layer: one number for every token, in place of megatron-core's output layer.


class ValueHead(nn.Module):
    """Linear layer from hidden states to values; it starts at 0, so the first predictions are 0.

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
    return name.startswith("output_layer.") and isinstance(chunk.output_layer, ValueHead)
