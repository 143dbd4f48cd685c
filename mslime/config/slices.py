"""Which elements of a bucket each machine of an engine keeps: what engines say, and what senders pack (`relay`)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slice:
    """Elements of a bucket: runs of neighbours that lie at equal distances. Packed they lie one after the other.

    Attributes:
        start: the first element.
        width: neighbours in a run.
        sizes, strides: how many runs there are, and their distances in elements, outermost first; empty: one run.
    """

    start: int
    width: int
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.width * math.prod(self.sizes)


HostSlice = tuple[Slice, ...]
"""What one machine keeps of a bucket, in the order in which it is packed; empty: nothing."""


@dataclass(frozen=True)
class HostSlices:
    """What each machine of an engine keeps of the buckets of a plan.

    Attributes:
        name: the same for the same cuts, and for no others.
        buckets: of each bucket, the cut of each machine; None where it goes to all machines as a whole.
    """

    name: str
    buckets: tuple[tuple[HostSlice, ...] | None, ...]

    @classmethod
    def of(cls, buckets: Sequence[tuple[HostSlice, ...] | None]) -> HostSlices:
        """With their name."""
        return cls(hashlib.sha256(_encoded(buckets).encode()).hexdigest()[:16], tuple(buckets))


def machine_lane(lane: str, machine: int) -> str:
    """The process group by which a sender sends to one machine of each engine.

    Args:
        lane: the group by which it sends to all of them.
    """
    return f"{lane}-machine{machine}"


def _encoded(buckets: Sequence[tuple[HostSlice, ...] | None]) -> str:
    rows = [
        None if cuts is None else [[[p.start, p.width, p.sizes, p.strides] for p in cut] for cut in cuts]
        for cuts in buckets
    ]
    return json.dumps(rows, separators=(",", ":"))
