"""Inside an SGLang server: checksums of the sent tensors, computed from a model's or an adapter's parameters.

The recorded copies of a bucket (`copy_plan`), run backwards, restore the sent tensors, even if the model joined, cut or
sharded them. So they can be compared with the trainer's without knowledge of the layout. Each rank sums its elements of
a tensor, and their places (`tensor_sums.place_sum`); sums of different places add up to those of the whole.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from mslime.engine_plugin.copy_plan import BucketCopies, RecordedBucket, SyncBuckets
from mslime.engine_plugin.wire import CANNOT, format_sum
from mslime.tensor_sums import bits_of, place_sum, whole_sum


def weight_sums(model: torch.nn.Module, every: Iterable[SyncBuckets]) -> dict[str, str]:
    """Checksum and places of this rank's elements, by name of the tensors sent in this update. Tensors that it cannot
    report are missing; `CANNOT` maps to the reason."""
    sums = dict[str, str]()
    for buckets in every:
        for bucket in buckets.loaded:
            copies = bucket.copies.get(id(model))
            if copies is None or not copies.fit(model):
                sums[CANNOT] = f"copies are not recorded: {copies.why_not if copies else ''}".rstrip(": ")
                continue
            buckets.buffer.reserve(bucket.flat.numel())
            sums |= of_bucket(bucket, copies)
    return sums


def of_bucket(bucket: RecordedBucket, copies: BucketCopies) -> dict[str, str]:
    """Checksum and places of each of its tensors. Overwrites the bucket's buffer."""
    if copies.places is None:
        copies.places, copies.apart = _places(bucket, copies)
    copies.make_backwards(bucket.flat)
    totals = torch.stack([place_sum(tensor) for _, tensor in bucket.named]).tolist()
    names = [name for name, _ in bucket.named]
    found = {name: format_sum(*pair) for name, *pair in zip(names, totals, copies.places, strict=True)}
    starts = [tensor.data_ptr() for _, tensor in bucket.named]
    for into, out_of in copies.apart:
        if not torch.equal(into, out_of.to(into.dtype)):
            found[names[bisect(starts, out_of.data_ptr()) - 1]] = f"a parameter in {into.dtype} has other values"
    return found


def _places(bucket: RecordedBucket, copies: BucketCopies) -> tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]:
    """The place sums of this rank's elements of each tensor, and the copies that the backward copy cannot restore:
    several copies of one place, and copies that change the dtype."""
    bucket.flat.zero_()
    for view in copies.out_of:
        bits_of(view).fill_(1)
    tensors = [tensor for _, tensor in bucket.named]
    covered = sum(int(torch.count_nonzero(bits_of(tensor))) for tensor in tensors)
    several = sum(view.numel() for view in copies.out_of) > covered
    pairs = zip(copies.into, copies.out_of, strict=True)
    apart = [(into, out_of) for into, out_of in pairs if several or into.dtype != out_of.dtype]
    return torch.stack([place_sum(tensor) for tensor in tensors]).tolist(), apart


# Inside an SGLang server (0.5.23): checksums of a loaded adapter, tensor by tensor.
#
# SGLang joins some tensors of an adapter after reading them (queries, keys and values; gate and up). It keeps the
# result in host memory on every rank while the adapter is loaded, and copies it to the device from there. This code
# locates each tensor in the joined one, and sums it as the trainer does.

_JOINED = (("q_proj", "k_proj", "v_proj", "qkv_proj"), ("gate_proj", "up_proj", "gate_up_proj"))
"""Modules whose tensors SGLang joins, in this order, and its name for the joined tensor."""
_SHAPES: WeakKeyDictionary[Any, dict[str, torch.Size]] = WeakKeyDictionary()
"""Shapes of the tensors of every adapter as they were read, by SGLang's adapter."""


def note_shape(original: Callable[..., Any], self: Any, name: str, loaded_weight: torch.Tensor) -> Any:
    """Wrapper of `LoRAAdapter._process_weight`, which receives each tensor as it was read."""
    _SHAPES.setdefault(self, {})[name] = loaded_weight.shape
    return original(self, name, loaded_weight)


def adapter_sums(manager: Any, name: str) -> dict[str, str]:
    """Checksum and places of every tensor of the named adapter; `CANNOT` maps to the reason if there are none.

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
    """Split the kept tensors into those that were read; missing ones are skipped.

    Args:
        kept: SGLang's tensors, by its names.
        shapes: of the tensors that were read, by their names.
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
