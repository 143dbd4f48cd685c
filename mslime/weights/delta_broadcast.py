"""Changes of buckets by broadcasts: what `delta` sends where trainer and engines share a network and no file system.

All of a bucket goes as the transport `broadcast` sends it. Of changes the places and values are one broadcast; their
number and sums are in the request that announces it, so an engine knows how much will come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mslime.config.keys import BucketVersion, EngineInfo
from mslime.weights.broadcast import BroadcastTransport, PendingBroadcast
from mslime.weights.differences import Differences
from mslime.weights.plan import Bucket
from mslime.weights.transport import Link
from mslime.weights.waiting import all_done


class BroadcastCarrier(BroadcastTransport):
    """Every bucket, or its changes, by a broadcast."""

    any_order = False

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._number = 0

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Ask every engine whether it can take changes, and make the process group. Raises WeightSyncError."""
        can = [self.link.receivers.can_take_changes(engine) for engine in engines]
        all_done(can, "connect", f"{len(engines)} engines", self.link.deadline_s)
        super().connect(engines)

    def begin(self, version: int, buckets: Sequence[Bucket]) -> None:
        """See `transport.SyncObserver`."""
        self._number = version

    def complete(self) -> None:
        """Nothing is left to do: engines know what they hold."""

    def start(self, bucket: Bucket, flat: torch.Tensor) -> PendingBroadcast:
        """Broadcast all of a bucket, of which changes may follow."""
        link, version = self.link, BucketVersion(self._number)
        return self.send(bucket, flat, link.receivers.announce_version(bucket, link.name, version))

    def start_changes(
        self, bucket: Bucket, base: int, found: Differences, sums: tuple[int, int, int]
    ) -> PendingBroadcast:
        """Broadcast what changed."""
        parts = (found.index.to(torch.int32), found.value)
        packed = torch.cat([part.view(torch.uint8) for part in parts])
        link, version = self.link, BucketVersion(self._number, base, len(found.index), sums)
        return self.send(bucket, packed, link.receivers.announce_version(bucket, link.name, version))
