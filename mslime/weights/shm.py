"""The transport `shm`: one host. A sender's buckets go one after the other through a file in /dev/shm.

The file is as large as the sender's largest bucket. It lies in a directory that only this user can enter, under a name
that nobody can guess, and it has a name only until all engines have mapped it, in the first sync. From then on it is
memory that goes with the processes which have it, however they end. What a sender leaves that is killed before that,
the next one on this machine removes: a living sender holds a lock on its directory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from mslime.config.errors import WeightSyncError
from mslime.engine_plugin import wire
from mslime.weights.files import DirectoryTransport
from mslime.weights.plan import Bucket
from mslime.weights.transport import Link

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "mslime-weights-"


@dataclass
class Room:
    """Memory that engines map.

    Attributes:
        flat: [bytes] uint8.
        path: of the file, as engines know it; they go on using it when the name is gone.
        file: open, and locked, as long as it is used.
    """

    flat: torch.Tensor
    path: Path
    file: int


class ShmTransport(DirectoryTransport):
    """One file of shared memory for one sender."""

    kind = "mapped"

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._directory: Path | None = None
        self._lock = -1
        self._room: Room | None = None

    def open_directory(self) -> Path:
        """A new private directory in /dev/shm."""
        try:
            remove_left_over()
            self._directory, self._lock = private_directory()
        except OSError as error:
            raise unusable(f"{SHARED_MEMORY} cannot be written to: {error}") from error
        return self._directory

    def begin(self, version: int, buckets: Sequence[Bucket]) -> None:
        """Make room for the largest of this sender's buckets. Raises WeightSyncError where there is none."""
        mine = [bucket.hf_bytes for bucket in buckets if bucket.sender == self.link.rank]
        if mine:
            self.make_room(max(mine))

    def write(self, bucket: Bucket, flat: torch.Tensor) -> Path:
        """Copy `flat` into the shared memory, from whatever device it is on."""
        room = self.make_room(bucket.hf_bytes)
        room.flat[: bucket.hf_bytes].copy_(flat.view(torch.uint8))
        return room.path

    def arrived(self) -> None:
        """All engines have mapped the file: it needs no name any more."""
        self._remove_names()

    def disconnect(self) -> None:
        """Let engines unmap the memory. One that no longer answers is left alone."""
        self._remove_names()
        self.give_back_room()

    def make_room(self, size: int) -> Room:
        """What there is, or new memory where that is too small. Raises WeightSyncError."""
        if self._room is None or self._room.flat.numel() < size:
            self.give_back_room()
            directory = self._directory or self.open_directory()
            self._room = self.new_room(directory / secrets.token_hex(16), size)
        return self._room

    def new_room(self, path: Path, size: int) -> Room:
        """Memory of so many bytes that engines map by this path. Raises WeightSyncError where there is none."""
        return _new_room(path, size)

    def give_back_room(self) -> None:
        """Let engines unmap the memory, and free it."""
        room, self._room = self._room, None
        if room is not None:
            forget = wire.ForgetDirectory(room.path.parent)
            forgotten = [self.link.engine_port.ask(engine, forget) for engine in self.engines]
            wait(forgotten, timeout=self.link.deadline_s)
            os.close(room.file)

    def _remove_names(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(self._lock)
            self._directory = None


def private_directory() -> tuple[Path, int]:
    """A new directory in /dev/shm for this user alone, and its descriptor, which holds a lock until it is closed."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHARED_MEMORY))
        with suppress(FileNotFoundError):  # taken for left over, between these two lines
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.is_dir():
                return path, lock
            os.close(lock)


def remove_left_over() -> None:
    """Remove what senders that were killed have left in /dev/shm: the directories that nobody holds a lock on."""
    for path in SHARED_MEMORY.glob(f"{PREFIX}*"):
        with suppress(OSError):  # somebody else's, or removed meanwhile
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _new_room(path: Path, size: int) -> Room:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        space = os.fstatvfs(file)
        if size > (free := space.f_bavail * space.f_frsize):
            raise OSError(errno.ENOSPC, f"{free >> 20:,} MiB of it are free")
        os.posix_fallocate(file, 0, size)  # memory that is missing later would kill whoever writes to it
        return Room(torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8), path, file)
    except OSError as error:
        os.close(file)
        raise unusable(
            f"{SHARED_MEMORY} has no room for a bucket of {size / 2**20:,.1f} MiB: {error.strerror}"
        ) from error


def unusable(rule: str, transport: str = "shm") -> WeightSyncError:
    """The error for a machine on which a transport through shared memory does not work."""
    return WeightSyncError(
        "weights.transport", transport, rule,
        f"make {SHARED_MEMORY} larger (docker run --shm-size; in Kubernetes an emptyDir of medium Memory), lower "
        "weights.bucket_mib or weights.senders, or set weights.transport: broadcast",
    )  # fmt: skip
