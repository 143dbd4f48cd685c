"""Read and write megatron-core's torch_dist files in this process, with checksums and safe unpickling.

Files are summed while they are written. When reading, only tensors and classes of the format are unpickled. torch's own
reader unpickles `.metadata` and stored objects unchecked, so a foreign checkpoint could run code.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from types import MethodType
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mslime.backends.megatron.model.chunks import fake_process_group, meta_chunks
from mslime.config.layout import ParallelLayout
from mslime.config.megatron import MegatronConfig
from mslime.config.resolved import ModelSpec
from mslime.convert.families import get_family
from mslime.convert.table import canonical_name
from mslime.convert.torch_dist import METADATA, ModelPlacement, ParameterBox, load_metadata, whole
from mslime.data.checkpoints import FileSum, SummedFile

SHARDING = {
    # Optimizer state is stored per parameter of the whole model, not per data-parallel piece of a buffer.
    "distrib_optim_sharding_type": "fully_reshardable",
    # The keys are the same whether one optimizer or two (dense and expert parameters) are chained.
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


class SummingFileSystem(FileSystem):
    """torch's file system, which records checksums of the files written through it.

    Attributes:
        sums: by name, of finished files. `.metadata` is renamed after it is written; the rank that completes the
            checkpoint sums it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        """Open a file; a file opened for writing is summed."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with SummedFile(Path(path)) as file:
            yield file
            file.flush()
            self.sums[Path(path).name] = file.sum


class _Writer(FileSystemWriter):
    """Raises the disk's own error: torch reports a failed write as a broken archive, and drops the reason between
    ranks."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, thread_count=1, sync_files=True)
        self.fs = SummingFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the plan. Raises OSError if the file system refuses it."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as broken:
            if isinstance(broken.__context__, OSError):
                raise broken.__context__ from broken
            raise


