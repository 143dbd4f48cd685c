"""Grouped experts' checkpoints where Transformer Engine keeps no state of FP8.

megatron-core 0.16.1 hands a grouped layer's state of FP8 on to its experts, and takes it for granted that a layer
that multiplies in FP8 has one. With recipes without a history of maxima (`train.fp8`) Transformer Engine 2.20 has none,
and says so by an empty tensor, of which nothing can be handed on: saving failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_SPLIT = "_split_extra_state"


def share_empty_states(chunk: torch.nn.Module) -> None:
    """Give each expert of every grouped layer the layer's state where that is empty."""
    for layer in chunk.modules():
        if hasattr(layer, _SPLIT):
            setattr(layer, _SPLIT, _sharing(getattr(layer, _SPLIT), layer))


def _sharing(split: Callable[[Tensor], list[Tensor]], layer: Any) -> Callable[[Tensor], list[Tensor]]:
    def share(state: Tensor) -> list[Tensor]:
        return split(state) if state.numel() else [state] * layer.num_gemms

    return share
