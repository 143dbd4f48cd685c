"""What `shm`, `handles`, `disk` and `mooncake` share: a sender writes a bucket somewhere, and engines are told to read
it there: in a file, or in memory.

No process group is made, so no engine waits for another one, and senders do not take turns: what one writes, others
need not wait for. What a sender asks before its first bucket is whether every engine sees its place.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from mslime.config.choices import FileKind
from mslime.config.errors import ChangesRefused
from mslime.config.keys import EngineInfo
from mslime.weights.plan import Bucket
from mslime.weights.transport import Link, Loading, Transport, all_done


class FileTransport(Transport):
    """Buckets in files that engines read."""

    kind: FileKind
    any_order = True

    def __init__(self, link: Link) -> None:
        self.link = link
        self.engines: tuple[EngineInfo, ...] = ()
        self._announced: dict[int, tuple[Path, bytes]] = {}

    @abstractmethod
    def prepare(self, engines: Sequence[EngineInfo]) -> Callable[[EngineInfo], Future[None]]:
        """Make the place where buckets will be; what asks an engine whether it sees that. Raises WeightSyncError."""

    @abstractmethod
    def write(self, bucket: Bucket, flat: torch.Tensor) -> Path:
        """Write `flat` [bucket.hf_numel] into a file. Raises WeightSyncError."""

    def arrived(self) -> None:
        """Every engine has loaded a bucket."""

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Ask every engine whether it sees this sender's place. Raises WeightSyncError when one does not."""
        self.engines = tuple(engines)
        ask = self.prepare(engines)
        all_done([ask(engine) for engine in engines], "connect", f"{len(engines)} engines", self.link.deadline_s)

    def start(self, bucket: Bucket, flat: torch.Tensor) -> PendingFile:
        """Write the bucket, and ask every engine to read it."""
        assert self.engines, "not connected"
        return self.announce(bucket, self.kind, self.write(bucket, flat))

    def announce(self, bucket: Bucket, kind: FileKind, path: Path) -> PendingFile:
        """Ask every engine to read a bucket from a file."""
        announcement = self._announcement(bucket, kind, path)
        answers = [self.link.receivers.receive(engine, announcement) for engine in self.engines]
        return PendingFile(bucket, answers, self.arrived)

    def _announcement(self, bucket: Bucket, kind: FileKind, path: Path) -> bytes:
        """The request that names a bucket; encoded anew only where its file is another one."""
        known = self._announced.get(bucket.index)
        if known is None or known[0] != path:
            known = path, self.link.receivers.announce_file(bucket, kind, path)
            self._announced[bucket.index] = known
        return known[1]


class DirectoryTransport(FileTransport):
    """Buckets in files of a directory that engines see."""

    @abstractmethod
    def open_directory(self) -> Path:
        """Where the files will be. Raises WeightSyncError."""

    def prepare(self, engines: Sequence[EngineInfo]) -> Callable[[EngineInfo], Future[None]]:
        """See `FileTransport`."""
        directory, receivers = self.open_directory(), self.link.receivers
        return lambda engine: receivers.see(engine, directory)


@dataclass
class PendingFile(Loading):
    """One bucket in a file, and an HTTP answer from every engine."""

    arrived: Callable[[], None]

    def refused(self) -> list[ChangesRefused]:
        """As `Loading.refused`."""
        if not (refused := super().refused()):
            self.arrived()
        return refused
