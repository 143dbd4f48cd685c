"""The transport `delta`: of a bucket goes what changed since the version before, through files that engines read.

    DIRECTORY/GROUP/version_000012/bucket_00003.safetensors          all of it
    DIRECTORY/GROUP/version_000013/bucket_00003.changes.safetensors  what is different in version 13

A sender keeps what it sent last (in host memory, as large as its part of the weights) and compares bits. All of a
bucket goes to engines that were met just now, where its changes would be more bytes, and where an engine refuses them:
it checks with sums that they belong to what it holds, and that the outcome is what was to be sent.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from mslime.config.choices import CHANGES
from mslime.config.errors import ChangesRefused
from mslime.convert.writers import SAFETENSORS_DTYPES, TensorPlan, safetensors_header
from mslime.weights.disk import DiskTransport
from mslime.weights.plan import Bucket
from mslime.weights.transport import Link, Moved, Pending
from mslime.weights.waiting import until_answered

_BITS = {2: torch.int16, 4: torch.int32}
_CHUNK = 1 << 24
"""Elements compared at once: their places take eight bytes each."""
_SPARSE = 8
"""One word in so many may differ for their elements to be looked at one by one."""
_LARGEST_INDEX = 2**31 - 1
_PATIENCE = 2
"""Refusals in a row after which a bucket's changes are not tried any more over this connection."""
_log = logging.getLogger(__name__)


@dataclass
class _Sent:
    """What all engines hold of a bucket.

    Attributes:
        version: its number.
        bits: [bucket.hf_numel] integers as wide as the bucket's dtype, in host memory.
        refused: how often in a row an engine refused changes of it.
    """

    version: int
    bits: torch.Tensor
    refused: int = 0


@dataclass(frozen=True)
class _Changes:
    """What is different in a bucket: places [n] int64 and values [n], on the bucket's device."""

    index: torch.Tensor
    value: torch.Tensor


class DeltaTransport(DiskTransport):
    """Every bucket's changes in a file of their own."""

    kind = "base"
    lasting = False  # nobody reads them later: closing a file is enough for other machines to see it

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._sent: dict[int, _Sent] = {}
        self._number = 0
        self._moved = Moved()

    def begin(self, version: int, buckets: Sequence[Bucket]) -> None:
        """See `DiskTransport.begin`."""
        super().begin(version, buckets)
        self._number, self._moved = version, Moved()

    def moved(self) -> Moved:
        """See `transport.MoveCounter`."""
        return self._moved

    def start(self, bucket: Bucket, flat: torch.Tensor) -> Pending:
        """Write what changed, or all, and ask every engine to read it."""
        sent = self._sent.get(bucket.index)
        if sent is None:
            return self.whole(bucket, flat, None)
        count, found = find_changes(flat, sent.bits)
        if found is None or sent.refused == _PATIENCE:
            return self.whole(bucket, flat, count)
        path = self._write_changes(bucket, flat, sent.version, found)
        return _PendingChanges(self, bucket, flat, found, self.announce(bucket, "changes", path))

    def whole(self, bucket: Bucket, flat: torch.Tensor, changed: int | None) -> Pending:
        """Write all of a bucket, and ask every engine to read it.

        Args:
            changed: elements that are different from the version before; None: not known.
        """
        return _PendingWhole(self, bucket, flat, changed, super().start(bucket, flat))

    def finish(self, version: Path) -> None:
        """No index: nobody else can read a version of changes."""

    def disconnect(self) -> None:
        """See `DiskTransport.disconnect`."""
        super().disconnect()
        self._sent.clear()

    def note_whole(self, bucket: Bucket, flat: torch.Tensor, changed: int | None) -> None:
        """Every engine has loaded all of a bucket."""
        sent = self._sent.get(bucket.index)
        if sent is None:
            bits = torch.empty(flat.numel(), dtype=_BITS[flat.itemsize], pin_memory=flat.is_cuda)
            sent = self._sent[bucket.index] = _Sent(self._number, bits)
        sent.bits.copy_(flat.view(sent.bits.dtype))
        sent.version = self._number
        self._moved += Moved(bucket.hf_bytes, changed or 0, 0 if changed is None else flat.numel())

    def note_changes(self, bucket: Bucket, found: _Changes) -> None:
        """Every engine has loaded the changes of a bucket."""
        sent, places = self._sent[bucket.index], found.index.cpu()
        sent.bits[places] = found.value.cpu().view(sent.bits.dtype)
        sent.version, sent.refused = self._number, 0
        self._moved += Moved(sum(plan.nbytes for plan in _plans(bucket, len(places))), len(places), bucket.hf_numel)

    def note_refusal(self, bucket: Bucket, refused: ChangesRefused) -> None:
        """An engine has not taken the changes of a bucket."""
        sent = self._sent[bucket.index]
        sent.refused += 1
        ever = ", and from now on" if sent.refused == _PATIENCE else ""
        _log.warning("%s goes as a whole%s: %s: %s", bucket.describe(), ever, refused.value, refused.rule)

    def _write_changes(self, bucket: Bucket, flat: torch.Tensor, version: int, found: _Changes) -> Path:
        path = self.path_of(bucket).with_suffix(".changes.safetensors")
        index, value, checksum = found.index.to("cpu", torch.int32), found.value.cpu(), self.link.receivers.checksum
        sums = torch.tensor([version, checksum(index), checksum(value), checksum(flat)])
        parts = (part.view(torch.uint8) for part in (sums, index, value))
        self.write_file(path, safetensors_header(_plans(bucket, len(index))), *parts)
        return path


