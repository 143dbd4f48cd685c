"""The transport `delta`: send the changes of a bucket since the last version, or all of it if that is smaller.

A sender keeps a copy of its last version (in host memory, as large as its part of the weights) and compares bits. It
sends whole buckets to newly connected engines, if changes would be more bytes, or if an engine rejects them. Engines
verify by checksums that the changes fit their version, and that the result is correct. A carrier transfers either:
files in a directory that all hosts share, or broadcasts (`weights.delta_over`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from mslime.config.errors import ChangesRefused
from mslime.config.keys import BucketVersion, EngineInfo
from mslime.tensor_sums import word_sum
from mslime.weights.transport import (
    ChangeCarrier,
    Link,
    LoadingBucket,
    MovedAmounts,
    Pending,
    Transport,
    find_transport,
)
from mslime.weights.weight_plan import Bucket

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer dtype by bytes of an element. A bucket of several dtypes is compared as bytes."""
_CHUNK = 1 << 24
"""Elements compared at once: their indices take eight bytes each."""
_SPARSE = 8
"""If at most one word in this many differs, differing words are compared element by element."""
_LARGEST_INDEX = 2**31 - 1
"""Largest index that a file of changes can store."""
_PATIENCE = 2
"""Refusals in a row after which a bucket's changes are no longer sent over this connection."""
_BYTES_A_CHANGE = {"cpu": 16, "cuda": 512}
"""Bytes of a bucket, by its device, that are copied to host memory in the time of writing one change there.

A change takes 5 to 50 ns on one thread, less if they are dense. The value of GPUs is for copies at 25 GB/s, and not
measured.
"""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BucketChanges:
    """Changed places [n] int64 and values [n] of a bucket, on the bucket's device."""

    index: torch.Tensor
    value: torch.Tensor


@dataclass
class _Sent:
    """The version of a bucket that all engines hold.

    Attributes:
        version: its number.
        bits: [bucket.hf_numel] integers as wide as the bucket's dtype, in host memory.
        refused: how often in a row an engine rejected changes of it.
    """

    version: int
    bits: torch.Tensor
    refused: int = 0


@dataclass(frozen=True)
class _Compared:
    """Comparison of a bucket with the engines' version.

    Attributes:
        bucket: its index.
        count: elements that changed; None: unknown.
        found: the changes; None: the whole bucket is smaller.
        sums: see `BucketVersion`.
    """

    bucket: int
    count: int | None = None
    found: BucketChanges | None = None
    sums: tuple[int, int, int] = (0, 0, 0)


