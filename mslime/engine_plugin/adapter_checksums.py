"""Inside an SGLang server (0.5.23): what it holds of an adapter that it was given, tensor by tensor.

SGLang joins some tensors of an adapter when it has read them (queries, keys and values; gate and up), and keeps the
whole in host memory, on every rank, as long as the adapter is loaded; it is copied to the device from there. Here each
tensor is found again in what it was joined to, and summed as the trainer sums what it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from mslime.engine_plugin.wire import CANNOT, format_sum
from mslime.tensor_sums import whole_sum

_JOINED = (("q_proj", "k_proj", "v_proj", "qkv_proj"), ("gate_proj", "up_proj", "gate_up_proj"))
"""Modules whose tensors SGLang joins, in this order, and what it calls the whole."""
_SHAPES: WeakKeyDictionary[Any, dict[str, torch.Size]] = WeakKeyDictionary()
"""Of the tensors of every adapter as they were read, by SGLang's adapter."""


def note_shape(original: Callable[..., Any], self: Any, name: str, loaded_weight: torch.Tensor) -> Any:
    """Around `LoRAAdapter._process_weight`, which is given each tensor as it was read."""
    _SHAPES.setdefault(self, {})[name] = loaded_weight.shape
    return original(self, name, loaded_weight)


def adapter_sums(manager: Any, name: str) -> dict[str, str]:
    """Sum and places of every tensor of the adapter of this name; under `CANNOT`, why there is none.

    Args:
        manager: SGLang's `LoRAManager` of this rank; None: it serves no adapters.
    """
    if manager is not None:
        for uid, ref in manager.lora_refs.items():
            if ref.lora_name == name:
                adapter = manager.loras[uid]
                kept = {key: tensor for layer in adapter.layers for key, tensor in layer.weights.items()}
                return {key: format_sum(*whole_sum(tensor)) for key, tensor in taken_apart(kept, _SHAPES[adapter])}
    return {CANNOT: f"there is no adapter {name}"}


def taken_apart(
    kept: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that was read, found in what is kept; those that are not there are left out.

    Args:
        kept: by SGLang's names.
        shapes: of what was read, by its names.
    """
    for name, shape in shapes.items():
        if name in kept:
            yield name, kept[name]
            continue
        for *parts, whole in _JOINED:
            module = next((part for part in parts if f".{part}." in name), None)
            joined = None if module is None else kept.get(name.replace(f".{module}.", f".{whole}."))
            if module is None or joined is None:
                continue
            before = [name.replace(f".{module}.", f".{part}.") for part in parts[: parts.index(module)]]
            start = sum(shapes.get(each, shape)[-2] for each in before)
            yield name, joined.narrow(-2, start, shape[-2])
