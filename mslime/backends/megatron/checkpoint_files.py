"""megatron-core's torch_dist files, written and read by this process: summed while they are written, and read without
ever unpickling what is not a tensor or a class of the format. torch's own reader unpickles `.metadata` and stored
objects as they come, so that a checkpoint from elsewhere could run code.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
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
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mslime.convert.torch_dist import METADATA, load_metadata
from mslime.data.checksums import FileSum, SummedFile

SHARDING = {
    # Optimizer state is stored per parameter of the whole model, not per data-parallel piece of a buffer.
    "distrib_optim_sharding_type": "fully_reshardable",
    # The same keys whether one optimizer or two (dense and expert parameters) are chained.
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


class SummingFileSystem(FileSystem):
    """torch's file system, which remembers the sums of the files written through it.

    Attributes:
        sums: by name, of finished files. `.metadata` is renamed after it is written, and left to who completes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        """Open a file; one that is written is summed."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with SummedFile(Path(path)) as file:
            yield file
            file.flush()
            self.sums[Path(path).name] = file.sum


class _Writer(FileSystemWriter):
    """Says what the disk said: torch reports a failed write as a broken archive, and drops the reason between ranks."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, thread_count=1, sync_files=True)
        self.fs = SummingFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the plan. Raises OSError when the file system refused it."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as broken:
            if isinstance(broken.__context__, OSError):
                raise broken.__context__ from broken
            raise


class InProcessSave(TorchDistSaveShardedStrategy):
    """megatron-core's torch_dist format, written by this process.

    Its own writer forks a writer per file and starts a manager process for their results: seconds for every save, and a
    fork of a process that runs Ray's and CUDA's threads. torch's writer does it here, and tells every rank when one of
    them failed, as long as it has one thread: what a further thread raises is lost with its part of the checkpoint.

    Attributes:
        sums: of the files that this rank wrote.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        self.sums: dict[str, FileSum] = {}

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write this rank's tensors. A collective; raises CheckpointException on every rank when one cannot write."""
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
    """Reads `.metadata` through an unpickler that lets the classes of the format through, and nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As torch's. Raises CheckpointError when the file names other code."""
        if self._cached_metadata is None:
            found: Metadata = load_metadata(Path(self.path) / METADATA)
            found.storage_meta = found.storage_meta or StorageMeta()
            found.storage_meta.load_id = self.load_id
            self._cached_metadata = found
        return self._cached_metadata


class _SafePlanner(MCoreLoadPlanner):
    """Loads stored objects as far as they are tensors and plain values.

    Args:
        empty: keys of objects that are empty in this run. Transformer Engine unpickles what it finds in such a tensor.
    """

    def __init__(self, *args: Any, empty: set[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._empty = empty

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take one object. Raises UnpicklingError when it names code, or would be unpickled later."""
        loaded: object = torch.load(value, weights_only=True)
        key = read_item.storage_index.fqn
        if key in self._empty and not _is_empty(loaded):
            raise UnpicklingError(f"{key} holds the state of another engine setting, which is empty in this run")
        value.seek(0)
        super().load_bytes(read_item, value)  # unpickles anything; by now these bytes are known to be harmless


class SafeLoad(TorchDistLoadShardedStrategy):
    """megatron-core's reading of the torch_dist format, with the two safe parts above."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        """Fill the sharded tensors and objects. A collective; torch_dist's `load` with another reader and planner."""
        values = list(nested_values(sharded_state_dict))
        tensors = [value for value in values if isinstance(value, ShardedTensor)]
        exact = [tensor for tensor in tensors if not tensor.allow_shape_mismatch]
        loose = {tensor.key: tensor for tensor in tensors if tensor.allow_shape_mismatch}
        given = sharded_state_dict
        renamed, flat, names = _replace_state_dict_keys_with_sharded_keys(given)
        found: dict[str, Any] = mcore_to_pyt_state_dict(renamed, True)
        reader = _SafeReader(checkpoint_dir)
        planner = _SafePlanner(
            shapes_validation_sharded_tensors=exact, allow_shape_mismatch_sharded_tensors=loose, empty=_empty(values)
        )
        load_state_dict(found, reader, planner=planner)
        self.cached_global_metadata = reader.read_metadata()
        unwrapped = {key: _unwrap_pyt_sharded_tensor(value) for key, value in found.items()}
        restored = _replace_sharded_keys_with_state_dict_keys(unwrapped, flat, names)  # type: ignore[arg-type]
        _restore_dict_types(restored, given)
        return restored


def _empty(values: list[Any]) -> set[str]:
    """Keys of objects that hold nothing."""
    return {value.unique_key for value in values if isinstance(value, ShardedObject) and _is_empty(value.data)}


def _is_empty(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_empty(part) for part in cast("list[object]", value))
    return value is None or (isinstance(value, torch.Tensor) and not value.numel())
