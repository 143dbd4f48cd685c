"""The transport `handles`: one host. A sender's buckets go one after the other through memory that torch shares.

On GPUs the memory is the GPU's own and what engines are given are CUDA's handles of it (IPC), so no byte goes through
the host: an engine on the same GPU copies within it, one on another over NVLink. On CPUs they are torch's handles of
shared memory, by the same calls. Handles lie in a private directory in /dev/shm, one for each rank that opens it, until
the first bucket has arrived. All is given back at the end of each sync, for engines that share the trainer's GPUs.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mslime.config.handles import HandleFields, write_handle
from mslime.weights.plan import Bucket
from mslime.weights.shm import Room, ShmTransport, unusable
from mslime.weights.transport import Link


def handle_of(flat: torch.Tensor) -> HandleFields:
    """A new handle of a tensor's memory, for one process to open once.

    Args:
        flat: all of its storage.
    """
    storage: Any = flat.untyped_storage()  # by what torch's own multiprocessing calls
    if not flat.is_cuda:
        return 0, *storage._share_filename_cpu_()
    return 1, *storage._share_cuda_()[1:]  # the device's number here says nothing elsewhere


class HandleTransport(ShmTransport):
    """Memory of one sender, on the device of its weights."""

    kind = "handle"

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._largest, self._device = 0, torch.device("cpu")

    def begin(self, version: int, buckets: Sequence[Bucket]) -> None:
        """Note the largest of this sender's buckets: where its memory is to be, the first of them says."""
        self._largest = max((bucket.hf_bytes for bucket in buckets if bucket.sender == self.link.rank), default=0)

    def write(self, bucket: Bucket, flat: torch.Tensor) -> Path:
        """Copy `flat` into the memory; returns when that is done, also on a GPU."""
        self._device = flat.device
        room = self.make_room(max(self._largest, bucket.hf_bytes))
        room.flat[: bucket.hf_bytes].copy_(flat.view(torch.uint8))
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()
        return room.path

    def new_room(self, path: Path, size: int) -> Room:
        """Memory on the device, and a handle of it for each rank of each engine: torch counts who has opened it."""
        file = -1
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
            flat = torch.empty(size, dtype=torch.uint8, device=self._device)
            for number in range(sum(engine.ranks for engine in self.engines)):
                write_handle(path, number, handle_of(flat))
        except (OSError, RuntimeError) as error:
            if file >= 0:
                os.close(file)
            raise unusable(f"memory on {self._device} cannot be shared: {error}", "handles") from error
        return Room(flat, path, file)

    def complete(self) -> None:
        """Give the memory back: engines that share this GPU need it now."""
        self.give_back_room()

    def give_back_room(self) -> None:
        """Let engines close their handles, and free the memory."""
        super().give_back_room()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # a rank that is late keeps it until torch is asked for memory that it lacks
