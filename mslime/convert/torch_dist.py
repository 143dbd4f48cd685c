"""megatron-core's `torch_dist` checkpoints, read lazily and without megatron, process groups or a model.

The format is torch's distributed checkpoint. The pickle `.metadata` maps chunks of tensors to offsets in `.distcp`
files. A chunk is a zip archive from `torch.save` whose tensor bytes are uncompressed. A pickle can name any code, so
only the classes of the format itself are allowed. Chunks are never unpickled into objects; only their tensors' strides
are read.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mslime.config.errors import MALFORMED, CheckpointError, reading
from mslime.convert.safetensors_files import kept_open, tensor_bytes, torch_dtype
from mslime.convert.table import BoundRule, RuleTable
from mslime.convert.tensor_layouts import Shape

if TYPE_CHECKING:
    from torch import Tensor


METADATA, CONFIG = ".metadata", "metadata.json"
_HINT = "restore the file from another copy, or convert again"
_NO_METADATA = "must be the metadata of a torch distributed checkpoint"
_OPEN_FILES = 8
_METADATA_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
_METADATA_CLASSES = {
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
}
_MEGATRON_STAND_INS = {"MCoreMetadata", "MCoreSavePlan"}


@dataclass(frozen=True)
class Chunk:
    """One box of a stored tensor: its place in the tensor and on disk (bytes `start` to `start + length`)."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor of the checkpoint: dtype as torch names it (`bfloat16`), shape, and its chunks."""

    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize

    @cached_property
    def _by_expert(self) -> dict[int, list[Chunk]] | None:
        """Chunks by their first offset, if every chunk is a slice of a stack: hundreds of experts in one tensor."""
        if not self.shape or any(chunk.sizes[0] != 1 for chunk in self.chunks):
            return None
        found: dict[int, list[Chunk]] = {}
        for chunk in self.chunks:
            found.setdefault(chunk.offsets[0], []).append(chunk)
        return found

    def near(self, offsets: Shape, sizes: Shape) -> Sequence[Chunk]:
        """The chunks that a box may touch."""
        if self._by_expert is None:
            return self.chunks
        return [chunk for i in range(offsets[0], offsets[0] + sizes[0]) for chunk in self._by_expert.get(i, ())]


