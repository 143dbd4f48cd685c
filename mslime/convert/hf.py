"""Hugging Face checkpoints on disk: a streaming safetensors reader and a sharded writer.

Names, shapes and dtypes come from the file headers, without reading a weight; tensors are read row by row through a few
open files. Whatever is missing, truncated or contradictory is a `CheckpointError` that names the file and the tensor.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mslime.config.errors import CheckpointError
from mslime.convert.kinds import Shape

if TYPE_CHECKING:
    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100 << 20  # the safetensors format's own limit
_OPEN_FILES = 4
_AGAIN = "download the checkpoint again, or point model.path at a complete one"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint: its file, safetensors dtype (`BF16`, `F32`, ...) and shape."""

    file: str
    dtype: str
    shape: Shape


@dataclass(frozen=True)
class LazyTensor:
    """A tensor on disk that is read, in the indexed part only, when indexed."""

    checkpoint: HFCheckpoint
    name: str

    @property
    def shape(self) -> Shape:
        """Shape, from the file's header."""
        return self.checkpoint.info[self.name].shape

    def __getitem__(self, index: Any, /) -> Tensor:
        handle = self.checkpoint.handle(self.checkpoint.info[self.name].file)
        return handle.get_tensor(self.name) if index is Ellipsis else handle.get_slice(self.name)[index]


class HFCheckpoint:
    """A checkpoint directory, opened by its headers alone.

    Attributes:
        directory: where it lies.
        info: every tensor by name.

    Raises:
        CheckpointError: no weights, a missing or truncated shard, an index that does not match its files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._handles: OrderedDict[str, Any] = OrderedDict()
        index = directory / INDEX_NAME
        if index.exists():
            self.info = self._read_indexed(index)
        elif (directory / SINGLE_NAME).exists():
            self.info = read_header(directory / SINGLE_NAME)
        else:
            raise CheckpointError(
                str(directory), None, f"a checkpoint holds {SINGLE_NAME} or {INDEX_NAME}",
                "point model.path at a Hugging Face checkpoint with safetensors weights",
            )  # fmt: skip

    def _read_indexed(self, index: Path) -> dict[str, TensorInfo]:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise CheckpointError(str(index), repr(error), "the index is JSON with a weight_map", _AGAIN) from error
        found: dict[str, TensorInfo] = {}
        headers: dict[str, dict[str, TensorInfo]] = {}
        for name, file in weight_map.items():
            if file not in headers:
                headers[file] = read_header(self.directory / file)
            if name not in headers[file]:
                raise CheckpointError(
                    f"{self.directory / file}: {name}",
                    None,
                    f"{INDEX_NAME} says that this file holds the tensor",
                    _AGAIN,
                )
            found[name] = headers[file][name]
        return found

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of every tensor."""
        return {name: info.shape for name, info in self.info.items()}

    def handle(self, file: str) -> Any:
        """An open safetensors file; the least recently used one is closed beyond a few."""
        from safetensors import safe_open

        if file not in self._handles:
            if len(self._handles) >= _OPEN_FILES:
                self._handles.popitem(last=False)
            self._handles[file] = safe_open(self.directory / file, framework="pt")
        self._handles.move_to_end(file)
        return self._handles[file]

    def view(self, name: str) -> LazyTensor:
        """A tensor by name, read when indexed.

        Raises:
            CheckpointError: the checkpoint has no such tensor.
        """
        if name not in self.info:
            raise CheckpointError(f"{self.directory}: {name}", None, "the tensor is missing", _AGAIN)
        return LazyTensor(self, name)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor by name, in the dtype of the file. Raises like `view`."""
        return self.view(name)[...]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of one safetensors file, whose length must be what its header promises.

    The format: 8 bytes little-endian header length, JSON header, tensor data
    (https://huggingface.co/docs/safetensors, "Format").

    Raises:
        CheckpointError: the file is missing, truncated or not safetensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(str(path), f"{size} bytes", "the file is truncated or not safetensors", _AGAIN)
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise CheckpointError(str(path), None, "the weight file is missing", _AGAIN) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(str(path), str(error), "the file's header is not safetensors", _AGAIN) from error
    header.pop("__metadata__", None)
    promised = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != promised:
        last = max(header, key=lambda name: header[name]["data_offsets"][1], default="")
        raise CheckpointError(
            f"{path}: {last}",
            f"{size} bytes",
            f"the header promises {promised} bytes: the file is truncated or damaged",
            _AGAIN,
        )
    return {name: TensorInfo(path.name, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


class ShardWriter:
    """Writes tensors into numbered safetensors files of a directory, one shard in memory at a time.

    Args:
        directory: an existing directory, usually the one that `atomic_directory` gives.
        part: tag that keeps the files of several writers (one per pipeline stage) apart.
        max_shard_bytes: a shard is closed when it would grow beyond this.
    """

    def __init__(self, directory: Path, part: str = "0", max_shard_bytes: int = 5 << 30) -> None:
        self._directory, self._part, self._limit = directory, part, max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._weight_map: dict[str, str] = {}
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor (any device; copied to the CPU)."""
        assert name not in self._weight_map and name not in self._pending, f"{name} written twice"
        if self._pending and self._pending_bytes + tensor.nbytes > self._limit:
            self._flush()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += tensor.nbytes

    def _flush(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

        file = f"model-{self._part}-{len(set(self._weight_map.values())):05d}.safetensors"
        try:
            save_file(self._pending, self._directory / file, {"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                str(self._directory / file), str(error), "the checkpoint shard could not be written",
                "free disk space or choose another output directory; what was there before is untouched",
            ) from error  # fmt: skip
        self._weight_map.update(dict.fromkeys(self._pending, file))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def close(self) -> tuple[dict[str, str], int]:
        """Write what is pending; (file of every tensor, bytes of all tensors) for `write_index`."""
        if self._pending:
            self._flush()
        return self._weight_map, self._total_bytes


def write_index(directory: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """The index over the shards of all writers; written last."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")


def copy_side_files(source: Path, target: Path) -> None:
    """config.json, tokenizer and generation settings of `source`: every small file that is not weights."""
    for path in source.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and path.name != INDEX_NAME:
            shutil.copyfile(path, target / path.name)


def staging_directory(target: Path) -> Path:
    """Where `target` is built before it is published: beside it, on the same file system."""
    return target.with_name(f".{target.name}.partial")


def publish(target: Path) -> None:
    """Put the finished staging directory in place of `target`, which is replaced whole or not at all."""
    staging, old = staging_directory(target), target.with_name(f".{target.name}.old")
    for path in staging.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    staging.rename(target)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def atomic_directory(target: Path) -> Generator[Path]:
    """A fresh staging directory that becomes `target` when the block ends, and vanishes when it raises."""
    staging = staging_directory(target)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        publish(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
