"""Output files of a conversion: a file grows under a temporary name, remembers a checksum of every tensor, and takes
its own name when it is complete and on the disk. Afterwards it is read again, from the disk, and compared.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mslime.config.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

Advance = Callable[[int], None]
"""Called with the number of bytes that have just been done."""
_READ_BYTES = 8 << 20
_GATHERED_BYTES = 1 << 20  # of one call to the system
_GATHERED_PIECES = 512  # Linux takes 1024
_BEHIND_BYTES = 16 << 20  # that the thread may lag behind
_SYNC_BYTES = 256 << 20  # between two waits for the disk, so that dirty pages do not pile up


@dataclass(frozen=True)
class ByteRange:
    """Where a tensor's bytes lie in a file, and their CRC-32."""

    start: int
    length: int
    crc: int


@dataclass(frozen=True)
class Written:
    """A finished file.

    Attributes:
        file: its name.
        size: in bytes.
        spans: of every tensor, under a name that is unique in the file.
        records: (start, length) of what holds each tensor, in formats that put something around it.
    """

    file: str
    size: int
    spans: Mapping[str, ByteRange]
    records: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


class OutputFile:
    """A file that is written from front to back; a context manager that leaves it whole or not at all.

    A thread hands the bytes to the system and to the disk, so that the next tensor is read and converted meanwhile.

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

    def write(self, data: bytes | memoryview, what: str = "header") -> int:
        """Append bytes, which must stay as they are until the file is complete; returns how many.

        Raises:
            CheckpointError: the file system refused, naming the file and about what was written then.
        """
        self._latest = what
        self._gathered.append(data)
        self._gathered_bytes += len(data)
        if self._gathered_bytes >= _GATHERED_BYTES or len(self._gathered) == _GATHERED_PIECES:
            self._hand_over()
        self.at += len(data)
        return len(data)

    def _hand_over(self) -> None:
        """Give what is gathered to the thread; wait when that lags behind."""
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
        """In the thread: to the system in one call, and on to the disk now and then."""
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
        """Append the bytes of a contiguous CPU tensor and remember their checksum. Raises like `write`."""
        data = tensor_bytes(tensor)
        span = ByteRange(self.at, len(data), zlib.crc32(data))
        self.write(data, name)
        self.spans[name] = span
        return span

    def complete(self) -> Written:
        """Everything is written: bring it to the disk and give the file its name. Raises like `write`."""
        self._hand_over()
        while self._writing:
            self._wait_for_one()
        try:
            os.fsync(self._file.fileno())
            self._temporary.rename(self._path)
        except OSError as error:
            raise self._failed(error) from error
        return Written(self._path.name, self.at, self.spans, self.records)

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: {self._latest}", error.strerror, f"could not be written after {self.at} bytes",
            "free space there, or choose another output directory; then run the same command again: "
            "finished files are kept",
        )  # fmt: skip


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, for reading or writing; works for every dtype."""
    import torch

    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    array = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)  # pyright: ignore[reportArgumentType]  numpy arrays are buffers


def verify(directory: Path, written: Written, advance: Advance) -> None:
    """Read a finished file from the disk again and compare every tensor's checksum.

    Raises:
        CheckpointError: naming the file and the first tensor that differs.
    """
    path = directory / written.file
    try:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what the disk has, not what memory kept
            size = os.fstat(file.fileno()).st_size
            if size != written.size:
                raise _different(path, "file", f"{size} bytes", f"{written.size} bytes were written")
            for name, span in sorted(written.spans.items(), key=lambda item: item[1].start):
                if _crc_of(file.fileno(), span, advance) != span.crc:
                    raise _different(
                        path, name, "another checksum", "the bytes on disk must be those that were written"
                    )
    except OSError as error:
        raise _different(path, "file", error.strerror, "must be readable") from error


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


def _different(path: Path, what: str, found: object, rule: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}", found, rule, "check the disk and its file system, then convert again")
