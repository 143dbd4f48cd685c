"""Inside an SGLang server (0.5.23): what it holds of an adapter that it was given, tensor by tensor.

SGLang joins some tensors of an adapter when it has read them (queries, keys and values; gate and up), and keeps the
whole in host memory, on every rank, as long as the adapter is loaded; it is copied to the device from there. Here each
tensor is found again in what it was joined to, and summed as the trainer sums what it wrote. A plug-in that answers
`/weights_checker`, as `checksums` does for weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mslime.engine_plugin.wire import CANNOT, HELD_ADAPTER, as_text
from mslime.tensor_sums import whole_sum

_JOINED = (("q_proj", "k_proj", "v_proj", "qkv_proj"), ("gate_proj", "up_proj", "gate_up_proj"))
"""Modules whose tensors SGLang joins, in this order, and what it calls the whole."""
_MANAGERS: dict[int, Any] = {}
"""SGLang's managers of adapters in this process, by `id`: one."""
Shapes = dict[str, torch.Size]
_SHAPES: dict[str, Shapes] = {}
"""Of the tensors of every adapter as they were read, by SGLang's id of the adapter."""


def install() -> None:
    """Called by SGLang in each of its processes. What it raises here SGLang only logs: the answers tell."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.lora.lora.LoRAAdapter._process_weight", _note_shape, HookType.AROUND)
    HookRegistry.register("sglang.srt.lora.lora_manager.LoRAManager.load_lora_adapter", _note, HookType.AROUND)
    HookRegistry.register("sglang.srt.lora.lora_manager.LoRAManager.unload_lora_adapter", _forget, HookType.AROUND)
    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", _handle, HookType.AROUND)


def _note_shape(original: Callable[..., Any], self: Any, name: str, loaded_weight: torch.Tensor) -> Any:
    _SHAPES.setdefault(self.uid, {})[name] = loaded_weight.shape
    return original(self, name, loaded_weight)


def _note(original: Callable[..., Any], self: Any, lora_ref: Any) -> Any:
    _MANAGERS[id(self)] = self
    return original(self, lora_ref)


def _forget(original: Callable[..., Any], self: Any, lora_ref: Any) -> Any:
    _SHAPES.pop(lora_ref.lora_id, None)
    return original(self, lora_ref)


def _handle(original: Callable[..., Any], self: Any, **asked: Any) -> Any:
    if not asked["action"].startswith(HELD_ADAPTER):
        return original(self, **asked)
    from sglang.srt.utils.weight_checker import ChecksumInfo

    try:
        sums = _held(asked["action"].removeprefix(HELD_ADAPTER))
    except Exception as error:  # the other ranks wait for this one's answer
        sums = {CANNOT: f"{type(error).__name__}: {error}"}
    place = self._parallelism_info(role=asked["role"])
    return ChecksumInfo(checksums=sums, per_gpu_checksum="", parallelism_info=place).model_dump()


def _held(name: str) -> dict[str, str]:
    """Sum and places of every tensor of the adapter of this name."""
    for manager in _MANAGERS.values():
        for uid, ref in manager.lora_refs.items():
            if ref.lora_name == name:
                kept = {key: tensor for layer in manager.loras[uid].layers for key, tensor in layer.weights.items()}
                return {key: as_text(*whole_sum(tensor)) for key, tensor in taken_apart(kept, _SHAPES[uid])}
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
