"""Offloading of a trained model's state while engines use its device, and reloading, bit for bit.

Parameters, gradients and optimizer state lie in storages, of which many tensors are views: parameters of one buffer,
shards of main weights, gradients. A storage's bytes are copied to host memory or a file, and the storage is given no
memory until they come back. Every view stays valid, so their users need no changes. Gradients are not copied: a step
clears them before it adds any.

This module handles one rank's model; only the calls around it are collective (`TrainedModel.hold`).
"""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from mslime.backends.megatron.step.optimizer import parts_of
from mslime.config.base import TrainerPart
from mslime.config.errors import TrainerError

PARTS: tuple[TrainerPart, ...] = get_args(TrainerPart)
CHUNK = 64 << 20
"""Bytes of a block of pinned memory (PyTorch rounds up to a power of two), and of one copy to a file."""
SMALLEST = 4096
"""Smallest storage that is worth moving, in bytes."""
Storage = torch.UntypedStorage


class MemoryStore:
    """Blocks of host memory, pinned for a GPU and kept: pinning takes as long as copying.

    Args:
        pinned: whether the blocks are pinned.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[torch.Tensor] = []

    def write(self, at: int, flat: torch.Tensor) -> None:
        for block, part in self._pairs(at, flat):
            block.copy_(part, non_blocking=True)

    def read(self, at: int, flat: torch.Tensor) -> None:
        for block, part in self._pairs(at, flat):
            part.copy_(block, non_blocking=True)

    def _pairs(self, at: int, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Corresponding pieces of blocks and of `flat`."""
        done = 0
        while done < flat.numel():
            block, offset = divmod(at + done, CHUNK)
            while len(self._blocks) <= block:
                self._blocks.append(torch.empty(CHUNK, dtype=torch.uint8, pin_memory=self._pinned))
            size = min(CHUNK - offset, flat.numel() - done)
            yield self._blocks[block][offset : offset + size], flat[done : done + size]
            done += size


class FileStore:
    """An unnamed file, which the system deletes when this process ends for any reason.

    Args:
        directory: on a file system with enough space.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - as long as this lives
        self._directory = directory

    def write(self, at: int, flat: torch.Tensor) -> None:
        """Store `flat` at offset `at`. Raises TrainerError if the disk is full."""
        for start in range(0, flat.numel(), CHUNK):
            part = flat[start : start + CHUNK].cpu()  # itself on a CPU
            view = memoryview(_bytes_of(part))
            try:
                while view:
                    written = os.pwrite(self._file.fileno(), view, at + start + part.numel() - len(view))
                    view = view[written:]
            except OSError as error:
                raise TrainerError(
                    "cluster.offload_directory", str(self._directory), f"state cannot be offloaded there: {error}",
                    "free space, choose another directory, or set cluster.offload_to: memory",
                ) from error  # fmt: skip

    def read(self, at: int, flat: torch.Tensor) -> None:
        for start in range(0, flat.numel(), CHUNK):
            part = flat[start : start + CHUNK]
            host = part if part.device.type == "cpu" else torch.empty_like(part, device="cpu")
            view = memoryview(_bytes_of(host))
            while view:
                read = os.preadv(self._file.fileno(), [view], at + start + host.numel() - len(view))
                assert read, "the file was truncated"
                view = view[read:]
            if host is not part:
                part.copy_(host)


def _bytes_of(flat: torch.Tensor) -> Any:
    """The memory of a tensor on the CPU. Not `numpy()`: after that torch refuses to free the storage's memory."""
    return (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())


