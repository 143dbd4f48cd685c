"""The transports `shm` and `handles`, for one host: a sender's buckets pass one by one through shared memory.

`shm` is memory of the host: a file in /dev/shm, as large as the sender's largest bucket, kept for the next sync.
`handles` is memory on the device of the weights, and engines get torch's handles of it. On GPUs these are CUDA IPC
handles, so no data passes through the host: an engine on the same GPU copies within it, one on another over NVLink. On
CPUs the same calls give handles of shared memory. The memory is freed at the end of each sync, for engines that share
the trainer's GPUs.

The file, or one handle per opening rank, is in a directory that only this user can enter, under an unguessable name,
until all engines have opened it. From then on the memory is freed when its processes end, for any reason. If a sender
is killed before that, the next sender on this host removes its files: live senders hold a lock on their directory.
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
from typing import Any

import torch

from mslime.config.errors import WeightSyncError
from mslime.config.keys import EngineInfo
from mslime.engine_plugin import wire
from mslime.engine_plugin.wire import HandleFields, write_handle
from mslime.weights.files import HINT, FileTransport
from mslime.weights.transport import Link
from mslime.weights.weight_plan import Bucket

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "mslime-weights-"


@dataclass
class SharedBuffer:
    """Memory that engines open.

    Attributes:
        flat: [bytes] uint8.
        path: of the file, for engines; it stays valid for them after the name is removed.
        file: open and locked while in use.
    """

    flat: torch.Tensor
    path: Path
    file: int


class MemoryTransport(FileTransport):
    """Memory of one sender.

    Args:
        on_device: on the device of the weights, and freed after each sync (`handles`).
    """

    def __init__(self, link: Link, on_device: bool = False) -> None:
        super().__init__(link)
        self.kind = "handle" if on_device else "mapped"
        self._on_device, self._largest, self._device = on_device, 0, torch.device("cpu")
        self._directory: Path | None = None
        self._lock = -1
        self._buffer: SharedBuffer | None = None

    def open_place(self, engines: Sequence[EngineInfo]) -> tuple[wire.Request, str]:
        """Create a new private directory in /dev/shm."""
        return wire.ReadDirectory(self.open_directory()), HINT

    def open_directory(self) -> Path:
        """Create the directory, and remove those of dead senders. Raises WeightSyncError."""
        try:
            remove_left_over()
            self._directory, self._lock = private_directory()
        except OSError as error:
            raise self._unusable(f"{SHARED_MEMORY} cannot be written: {error}") from error
        return self._directory

    def begin(self, version: int, buckets: Sequence[Bucket]) -> None:
        """Allocate memory for the largest of this sender's buckets. On a device `write` does it, because the first
        bucket determines the device. Raises WeightSyncError if there is not enough."""
        self._largest = max((bucket.hf_bytes for bucket in buckets if bucket.sender == self.link.rank), default=0)
        if self._largest and not self._on_device:
            self._buffer_of(self._largest)

    def write(self, bucket: Bucket, flat: torch.Tensor) -> Path:
        """Copy `flat` into the memory; returns when the copy is complete, also on a GPU."""
        if self._on_device:
            self._device = flat.device
        buffer = self._buffer_of(max(self._largest, bucket.hf_bytes))
        buffer.flat[: bucket.hf_bytes].copy_(flat.view(torch.uint8))
        if buffer.flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()
        return buffer.path

    def arrived(self) -> None:
        """Remove the memory's name once all engines have opened it."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(self._lock)
            self._directory = None

    def complete(self) -> None:
        """Free device memory: engines that share this GPU need it now."""
        if self._on_device:
            self._release()

    def disconnect(self) -> None:
        """Make engines close the memory. One that no longer answers is left alone."""
        self.arrived()
        self._release()

    def _buffer_of(self, size: int) -> SharedBuffer:
        """The current memory, or new memory if that is too small. Raises WeightSyncError."""
        if self._buffer is None or self._buffer.flat.numel() < size:
            self._release()
            directory = self._directory or self.open_directory()
            self._buffer = self.new_buffer(directory / secrets.token_hex(16), size)
        return self._buffer

    def new_buffer(self, path: Path, size: int) -> SharedBuffer:
        """Allocate memory that engines open by this path. Raises WeightSyncError if there is not enough."""
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                return SharedBuffer(
                    self._handles_of(path, size) if self._on_device else _mapped(file, size), path, file
                )
            except BaseException:
                os.close(file)
                raise
        except (OSError, RuntimeError) as error:
            if self._on_device:
                raise self._unusable(f"memory on {self._device} cannot be shared: {error}") from error
            why = error.strerror if isinstance(error, OSError) else error
            raise self._unusable(
                f"{SHARED_MEMORY} has no room for a bucket of {size / 2**20:,.1f} MiB: {why}"
            ) from error

    def _handles_of(self, path: Path, size: int) -> torch.Tensor:
        """Memory on a device, and a handle for each rank that opens it, because torch counts the openings. Raises
        OSError or RuntimeError if memory is exhausted, or cannot be shared."""
        flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        for number in range(sum(engine.ranks for engine in self.engines)):
            write_handle(path, number, handle_of(flat))
        return flat

    def _release(self) -> None:
        """Make engines close the memory, and free it."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            forget = wire.ForgetDirectory(buffer.path.parent)
            forgotten = [self.link.engine_port.ask(engine, forget) for engine in self.engines]
            wait(forgotten, timeout=self.link.deadline_s)
            os.close(buffer.file)
        del buffer  # before torch frees unused memory
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # a late rank keeps it until torch runs out of memory

    def _unusable(self, rule: str) -> WeightSyncError:
        return WeightSyncError(
            "weights.transport", "handles" if self._on_device else "shm", rule,
            f"make {SHARED_MEMORY} larger (docker run --shm-size; in Kubernetes an emptyDir of medium Memory), lower "
            "weights.bucket_mib or weights.senders, or set weights.transport: broadcast",
        )  # fmt: skip


def device_memory(link: Link) -> MemoryTransport:
    """Create the transport `handles`."""
    return MemoryTransport(link, on_device=True)


def handle_of(flat: torch.Tensor) -> HandleFields:
    """A new handle of a tensor's memory, for one process to open once.

    Args:
        flat: a view of its whole storage.
    """
    storage: Any = flat.untyped_storage()  # with the private calls of torch's multiprocessing
    if not flat.is_cuda:
        return 0, *wire.with_manager(storage._share_filename_cpu_)
    return 1, *storage._share_cuda_()[1:]  # the device index here has no meaning in another process


def _mapped(file: int, size: int) -> torch.Tensor:
    """Host memory in a file. Raises OSError if there is not enough."""
    space = os.fstatvfs(file)
    if size > (free := space.f_bavail * space.f_frsize):
        raise OSError(errno.ENOSPC, f"{free >> 20:,} MiB of it are free")
    os.posix_fallocate(file, 0, size)  # memory missing later would kill the writing process
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def private_directory() -> tuple[Path, int]:
    """Create a new directory in /dev/shm for this user alone; returns it and a descriptor with a lock until it is
    closed."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHARED_MEMORY))
        with suppress(FileNotFoundError):  # another process removed it as a leftover between these two lines
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.is_dir():
                return path, lock
            os.close(lock)


def remove_left_over() -> None:
    """Remove directories of killed senders in /dev/shm: those without a lock."""
    for path in SHARED_MEMORY.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or removed meanwhile
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
