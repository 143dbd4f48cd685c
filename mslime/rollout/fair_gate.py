"""The gate that several adapters share: which adapter sends the next request to the engines.

The gate of each adapter's tracker (`group_tracker.SubmitGate`) bounds the age of its groups from its version alone.
This module divides the shared resource, room at the engines. Each adapter has a reserved share, so a task whose
requests take long, or never end, cannot delay another's next step. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class InLine:
    """Requests of one adapter.

    Attributes:
        running: requests at the engines; responses that are only being scored take no room there.
        waiting: requests that are ready to be sent.
    """

    running: int
    waiting: int


@dataclass(frozen=True)
class FairGate:
    """Divides the engines' concurrent requests among adapters.

    One request for each adapter, and `guaranteed` of the rest divided by weight, is kept for its owner, used or not.
    The remainder goes to the adapter with the fewest running requests for its weight, so engines have work while some
    adapters wait for their trainer.

    Attributes:
        capacity: requests that all adapters together may have running.
        weights: of each adapter, by name; above 0.
        guaranteed: 0 to 1.
    """

    capacity: int
    weights: Mapping[str, float]
    guaranteed: float = 0.5

    def __post_init__(self) -> None:
        assert self.weights and all(weight > 0 for weight in self.weights.values()), "weights are above 0"
        assert 0 <= self.guaranteed <= 1, "a part of the capacity"
        assert self.capacity >= len(self.weights), "one request for each adapter at least"

    def share(self, name: str) -> int:
        """Requests that the adapter can always have running."""
        part = self.guaranteed * self.weights[name] / sum(self.weights.values())
        return 1 + int((self.capacity - len(self.weights)) * part)

    def next_in_line(self, adapters: Mapping[str, InLine]) -> str | None:
        """The adapter that sends a request now; None if all must wait.

        Args:
            adapters: all adapters by name; ties go to the first.
        """
        assert adapters.keys() == self.weights.keys(), "weights are those of the adapters"
        kept = sum(max(self.share(name), one.running) for name, one in adapters.items())
        may = [
            name
            for name, one in adapters.items()
            if one.waiting > 0 and (one.running < self.share(name) or kept < self.capacity)
        ]
        return min(may, key=lambda name: adapters[name].running / self.weights[name], default=None)