class DistCheckpoint:
    """A `torch_dist` checkpoint, opened by its metadata alone.

    Attributes:
        directory: its path.
        tensors: every tensor by the key under which megatron-core stores it.
        objects: keys of objects that are not tensors.

    Raises:
        CheckpointError: not such a checkpoint, or a file is missing or shorter than the metadata requires.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        _check_backend(directory)
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: list[str] = []
        self._open = kept_open(lambda path: path.open("rb"), directory, _OPEN_FILES)
        self._layouts: dict[int, list[tuple[bytes, _Record]]] = {}
        self._sizes: dict[str, int] = {}
        metadata = load_metadata(directory / METADATA)
        with reading(CheckpointError, str(directory / METADATA), _NO_METADATA, _HINT):
            self._read(metadata)
            self._check_files()

    def _read(self, metadata: Any) -> None:
        """Read the stored tensors from the metadata. Raises CheckpointError, or one of MALFORMED."""
        storage = {(index.fqn, _shape(index.offset or ())): info for index, info in metadata.storage_data.items()}
        for key, entry in metadata.state_dict_metadata.items():
            if not hasattr(entry, "chunks"):
                self.objects.append(key)
                continue
            chunks = tuple(self._chunk(key, chunk, storage) for chunk in entry.chunks)
            self.tensors[key] = StoredTensor(
                str(entry.properties.dtype).removeprefix("torch."), _shape(entry.size), chunks
            )

    def _chunk(self, key: str, chunk: Any, storage: dict[tuple[str, Shape], Any]) -> Chunk:
        info = storage.get((key, _shape(chunk.offsets)))
        if info is None:
            raise CheckpointError(
                f"{self.directory / METADATA}: {key}", _shape(chunk.offsets), "a chunk has no location on disk", _HINT
            )
        return Chunk(_shape(chunk.offsets), _shape(chunk.sizes), info.relative_path, info.offset, info.length)

    def _check_files(self) -> None:
        """Check that every file is long enough for its chunks, and that chunks fill every tensor exactly."""
        for key, tensor in self.tensors.items():
            if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.shape):
                raise CheckpointError(
                    f"{self.directory / METADATA}: {key}", [chunk.sizes for chunk in tensor.chunks][:4],
                    f"the chunks do not fill the shape {tensor.shape}", _HINT,
                )  # fmt: skip
            for chunk in tensor.chunks:
                path = self.directory / chunk.file
                if chunk.file not in self._sizes:
                    if Path(chunk.file).is_absolute() or ".." in Path(chunk.file).parts:
                        raise ValueError(f"{key} is in {chunk.file!r}, outside of the checkpoint")
                    self._sizes[chunk.file] = path.stat().st_size if path.is_file() else -1
                size = self._sizes[chunk.file]
                if size < chunk.start + chunk.length:
                    raise CheckpointError(
                        f"{path}: {key}", "missing" if size < 0 else f"{size} bytes",
                        f"{METADATA}: the tensor ends at byte {chunk.start + chunk.length}", _HINT,
                    )  # fmt: skip

    def view(self, key: str) -> DistView:
        """A tensor by key, read when indexed.

        Raises:
            CheckpointError: the checkpoint has no such tensor.
        """
        if key not in self.tensors:
            raise CheckpointError(f"{self.directory}: {key}", None, "the tensor is missing", _HINT)
        return DistView(self, key, self.tensors[key])

    def read_chunk(self, key: str, chunk: Chunk) -> Tensor:
        """Read one chunk, in its own sizes.

        Raises:
            CheckpointError: the bytes on disk do not match the metadata.
        """
        import torch

        path = self.directory / chunk.file
        handle = self._open(chunk.file)
        promised = torch_dtype(self.tensors[key].dtype)
        try:
            stored = self._locate(handle, chunk)
            whole = torch.empty(stored.numel, dtype=promised)
            if whole.nbytes != stored.nbytes:
                raise ValueError(f"{stored.nbytes} bytes for {stored.numel} elements of {promised}")
            handle.seek(stored.start)
            read = handle.readinto(tensor_bytes(whole))
        except (zipfile.BadZipFile, pickle.UnpicklingError, *MALFORMED) as error:
            raise CheckpointError(
                f"{path}: {key}", f"{type(error).__name__}: {error}",
                f"bytes {chunk.start} to {chunk.start + chunk.length} are not a tensor written by torch.save", _HINT,
            ) from error  # fmt: skip
        if read != whole.nbytes or stored.size != chunk.sizes or not stored.fits:
            raise CheckpointError(
                f"{path}: {key}", f"{stored.size} in {stored.nbytes} bytes",
                f"{METADATA} requires {chunk.sizes} of {self.tensors[key].dtype}", _HINT,
            )  # fmt: skip
        return whole.as_strided(stored.size, stored.stride, stored.offset)

    def _locate(self, handle: io.BufferedReader, chunk: Chunk) -> _Record:
        """Locate the chunk's elements; archives of equal length and equal first bytes have the same layout."""
        for head, record in self._layouts.get(chunk.length, ()):
            handle.seek(chunk.start)
            if handle.read(len(head)) == head:
                return replace(record, start=chunk.start + record.start)
        record = _locate(handle, chunk)
        handle.seek(chunk.start)
        head, relative = handle.read(record.start - chunk.start), replace(record, start=record.start - chunk.start)
        self._layouts.setdefault(chunk.length, []).append((head, relative))
        return record


@dataclass(frozen=True)
class DistView:
    """A stored tensor; indexing it assembles only the requested box."""

    checkpoint: DistCheckpoint
    key: str
    stored: StoredTensor

    @property
    def shape(self) -> Shape:
        """Shape of the whole tensor."""
        return self.stored.shape

    def box(self, offsets: Shape, sizes: Shape) -> Tensor:
        """The elements from `offsets` on, as a tensor of `sizes`; dtype of the checkpoint.

        Raises:
            CheckpointError: a chunk cannot be read, or the box is not within the tensor.
        """
        import torch

        if any(o < 0 or o + n > whole for o, n, whole in zip(offsets, sizes, self.shape, strict=True)):
            raise CheckpointError(
                f"{self.checkpoint.directory}: {self.key}", self.shape, f"must contain {sizes} at {offsets}",
                "use the config.json of the checkpoint's model",
            )  # fmt: skip
        touched = [
            (chunk, overlap)
            for chunk in self.stored.near(offsets, sizes)
            if (overlap := _overlap(chunk, offsets, sizes))
        ]
        if len(touched) == 1 and touched[0][1][1] == sizes:
            chunk, (within, size, _) = touched[0]
            return _narrow(self.checkpoint.read_chunk(self.key, chunk), within, size)
        shares = [(target, size) for _, (_, size, target) in touched]
        covered = sum(math.prod(size) for _, size in shares)
        if covered != math.prod(sizes) or any(_intersect(a, b) for i, a in enumerate(shares) for b in shares[:i]):
            raise CheckpointError(
                f"{self.checkpoint.directory}: {self.key}", f"{len(touched)} chunks with {covered} elements",
                f"the chunks must cover {sizes} at {offsets} exactly once", _HINT,
            )  # fmt: skip
        assembled = torch.empty(sizes, dtype=torch_dtype(self.stored.dtype))
        for chunk, (within, size, target) in touched:
            source = _narrow(self.checkpoint.read_chunk(self.key, chunk), within, size)
            _narrow(assembled, target, size).copy_(source)
        return assembled


