"""Files of a conversion: safetensors headers, output files with checksums, writers of both formats, and verification
from the disk.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from mslime.config.errors import CheckpointError, reading
from mslime.convert.tensor_layouts import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor


_File = TypeVar("_File")
_T = TypeVar("_T")
Advance = Callable[[int], None]
"""Called with the number of bytes just processed."""
_READ_BYTES = 8 << 20
_GATHERED_BYTES = 1 << 20  # bytes per system call
_GATHERED_PIECES = 512  # Linux's limit is 1024
_BEHIND_BYTES = 16 << 20  # most bytes that the thread may lag behind
CONVERT_AGAIN = "check the disk and its file system, then convert again"
_SYNC_BYTES = 256 << 20  # between two syncs, which limits dirty pages


@dataclass(frozen=True)
class ByteRange:
    """Position of a tensor's bytes in a file, and their CRC-32."""

    start: int
    length: int
    crc: int


@dataclass(frozen=True)
class WrittenFile:
    """A finished file.

    Attributes:
        file: its name.
        size: in bytes.
        spans: of every tensor, under a name that is unique in the file.
        records: (start, length) of each tensor's container, in formats that have one.
    """

    file: str
    size: int
    spans: Mapping[str, ByteRange]
    records: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


class OutputFile:
    """A file that is written sequentially; a context manager that leaves a complete file or none.

    A thread writes and syncs the bytes while the next tensor is read and converted.

    Args:
        path: its final name.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._gathered: list[bytes | memoryview] = []
        self._gathered_bytes = 0
        self._writing: deque[tuple[Future[None], int]] = deque()
        self._unsynced = 0
        self._latest = "header"
        self.spans: dict[str, ByteRange] = {}
        self.records: dict[str, tuple[int, int]] = {}
        self.at = 0

    def __enter__(self) -> Self:
        try:
            self._file = self._temporary.open("wb", buffering=0)
        except OSError as error:
            raise self._failed(error) from error
        self._thread = ThreadPoolExecutor(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._file.close()
        if kind is not None:
            self._temporary.unlink(missing_ok=True)

    def write(self, data: bytes | memoryview, name: str = "header") -> int:
        """Append bytes, which must not change until the file is complete; returns how many.

        Raises:
            CheckpointError: the file system refused, naming the file and the approximate position.
        """
        self._latest = name
        self._gathered.append(data)
        self._gathered_bytes += len(data)
        if self._gathered_bytes >= _GATHERED_BYTES or len(self._gathered) == _GATHERED_PIECES:
            self._submit_gathered()
        self.at += len(data)
        return len(data)

    def _submit_gathered(self) -> None:
        """Pass gathered bytes to the thread; wait if it lags behind."""
        self._writing.append((self._thread.submit(self._flush, self._gathered), self._gathered_bytes))
        self._gathered, self._gathered_bytes = [], 0
        while self._writing and (sum(n for _, n in self._writing) > _BEHIND_BYTES or self._writing[0][0].done()):
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        try:
            self._writing.popleft()[0].result()
        except OSError as error:
            raise self._failed(error) from error

    def _flush(self, waiting: list[bytes | memoryview]) -> None:
        """Write in one system call, in the thread, and sync from time to time."""
        while waiting:
            written = os.writev(self._file.fileno(), waiting)
            self._unsynced += written
            while waiting and written >= len(waiting[0]):
                written -= len(waiting.pop(0))
            if written:
                waiting[0] = memoryview(waiting[0])[written:]
        if self._unsynced >= _SYNC_BYTES:
            os.fdatasync(self._file.fileno())
            self._unsynced = 0

    def write_tensor(self, name: str, tensor: Tensor) -> ByteRange:
        """Append the bytes of a contiguous CPU tensor and record their checksum. Raises like `write`."""
        data = tensor_bytes(tensor)
        span = ByteRange(self.at, len(data), zlib.crc32(data))
        self.write(data, name)
        self.spans[name] = span
        return span

    def complete(self) -> WrittenFile:
        """Sync the finished file to the disk and rename it to its final name. Raises like `write`."""
        self._submit_gathered()
        while self._writing:
            self._wait_for_one()
        try:
            os.fsync(self._file.fileno())
            self._temporary.rename(self._path)
        except OSError as error:
            raise self._failed(error) from error
        return WrittenFile(self._path.name, self.at, self.spans, self.records)

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: {self._latest}", error.strerror, f"could not be written after {self.at} bytes",
            "free space there, or choose another output directory; then run the same command again: "
            "finished files are kept",
        )  # fmt: skip


def kept_open(opened: Callable[[Path], _File], directory: Path, most: int) -> Callable[[str], _File]:
    """Function that opens a file of a directory by name; the `most` used last stay open, others close when dropped."""

    @lru_cache(most)
    def by_name(name: str) -> _File:
        return opened(directory / name)

    return by_name


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, for reading or writing; works for every dtype."""
    import torch

    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    array = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)  # pyright: ignore[reportArgumentType]  numpy arrays are buffers


