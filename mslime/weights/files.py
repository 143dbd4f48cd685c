"""What the transports `shm` and `disk` share: a sender writes a bucket into a file, and engines are told to read it.

No process group is made. What a sender asks before its first bucket is whether every engine sees its directory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from mslime.config.choices import FileKind
from mslime.config.keys import EngineInfo
from mslime.weights.plan import Bucket
from mslime.weights.transport import Link, Pending
from mslime.weights.waiting import all_done, until_loaded


class FileTransport(ABC):
    """Buckets in files that engines read."""

    kind: FileKind

    def __init__(self, link: Link) -> None:
        self.link = link
        self.engines: tuple[EngineInfo, ...] = ()
        self._announced: dict[int, tuple[Path, bytes]] = {}

    @abstractmethod
    def open_directory(self) -> Path:
        """Where the files will be. Raises WeightSyncError."""

    @abstractmethod
    def begin(self, version: int, buckets: Sequence[Bucket]) -> None:
        """See `transport.SyncObserver`."""

    @abstractmethod
    def complete(self) -> None:
        """See `transport.SyncObserver`."""

    @abstractmethod
    def write(self, bucket: Bucket, flat: torch.Tensor) -> Path:
        """Write `flat` [bucket.hf_numel] into a file. Raises WeightSyncError."""

    @abstractmethod
    def arrived(self) -> None:
        """Every engine has loaded a bucket."""

    @abstractmethod
    def disconnect(self) -> None:
        """See `transport.Transport`."""

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Ask every engine whether it sees this sender's directory. Raises WeightSyncError when one does not."""
        self.engines = tuple(engines)
        directory, link = self.open_directory(), self.link
        seen = [link.receivers.see(engine, directory) for engine in engines]
        all_done(seen, "connect", f"{len(engines)} engines", link.deadline_s)

    def start(self, bucket: Bucket, flat: torch.Tensor) -> Pending:
        """Write the bucket, and ask every engine to read it."""
        assert self.engines, "not connected"
        return PendingFile(bucket, self.announce(bucket, self.kind, self.write(bucket, flat)), self.arrived)

    def announce(self, bucket: Bucket, kind: FileKind, path: Path) -> list[Future[None]]:
        """Ask every engine to read a bucket from a file."""
        announcement = self._announcement(bucket, kind, path)
        return [self.link.receivers.receive(engine, announcement) for engine in self.engines]

    def _announcement(self, bucket: Bucket, kind: FileKind, path: Path) -> bytes:
        """The request that names a bucket; encoded anew only where its file is another one."""
        known = self._announced.get(bucket.index)
        if known is None or known[0] != path:
            names, shapes = [entry.name for entry in bucket.entries], [entry.shape for entry in bucket.entries]
            known = path, self.link.receivers.announce_file(names, bucket.dtypes, shapes, kind, path)
            self._announced[bucket.index] = known
        return known[1]


@dataclass
class PendingFile:
    """One bucket in a file, and an HTTP answer from every engine."""

    bucket: Bucket
    answers: Sequence[Future[None]]
    arrived: Callable[[], None]

    def wait(self) -> None:
        """Return when every rank of every engine has loaded the bucket. Raises WeightSyncError."""
        until_loaded(self.bucket, self.answers)
        self.arrived()
