"""State of a trained model that leaves its device while engines use it, and comes back bit for bit.

Parameters, gradients and optimizer state lie in storages, of which many tensors are views: parameters of one buffer,
shards of main weights, gradients. A storage's bytes are copied to host memory or a file, and the storage is given no
memory until they come back. Every view of it stays what it was, so nothing that holds one has to know. Gradients are
not copied: a step clears them before it adds any.

A model of one rank. Collective are only the calls around it (`TrainedModel.hold`).
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

from mslime.backends.cpu.pages import trim_heap
from mslime.backends.megatron.step.optimizer import parts_of
from mslime.config.base import TrainerPart
from mslime.config.errors import TrainerError

PARTS: tuple[TrainerPart, ...] = get_args(TrainerPart)
CHUNK = 64 << 20
"""Bytes of a block of pinned memory, which PyTorch rounds up to a power of two; and of a copy on its way to a file."""
SMALLEST = 4096
"""Bytes of a storage that is worth moving."""
Storage = torch.UntypedStorage


class MemoryStore:
    """Blocks of host memory, pinned for a GPU, which are kept: pinning takes as long as copying.

    Args:
        pinned: whether they are.
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
        """Pieces of blocks and of `flat` that belong together."""
        done = 0
        while done < flat.numel():
            block, offset = divmod(at + done, CHUNK)
            while len(self._blocks) <= block:
                self._blocks.append(torch.empty(CHUNK, dtype=torch.uint8, pin_memory=self._pinned))
            size = min(CHUNK - offset, flat.numel() - done)
            yield self._blocks[block][offset : offset + size], flat[done : done + size]
            done += size


class FileStore:
    """A file without a name, which goes with this process, however it ends.

    Args:
        directory: of a file system with room for it.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - as long as this lives
        self._directory = directory

    def write(self, at: int, flat: torch.Tensor) -> None:
        """Raises TrainerError where there is no room."""
        for start in range(0, flat.numel(), CHUNK):
            part = _on_host(flat[start : start + CHUNK])
            view = memoryview(_bytes_of(part))
            try:
                while view:
                    written = os.pwrite(self._file.fileno(), view, at + start + part.numel() - len(view))
                    view = view[written:]
            except OSError as error:
                raise TrainerError(
                    "cluster.asleep_directory", str(self._directory), f"the trainer cannot sleep there: {error}",
                    "make room, name another directory, or set cluster.asleep_in: memory",
                ) from error  # fmt: skip

    def read(self, at: int, flat: torch.Tensor) -> None:
        for start in range(0, flat.numel(), CHUNK):
            part = flat[start : start + CHUNK]
            host = part if part.device.type == "cpu" else torch.empty_like(part, device="cpu")
            view = memoryview(_bytes_of(host))
            while view:
                read = os.preadv(self._file.fileno(), [view], at + start + host.numel() - len(view))
                assert read, "the file ends before what was written"
                view = view[read:]
            if host is not part:
                part.copy_(host)


def _on_host(flat: torch.Tensor) -> torch.Tensor:
    return flat.cpu() if flat.device.type != "cpu" else flat


def _bytes_of(flat: torch.Tensor) -> Any:
    """The memory of a tensor on the CPU. Not `numpy()`: after that torch refuses to give a storage's memory back."""
    return (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())


class DeviceState:
    """What a model that is trained has on its device, in three parts that come and go.

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
        """What is on the device."""
        return frozenset(self._here)

    def changed(self) -> None:
        """Something has written into the state: copies that were made before are of no use."""
        self._stored.clear()

    def hold(self, parts: Collection[TrainerPart]) -> None:
        """Have these parts on the device and no others. Raises TrainerError where there is no room for the rest."""
        if "gradients" in self._here:  # it may have been trained
            self.changed()
        leaving: list[TrainerPart] = [part for part in PARTS if part in self._here and part not in parts]
        for part in leaving:
            self._put_away(part)
        if leaving:
            self._give_back(collect="gradients" in leaving)
        for part in PARTS:
            if part in parts and part not in self._here:
                self._bring_back(part)
        self._wait()

    def size_of(self, part: TrainerPart) -> int:
        """Bytes of a part, here or not."""
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
        """Copy what is not there already."""
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
        """Those of a part, each once, in an order that stays; without what cannot be resized, or is small."""
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

    def _give_back(self, collect: bool) -> None:
        """To the driver, or the system, what nobody uses any more.

        Args:
            collect: what a step of training has left in cycles, too.
        """
        if collect:
            gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            trim_heap()


def optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Main weights and moments of all parts of an optimizer; where a parameter is its own main weight, that is among
    them."""
    for part in parts_of(optimizer):
        inner = part.optimizer
        if inner is None:  # of a rank without such parameters
            continue
        yield from (parameter for group in inner.param_groups for parameter in group["params"])
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def gradient_buffers(chunk: DistributedDataParallel) -> list[Any]:
    """Of a wrapper: those of its dense parameters, then of its experts."""
    wrapper: Any = chunk  # its `buffers` are not those of `Module`
    return [*wrapper.buffers, *wrapper.expert_parallel_buffers]


def _unique(tensors: Iterable[torch.Tensor]) -> list[Storage]:
    return list({(storage := tensor.untyped_storage())._cdata: storage for tensor in tensors}.values())


def _flat(storage: Storage, device: torch.device) -> torch.Tensor:
    """[bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