def verify(directory: Path, written: WrittenFile, advance: Advance, hint: str = CONVERT_AGAIN) -> None:
    """Read a finished file from the disk again and compare every tensor's checksum.

    Args:
        hint: of an error.

    Raises:
        CheckpointError: naming the file and the first tensor that differs.
    """
    path = directory / written.file
    try:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read from the disk, not from the page cache
            size = os.fstat(file.fileno()).st_size
            if size != written.size:
                raise CheckpointError(f"{path}: file", f"{size} bytes", f"{written.size} bytes were written", hint)
            for name, span in sorted(written.spans.items(), key=lambda item: item[1].start):
                if _crc_of(file.fileno(), span, advance) != span.crc:
                    rule = "the bytes on disk differ from the written bytes"
                    raise CheckpointError(f"{path}: {name}", "different checksum", rule, hint)
    except OSError as error:
        raise CheckpointError(f"{path}: file", error.strerror, "cannot be read", hint) from error


def _crc_of(descriptor: int, span: ByteRange, advance: Advance) -> int:
    crc, at, end = 0, span.start, span.start + span.length
    while at < end:
        data = os.pread(descriptor, min(_READ_BYTES, end - at), at)
        if not data:
            break
        crc = zlib.crc32(data, crc)
        at += len(data)
        advance(len(data))
    return crc


# Writers of the two formats of a conversion: safetensors shards, and records of `torch_dist` files.

SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
TORCH_DTYPES = {short: name for name, short in SAFETENSORS_DTYPES.items()}
_ZIP64_BYTES = 1 << 31
_DATA = "archive/data/0"


def torch_dtype(name: str) -> torch.dtype:
    """A torch dtype by its own name (`bfloat16`) or by safetensors' (`BF16`)."""
    import torch

    dtype = getattr(torch, TORCH_DTYPES.get(name, name), None)
    assert isinstance(dtype, torch.dtype), name
    return dtype


@dataclass(frozen=True)
class TensorPlan:
    """A tensor that will be written: its name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * _HEADER_BITS[self.dtype] // 8


def batches(sized: Iterable[tuple[_T, int]], limit: int) -> Iterator[list[_T]]:
    """Divide items with their sizes in order, into lists of at most `limit` bytes; a larger item has its own list."""
    batch, total = list[_T](), 0
    for item, nbytes in sized:
        if batch and total + nbytes > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += nbytes
    if batch:
        yield batch


def safetensors_header(plans: Sequence[TensorPlan]) -> bytes:
    """Header of a shard; the tensors' bytes follow one after the other."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for plan in plans:
        header[plan.name] = {
            "dtype": plan.dtype,
            "shape": list(plan.shape),
            "data_offsets": [at, at + plan.nbytes],
        }
        at += plan.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # tensors start aligned
    return len(text).to_bytes(8, "little") + text


def write_safetensors(
    path: Path, plans: Sequence[TensorPlan], tensors: Iterable[Tensor], advance: Advance
) -> WrittenFile:
    """Write one shard: the header, which needs no tensor, then the tensors one at a time.

    Args:
        tensors: in the order of `plans`, on the CPU, in the planned dtypes and shapes.

    Raises:
        CheckpointError: the file could not be written.
    """
    text = safetensors_header(plans)
    with OutputFile(path) as file:
        file.write(text)
        for plan, tensor in zip(plans, tensors, strict=True):
            assert tuple(tensor.shape) == plan.shape, (plan, tensor.shape)
            assert SAFETENSORS_DTYPES[str(tensor.dtype).removeprefix("torch.")] == plan.dtype, (plan, tensor.dtype)
            file.write_tensor(plan.name, tensor.contiguous())
            advance(plan.nbytes)
        return file.complete()


