"""megatron-core's token dispatchers, which forget a micro-batch once its tokens are back.

Version 0.16.1 leaves a layer's routing weights with its dispatcher until the layer's next forward pass. They hang on
the graph of what computed them: the input of every MoE layer, its router's and the sum behind its attention stay in
memory through the rest of the backward pass, the optimizer's step and a weight sync, 2 x [T / TP, H] a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

KEPT = ("probs", "local_probs", "routing_map", "local_map", "reversed_local_input_permutation_mapping")
"""Attributes of dispatchers that are read from a forward pass's beginning to its end, and not after it."""


def forget_micro_batches(chunk: torch.nn.Module) -> None:
    """Let the dispatchers of all MoE layers drop these attributes at the end of each pass, a recomputed one too."""
    for layer in chunk.modules():
        if isinstance(layer, MoELayer):
            _forget_after_combining(layer.token_dispatcher)


def _forget_after_combining(dispatcher: Any) -> None:
    combine = dispatcher.combine_postprocess

    def combine_and_forget(hidden: Tensor) -> Tensor:
        out = combine(hidden)
        for name in KEPT:
            if name in vars(dispatcher):
                setattr(dispatcher, name, None)
        return out

    dispatcher.combine_postprocess = combine_and_forget
