"""The two formats a conversion writes, tensor by tensor: safetensors shards, and the records of `torch_dist` files."""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mslime.convert.files import Advance, ByteRange, OutputFile, Written, tensor_bytes
from mslime.convert.kinds import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
TORCH_DTYPES = {short: name for name, short in SAFETENSORS_DTYPES.items()}
_BITS = {"F64": 64, "F32": 32, "BF16": 16, "F16": 16, "I64": 64, "I32": 32, "I16": 16}
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
        return math.prod(self.shape) * _BITS.get(self.dtype, 8) // 8


def safetensors_header(plans: Sequence[TensorPlan]) -> bytes:
    """What a shard begins with; the tensors' bytes follow one after the other."""
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
    text += b" " * (-(8 + len(text)) % 64)  # tensors begin aligned
    return len(text).to_bytes(8, "little") + text


def write_safetensors(path: Path, plans: Sequence[TensorPlan], tensors: Iterable[Tensor], advance: Advance) -> Written:
    """One shard: the header, which is known before any tensor, then the tensors one at a time.

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
    """Append what `torch.save(tensor)` means: a zip archive of a small pickle and the tensor's bytes as they are.

    Written by hand because torch computes its checksums at a tenth of the speed of zlib, and Python's zipfile takes
    longer for an archive than a small tensor takes.

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
    """An archive with 64-bit sizes; returns where the data begins."""
    with zipfile.ZipFile(_Appending(file, name), "w") as archive:  # pyright: ignore[reportArgumentType]
        for member, content in members:
            archive.writestr(zipfile.ZipInfo(member), content)
        with archive.open(zipfile.ZipInfo(_DATA), "w", force_zip64=True) as stored:
            begin = file.at
            stored.write(data)
    return begin


@dataclass(frozen=True)
class _Template:
    """The archive of every tensor of one dtype and shape, but for its bytes and their checksum.

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
    """Made with `zipfile` from an archive whose data is missing; the format is PKWARE's APPNOTE.TXT, section 4.3."""
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
    """A file from its present end on, which cannot be sought: zipfile then writes from front to back."""

    def __init__(self, file: OutputFile, what: str) -> None:
        self._target, self._what, self._start = file, what, file.at

    def tell(self) -> int:
        return self._target.at - self._start

    def seekable(self) -> bool:
        return False

    def seek(self, offset: int, whence: int = 0) -> int:
        raise io.UnsupportedOperation("seek")

    def write(self, data: Any) -> int:
        return self._target.write(data, self._what)


@lru_cache(maxsize=256)
def _prelude(dtype: str, shape: Shape) -> tuple[tuple[str, bytes], ...]:
    """The members of the archive but the data (torch's `torch/serialization.py`, `_save`)."""
    buffer = io.BytesIO()
    _TensorPickler(buffer, protocol=2).dump(_Described(dtype, shape))
    return (
        ("archive/data.pkl", buffer.getvalue()),
        ("archive/byteorder", b"little"),
        ("archive/version", b"3\n"),
    )


@dataclass(frozen=True)
class _Described:
    """Stands for a contiguous tensor in a pickle."""

    dtype: str
    shape: Shape


@dataclass(frozen=True)
class _Storage:
    """Stands for its storage."""

    dtype: str
    numel: int


class _TensorPickler(pickle.Pickler):
    """Pickles a `_Described` the way torch pickles a tensor."""

    def reducer_override(self, obj: Any, /) -> Any:
        if not isinstance(obj, _Described):
            return NotImplemented
        stride = tuple(math.prod(obj.shape[i + 1 :]) for i in range(len(obj.shape)))
        storage = _Storage(obj.dtype, math.prod(obj.shape))
        return _rebuild_function(), (storage, 0, obj.shape, stride, False, _no_hooks())

    def persistent_id(self, obj: Any, /) -> Any:
        import torch

        if not isinstance(obj, _Storage):
            return None
        names = {"float32": "Float", "bfloat16": "BFloat16", "float16": "Half", "float64": "Double", "int64": "Long"}
        return "storage", getattr(torch, f"{names[obj.dtype]}Storage"), "0", "cpu", obj.numel


def _rebuild_function() -> Any:
    """The function that a pickled tensor names."""
    import torch._utils  # pyright: ignore[reportMissingTypeStubs]

    return torch._utils._rebuild_tensor_v2  # pyright: ignore


def _no_hooks() -> OrderedDict[str, object]:
    """Must not be made by calling the generic alias, which would leave its mark on the object."""
    hooks: OrderedDict[str, object] = OrderedDict()
    return hooks
