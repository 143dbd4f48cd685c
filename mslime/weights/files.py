"""What `shm`, `handles`, `disk` and `mooncake` share: a sender writes a bucket somewhere, and engines are told to read
it there: in a file, or in memory.

No process group is made, so no engine waits for another one, and senders do not take turns: what one writes, others
need not wait for. What a sender asks before its first bucket is whether every engine sees its place.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mslime.config.choices import FileKind
from mslime.config.errors import ChangesRefused
from mslime.config.keys import EngineInfo
from mslime.engine_plugin import wire
from mslime.weights.plan import Bucket
from mslime.weights.transport import Link, Loading, Transport, ask_all


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
        """Make the place where buckets will be; what an engine is asked, to find out whether it can read there, and
        what the user can do if it cannot. Raises WeightSyncError."""

    @abstractmethod
    def write(self, bucket: Bucket, flat: torch.Tensor) -> Path:
        """Write `flat` [bucket.hf_numel] into a file. Raises WeightSyncError."""

    def arrived(self) -> None:
        """Every engine has loaded a bucket."""

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Ask every engine whether it sees this sender's place. Raises WeightSyncError when one does not."""
        self.engines = tuple(engines)
        request, hint = self.open_place(engines)
        ask_all(self.link.engine_port, engines, request, self.link.deadline_s, hint)

    def start(self, bucket: Bucket, flat: torch.Tensor) -> PendingFile:
        """Write the bucket, and ask every engine to read it."""
        assert self.engines, "not connected"
        return self.announce(bucket, self.kind, self.write(bucket, flat))

    def announce(self, bucket: Bucket, kind: FileKind, path: Path) -> PendingFile:
        """Ask every engine to read a bucket from a file."""
        known = self._announced.get(bucket.index)
        if known is None or known[0] != path:  # the request is encoded anew only if the file is another one
            known = path, wire.update_request([bucket], load=wire.FromFile(kind, path))
            self._announced[bucket.index] = known
        answers = [self.link.engine_port.load(engine, known[1]) for engine in self.engines]
        return PendingFile(bucket, answers, self.arrived)


class DirectoryTransport(FileTransport):
    """Buckets in files of a directory that engines see."""

    @abstractmethod
    def open_directory(self) -> Path:
        """Where the files will be. Raises WeightSyncError."""

    def open_place(self, engines: Sequence[EngineInfo]) -> tuple[wire.Request, str]:
        """The directory."""
        return wire.ReadDirectory(self.open_directory()), (
            "set weights.transport: broadcast; shm and handles are for engines on the machine of every sender, and "
            "disk and delta for a weights.directory that all machines share"
        )


@dataclass
class PendingFile(Loading):
    """One bucket in a file, and an HTTP answer from every engine."""

    arrived: Callable[[], None]

    def refused(self) -> list[ChangesRefused]:
        """As `Loading.refused`."""
        if not (refused := super().refused()):
            self.arrived()
        return refused
