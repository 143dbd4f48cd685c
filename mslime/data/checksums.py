"""SHA-256 of files: summed while they are written, so that nothing is read again, and compared when they are read.

Why SHA-256 and not a faster sum is in docs/decisions/0003-models-and-checkpoints.md.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mslime.config.errors import CheckpointError

_READ_BYTES = 8 << 20
_OVERLAPPED_BYTES = 1 << 20  # from here on it pays to sum in a thread while the system writes
_THREADS = 8
WAY_OUT = (
    "restore the file, delete the checkpoint, or set checkpoint.resume: older to continue from the newest undamaged one"
)


@dataclass(frozen=True)
class FileSum:
    """What a file must be.

    Attributes:
        size: in bytes.
        sha256: in hexadecimal; None in checkpoints from before files were summed.
    """

    size: int
    sha256: str | None


class SummedFile(io.RawIOBase):
    """A new file, written from front to back and summed on the way.

    Args:
        path: replaced when it exists.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("wb")
        self._hash = hashlib.sha256()
        self._at = 0
        self._thread: ThreadPoolExecutor | None = None

    @property
    def sum(self) -> FileSum:
        """Of everything written so far."""
        return FileSum(self._at, self._hash.hexdigest())

    def write(self, data: Any, /) -> int:
        """Append bytes; returns how many. Raises OSError when the file system refuses."""
        view = memoryview(data).cast("B")
        if len(view) < _OVERLAPPED_BYTES:
            self._file.write(view)
            self._hash.update(view)
        else:
            self._thread = self._thread or ThreadPoolExecutor(1)
            summing = self._thread.submit(self._hash.update, view)
            try:
                self._file.write(view)
            finally:
                summing.result()  # the caller may reuse the memory
        self._at += len(view)
        return len(view)

    def sync(self) -> None:
        """Bring it to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def flush(self) -> None:
        """To the system."""
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        """Of the file underneath."""
        self._file.flush()
        return self._file.fileno()

    def writable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Never: what was summed cannot be written again."""
        return False

    def tell(self) -> int:
        """Bytes written."""
        return self._at

    def close(self) -> None:
        """Close the file and end the thread."""
        if self._thread is not None:
            self._thread.shutdown()
        self._file.close()
        super().close()


def write_summed(path: Path, data: bytes) -> FileSum:
    """Write a whole small file to the disk; returns its sum."""
    with SummedFile(path) as file:
        file.write(data)
        file.sync()
        return file.sum


def sum_file(path: Path) -> FileSum:
    """The sum of a file that is there. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(_READ_BYTES, os.fstat(file.fileno()).st_size + 1)))
        while read := file.readinto(buffer):
            digest.update(buffer[:read])
            size += read
    return FileSum(size, digest.hexdigest())


def check_sizes(directory: Path, files: Mapping[str, FileSum]) -> None:
    """Compare sizes, without reading. Raises CheckpointError naming the first file that is missing or another."""
    for name, expected in files.items():
        path, found = directory / name, None
        with suppress(OSError):  # a name that no file system takes, a directory that may not be entered
            found = path.stat().st_size if path.is_file() else None
        if found != expected.size:
            raise CheckpointError(
                str(path), "missing" if found is None else f"{found} bytes",
                f"the manifest has {expected.size} bytes", WAY_OUT,
            )  # fmt: skip


def check_sums(directory: Path, files: Mapping[str, FileSum], threads: int = _THREADS) -> None:
    """Read the files and compare them with their sums, several side by side; sizes only where there is no sum.

    Raises:
        CheckpointError: naming the first file, by name, that is missing or damaged.
    """
    check_sizes(directory, files)
    with ThreadPoolExecutor(threads) as pool:
        names = sorted(files)
        for error in list(pool.map(_damage, [directory / name for name in names], [files[name] for name in names])):
            if error is not None:
                raise error


def _damage(path: Path, expected: FileSum) -> CheckpointError | None:
    if expected.sha256 is None:
        return None
    try:
        found = sum_file(path)
    except OSError as error:
        return CheckpointError(str(path), error.strerror, "must be readable", WAY_OUT)
    if found == expected:
        return None
    return CheckpointError(
        str(path), f"sha256 {str(found.sha256)[:16]}...",
        f"the manifest has {expected.sha256[:16]}...: the file is not what was written", WAY_OUT,
    )  # fmt: skip


def share(files: Mapping[str, FileSum], rank: int, ranks: int) -> dict[str, FileSum]:
    """The files that one of several readers checks, so that each reads about as many bytes: the same on every rank."""
    loads, mine = [0] * ranks, dict[str, FileSum]()
    for name in _largest_first(files):
        lightest = loads.index(min(loads))
        loads[lightest] += files[name].size
        if lightest == rank:
            mine[name] = files[name]
    return mine


def _largest_first(files: Mapping[str, FileSum]) -> Iterable[str]:
    return sorted(files, key=lambda name: (-files[name].size, name))
