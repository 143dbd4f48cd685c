"""Engine slots shared by several adapters: each request takes one, in the order of `FairGate`.

A request waits for its slot before it is composed, so waiting requests have nothing at an engine to abort.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType

from mslime.rollout.fair_gate import FairGate, InLine


class SharedRoom:
    """All engine slots of a run. Belongs to one event loop.

    Args:
        capacity: requests that all engines run at once; called each time, since engines come and go.
        weights: of each adapter, by name; above 0.
    """

    def __init__(self, capacity: Callable[[], int], weights: Mapping[str, float]) -> None:
        self._capacity, self._weights = capacity, dict(weights)
        self._running = dict.fromkeys(weights, 0)
        self._waiting = {name: deque[asyncio.Event]() for name in weights}

    def of(self, name: str) -> Places:
        """The slots of one adapter."""
        assert name in self._running, f"no adapter {name}"
        return Places(self, name)

    def leave(self, name: str) -> None:
        """The adapter is trained: the other adapters take over its share."""
        if len(self._weights) > 1:
            self._weights.pop(name, None)
            self._admit()

    async def enter(self, name: str) -> None:
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
                self.exit(name)
            else:
                self._waiting[name].remove(turn)
            raise

    def exit(self, name: str) -> None:
        """A request of the adapter has ended."""
        self._running[name] -= 1
        assert self._running[name] >= 0, f"{name} left more places than it had"
        if any(self._waiting.values()):
            self._admit()

    def _admit(self) -> None:
        capacity = max(self._capacity() - self._of_trained(), len(self._weights))
        gate = FairGate(capacity, self._weights)
        while (name := self._next(gate)) is not None:
            self._running[name] += 1
            self._waiting[name].popleft().set()

    def _next(self, gate: FairGate) -> str | None:
        """Adapter of the next request. Those of a trained adapter, from an evaluation, have priority."""
        trained = next((n for n, turns in self._waiting.items() if turns and n not in self._weights), None)
        return trained or gate.next_in_line({n: InLine(self._running[n], len(self._waiting[n])) for n in self._weights})

    def _of_trained(self) -> int:
        return sum(running for name, running in self._running.items() if name not in self._weights)


class Places:
    """Context manager that holds one slot; may be entered concurrently any number of times."""

    def __init__(self, room: SharedRoom, name: str) -> None:
        self._room, self._name = room, name

    async def __aenter__(self) -> None:
        await self._room.enter(self._name)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._room.exit(self._name)