def write_record(file: OutputFile, name: str, tensor: Tensor) -> None:
    """Append a tensor in the format of `torch.save`: a zip archive of a small pickle and the tensor's raw bytes.

    Not by torch, whose checksums have a tenth of zlib's speed, nor by zipfile: its overhead for an archive exceeds the
    cost of a small tensor.

    Args:
        name: for `file.records` and `file.spans`.
        tensor: contiguous, on the CPU.
    """
    data, start = tensor_bytes(tensor), file.at
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    crc = zlib.crc32(data)
    if len(data) >= _ZIP64_BYTES:
        begin = _write_large(file, name, _prelude(dtype, shape), data)
    else:
        template = _template(dtype, shape, len(data))
        file.write(template.head, name)
        begin = file.at
        file.write(data, name)
        file.write(template.tail(crc), name)
    file.spans[name] = ByteRange(begin, len(data), crc)
    file.records[name] = (start, file.at - start)


def _write_large(file: OutputFile, name: str, members: Sequence[tuple[str, bytes]], data: memoryview) -> int:
    """Write an archive with 64-bit sizes; returns where the data begins."""
    with zipfile.ZipFile(_Appending(file, name), "w") as archive:  # pyright: ignore[reportArgumentType]
        for member, content in members:
            archive.writestr(zipfile.ZipInfo(member), content)
        with archive.open(zipfile.ZipInfo(_DATA), "w", force_zip64=True) as stored:
            begin = file.at
            stored.write(data)
    return begin


@dataclass(frozen=True)
class _Template:
    """Archive for tensors of one dtype and shape, without their bytes and checksum.

    Attributes:
        head: everything before the tensor's bytes.
        size: of those bytes.
        directory: central directory and its end record; the data's checksum belongs at `crc_at`.
    """

    head: bytes
    size: int
    directory: bytes
    crc_at: int

    def tail(self, crc: int) -> bytes:
        """Everything after the tensor's bytes."""
        descriptor = struct.pack("<4s3L", b"PK\x07\x08", crc, self.size, self.size)
        before, after = self.directory[: self.crc_at], self.directory[self.crc_at + 4 :]
        return b"".join((descriptor, before, crc.to_bytes(4, "little"), after))


