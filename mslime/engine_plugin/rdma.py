"""Inside an SGLang server: read a bucket from a sender's memory with Mooncake's transfer engine.

Each rank of an engine reads a part and shares it over NVLink. So every byte crosses the network once per engine, spread
over all network adapters. A part of the plug-in `bucket_files`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from mslime.config.transports import MooncakeOver
from mslime.engine_plugin.engine_ranks import EngineRankGroup
from mslime.network import own_address
from mslime.remote_memory import End, RemoteMemory


class RdmaReader:
    """Reads senders' memory in one process of an engine."""

    def __init__(self) -> None:
        self._ends: dict[MooncakeOver, End] = {}
        self._registered: tuple[End, int, int] | None = None

    def reach(self, place: Path, said: bytes) -> None:
        """Read these bytes there, to check the connection.

        Raises:
            ImportError: Mooncake's package is missing.
            OSError: they cannot be read.
            ValueError: the memory has other bytes.
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
        """Fill `flat` [bytes] uint8; returns when the sender's memory is no longer needed.

        Args:
            near: the engine's ranks, all of which call this.

        Raises:
            RuntimeError: on each of several ranks: one could not read its part.
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
        """Unregister the receiving memory, so that it can be freed."""
        if self._registered is not None:
            end, address, _ = self._registered
            end.unregister(address)
            self._registered = None

    def _read(self, memory: RemoteMemory, flat: torch.Tensor, part: torch.Tensor) -> None:
        end, storage = self._end(memory), flat.untyped_storage()
        wanted = end, storage.data_ptr(), storage.nbytes()
        if self._registered != wanted:  # once per sync: all buckets share one buffer, unless it was enlarged
            self.forget()
            end.register(wanted[1], wanted[2])
            self._registered = wanted
        if part.is_cuda:
            # wait for copies from the previous bucket: RDMA ignores streams
            torch.cuda.current_stream(part.device).synchronize()
        end.read(memory, part.data_ptr() - flat.data_ptr(), part.data_ptr(), part.numel())

    def _end(self, memory: RemoteMemory) -> End:
        if memory.over not in self._ends:
            self._ends[memory.over] = End(own_address(f"//{memory.session}"), memory.over)
        return self._ends[memory.over]
