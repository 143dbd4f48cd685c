"""Matching of the run's group requests with submitted groups; the earlier one waits for the other.

A group of the run consists of rollouts, each of which requests its sequence. It gets a whole group of an environment
once all of them have requested, or nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mslime.rollout.workflow import AbsentError
from mslime_plugins.atropos.matching import MatchedSequence


@dataclass(frozen=True)
class SubmittedGroup:
    """A submitted group that waits for training, or its error.

    Attributes:
        environment: its name.
        failed: why it cannot be trained; ends the run unless it drops such groups.
    """

    environment: str
    sequences: tuple[MatchedSequence, ...] = ()
    failed: str = ""


@dataclass(eq=False)
class Lease:
    """A group that the run waits for.

    Attributes:
        size: its number of rollouts.
        broken: a part of it ended in an earlier process, so no environment's group can fill it.
        asked: the waiting rollouts.
    """

    size: int
    broken: bool
    asked: dict[int, asyncio.Future[SubmittedGroup]] = field(
        default_factory=dict[int, "asyncio.Future[SubmittedGroup]"]
    )

    @property
    def ready(self) -> bool:
        """Whether it may get a group."""
        return len(self.asked) == self.size and not any(f.done() for f in self.asked.values())


class Leases:
    """All leases and submitted groups.

    Args:
        most: most submitted groups that may wait.
        moved: called after a change of either number.
    """

    def __init__(self, most: int, moved: Callable[[], None] = lambda: None) -> None:
        self._most, self._moved = most, moved
        self._open: dict[int, Lease] = {}
        self._waiting: deque[SubmittedGroup] = deque()

    @property
    def wanted(self) -> int:
        """Number of groups that the run waits for."""
        return sum(lease.ready for lease in self._open.values())

    @property
    def waiting(self) -> int:
        """Number of submitted groups not yet requested."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether no further group may wait."""
        return len(self._waiting) >= self._most and not self.wanted

    def submit(self, group: SubmittedGroup) -> None:
        """Give a submitted group to the run, or queue it."""
        self._waiting.append(group)
        self._give()

    async def ask(self, group_id: int, index: int, size: int, whole: bool) -> SubmittedGroup:
        """The submitted group for group `group_id` of the run.

        Args:
            index: of the requesting rollout. size: rollouts of the group. whole: none of them has ended.

        Raises:
            AbsentError: the others ended without it, in an earlier process.
        """
        lease = self._open.setdefault(group_id, Lease(size, broken=not whole))
        if lease.broken:
            del self._open[group_id]
            raise AbsentError("its group was submitted to an earlier process, which ended")
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
        """Give waiting groups to waiting leases, both in order."""
        for lease in list(self._open.values()):
            if self._waiting and lease.ready:
                group = self._waiting.popleft()
                for future in lease.asked.values():
                    future.set_result(group)
        self._moved()