class DeviceState:
    """Device state of a trained model, in three parts that can be offloaded.

    Args:
        wrapped: its chunks in their data-parallel wrappers.
        directory: for files; None: host memory.
    """

    def __init__(
        self,
        wrapped: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        device: torch.device,
        directory: Path | None,
    ) -> None:
        self._wrapped, self._optimizer, self._device, self._directory = wrapped, optimizer, device, directory
        self._here: set[TrainerPart] = set(PARTS)
        self._away: dict[TrainerPart, list[tuple[Storage, int]]] = {}
        self._stores: dict[TrainerPart, MemoryStore | FileStore] = {}
        self._stored: dict[TrainerPart, list[tuple[int, int]]] = {}  # identity and size of each storage, in order

    @property
    def here(self) -> frozenset[TrainerPart]:
        """Parts that are on the device."""
        return frozenset(self._here)

    def changed(self) -> None:
        """Invalidate earlier copies, because the state was written to."""
        self._stored.clear()

    def hold(self, parts: Collection[TrainerPart]) -> None:
        """Keep exactly these parts on the device and offload the others. Raises TrainerError if there is no space for
        them."""
        if "gradients" in self._here:  # training may have changed the state
            self.changed()
        leaving: list[TrainerPart] = [part for part in PARTS if part in self._here and part not in parts]
        for part in leaving:
            self._put_away(part)
        if "gradients" in leaving:
            gc.collect()  # reference cycles left by a training step
        if leaving:  # return unused memory to the driver or the system
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            else:
                ctypes.CDLL(None).malloc_trim(0)
        for part in PARTS:
            if part in parts and part not in self._here:
                self._bring_back(part)
        self._wait()

    def size_of(self, part: TrainerPart) -> int:
        """Bytes of a part, on the device or not."""
        found = self._away.get(part)
        return sum(size for _, size in found) if found is not None else sum(s.nbytes() for s in self._storages(part))

    def _put_away(self, part: TrainerPart) -> None:
        storages = self._storages(part)
        self._away[part] = [(storage, storage.nbytes()) for storage in storages]
        if part != "gradients":
            self._store(part, storages)
        for storage in storages:
            storage.resize_(0)
        self._here.remove(part)

    def _store(self, part: TrainerPart, storages: Sequence[Storage]) -> None:
        """Offload the storages; copy only those without a valid copy."""
        mine = [(storage._cdata, storage.nbytes()) for storage in storages]
        if self._stored.get(part) == mine:
            return
        if part not in self._stores:
            pinned = self._device.type == "cuda"
            self._stores[part] = FileStore(self._directory) if self._directory is not None else MemoryStore(pinned)
        at = 0
        for storage in storages:
            self._stores[part].write(at, _flat(storage, self._device))
            at += storage.nbytes()
        self._wait()
        self._stored[part] = mine

    def _bring_back(self, part: TrainerPart) -> None:
        at = 0
        for storage, size in self._away.pop(part):
            storage.resize_(size)
            flat = _flat(storage, self._device)
            if part == "gradients":
                flat.zero_()
            else:
                self._stores[part].read(at, flat)
            at += size
        self._here.add(part)

    def _storages(self, part: TrainerPart) -> list[Storage]:
        """Storages of a part, each once, in a stable order; without small ones and those that cannot be resized."""
        if part == "gradients":
            found = _unique(buffer.grad_data for chunk in self._wrapped for buffer in gradient_buffers(chunk))
        else:
            found = _unique(self._weights())
            if part == "optimizer":
                weights = {storage._cdata for storage in found}
                states = _unique(optimizer_tensors(self._optimizer))
                found = [storage for storage in states if storage._cdata not in weights]
        return [s for s in found if s.device.type == self._device.type and s.nbytes() >= SMALLEST and s.resizable()]

    def _weights(self) -> Iterator[torch.Tensor]:
        for chunk in self._wrapped:
            yield from (buffer.param_data for buffer in gradient_buffers(chunk) if buffer.param_data is not None)
            yield from chunk.module.parameters()
            yield from chunk.module.buffers()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Main weights and moments of all parts of an optimizer, including parameters that are their own main weights."""
    for part in parts_of(optimizer):
        inner = part.optimizer
        if inner is None:  # a rank without such parameters
            continue
        yield from (parameter for group in inner.param_groups for parameter in group["params"])
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def gradient_buffers(chunk: DistributedDataParallel) -> list[Any]:
    """Buffers of a wrapper: those of dense parameters, then those of experts."""
    wrapper: Any = chunk  # its `buffers` differ from `Module`'s
    return [*wrapper.buffers, *wrapper.expert_parallel_buffers]


def _unique(tensors: Iterable[torch.Tensor]) -> list[Storage]:
    return list({(storage := tensor.untyped_storage())._cdata: storage for tensor in tensors}.values())


def _flat(storage: Storage, device: torch.device) -> torch.Tensor:
    """The storage as [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
