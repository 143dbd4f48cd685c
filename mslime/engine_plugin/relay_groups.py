"""Inside an SGLang server: what one rank receives from its senders, in the order of the plan (`relay`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mslime.config.base import NOT_ARRIVED

_ALIGNED = 16


def aligned(size: int) -> int:
    """So many bytes that what follows them may have elements of any size."""
    return -(-size // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class ArrivalSlot:
    """Where one arrival of a rank lies in the room for all of them.

    Attributes:
        start: its first byte.
        taken: how many arrivals are taken before it may come.
    """

    start: int
    size: int
    taken: int


def arrival_slots(sizes: Sequence[int], capacity: int) -> list[ArrivalSlot]:
    """Where arrivals lie one after the other, again from the room's beginning where it ends.

    Args:
        sizes: bytes of each.
        capacity: bytes of the room. One that is larger has the room for itself, from its beginning.
    """
    found: list[ArrivalSlot] = []
    start = first = 0  # `first`: of those that lie in the room with the next, as far as they are in its way
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
    """What one rank receives. As many arrivals are on their way as there is room for.

    Args:
        arriving: of each, in the order of the plan, the groups of those who send equal parts of it, and where it is to
            lie.
        room: [bytes] uint8, for all that is on its way.

    Attributes:
        failed: why nothing comes any more; empty while all is well.
    """

    def __init__(self, arriving: Sequence[tuple[Sequence[dist.ProcessGroup], ArrivalSlot]], room: torch.Tensor) -> None:
        self._room, self._coming, self._taken = room, deque(arriving), 0
        self._on_the_way: deque[tuple[list[dist.Work], torch.Tensor]] = deque()
        self.failed = ""
        self._ask()

    def take(self, use: Callable[[torch.Tensor], object]) -> None:
        """Let `use` read the next arrival, [bytes] uint8, and ask for what has room then."""
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