def _plans(bucket: Bucket, count: int) -> list[TensorPlan]:
    """The tensors of a file of changes."""
    kinds = (("I64", 4), ("I32", count), (SAFETENSORS_DTYPES[bucket.dtype], count))
    return [TensorPlan(name, dtype, (size,)) for name, (dtype, size) in zip(CHANGES, kinds, strict=True)]


def find_changes(flat: torch.Tensor, before: torch.Tensor) -> tuple[int, _Changes | None]:
    """How many elements of a bucket have other bits than before, and which; None where sending all of it is less.

    Args:
        flat: [n] of 2 or 4 bytes each, on any device.
        before: [n] its bits, as integers in host memory.
    """
    bits, limit = flat.view(before.dtype), len(flat) * flat.itemsize // (4 + flat.itemsize)
    count, places = 0, list[torch.Tensor]()
    for begin in range(0, len(flat), _CHUNK):
        old = before[begin : begin + _CHUNK].to(flat.device, non_blocking=True)
        more, found = _differing(bits[begin : begin + _CHUNK], old, limit)
        count += more
        if found is not None:
            places.append(found + begin)
    if count > min(limit, _LARGEST_INDEX):
        return count, None
    index = torch.cat(places)
    return count, _Changes(index, flat[index])


def _differing(now: torch.Tensor, before: torch.Tensor, limit: int) -> tuple[int, torch.Tensor | None]:
    """Where two tensors of integers differ: how often, and [n] int64 places, unless there are more than `limit`.

    Words of 8 bytes are compared first: most are equal, and that is found out at the speed of memory.
    """
    each = 8 // now.itemsize
    words = 0 if now.data_ptr() % 8 or before.data_ptr() % 8 else len(now) // each * each
    unequal = now[:words].view(torch.int64) != before[:words].view(torch.int64) if words else None
    if unequal is None or int(unequal.count_nonzero()) > words // each // _SPARSE:
        differs = now != before
        count = int(differs.count_nonzero())
        return count, differs.nonzero().view(-1) if count <= limit else None
    inside = unequal.nonzero() * each + torch.arange(each, device=now.device)
    candidates = torch.cat([inside.view(-1), torch.arange(words, len(now), device=now.device)])
    found = candidates[now[candidates] != before[candidates]]
    return len(found), found if len(found) <= limit else None


@dataclass
class _PendingWhole:
    """All of a bucket on its way."""

    transport: DeltaTransport
    bucket: Bucket
    flat: torch.Tensor
    changed: int | None
    file: Pending

    def wait(self) -> None:
        """Return when every engine has loaded it. Raises WeightSyncError."""
        self.file.wait()
        self.transport.note_whole(self.bucket, self.flat, self.changed)


@dataclass
class _PendingChanges:
    """The changes of a bucket on their way."""

    transport: DeltaTransport
    bucket: Bucket
    flat: torch.Tensor
    found: _Changes
    answers: list[Future[None]]

    def wait(self) -> None:
        """Return when every engine has loaded the bucket, as a whole if one refused. Raises WeightSyncError."""
        refused = until_answered(self.bucket, self.answers)
        if not refused:
            self.transport.note_changes(self.bucket, self.found)
            return
        self.transport.note_refusal(self.bucket, refused[0])
        self.transport.whole(self.bucket, self.flat, len(self.found.index)).wait()