def is_torch_dist(directory: Path) -> bool:
    """Whether a directory looks like a `torch_dist` checkpoint, complete or not."""
    return (directory / METADATA).exists() or any(directory.glob("*.distcp"))


def _shape(sizes: Any) -> Shape:
    return tuple(int(size) for size in sizes)


def _overlap(chunk: Chunk, offsets: Shape, sizes: Shape) -> tuple[Shape, Shape, Shape] | None:
    """(start within the chunk, size, start within the box) of the overlap of chunk and box, or None."""
    within: list[int] = []
    size: list[int] = []
    target: list[int] = []
    for low, extent, offset, wanted in zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True):
        begin, end = max(low, offset), min(low + extent, offset + wanted)
        if begin >= end:
            return None
        within.append(begin - low)
        size.append(end - begin)
        target.append(begin - offset)
    return tuple(within), tuple(size), tuple(target)


def _intersect(a: tuple[Shape, Shape], b: tuple[Shape, Shape]) -> bool:
    """Whether two (start, size) boxes share an element."""
    return all(x < y + n and y < x + m for x, m, y, n in zip(*a, *b, strict=True))


def _narrow(tensor: Tensor, offsets: Shape, sizes: Shape) -> Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


def _check_backend(directory: Path) -> None:
    path = directory / CONFIG
    try:
        backend = json.loads(path.read_text(encoding="utf-8"))["sharded_backend"]
    except FileNotFoundError as error:
        raise CheckpointError(
            str(path),
            None,
            "no such file; it is written last, so the checkpoint is incomplete",
            "name a complete checkpoint",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(str(path), str(error), "is not JSON with sharded_backend", _HINT) from error
    if backend != "torch_dist":
        raise CheckpointError(
            str(path), backend, "only Megatron checkpoints in torch_dist format are supported",
            "save it again with --ckpt-format torch_dist",
        )  # fmt: skip


class _PlaceholderClass:
    """Placeholder for a class of megatron-core whose content is not needed."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles only the classes of the checkpoint format."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) == ("builtins", "getattr"):
            return _enum_member
        if global_name in _MEGATRON_STAND_INS and module_name.startswith("megatron.core."):
            return _PlaceholderClass
        # A dotted name would reach any class that the module imports.
        known = "." not in global_name and _is_known(module_name, global_name)
        found = super().find_class(module_name, global_name) if known else None
        own = isinstance(found, type) and found.__module__ == module_name
        if found is None or (module_name in _METADATA_MODULES and not own):
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which is not part of the format")
        return found


def _enum_member(enum: Any, name: str) -> Any:
    """Result of a file's `getattr` call: some versions of Python (3.11.2) write a member of an enum as one."""
    if not (isinstance(enum, type) and issubclass(enum, Enum) and name in enum.__members__):
        raise pickle.UnpicklingError(f"it asks for {name!r} of {enum!r}, which is not a member of an enum")
    return enum[name]


def _is_known(module: str, name: str) -> bool:
    import torch

    if module == "torch":
        return name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
    return module in _METADATA_MODULES or (module, name) in _METADATA_CLASSES


def load_metadata(path: Path) -> Any:
    """Unpickle torch's `Metadata` from a `.metadata` file, without running any code that the file names.

    Raises:
        CheckpointError: it is missing, damaged, or names a class outside of the format.
    """
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        assert metadata.storage_data is not None
    except FileNotFoundError as error:
        raise CheckpointError(
            str(path), None, "the checkpoint has no metadata: it is incomplete", "name a complete checkpoint"
        ) from error
    except (pickle.UnpicklingError, ImportError, *MALFORMED) as error:
        raise CheckpointError(str(path), f"{type(error).__name__}: {error}", _NO_METADATA, _HINT) from error
    return metadata


@dataclass(frozen=True)
class _Record:
    """Position of the elements of a `torch.save`d tensor in a file, and its view of them."""

    start: int
    nbytes: int
    numel: int
    offset: int
    size: Shape
    stride: Shape

    @property
    def fits(self) -> bool:
        """Whether the view lies within the stored elements."""
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return self.numel == 0 or 0 <= last < self.numel


class _Window(io.RawIOBase):
    """Bytes `start` to `start + length` of a file as a separate file."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._at, 0)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


class _RecordUnpickler(pickle.Unpickler):
    """Reads the shape of a saved tensor; builds no tensor and calls nothing that the file names."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module_name, global_name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _described
        if module_name == "torch" and global_name.endswith("Storage"):
            return global_name  # kept as a name: it is only passed to persistent_load
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> Any:
        kind, _, key, _, numel = pid
        assert kind == "storage"
        return key, int(numel)


def _described(storage: tuple[str, int], offset: int, size: Any, stride: Any, *rest: Any) -> tuple[Any, ...]:
    return (*storage, int(offset), _shape(size), _shape(stride))


def _locate(file: io.BufferedReader, chunk: Chunk) -> _Record:
    """Record of one chunk: opens the zip archive's directory, reads the small pickle, and skips the data."""
    window = _Window(file, chunk.start, chunk.length)
    with zipfile.ZipFile(window) as archive:  # pyright: ignore[reportArgumentType]
        names = {name.split("/", 1)[1]: name for name in archive.namelist() if "/" in name}
        key, numel, offset, size, stride = _RecordUnpickler(io.BytesIO(archive.read(names["data.pkl"]))).load()
        data = archive.getinfo(names[f"data/{key}"])
        if data.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile("the tensor is compressed")
    window.seek(data.header_offset + 26)
    lengths = window.read(4)  # lengths of the local header's name and extra field, which differ from the directory's
    begin = data.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    return _Record(chunk.start + begin, data.file_size, numel, offset, size, stride)


# Places of parameters in megatron-core checkpoints: pure data, made by a built model
# (`backends.megatron.checkpoint_files`) and used without one. Layers and experts may be stacked in one stored tensor,
# and a parameter may be stored in pieces (the halves of a gated MLP).


@dataclass(frozen=True)
class ParameterBox:
    """A view of one parameter, and its box in a stored tensor.

    Attributes:
        key: of the stored tensor.
        shape: of the stored tensor.
        offsets, sizes: of the box; as many dimensions as `shape`.
        start, size, stride: the view of the contiguous parameter: first element, shape and strides in elements.
    """

    key: str
    shape: Shape
    offsets: Shape
    sizes: Shape
    start: int
    size: Shape
    stride: Shape

    def cut(self, parameter: Tensor) -> Tensor:
        """This piece of a parameter, in the box's shape; contiguous."""
        return parameter.contiguous().as_strided(self.size, self.stride, self.start).reshape(self.sizes).contiguous()

    def paste(self, parameter: Tensor, box: Tensor) -> None:
        """Copy the box into its place in a contiguous parameter."""
        parameter.as_strided(self.size, self.stride, self.start).copy_(box.reshape(self.size))


@dataclass(frozen=True)
class ModelPlacement:
    """Places of a whole model's parameters.

    Attributes:
        pieces: of every parameter, by canonical name.
        objects: keys of megatron-core's stored objects (modules' extra state, `None` in a fresh model).
    """

    pieces: Mapping[str, tuple[ParameterBox, ...]]
    objects: Sequence[str]

    def check(self, table: RuleTable) -> None:
        """Assert that every exported rule has its parameter, and that pieces fill parameters."""
        absent = [name for name, rule in table.all_bound.items() if rule.exported and name not in self.pieces]
        assert not absent, f"no place for {absent[:3]}"
        for name, pieces in self.pieces.items():
            covered = sum(math.prod(piece.size) for piece in pieces)
            expected = math.prod(table.bind(name).kind.full_shape)
            assert covered == expected, f"{name}: pieces of {covered} elements, the rule says {expected}"


def whole(rule: BoundRule) -> ParameterBox:
    """Place of a parameter that megatron-core does not build: under its own name."""
    shape = rule.kind.full_shape
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return ParameterBox(rule.name, shape, (0,) * len(shape), shape, 0, shape, stride)
