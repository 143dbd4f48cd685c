"""Groups that the run waits for, and groups that were handed in: whichever is first waits for the other.

A group of the run is as many rollouts, each of which asks for its sequence. It is given a whole group of an environment
when all of them have asked, or nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mslime.rollout.workflow import AbsentError
from mslime_plugins.atropos.matching import Recognised


@dataclass(frozen=True)
class HandedIn:
    """A group that waits to be trained, or what was wrong with one.

    Attributes:
        environment: its name.
        failed: why it cannot be trained; a run that does not drop such groups ends of it.
    """

    environment: str
    sequences: tuple[Recognised, ...] = ()
    failed: str = ""


@dataclass(eq=False)
class Lease:
    """A group that the run waits for.

    Attributes:
        size: rollouts that it is made of.
        broken: a part of it ended in an earlier process: it cannot be given to an environment any more.
        asked: the rollouts that wait.
    """

    size: int
    broken: bool
    asked: dict[int, asyncio.Future[HandedIn]] = field(default_factory=dict[int, "asyncio.Future[HandedIn]"])

    @property
    def ready(self) -> bool:
        """Whether it may be given a group."""
        return len(self.asked) == self.size and not any(f.done() for f in self.asked.values())


class Leases:
    """All of them.

    Args:
        most: groups that may wait to be asked for.
        moved: told when the number of either has changed.
    """

    def __init__(self, most: int, moved: Callable[[], None] = lambda: None) -> None:
        self._most, self._moved = most, moved
        self._open: dict[int, Lease] = {}
        self._waiting: deque[HandedIn] = deque()

    @property
    def wanted(self) -> int:
        """Groups that the run waits for."""
        return sum(lease.ready for lease in self._open.values())

    @property
    def waiting(self) -> int:
        """Groups that were handed in and are not asked for yet."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether no further group may wait."""
        return len(self._waiting) >= self._most and not self.wanted

    def hand_in(self, group: HandedIn) -> None:
        """Give a group to the run, or let it wait."""
        self._waiting.append(group)
        self._give()

    async def ask(self, group_id: int, index: int, size: int, whole: bool) -> HandedIn:
        """The group that group `group_id` of the run is given.

        Args:
            index: of the rollout that asks. size: rollouts of the group. whole: none of them has ended.

        Raises:
            AbsentError: the others have ended without it, in an earlier process.
        """
        lease = self._open.setdefault(group_id, Lease(size, broken=not whole))
        if lease.broken:
            del self._open[group_id]
            raise AbsentError("its group was handed in to an earlier process, which ended")
        future = lease.asked[index] = asyncio.get_running_loop().create_future()
        self._give()
        try:
            return await future
        finally:
            del lease.asked[index]
            if not lease.asked and self._open.get(group_id) is lease:
                del self._open[group_id]
            self._moved()

    def _give(self) -> None:
        """Give the groups that wait to those that ask, the first one first."""
        for lease in list(self._open.values()):
            if self._waiting and lease.ready:
                group = self._waiting.popleft()
                for future in lease.asked.values():
                    future.set_result(group)
        self._moved()
