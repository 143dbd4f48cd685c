"""The transport `mooncake`: a sender's buckets pass one by one through memory that engines read.

The memory is the sender's own, on the device of its weights, and registered with Mooncake's transfer engine. A request
names it, and each rank of an engine reads a part of the bucket, over RDMA if there is an adapter. There is no process
group, engines do not wait for each other, and a dead engine delays no other.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from mslime.config.errors import WeightSyncError
from mslime.config.keys import EngineInfo
from mslime.config.transports import MooncakeOver
from mslime.engine_plugin import wire
from mslime.network import own_address
from mslime.remote_memory import MemoryEndpoint
from mslime.weights.files import FileTransport
from mslime.weights.transport import Link
from mslime.weights.weight_plan import Bucket

GREETING = 16
"""Bytes that an engine reads before the first bucket, as a test."""


class MooncakeTransport(FileTransport):
    """Memory of one sender, as large as the largest of its buckets."""

    kind = "remote"

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._end: MemoryEndpoint | None = None
        self._room = torch.empty(0, dtype=torch.uint8)
        self._place = Path()
        self._largest = 0

    def open_place(self, engines: Sequence[EngineInfo]) -> tuple[wire.Request, str]:
        """Start this end; every engine tests the connection by reading a few random bytes."""
        try:
            self._end = MemoryEndpoint(
                own_address(engines[0].url), cast(MooncakeOver, self.link.settings["mooncake_over"])
            )
            nonce = secrets.token_bytes(GREETING)
            self._share(torch.frombuffer(bytearray(nonce), dtype=torch.uint8))
        except ImportError as error:
            raise _unusable(
                f"Mooncake's package is not usable here: {error}",
                "install the extra on every host of trainer and engines (pip install 'mslime[mooncake]'; it needs the "
                "system package libibverbs1)",
            ) from error
        except OSError as error:
            raise _unusable(str(error), "read Mooncake's messages in the log") from error
        return wire.ReadMemory(self._place, nonce.hex()), (
            "install the extra `mooncake` for the engine too, open the sender's ports to its host, or set "
            "weights.transport: broadcast"
        )

    def begin(self, version: int, buckets: Sequence[Bucket]) -> None:
        """Store the size of this sender's largest bucket; memory is allocated at the first bucket, on its device."""
        self._largest = max((bucket.hf_bytes for bucket in buckets if bucket.sender == self.link.rank), default=0)

    def write(self, bucket: Bucket, flat: torch.Tensor) -> Path:
        """Copy `flat` into the memory; returns when the copy is complete, also on a GPU. Raises WeightSyncError."""
        size = max(self._largest, bucket.hf_bytes)
        if self._room.numel() < size or self._room.device != flat.device:
            self._unshare()
            try:
                self._share(torch.empty(size, dtype=torch.uint8, device=flat.device))
            except (OSError, RuntimeError) as error:
                raise _unusable(
                    f"memory of {size / 2**20:,.1f} MiB on {flat.device} cannot be shared: {error}",
                    "lower weights.bucket_mib or weights.senders",
                ) from error
        self._room[: bucket.hf_bytes].copy_(flat.view(torch.uint8))
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()
        return self._place

    def disconnect(self) -> None:
        """Stop sharing memory, and close the port. Between syncs the memory stays registered, because a new
        registration costs more."""
        self._unshare()
        self._end = None

    def _share(self, room: torch.Tensor) -> None:
        assert self._end is not None, "not connected"
        self._place = self._end.share(room.data_ptr(), room.numel()).as_path()
        self._room = room

    def _unshare(self) -> None:
        if self._end is not None and self._room.numel():
            self._end.unregister(self._room.data_ptr())
        self._room = torch.empty(0, dtype=torch.uint8)


def _unusable(rule: str, hint: str) -> WeightSyncError:
    return WeightSyncError("weights.transport", "mooncake", rule, f"{hint}, or set weights.transport: broadcast")
