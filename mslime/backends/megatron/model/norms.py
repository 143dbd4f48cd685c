"""Norms that megatron-core 0.16.1 does not build, put into the layer spec where a family needs them.

Joint query-key norms (OLMoE, MiniMax-M2): one RMS norm over all heads of the query, and one over all heads of the key,
of which each tensor-parallel rank holds its heads' part. Post-norms (GLM-4): what attention and MLP add to the residual
stream is normed first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

Residual = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


class JointNorm(torch.nn.Module):
    """RMS norm of one token's features over all heads of all tensor-parallel ranks.

    In place of `SelfAttention`'s norm of single heads. `TransformerConfig.qk_layernorm` must stay off beside it:
    megatron-core would sum the gradients of the ranks' different weights.
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
        # Counted on every rank in the gradient norm, and saved as parts of one tensor.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, heads of this rank, features of a head] -> the same, in the dtype of `x`; computed in float32."""
        whole = x.float()
        squares = whole.square().sum((-2, -1), keepdim=True)
        # Every rank's output depends on every rank's squares: summed over the ranks in both directions.
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
        """The addition; there is neither dropout nor a fused kernel of it."""
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
    """Put a norm before each addition to the residual stream of every layer of the spec."""
    for layer in block.layer_specs or []:
        modules: Any = layer.submodules
        addition = ModuleSpec(NormedResidual, params={"config": config, "norm": block.layer_norm})
        modules.self_attn_bda = modules.mlp_bda = addition
