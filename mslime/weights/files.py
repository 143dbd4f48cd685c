"""What `shm`, `handles`, `disk` and `mooncake` share: a sender writes a bucket somewhere, and engines are told to read
it there: in a file, or in memory.

No process group is made, so no engine waits for another one, and senders do not take turns: what one writes, others
need not wait for. What a sender asks before its first bucket is whether every engine sees its place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from mslime.config.choices import FileKind
from mslime.config.errors import ChangesRefused
from mslime.config.keys import EngineInfo
from mslime.weights.plan import Bucket
from mslime.weights.transport import Link, Pending
from mslime.weights.waiting import all_done, naming, until_answered


class FileTransport(ABC):
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
        """Ask every engine whether it sees this sender's place. Raises WeightSyncError when one does not."""
        self.engines = tuple(engines)
        ask = self.prepare(engines)
        all_done([ask(engine) for engine in engines], "connect", f"{len(engines)} engines", self.link.deadline_s)

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
class PendingFile:
    """One bucket in a file, and an HTTP answer from every engine."""

    bucket: Bucket
    answers: Sequence[Future[None]]
    arrived: Callable[[], None]

    def wait(self) -> None:
        """Return when every rank of every engine has loaded the bucket. Raises WeightSyncError."""
        for refused in self.refused():
            raise naming(self.bucket.describe(), refused)

    def refused(self) -> list[ChangesRefused]:
        """Return when every rank of every engine has loaded the bucket, or an engine refused changes of it.

        Raises:
            WeightSyncError: as `wait`, but for the refusals, which are returned.
        """
        if not (refused := until_answered(self.bucket, self.answers)):
            self.arrived()
        return refused
