"""The transport `disk`, and the base of `shm`, `handles` and `mooncake`: a sender writes a bucket, and engines read it.

There is no process group, so no engine waits for another one, and senders do not take turns. Before the first bucket, a
test request to every engine checks that it can read the sender's files. `disk` writes each bucket into a safetensors
file, which engines on any host read:

    DIRECTORY/GROUP/version_000012/bucket_00003.safetensors     complete under this name
    DIRECTORY/GROUP/version_000012/model.safetensors.index.json written last, by the first sender: complete
    DIRECTORY/GROUP/version_000013/bucket_00003.changes.safetensors  of `delta`: changes in version 13

GROUP is new for every connection. A version is removed when the next one is complete, also one of a killed run. So
there are at most two; the last one stays.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from mslime.config.base import CHANGES, FileKind, version_name
from mslime.config.errors import ChangesRefused, WeightSyncError
from mslime.config.keys import BucketVersion, EngineInfo
from mslime.convert.hf import INDEX_NAME
from mslime.convert.safetensors_files import SAFETENSORS_DTYPES, TensorPlan, safetensors_header
from mslime.engine_plugin import wire
from mslime.weights.transport import ChangeCarrier, Link, LoadingBucket, Transport, ask_all
from mslime.weights.weight_plan import Bucket

HINT = (
    "set weights.transport: broadcast; shm and handles need engines and senders on one host, disk and delta need a "
    "weights.directory that all hosts share"
)
"""Hint for the user if an engine cannot read a directory."""
_VERSION = re.compile(r"version_\d{6,}")


class FileTransport(Transport):
    """Buckets in files that engines read."""

    kind: FileKind
    any_order = True

    def __init__(self, link: Link) -> None:
        self.link = link
        self.engines: tuple[EngineInfo, ...] = ()
        self._announced: dict[int, tuple[Path, bytes]] = {}

    @abstractmethod
    def open_place(self, engines: Sequence[EngineInfo]) -> tuple[wire.Request, str]:
        """Create the place of the buckets; returns a request that tests whether an engine can read there, and a hint
        for the user if it cannot. Raises WeightSyncError."""

    @abstractmethod
    def write(self, bucket: Bucket, flat: torch.Tensor) -> Path:
        """Write `flat` [bucket.hf_numel] into a file. Raises WeightSyncError."""

    def arrived(self) -> None:
        """Called when every engine has loaded a bucket."""

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Check that every engine can read this sender's files. Raises WeightSyncError if one cannot."""
        self.engines = tuple(engines)
        request, hint = self.open_place(engines)
        ask_all(self.link.engine_port, engines, request, self.link.deadline_s, hint)

    def start(self, bucket: Bucket, flat: torch.Tensor) -> PendingFile:
        """Write the bucket, and request every engine to read it."""
        assert self.engines, "not connected"
        return self.announce(bucket, self.kind, self.write(bucket, flat))

    def announce(self, bucket: Bucket, kind: FileKind, path: Path) -> PendingFile:
        """Request every engine to read a bucket from a file."""
        known = self._announced.get(bucket.index)
        if known is None or known[0] != path:  # the request is encoded again only for another file
            known = path, wire.update_request([bucket], load=wire.FromFile(kind, path))
            self._announced[bucket.index] = known
        answers = [self.link.engine_port.load(engine, known[1]) for engine in self.engines]
        return PendingFile(bucket, answers, self.arrived)


@dataclass
class PendingFile(LoadingBucket):
    """One bucket in a file, and an HTTP answer from every engine."""

    arrived: Callable[[], None]

    def refused(self) -> list[ChangesRefused]:
        if not (refused := super().refused()):
            self.arrived()
        return refused