class DeltaTransport(Transport):
    """Sends the changes of every bucket."""

    def __init__(self, link: Link) -> None:
        make: Callable[..., ChangeCarrier] = cast(Any, find_transport(link.settings["delta_over"]))
        self._carrier = make(link, with_changes=True)
        self._sent: dict[int, _Sent] = {}
        self._number = 0
        self._moved = MovedAmounts()
        self._compared: _Compared | None = None
        # By every engine, and not yet recorded: others wait for this sender's turn.
        self.loaded: list[tuple[Bucket, BucketChanges]] = []
        self.any_order = self._carrier.any_order

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Connect with the engines through the carrier."""
        self._carrier.connect(engines)

    def begin(self, version: int, buckets: Sequence[Bucket]) -> None:
        """Reset the counters."""
        self._carrier.begin(version, buckets)
        self._note_loaded()
        self._number, self._moved, self._compared = version, MovedAmounts(), None

    def complete(self) -> None:
        """Record the last bucket's changes."""
        self._carrier.complete()
        self._note_loaded()

    def moved(self) -> MovedAmounts:
        """Bytes and elements of the buckets that every engine has loaded."""
        return self._moved

    def prepare_bucket(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Find the changes, on all senders at the same time; limited by the speed of memory or of the copy to the
        host."""
        self._compared = self._compare(bucket, flat)

    def start(self, bucket: Bucket, flat: torch.Tensor) -> Pending:
        """Send the changes, or the whole bucket."""
        compared, self._compared = self._compared, None
        if compared is None or compared.bucket != bucket.index:
            compared = self._compare(bucket, flat)
        found = compared.found
        if found is None:
            return self.whole(bucket, flat, compared.count)
        base = self._sent[bucket.index].version
        version = BucketVersion(self._number, base, len(found.index), compared.sums)
        sent = self._carrier.start_changes(bucket, version, found.index.to(torch.int32), found.value)
        return _PendingChanges(self, bucket, flat, found, sent)

    def _compare(self, bucket: Bucket, flat: torch.Tensor) -> _Compared:
        self._note_loaded()
        sent = self._sent.get(bucket.index)
        if sent is None:
            return _Compared(bucket.index)
        count, found = find_changes(flat, sent.bits)
        if found is None or sent.refused == _PATIENCE:
            return _Compared(bucket.index, count)
        sums = (word_sum(found.index.to(torch.int32)), word_sum(found.value), word_sum(flat))
        return _Compared(bucket.index, count, found, sums)

    def whole(self, bucket: Bucket, flat: torch.Tensor, changed: int | None) -> Pending:
        """Send all of a bucket.

        Args:
            changed: elements that differ from the last version; None: unknown.
        """
        return _PendingWhole(self, bucket, flat, changed, self._carrier.start(bucket, flat))

    def disconnect(self) -> None:
        """Leave the engines, and drop the record of their versions."""
        self._carrier.disconnect()
        self._sent.clear()
        self.loaded.clear()

    def note_whole(self, bucket: Bucket, flat: torch.Tensor, changed: int | None) -> None:
        """Record that every engine has loaded a whole bucket."""
        sent = self._sent.get(bucket.index)
        if sent is None:
            bits = torch.empty(flat.numel(), dtype=BITS[flat.itemsize], pin_memory=flat.is_cuda)
            sent = self._sent[bucket.index] = _Sent(self._number, bits)
        sent.bits.copy_(flat.view(sent.bits.dtype))
        sent.version = self._number
        self._moved += MovedAmounts(bucket.hf_bytes, changed or 0, 0 if changed is None else flat.numel())

    def note_changes(self, bucket: Bucket, flat: torch.Tensor, found: BucketChanges) -> None:
        """Record that every engine has loaded changes: at once from the whole bucket if that is faster and no other
        sender waits for the turn, else before the next comparison."""
        bits, per_change = self._sent[bucket.index].bits, _BYTES_A_CHANGE[flat.device.type]
        if not self.any_order or len(found.index) * per_change < flat.nbytes:
            self.loaded.append((bucket, found))
            return
        # All other elements are equal. Not later: `flat` may be a view of parameters, which the next step changes, and
        # keeping a filled buffer would take the memory of one bucket more. On a GPU this waits for the copy, which
        # follows the filling on this stream (`BucketSender`), so the buffer may be reused afterwards.
        bits.copy_(flat.view(bits.dtype))
        self._count(bucket, found)

    def _note_loaded(self) -> None:
        """Record the remaining changes that every engine has loaded."""
        while self.loaded:
            bucket, found = self.loaded.pop(0)
            bits = self._sent[bucket.index].bits
            # Two thirds of the time of `bits[places] = value`.
            bits.scatter_(0, found.index.cpu(), found.value.cpu().view(bits.dtype))
            self._count(bucket, found)

    def _count(self, bucket: Bucket, found: BucketChanges) -> None:
        sent, count = self._sent[bucket.index], len(found.index)
        sent.version, sent.refused = self._number, 0
        self._moved += MovedAmounts(count * (4 + found.value.itemsize), count, bucket.hf_numel)

    def note_refusal(self, bucket: Bucket, refused: ChangesRefused) -> None:
        """Record that an engine rejected the changes of a bucket."""
        sent = self._sent[bucket.index]
        sent.refused += 1
        ever = ", and from now on" if sent.refused == _PATIENCE else ""
        _log.warning("%s goes as a whole%s: %s: %s", bucket.describe(), ever, refused.value, refused.rule)


@dataclass
class _PendingWhole:
    """A whole bucket in flight."""

    transport: DeltaTransport
    bucket: Bucket
    flat: torch.Tensor
    changed: int | None
    sent: LoadingBucket

    def wait(self) -> None:
        """Return when every engine has loaded it. Raises WeightSyncError."""
        self.sent.wait()
        self.transport.note_whole(self.bucket, self.flat, self.changed)


@dataclass
class _PendingChanges:
    """Changes of a bucket in flight."""

    transport: DeltaTransport
    bucket: Bucket
    flat: torch.Tensor
    found: BucketChanges
    sent: LoadingBucket

    def wait(self) -> None:
        """Return when every engine has loaded the bucket, as a whole if one refused. Raises WeightSyncError."""
        refused = self.sent.refused()
        if not refused:
            self.transport.note_changes(self.bucket, self.flat, self.found)
            return
        self.transport.note_refusal(self.bucket, refused[0])
        self.transport.whole(self.bucket, self.flat, len(self.found.index)).wait()


def find_changes(flat: torch.Tensor, before: torch.Tensor) -> tuple[int, BucketChanges | None]:
    """Number of elements of a bucket with changed bits, and the changes; None if the whole bucket is smaller.

    Args:
        flat: [n] of 1, 2 or 4 bytes each, on any device.
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
    if count > limit or len(flat) > _LARGEST_INDEX + 1:
        return count, None
    index = torch.cat(places)
    return count, BucketChanges(index, flat[index])


def _differing(now: torch.Tensor, before: torch.Tensor, limit: int) -> tuple[int, torch.Tensor | None]:
    """Number of differences of two integer tensors, and [n] int64 places unless there are more than `limit`.

    Words of 8 bytes are compared first: most are equal, and this check runs at memory speed.
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
