"""Engine slots shared by several adapters: each request takes one, in the order of `FairGate`.

A request waits for its slot before it is composed, so waiting requests have nothing at an engine to abort.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class AdapterQueue:
    """Requests of one adapter.

    Attributes:
        running: requests at the engines; responses that are only being scored take no slot there.
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

    def next_adapter(self, adapters: Mapping[str, AdapterQueue]) -> str | None:
        """The adapter that sends a request now; None if all must wait.

        Args:
            adapters: all adapters by name; ties go to the first.
        """
        assert adapters.keys() == self.weights.keys(), "weights have the names of the adapters"
        kept = sum(max(self.share(name), one.running) for name, one in adapters.items())
        may = [
            name
            for name, one in adapters.items()
            if one.waiting > 0 and (one.running < self.share(name) or kept < self.capacity)
        ]
        return min(may, key=lambda name: adapters[name].running / self.weights[name], default=None)


class RequestSlots:
    """All engine slots of a run. Belongs to one event loop.

    Args:
        capacity: requests that all engines run at once; called each time, since engines come and go.
        weights: of each adapter, by name; above 0.
    """

    def __init__(self, capacity: Callable[[], int], weights: Mapping[str, float]) -> None:
        self._capacity, self._weights = capacity, dict(weights)
        self._running = dict.fromkeys(weights, 0)
        self._waiting = {name: deque[asyncio.Event]() for name in weights}

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """Hold one slot of an adapter."""
        await self._enter(name)
        try:
            yield
        finally:
            self._exit(name)

    def leave(self, name: str) -> None:
        """The adapter is trained: the other adapters take over its share."""
        if len(self._weights) > 1:
            self._weights.pop(name, None)
            self._admit()

    async def _enter(self, name: str) -> None:
        """Wait until the adapter has a slot for one more request."""
        if len(self._running) == 1 and not self._waiting[name] and self._running[name] < max(self._capacity(), 1):
            self._running[name] += 1  # a single adapter needs no gate
            return
        turn = asyncio.Event()
        self._waiting[name].append(turn)
        self._admit()
        try:
            await turn.wait()
        except asyncio.CancelledError:
            if turn.is_set():  # it was admitted at that very moment
                self._exit(name)
            else:
                self._waiting[name].remove(turn)
            raise

    def _exit(self, name: str) -> None:
        self._running[name] -= 1
        assert self._running[name] >= 0, f"{name} left more slots than it had"
        if any(self._waiting.values()):
            self._admit()

    def _admit(self) -> None:
        of_trained = sum(running for name, running in self._running.items() if name not in self._weights)
        capacity = max(self._capacity() - of_trained, len(self._weights))
        gate = FairGate(capacity, self._weights)
        while (name := self._next(gate)) is not None:
            self._running[name] += 1
            self._waiting[name].popleft().set()

    def _next(self, gate: FairGate) -> str | None:
        """Adapter of the next request. Requests of a trained adapter, from an evaluation, have priority."""
        trained = next((n for n, turns in self._waiting.items() if turns and n not in self._weights), None)
        return trained or gate.next_adapter(
            {n: AdapterQueue(self._running[n], len(self._waiting[n])) for n in self._weights}
        )