class InProcessSave(TorchDistSaveShardedStrategy):
    """megatron-core's torch_dist format, written by this process.

    megatron-core's writer forks a process per file and starts a manager process for their results. That takes seconds
    per save and forks a process with Ray's and CUDA's threads. torch's writer runs here with one thread, and reports a
    failed rank to all. With more threads, an error in a further thread would be lost, with its part of the checkpoint.

    Attributes:
        sums: checksums of the files that this rank wrote.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        self.sums: dict[str, FileSum] = {}

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write this rank's tensors. A collective; raises CheckpointException on every rank if one cannot write."""
        tensors = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)[0]
        writer = _Writer(checkpoint_dir)
        state_dict_saver.save(
            mcore_to_pyt_state_dict(tensors, False),
            storage_writer=writer,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
        written = cast(SummingFileSystem, writer.fs).sums
        self.sums = {name: total for name, total in written.items() if not name.startswith(METADATA)}


class _SafeReader(CachedMetadataFileSystemReader):
    """Reads `.metadata` through an unpickler that allows only the classes of the format."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata. Raises CheckpointError if the file names other code."""
        if self._cached_metadata is None:
            found: Metadata = load_metadata(Path(self.path) / METADATA)
            found.storage_meta = found.storage_meta or StorageMeta()
            found.storage_meta.load_id = self.load_id
            self._cached_metadata = found
        return self._cached_metadata


class _SafePlanner(MCoreLoadPlanner):
    """Loads stored objects if they consist of tensors and plain values.

    Args:
        empty: keys of objects that are empty in this run. Transformer Engine unpickles the contents of such a tensor.
    """

    def __init__(self, *args: Any, empty: set[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._empty = empty

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load one object. Raises UnpicklingError if it names code, or would be unpickled later."""
        loaded: object = torch.load(value, weights_only=True)
        key = read_item.storage_index.fqn
        if key in self._empty and not _is_empty(loaded):
            raise UnpicklingError(f"{key} has the state of another engine setting, and must be empty in this run")
        value.seek(0)
        super().load_bytes(read_item, value)  # unpickles anything; these bytes are already checked


class SafeLoad(TorchDistLoadShardedStrategy):
    """megatron-core's reader of the torch_dist format, with the safe reader and planner."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        """Fill the sharded tensors and objects. A collective; torch_dist's `load` with another reader and planner."""
        values = list(nested_values(sharded_state_dict))
        tensors = [value for value in values if isinstance(value, ShardedTensor)]
        exact = [tensor for tensor in tensors if not tensor.allow_shape_mismatch]
        loose = {tensor.key: tensor for tensor in tensors if tensor.allow_shape_mismatch}
        empty = {value.unique_key for value in values if isinstance(value, ShardedObject) and _is_empty(value.data)}
        given = sharded_state_dict
        renamed, flat, names = _replace_state_dict_keys_with_sharded_keys(given)
        found: dict[str, Any] = mcore_to_pyt_state_dict(renamed, True)
        reader = _SafeReader(checkpoint_dir)
        planner = _SafePlanner(
            shapes_validation_sharded_tensors=exact, allow_shape_mismatch_sharded_tensors=loose, empty=empty
        )
        load_state_dict(found, reader, planner=planner)
        self.cached_global_metadata = reader.read_metadata()
        unwrapped = {key: _unwrap_pyt_sharded_tensor(value) for key, value in found.items()}
        restored = _replace_sharded_keys_with_state_dict_keys(unwrapped, flat, names)  # type: ignore[arg-type]
        _restore_dict_types(restored, given)
        return restored


def _is_empty(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_empty(part) for part in cast("list[object]", value))
    return value is None or (isinstance(value, torch.Tensor) and not value.numel())


# A distributed optimizer's checkpoint state: each rank stores its own part from the memory where it lies.
#
# megatron-core's `fully_reshardable` state gathers a buffer's main weights and moments in the host memory of every
# data-parallel rank when it saves, 12 bytes a parameter, and needs as much when it loads. Here each rank stores its own
# elements as rectangles of the whole tensor under the same names. Readers in any layout find the same tensors as
# megatron-core would have stored, and a rank reads only its own part.

UNSCALED = (torch.float32, torch.bfloat16, torch.int16)
"""Dtypes of main weights and moments stored without a scale; int16 holds the 16 bits that a bfloat16 weight lacks."""


def keep_own_state(optimizer: DistributedOptimizer) -> None:
    """Make this optimizer save and load only its own part of its state."""
    made: Any = optimizer
    made.sharded_param_state_fully_reshardable = MethodType(_own_state, optimizer)
    made.load_parameter_state_from_fully_reshardable = MethodType(_take_state, optimizer)


def _own_state(
    optimizer: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
) -> dict[int, Any]:
    """Replaces `DistributedOptimizer.sharded_param_state_fully_reshardable`; keyed by the parameter's number."""
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
    """Replaces `DistributedOptimizer.load_parameter_state_from_fully_reshardable`: loaded values already lie in the
    optimizer's own memory. Copies are written back there, and offloaded state is passed to the parts that own it."""
    to_take, optimizer.being_loaded = optimizer.being_loaded, []
    with torch.no_grad():
        for param, tensors in to_take:
            offloads = isinstance(optimizer.optimizer, HybridDeviceOptimizer)
            given = tensors if offloads else {kind: each.to(param.device) for kind, each in tensors.items()}
            optimizer._set_main_param_and_optimizer_states(param, given)
    if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
        optimizer.optimizer._sync_hdo_state_to_sub_optimizers()


def _held(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """Parameters with elements on this rank, and the range of elements in the flat parameter."""
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for param, ranges in bucket["param_map"].items():
                    yield param, ranges["param"].start, ranges["param"].end


def _tensors(optimizer: Any, param: torch.nn.Parameter) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Main weights and moments of a parameter, [elements held], and names of those in the optimizer's own memory.

    Copies in host memory replace state that Transformer Engine's optimizer keeps in 16 or 8 bits with a scale.
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
    """Rectangles of the stored tensors that contain these elements of a parameter, with their data.

    Args:
        entry: the model's checkpoint entry of the parameter.
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
    """Tensors stored by a sharded state dict entry; a factory splits its tensor into views."""
    if isinstance(entry, ShardedTensorFactory):
        entry = entry.build()
    parts: list[Any] = list(nested_values([entry]))
    assert all(isinstance(part, ShardedTensor) for part in parts), parts
    return parts


def rectangles(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Corner and sizes of the fewest rectangles that cover exactly the elements from `start` to `end` of a row-major
    tensor; each is one consecutive run, in order."""
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


# Storage layout of each parameter in a checkpoint, obtained from megatron-core with a model without memory.
#
# It does not depend on the parallel layout: megatron-core names stored tensors by global layers and experts, and every
# layout writes boxes of the same tensors. So one rank with the whole model yields the complete answer.


def model_placement(hf_config: Mapping[str, object], directory: Path) -> ModelPlacement:
    """Checkpoint layout of this model: every parameter, including those of multi-token prediction.

    Args:
        directory: of the Hugging Face checkpoint; only named, not read.

    Raises:
        CheckpointError: the architecture is not supported.
    """
    one_rank = ModelSpec(checkpoint=directory, layout=ParallelLayout(), megatron=MegatronConfig(), device="cpu")
    pieces: dict[str, tuple[ParameterBox, ...]] = {}
    objects: list[str] = []
    with fake_process_group(one_rank.layout):
        (chunk,) = meta_chunks(one_rank, hf_config, mtp=True)
        metadata = SHARDING | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        for local, entry in chunk.sharded_state_dict(metadata=metadata).items():
            if isinstance(entry, ShardedObject):
                objects.append(entry.unique_key)
                continue
            parts = parts_of_entry(entry)
            pieces[canonical_name(local)] = tuple(_piece(part, cast("Tensor", entry.data)) for part in parts)
    table = get_family(hf_config).rules(hf_config)
    for name, rule in table.all_bound.items():
        if rule.untrained and name not in pieces:
            pieces[name] = (whole(rule),)
    placement = ModelPlacement(pieces, objects)
    placement.check(table)
    return placement


def _piece(part: ShardedTensor, parameter: Tensor) -> ParameterBox:
    data = cast("Tensor", part.data)
    owner = data if data._base is None else data._base
    assert parameter.is_contiguous() and (owner is parameter or owner is parameter._base or data is parameter), (
        f"{part.key}: stored from a copy, not from a view of the parameter"
    )
    sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    return ParameterBox(
        part.key, tuple(part.global_shape), tuple(part.global_offset), sizes,
        int(data.storage_offset()) - int(parameter.storage_offset()), tuple(data.shape), data.stride(),
    )  # fmt: skip
