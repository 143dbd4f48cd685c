"""The time that an agent takes: between a reply and its next request, and in all.

An agent that has died asks nothing, so nothing but a timer notices. There is one for a rollout, and it runs while no
turn is under way: a reply that waits for new weights costs its agent nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from mslime.config.rollout import AgentLimits


class AgentClock:
    """The time of one rollout's agents.

    Args:
        on_expiry: called when a limit has passed without another request; whether the rollout ends of it. Where it does
            not, because its function generates by itself, the agent has `idle_s` again.

    Attributes:
        expired: the limit of which the rollout ended, with its value; empty where it did not.
    """

    def __init__(self, limits: AgentLimits, on_expiry: Callable[[], bool]) -> None:
        self._limits, self._on_expiry, self.expired = limits, on_expiry, ""
        self._first = self._last = time.monotonic()
        self._alarm: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """The first request is here."""
        self._first = time.monotonic()

    def passed(self, alone: bool) -> tuple[str, float] | None:
        """The limit that had passed when a request came: its name and value.

        Args:
            alone: no other turn is under way.
        """
        now, idle, wall = time.monotonic(), self._limits.idle_s, self._limits.wall_s
        if alone and now - self._last > idle:
            return "idle_s", idle
        return ("wall_s", wall) if now - self._first > wall else None

    def run(self) -> None:
        """The agent has its reply: its time runs. When all of it has passed already, the next request is told."""
        self.stop()
        self._last = now = time.monotonic()
        idle, wall = self._limits.idle_s, self._first + self._limits.wall_s - now
        of_all = 0 < wall < idle
        limit = f"wall_s = {self._limits.wall_s:g}" if of_all else f"idle_s = {idle:g}"
        self._alarm = asyncio.get_running_loop().call_later(wall if of_all else idle, self._ring, limit)

    def stop(self) -> None:
        """A turn is under way, or the rollout has ended."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _ring(self, limit: str) -> None:
        self.expired = f"rollout.limits.{limit}"
        if not self._on_expiry():
            self.expired = ""
            self.run()
