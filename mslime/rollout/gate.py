"""The submit gate: how many groups may be in flight. Pure arithmetic.

With `max_staleness` = s, weights of version v may work on groups for the steps v .. v + s and no further, so groups are
submitted while `accepted + running < (v + 1 + s) * groups_per_step`. Spare groups come on top, for those that a filter
will refuse or, with s = 0, that finish late; where nothing is refused and s > 0, the last of them would be of step
v + s + 1, too old by construction, so there are none. Counts and versions are those since the gate opened.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SubmitGate:
    """Bounds the work in flight.

    Attributes:
        groups_per_step: groups that one training step takes.
        max_staleness: versions that a group may be behind when it is trained.
        spare: groups in flight beyond what the steps need.
    """

    groups_per_step: int
    max_staleness: int
    spare: int = 0

    def limit(self, version: int) -> int:
        """Groups that may be accepted or running, counted since the gate opened, under weights of `version`."""
        return (version + 1 + self.max_staleness) * self.groups_per_step + self.spare

    def room(self, accepted: int, running: int, version: int) -> int:
        """Groups that may be submitted now.

        Args:
            accepted: groups taken by the trainer or ready for it.
            running: groups being generated or scored.
            version: updates of the weights since the gate opened.
        """
        return max(0, self.limit(version) - accepted - running)