class DiskTransport(FileTransport, ChangeCarrier):
    """Every bucket in a file of its own.

    Args:
        with_changes: changes of buckets may follow. Such versions have no other readers, so they get no index and need
            not survive a crash: closing a file makes it visible to other hosts.
    """

    def __init__(self, link: Link, with_changes: bool = False) -> None:
        assert link.directory is not None, "the link has no directory"
        super().__init__(link)
        self.kind, self._with_changes = "base" if with_changes else "safetensors", with_changes
        self._root, self._group = link.directory, link.directory / (link.group or link.name)
        self._version: Path | None = None
        self._buckets: Sequence[Bucket] = ()
        self._unfinished: list[Path] = []

    def open_place(self, engines: Sequence[EngineInfo]) -> tuple[wire.Request, str]:
        """Create a directory for this connection."""
        return wire.ReadDirectory(self.open_directory()), HINT

    def open_directory(self) -> Path:
        """Create the directory, which all senders share. Raises WeightSyncError."""
        with self._writing():
            self._group.mkdir(parents=True, exist_ok=True)
        return self._group

    def begin(self, version: int, buckets: Sequence[Bucket]) -> None:
        """Create a directory for the version. Raises WeightSyncError if this sender's part does not fit."""
        self._version, self._buckets = self._group / version_name(version), buckets
        with self._writing():
            self._version.mkdir(exist_ok=True)
            if buckets[0].sender == self.link.rank:  # the same version again
                (self._version / INDEX_NAME).unlink(missing_ok=True)
            free = shutil.disk_usage(self._version).free
        mine = sum(bucket.hf_bytes for bucket in buckets if bucket.sender == self.link.rank)
        if mine > free:
            raise self._unusable(f"{free >> 20:,} MiB are free; this sender's part of a version needs {mine >> 20:,}")

    def write(self, bucket: Bucket, flat: torch.Tensor) -> Path:
        """Write the bucket's file, completely or not at all."""
        path = self._path_of(bucket)
        tensors = zip(bucket.entries, bucket.dtypes, strict=True)
        header = safetensors_header(
            [TensorPlan(entry.name, SAFETENSORS_DTYPES[dtype], entry.shape) for entry, dtype in tensors]
        )
        self._write_file(path, header, flat.view(torch.uint8).cpu())
        return path

    def start_changes(
        self, bucket: Bucket, version: BucketVersion, index: torch.Tensor, value: torch.Tensor
    ) -> PendingFile:
        """Write the changes, and request every engine to read them."""
        path = self._path_of(bucket).with_suffix(".changes.safetensors")
        kinds = (("I64", 4), ("I32", len(index)), (SAFETENSORS_DTYPES[bucket.dtype], len(index)))
        plans = [TensorPlan(name, dtype, (size,)) for name, (dtype, size) in zip(CHANGES, kinds, strict=True)]
        parts = (torch.tensor([version.base, *version.sums]), index.cpu(), value.cpu())
        self._write_file(path, safetensors_header(plans), *(part.view(torch.uint8) for part in parts))
        return self.announce(bucket, "changes", path)

    def _path_of(self, bucket: Bucket) -> Path:
        """The bucket's file in the current version."""
        assert self._version is not None, "begin comes before start"
        return self._version / _file_name(bucket)

    def _write_file(self, path: Path, *parts: bytes | torch.Tensor) -> None:
        """Write a file of the current version, completely or not at all. Raises WeightSyncError."""
        self._unfinished.append(path)
        with self._writing():
            write_whole(path, *parts, lasting=not self._with_changes)

    def complete(self) -> None:
        """Mark the version as complete, and remove all others. Only the plan's first sender does this."""
        assert self._version is not None
        self._unfinished.clear()
        if self._buckets[0].sender == self.link.rank:
            with self._writing():
                if not self._with_changes:
                    files = {entry.name: _file_name(bucket) for bucket in self._buckets for entry in bucket.entries}
                    size = sum(bucket.hf_bytes for bucket in self._buckets)
                    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
                    write_whole(self._version / INDEX_NAME, json.dumps(index, indent=2).encode())
                self._remove_others(self._version)

    def _remove_others(self, kept: Path) -> None:
        for group in [group for group in self._root.iterdir() if group.is_dir() and not group.is_symlink()]:
            for version in group.iterdir():
                if _VERSION.fullmatch(version.name) and version != kept:
                    shutil.rmtree(version)
            if group != self._group:
                with suppress(OSError):  # the directory has other contents
                    group.rmdir()

    def disconnect(self) -> None:
        """Remove this sender's files of an incomplete version."""
        for path in self._unfinished:
            path.unlink(missing_ok=True)
        self._unfinished.clear()
        for directory in filter(None, (self._version, self._group)):
            with suppress(OSError):  # not empty, or missing
                directory.rmdir()

    def _unusable(self, rule: str) -> WeightSyncError:
        return WeightSyncError(
            "weights.directory", str(self._root), rule,
            "choose a directory that all hosts share, with space for all weights twice, or set "
            "weights.transport: broadcast",
        )  # fmt: skip

    @contextmanager
    def _writing(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise self._unusable(f"cannot be written: {error}") from error


def _file_name(bucket: Bucket) -> str:
    return f"bucket_{bucket.index:05d}.safetensors"


def write_whole(path: Path, *parts: bytes | torch.Tensor, lasting: bool = True) -> None:
    """Write a file that gets its name only when complete (and synced to disk if `lasting`). Raises OSError.

    Args:
        parts: one after the other; tensors are [bytes] uint8 on a CPU, contiguous.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            for part in parts:
                if isinstance(part, torch.Tensor):  # not by `numpy()`: torch could no longer resize the storage
                    file.write((ctypes.c_char * part.numel()).from_address(part.data_ptr()))
                else:
                    file.write(part)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
