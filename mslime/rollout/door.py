"""A group's rollouts reach the engines through its door. It is open while the group runs and the traffic flows; whoever
finds it closed waits inside `generate` until the group is continued."""

from __future__ import annotations

import asyncio

from mslime.rollout.generation import Traffic


class Door:
    """Whether the rollouts of a group may ask the engines.

    Attributes:
        admitted: the group runs; else it rests.
        moved: set whenever a rollout of the group begins or ends to do something.
    """

    def __init__(self, traffic: Traffic, admitted: bool = False) -> None:
        self.traffic, self.admitted = traffic, admitted
        self.moved, self._next = asyncio.Event(), asyncio.Event()

    @property
    def open(self) -> bool:
        """Whether a request may be sent."""
        return self.admitted and self.traffic.open

    def admit(self) -> None:
        """The group runs from now on; those who wait go on."""
        self.admitted = True
        self._next.set()
        self._next = asyncio.Event()

    async def next_admission(self) -> None:
        """Wait until the group is continued."""
        await self._next.wait()
