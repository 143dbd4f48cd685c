"""What a rank's distributed optimizer puts into a checkpoint: its own part, out of the memory in which it lies.

megatron-core's `fully_reshardable` state gathers a buffer's main weights and moments in the host memory of every
data-parallel rank, 12 bytes a parameter, when it saves, and asks for as much when it loads. Here each rank stores the
elements that it holds, as rectangles of the whole tensor under the same names: whoever reads them, in whatever layout,
finds the tensor that megatron-core would have stored; and reads into its own part alone what any of them has stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

UNSCALED = (torch.float32, torch.bfloat16, torch.int16)
"""Dtypes of main weights and moments that are what they say; of the last, the 16 bits that a bfloat16 weight lacks."""


def keep_own_state(optimizer: DistributedOptimizer) -> None:
    """Let this optimizer save and load its own part of its state."""
    made: Any = optimizer
    made.sharded_param_state_fully_reshardable = MethodType(_own_state, optimizer)
    made.load_parameter_state_from_fully_reshardable = MethodType(_take_state, optimizer)


def _own_state(
    optimizer: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
) -> dict[int, Any]:
    """In the place of `DistributedOptimizer.sharded_param_state_fully_reshardable`: by the parameter's number."""
    sharded, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    entries = {entry.data: entry for entry in nested_values(sharded)}
    offloads = isinstance(optimizer.optimizer, HybridDeviceOptimizer)
    optimizer.being_loaded = to_take = list[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]()
    state: dict[int, Any] = {}
    for number, (param, start, end) in enumerate(_held(optimizer)):
        tensors, own = _tensors(optimizer, param)
        later = tensors if offloads else {kind: each for kind, each in tensors.items() if kind not in own}
        if is_loading and later:
            to_take.append((param, later))
        state[number] = {
            kind: {str(i): part for i, part in enumerate(_parts(entries[param], kind, param, tensor, start, end))}
            for kind, tensor in tensors.items()
        }
    return state


def _take_state(optimizer: Any, state_dict: Mapping[int, Any]) -> None:
    """In the place of `DistributedOptimizer.load_parameter_state_from_fully_reshardable`: what was loaded lies in the
    optimizer's own memory already. Copies go back there, and what is offloaded is handed on to the parts it is with."""
    to_take, optimizer.being_loaded = optimizer.being_loaded, []
    with torch.no_grad():
        for param, tensors in to_take:
            offloads = isinstance(optimizer.optimizer, HybridDeviceOptimizer)
            given = tensors if offloads else {kind: each.to(param.device) for kind, each in tensors.items()}
            optimizer._set_main_param_and_optimizer_states(param, given)
    if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
        optimizer.optimizer._sync_hdo_state_to_sub_optimizers()


def _held(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """Parameters of which this rank holds elements, and which of those of the flat parameter."""
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for param, ranges in bucket["param_map"].items():
                    yield param, ranges["param"].start, ranges["param"].end


def _tensors(optimizer: Any, param: torch.nn.Parameter) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Main weights and moments of a parameter, [elements held], and which of them are the optimizer's own memory.

    Copies in host memory stand for what Transformer Engine's optimizer keeps in 16 or 8 bits with a scale.
    """
    group, place = optimizer.model_param_group_index_map[param]
    main = optimizer.optimizer.param_groups[group]["params"][place]
    state = optimizer.optimizer.state[main]
    kept = {"param": state.get("master_param", main), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    own = {kind for kind, tensor in kept.items() if tensor.dtype in UNSCALED}
    found = kept if len(own) == len(kept) else optimizer._get_main_param_and_optimizer_states(param)
    return {k: each.detach() if k in own else found[k].detach().cpu() for k, each in kept.items()}, own


def _parts(
    entry: Any, kind: str, param: torch.nn.Parameter, tensor: torch.Tensor, start: int, end: int
) -> Iterator[ShardedTensor]:
    """Rectangles of the stored tensors that these elements of a parameter are, with their data.

    Args:
        entry: what the model stores of the parameter.
        tensor: [end - start], of the elements from `start` to `end` of the flat parameter.
    """
    named = replace(entry, key=f"optimizer.state.{kind}.{entry.key}")
    for part in parts_of_entry(named):
        assert part.data is not None and part.data.is_contiguous(), part.key
        begin = int(part.data.storage_offset() - param.storage_offset())
        first, last = max(start, begin), min(end, begin + part.data.numel())
        if first >= last:
            continue
        pipeline, tensor_rank, _ = cast("tuple[int, int, int]", part.replica_id)
        ones, corner = (1,) * part.prepend_axis_num, part.global_offset[part.prepend_axis_num :]
        for at, sizes in rectangles(tuple(part.local_shape), first - begin, last - begin):
            size = math.prod(sizes)
            offset = tuple(base + here for base, here in zip(corner, at, strict=True))
            yield replace(
                part, data=tensor[first - start : first - start + size].view(ones + sizes), dtype=tensor.dtype,
                local_shape=ones + sizes, global_offset=(*part.global_offset[: part.prepend_axis_num], *offset),
                prepend_axis_num=0, axis_fragmentations=None, replica_id=(pipeline, tensor_rank, 0),
            )  # fmt: skip
            first += size


def parts_of_entry(entry: object) -> list[ShardedTensor]:
    """What a sharded state dict entry stores; a factory splits its tensor into views."""
    if isinstance(entry, ShardedTensorFactory):
        built: list[ShardedTensor] = []
        for part in _flat(entry.build()):
            assert isinstance(part, ShardedTensor), part
            built.append(part)
        return built
    assert isinstance(entry, ShardedTensor), entry
    return [entry]


def _flat(built: object) -> list[object]:
    if isinstance(built, Mapping):
        return [leaf for part in built.values() for leaf in _flat(part)]
    if isinstance(built, list | tuple):
        return [leaf for part in built for leaf in _flat(part)]
    return [built]


def rectangles(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Corner and sizes of the fewest rectangles that are the elements from `start` to `end` of a tensor that lies row
    by row; each is one run of them, and they follow each other."""
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    while start < end:
        at, within = divmod(start, row)
        if within or end - start < row:
            stop = min(end, (at + 1) * row)
            for corner, sizes in rectangles(shape[1:], within, stop - at * row):
                yield (at, *corner), (1, *sizes)
        else:
            stop = end - (end - start) % row
            yield (at, *(0 for _ in shape[1:])), ((stop - start) // row, *shape[1:])
        start = stop
