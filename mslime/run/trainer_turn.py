"""The queue for a trainer that threads share: its holder, and waiting work that may be combined with the holder's.

Without it, one adapter's call would wait in the ranks behind another's step while its own deadline runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

LOOK_EVERY_S = 0.2


_OWNER: ContextVar[object | None] = ContextVar("owner of a turn", default=None)


def become(owner: object) -> None:
    """Make code in this context, and in copies of it in other threads, one owner of turns."""
    _OWNER.set(owner)


def _who() -> object:
    """The calling owner: that of the context, or else its thread."""
    return _OWNER.get() or threading.get_ident()


class Offer:
    """Work that the holder of the turn may do along with its own.

    Attributes:
        work: the work itself.
        taken: another owner does it; the offering one then does not get the turn for it.
    """

    def __init__(self, work: Any) -> None:
        self.work, self.taken = work, False
        self._done = threading.Event()
        self._found: Any = None
        self._error: BaseException | None = None

    def finish(self, found: Any) -> None:
        """Store the result; called by the owner that took it."""
        self._found = found
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """Store an error; called by the owner that took it."""
        self._error = error
        self._done.set()

    def wait(self, on_wait: Callable[[], None]) -> Any:
        """Result of the work, once it is taken. Raises its error, or an error of `on_wait`."""
        while not self._done.wait(LOOK_EVERY_S):
            on_wait()
        if self._error is not None:
            raise self._error
        return self._found


@dataclass(eq=False)
class _Place:
    """An entry of the queue."""

    owner: object
    urgent: bool
    offer: Offer | None


class TrainerTurn:
    """A lock in the order of its requests; its holder may take it again."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line = list[_Place]()  # the next one first
        self._holder: object | None = None
        self._depth = 0

    @property
    def mine(self) -> bool:
        """Whether the caller holds the turn."""
        return self._holder == _who()

    def take(self, urgent: bool = False, on_wait: Callable[[], None] | None = None, offer: Offer | None = None) -> None:
        """Wait for the turn.

        Args:
            urgent: before all others that are not: for short calls that keep engines waiting.
            on_wait: called now and then meanwhile; an error of it ends the wait.
            offer: the work for this turn. If another owner takes it, this returns without the turn.
        """
        place = _Place(_who(), urgent, offer)
        with self._changed:
            if self._holder == place.owner:
                self._depth += 1
                return
            before = sum(each.urgent for each in self._line) if urgent else len(self._line)
            self._line.insert(before, place)
        try:
            while not self._got(place):
                if on_wait is not None:
                    on_wait()
        except BaseException:
            with self._changed:
                if offer is not None and offer.taken:
                    return  # it is done in any case; the condition that ends the wait is raised again at the next rest
                self._line.remove(place)
                self._changed.notify_all()
            raise

    def offered(self, kind: type[object] = object) -> list[Offer]:
        """Work offered by waiting owners, in their order. The holder takes it with this call, and must finish or fail
        each.

        Args:
            kind: of work; other offers keep waiting.
        """
        assert self.mine, "another has the turn"
        with self._changed:
            found = [place.offer for place in self._line if place.offer and isinstance(place.offer.work, kind)]
            self._line = [place for place in self._line if place.offer not in found]
            for offer in found:
                offer.taken = True
            self._changed.notify_all()
        return found

    def give(self) -> None:
        """Release the turn; needed as often as it was taken."""
        assert self.mine, "another has the turn"
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._holder = None
                self._changed.notify_all()

    def leave(self) -> None:
        """Release the turn completely, however often it was taken; nothing if the caller does not hold it."""
        while self.mine:
            self.give()

    @contextmanager
    def held(
        self, urgent: bool = False, on_wait: Callable[[], None] | None = None, offer: Offer | None = None
    ) -> Iterator[None]:
        """Context in which the caller holds the turn, or another owner does its offered work; see `take`."""
        self.take(urgent, on_wait, offer)
        try:
            yield
        finally:
            if offer is None or not offer.taken:
                self.give()

    def _got(self, place: _Place) -> bool:
        """Wait a moment; whether this entry then has the turn, or its offer was taken."""
        with self._changed:
            if place.offer is not None and place.offer.taken:
                return True
            if self._holder is None and self._line[0] is place:
                self._holder, self._depth = self._line.pop(0).owner, 1
                return True
            self._changed.wait(LOOK_EVERY_S)
            return False