@lru_cache(maxsize=256)
def _template(dtype: str, shape: Shape, size: int) -> _Template:
    """Build a template from an archive without data. Format: PKWARE's APPNOTE.TXT, section 4.3."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for member, content in _prelude(dtype, shape):
            archive.writestr(zipfile.ZipInfo(member), content)
        archive.writestr(zipfile.ZipInfo(_DATA), b"")
        end_of_head = buffer.tell()
        entries = archive.filelist
    whole = bytearray(buffer.getvalue())
    local = entries[-1].header_offset
    whole[local + 6] |= 8  # flags: checksum and sizes follow the data
    after = end_of_head + size + 16  # the descriptor's length
    directory = whole[end_of_head:]
    own = len(directory) - 22 - 46 - len(_DATA)  # the last entry, before the end record
    directory[own + 8] |= 8
    struct.pack_into("<2L", directory, own + 20, size, size)
    struct.pack_into("<L", directory, len(directory) - 6, after)
    return _Template(bytes(whole[:end_of_head]), size, bytes(directory), own + 16)


class _Appending(io.RawIOBase):
    """Unseekable file that appends at the present end, which makes zipfile write sequentially."""

    def __init__(self, file: OutputFile, name: str) -> None:
        self._target, self._name, self._start = file, name, file.at

    def tell(self) -> int:
        return self._target.at - self._start

    def seekable(self) -> bool:
        return False

    def seek(self, offset: int, whence: int = 0) -> int:
        raise io.UnsupportedOperation("seek")

    def write(self, data: Any) -> int:
        return self._target.write(data, self._name)


@lru_cache(maxsize=256)
def _prelude(dtype: str, shape: Shape) -> tuple[tuple[str, bytes], ...]:
    """Members of the archive except the data (torch's `torch/serialization.py`, `_save`)."""
    buffer = io.BytesIO()
    _TensorPickler(buffer, protocol=2).dump(_Described(dtype, shape))
    return (
        ("archive/data.pkl", buffer.getvalue()),
        ("archive/byteorder", b"little"),
        ("archive/version", b"3\n"),
    )


@dataclass(frozen=True)
class _Described:
    """Placeholder of a contiguous tensor in a pickle."""

    dtype: str
    shape: Shape


@dataclass(frozen=True)
class _Storage:
    """Placeholder of its storage."""

    dtype: str
    numel: int


class _TensorPickler(pickle.Pickler):
    """Pickles a `_Described` as torch pickles a tensor."""

    def reducer_override(self, obj: Any, /) -> Any:
        if not isinstance(obj, _Described):
            return NotImplemented
        stride = tuple(math.prod(obj.shape[i + 1 :]) for i in range(len(obj.shape)))
        storage = _Storage(obj.dtype, math.prod(obj.shape))
        import torch._utils  # pyright: ignore[reportMissingTypeStubs]

        # The generic alias is not called: it would set an attribute on the mapping.
        hooks: OrderedDict[str, object] = OrderedDict()
        rebuild = torch._utils._rebuild_tensor_v2  # pyright: ignore
        return rebuild, (storage, 0, obj.shape, stride, False, hooks)

    def persistent_id(self, obj: Any, /) -> Any:
        import torch

        if not isinstance(obj, _Storage):
            return None
        names = {"float32": "Float", "bfloat16": "BFloat16", "float16": "Half", "float64": "Double", "int64": "Long"}
        return "storage", getattr(torch, f"{names[obj.dtype]}Storage"), "0", "cpu", obj.numel


# Headers of safetensors files, validated as in the safetensors library, without reading a weight.
#
# The format: 8 bytes little-endian header length, JSON header, tensor data (huggingface.co/docs/safetensors, "Format";
# rules: `Metadata::validate` of the library). Validation is as strict as the library's: a damaged header could
# otherwise be read as other weights.

_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_HEADER_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
RESTORE = "download the checkpoint again, or use a complete one"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint: its file, safetensors dtype (`BF16`, `F32`, ...), shape, first byte in the file."""

    file: str
    dtype: str
    shape: Shape
    start: int = -1


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of one safetensors file, whose length must match its header.

    Raises:
        CheckpointError: the file is missing, truncated or not safetensors, or its header contradicts itself.
    """
    with reading(CheckpointError, str(path), "the file's header is not in safetensors format", RESTORE):
        length, size, header = _load(path)
        metadata = header.pop("__metadata__", None)
        assert metadata is None or isinstance(metadata, dict), "__metadata__ is not an object"
        found = {name: _tensor(path, name, entry, length) for name, entry in header.items()}
        _check_layout(path, {name: (info, *header[name]["data_offsets"]) for name, info in found.items()}, length, size)
        return found


def _load(path: Path) -> tuple[int, int, dict[str, Any]]:
    """(bytes of the header, bytes of the file, the header)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(str(path), f"{size} bytes", "the file is truncated or not safetensors", RESTORE)
            header = json.loads(file.read(length), object_pairs_hook=_once)
    except FileNotFoundError as error:
        raise CheckpointError(str(path), None, "the weight file is missing", RESTORE) from error
    assert isinstance(header, dict), "it is not an object"
    return length, size, cast("dict[str, Any]", header)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    assert len(set(names)) == len(names), "a name appears twice"
    return dict(pairs)


def _tensor(path: Path, name: str, entry: Any, length: int) -> TensorInfo:
    """Info from one entry of the header, whose bytes must match its shape and dtype."""
    shape, dtype = entry["shape"], entry["dtype"]
    start, end = entry["data_offsets"]
    assert all(type(n) is int and n >= 0 for n in [*shape, start, end]), f"{name}: shape or offsets are not sizes"
    assert dtype in _HEADER_BITS, f"{name}: the dtype {dtype!r} is unknown"
    needed = math.prod(shape) * _HEADER_BITS[dtype]
    if (end - start) * 8 != needed:
        raise CheckpointError(
            f"{path}: {name}", f"{end - start} bytes", f"{dtype} of shape {shape} has {needed / 8:g} bytes", RESTORE
        )
    return TensorInfo(path.name, dtype, tuple(shape), 8 + length + start)


def _check_layout(path: Path, spans: dict[str, tuple[TensorInfo, int, int]], length: int, size: int) -> None:
    """Check that tensors are contiguous, from the end of the header to the end of the file."""
    at = 0
    for name, (_, start, end) in sorted(spans.items(), key=lambda item: item[1][1:]):
        if start != at:
            raise CheckpointError(f"{path}: {name}", f"starts at byte {start}",
                                  f"the tensor before ends at byte {at}: the header is damaged", RESTORE)  # fmt: skip
        at = end
    promised = 8 + length + at
    if size != promised:
        last = max(spans, key=lambda name: spans[name][2], default="")
        raise CheckpointError(
            f"{path}: {last}",
            f"{size} bytes",
            f"the header requires {promised} bytes: the file is truncated or damaged",
            RESTORE,
        )
