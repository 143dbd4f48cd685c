"""Inside an SGLang server: a bucket is read out of a sender's memory, by Mooncake's transfer engine.

The ranks of an engine read a part each, so that every byte crosses the network once for an engine and by all of its
adapters, and give the parts to each other over NVLink. A part of the plug-in `bucket_files`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from mslime.config.transports import MooncakeOver
from mslime.engine_plugin.engine_ranks import EngineRankGroup
from mslime.network import own_address
from mslime.remote_memory import End, RemoteMemory


class RdmaReader:
    """What one process of an engine reads of senders' memory."""

    def __init__(self) -> None:
        self._ends: dict[MooncakeOver, End] = {}
        self._registered: tuple[End, int, int] | None = None

    def reach(self, place: Path, said: bytes) -> None:
        """Return when these bytes were read there.

        Raises:
            ImportError: Mooncake's package is missing.
            OSError: they cannot be read.
            ValueError: others lie there.
        """
        memory, into = RemoteMemory.of_path(place), torch.zeros(len(said), dtype=torch.uint8)
        end = self._end(memory)
        end.register(into.data_ptr(), len(said))
        try:
            end.read(memory, 0, into.data_ptr(), len(said))
        finally:
            end.unregister(into.data_ptr())
        if bytes(into.tolist()) != said:
            raise ValueError(f"something else lies in the memory of {memory.session}")

    def read(self, place: Path, flat: torch.Tensor, near: EngineRankGroup) -> None:
        """Fill `flat` [bytes] uint8; returns when the memory is not needed any more.

        Args:
            near: the engine's ranks, all of which call this.

        Raises:
            RuntimeError: with several ranks, on each of them: one could not read its part.
            OSError: it cannot be read.
            ValueError: the path names no memory.
        """
        parts = flat.split(max(1, -(-flat.numel() // near.count)))
        try:
            if near.rank < len(parts):
                self._read(RemoteMemory.of_path(place), flat, parts[near.rank])
        except Exception as error:
            if near.count == 1:
                raise
            near.heard(f"{type(error).__name__}: {error}", None)
        else:
            near.heard("", None)
        for source, part in enumerate(parts):
            near.pass_on(part, source)

    def forget(self) -> None:
        """Let the memory that was read into be given back."""
        if self._registered is not None:
            end, address, _ = self._registered
            end.unregister(address)
            self._registered = None

    def _read(self, memory: RemoteMemory, flat: torch.Tensor, part: torch.Tensor) -> None:
        end, storage = self._end(memory), flat.untyped_storage()
        wanted = end, storage.data_ptr(), storage.nbytes()
        if self._registered != wanted:  # once in a sync: all buckets lie in one buffer, unless it was made larger
            self.forget()
            end.register(wanted[1], wanted[2])
            self._registered = wanted
        if part.is_cuda:
            torch.cuda.current_stream(part.device).synchronize()  # copies out of the bucket before: RDMA asks no stream
        end.read(memory, part.data_ptr() - flat.data_ptr(), part.data_ptr(), part.numel())

    def _end(self, memory: RemoteMemory) -> End:
        if memory.over not in self._ends:
            self._ends[memory.over] = End(own_address(f"//{memory.session}"), memory.over)
        return self._ends[memory.over]
