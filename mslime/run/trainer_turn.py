"""The queue at a trainer that threads share: whose turn it is, and what waits that may be done along with it.

Without it, one adapter's call would wait in the ranks behind another's step, and its deadline would run meanwhile.
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
    """Let what runs in this context, and in copies of it in other threads, be one owner of turns."""
    _OWNER.set(owner)


def _who() -> object:
    """The owner that calls: of the context, or else its thread."""
    return _OWNER.get() or threading.get_ident()


class Offer:
    """Work that whoever has the turn may do along with its own.

    Attributes:
        work: what that is.
        taken: somebody does it; who offered it does not get the turn for it.
    """

    def __init__(self, work: Any) -> None:
        self.work, self.taken = work, False
        self._done = threading.Event()
        self._found: Any = None
        self._error: BaseException | None = None

    def finish(self, found: Any) -> None:
        """Who took it has done it."""
        self._found = found
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """Who took it has not."""
        self._error = error
        self._done.set()

    def wait(self, on_wait: Callable[[], None]) -> Any:
        """What became of it, once it is taken. Raises what it failed with, or what `on_wait` raises."""
        while not self._done.wait(LOOK_EVERY_S):
            on_wait()
        if self._error is not None:
            raise self._error
        return self._found


@dataclass(eq=False)
class _Place:
    """In the line."""

    owner: object
    urgent: bool
    offer: Offer | None


class TrainerTurn:
    """A lock that is given in the order in which it was asked for; who has it may take it again."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line = list[_Place]()  # the next one first
        self._holder: object | None = None
        self._depth = 0

    @property
    def mine(self) -> bool:
        """Whether the caller has it."""
        return self._holder == _who()

    def take(self, urgent: bool = False, on_wait: Callable[[], None] | None = None, offer: Offer | None = None) -> None:
        """Wait for the turn.

        Args:
            urgent: before all that are not: for what is short, and keeps engines from their work.
            on_wait: called now and then meanwhile; what it raises ends the wait.
            offer: what the turn is wanted for. Where another takes it along, this returns without the turn.
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
                    return  # it is done whatever comes; who ends the wait says so again at the next rest
                self._line.remove(place)
                self._changed.notify_all()
            raise

    def offered(self, kind: type[object] = object) -> list[Offer]:
        """What those who wait for the turn offer, in their order. Who has the turn takes it with this call, and has to
        finish or fail each.

        Args:
            kind: of work; the rest waits on.
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
        """Give it back, as often as it was taken."""
        assert self.mine, "another has the turn"
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._holder = None
                self._changed.notify_all()

    def leave(self) -> None:
        """Give it back for good, however often it was taken; nothing where the caller has it not."""
        while self.mine:
            self.give()

    @contextmanager
    def held(
        self, urgent: bool = False, on_wait: Callable[[], None] | None = None, offer: Offer | None = None
    ) -> Iterator[None]:
        """The caller has the turn inside, or another does what it offers; see `take`."""
        self.take(urgent, on_wait, offer)
        try:
            yield
        finally:
            if offer is None or not offer.taken:
                self.give()

    def _got(self, place: _Place) -> bool:
        """Whether it is this one's turn, within a moment, which it has then; or what it offers is taken."""
        with self._changed:
            if place.offer is not None and place.offer.taken:
                return True
            if self._holder is None and self._line[0] is place:
                self._holder, self._depth = self._line.pop(0).owner, 1
                return True
            self._changed.wait(LOOK_EVERY_S)
            return False
