"""What travels between environments' processes and their parent, where their program is `__main__`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mslime.rollout.environments.protocol import SETTING

CLOSE_S = 10.0
"""Seconds that closing an environment may take at most: runs wait for it when they stop."""


class Failure(Enum):
    """Why an environment gave no answer."""

    RAISED = "raised"
    """It raised, or returned what it may not."""
    LATE = "late"
    """It took too long, and may still be at work."""
    MEMORY = "memory"
    """Its process had no memory left, which another environment may have taken."""


@dataclass(frozen=True)
class EnvironmentJob:
    """What an environments' process is for.

    Attributes:
        function: `module:Class`.
        options: what its constructor is given.
        limit_s: seconds for one call.
        memory_mib: that the process may take beyond what it holds after the import; None: as much as it likes.
        setting: that named it, for messages.
    """

    function: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    limit_s: float = 60.0
    memory_mib: float | None = None
    setting: str = SETTING

    def limit_of(self, method: str) -> float:
        """Seconds for one call of a method."""
        return min(self.limit_s, CLOSE_S) if method == "close" else self.limit_s
