"""Inside an SGLang server: one rank's arrivals from its senders, in the order of the plan (`relay`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mslime.config.base import NOT_ARRIVED

_ALIGNED = 16


def aligned(size: int) -> int:
    """The size rounded up, so that elements of any size are aligned behind it."""
    return -(-size // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class ArrivalSlot:
    """Position of one arrival in a rank's receive buffer.

    Attributes:
        start: its first byte.
        taken: number of earlier arrivals that must be consumed before it may arrive.
    """

    start: int
    size: int
    taken: int


def arrival_slots(sizes: Sequence[int], capacity: int) -> list[ArrivalSlot]:
    """Slots of consecutive arrivals in a ring buffer.

    Args:
        sizes: bytes of each.
        capacity: bytes of the buffer. A larger arrival gets the whole buffer, from its start.
    """
    found: list[ArrivalSlot] = []
    start = first = 0  # `first`: first arrival that still occupies memory of the next one
    for size in sizes:
        if start + size > capacity:
            start = 0
        while any(_meet(each, start, size) for each in found[first:]):
            first += 1
        found.append(ArrivalSlot(start, size, first))
        start += aligned(size)
    return found


def _meet(place: ArrivalSlot, start: int, size: int) -> bool:
    return place.start < start + size and start < place.start + place.size


class RelayGroups:
    """One rank's arrivals; as many are in flight as fit into the buffer.

    Args:
        arriving: for each arrival, in the plan's order, the groups of the senders of its equal parts, and its slot.
        room: [bytes] uint8, buffer for all arrivals in flight.

    Attributes:
        failed: why nothing more arrives; empty without an error.
    """

    def __init__(self, arriving: Sequence[tuple[Sequence[dist.ProcessGroup], ArrivalSlot]], room: torch.Tensor) -> None:
        self._room, self._coming, self._taken = room, deque(arriving), 0
        self._on_the_way: deque[tuple[list[dist.Work], torch.Tensor]] = deque()
        self.failed = ""
        self._ask()

    def take(self, use: Callable[[torch.Tensor], object]) -> None:
        """Let `use` read the next arrival, [bytes] uint8, then request the arrivals that now fit."""
        if self.failed:
            return
        try:
            assert self._on_the_way, "nothing is left to come"
            works, arrived = self._on_the_way.popleft()
            for work in works:
                work.wait()
            use(arrived)
        except RuntimeError as error:
            self.failed = f"{NOT_ARRIVED}: {error}"
        else:
            self._taken += 1
            self._ask()

    def _ask(self) -> None:
        while self._coming and self._coming[0][1].taken <= self._taken:
            groups, place = self._coming.popleft()
            room = self._room[place.start : place.start + place.size]
            parts = room.view(len(groups), -1)
            try:
                works = [
                    dist.broadcast(part, group=group, group_src=0, async_op=True)
                    for part, group in zip(parts, groups, strict=True)
                ]
            except RuntimeError as error:
                self.failed = f"{NOT_ARRIVED}: {error}"
                return
            self._on_the_way.append(([work for work in works if work is not None], room))
