"""The books of several managers as one: what is begun, what a step takes, what became of every token.

Each manager keeps books of its own groups. Here is what there is one of: the division of the gate, the choice of a
step's groups, the ledger since the start of the run. Pure arithmetic over what managers tell, as `books` is, so that
the two can be compared event by event.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mslime.config.schema import RunConfig
from mslime.data.ledger import Ledger
from mslime.rollout.books import SubmitGate
from mslime.rollout.kept import Begun, Continued, Kept, State, outline_of, state_of

Due = tuple[int, int]
"""Of an accepted group: when it is trained (`books.due`); the second number is its id."""


@dataclass(frozen=True)
class ManagerShare:
    """Where a manager stands when the gate is divided.

    Attributes:
        ready: its groups that were taken since the gate opened, or are accepted.
        engines: that are alive.
    """

    ready: int
    engines: int


def dealt(groups: int, unfinished: Sequence[int], engines: Sequence[int]) -> list[int]:
    """How many of `groups` new groups each manager is given: one after the other to the one with the fewest unfinished
    groups for each living engine. A manager without engines is given none.

    Args:
        unfinished: groups that each manager has been given and not finished; below 0 where it holds finished ones that
            were never given. engines: that live, of each.
    """
    assert any(engines), "no manager has a living engine"
    queue = [
        (held / alive, index) for index, (held, alive) in enumerate(zip(unfinished, engines, strict=True)) if alive
    ]
    heapq.heapify(queue)
    given = [0] * len(engines)
    for _ in range(groups):
        load, index = queue[0]
        given[index] += 1
        heapq.heapreplace(queue, (load + 1 / engines[index], index))
    return given


class JoinedBooks:
    """Several managers' books.

    Args:
        config: `rollout` is read, and what follows from it.

    Attributes:
        version: weight version that all engines serve.
        next_group_id: groups that were begun.
        allowances: groups that each manager may take, accept and run since the gate opened.
    """

    def __init__(self, config: RunConfig, managers: int) -> None:
        self._gate, self._groups_per_step = SubmitGate.of(config), config.rollout.groups_per_step
        self._base_version: int | None = None
        self._settled = Ledger()  # tokens whose fate was known before the managers began
        self._counted = Counter[str]()  # before they did
        self._mark, self._mark_before = dict[str, int](), dict[str, int]()  # of the last two steps
        self.version = self.next_group_id = 0
        self.allowances = [0] * managers

    # ------------------------------------------------------------------------------------------------------ the gate

    @property
    def is_open(self) -> bool:
        """Whether the gate was opened."""
        return self._base_version is not None

    def allow(self, shares: Sequence[ManagerShare]) -> list[int]:
        """Divide what the gate allows more than it did; returns `allowances`. It opens at the first time."""
        if self._base_version is None:
            self._base_version = self.version
        more = self._gate.limit(self.version - self._base_version) - sum(self.allowances)
        unfinished = [allowed - share.ready for allowed, share in zip(self.allowances, shares, strict=True)]
        engines = [share.engines for share in shares]
        if not any(engines):  # whoever asks them for anything is told so
            engines = [1] * len(shares)
        given = dealt(more, unfinished, engines)
        self.allowances = [allowed + new for allowed, new in zip(self.allowances, given, strict=True)]
        return self.allowances

    # -------------------------------------------------------------------------------------------------------- a step

    def choose(self, accepted: Iterable[Iterable[Due]]) -> list[set[int]]:
        """The ids that a step takes from each manager: as `Books.take`, those with the oldest tokens first, whoever has
        them."""
        every = sorted((due, manager) for manager, of_one in enumerate(accepted) for due in of_one)
        chosen = [set[int]() for _ in self.allowances]
        for (_, group_id), manager in every[: self._groups_per_step]:
            chosen[manager].add(group_id)
        return chosen

    def taken(self, ledgers: Sequence[Ledger], alive: int) -> dict[str, float]:
        """Close a step's books; returns `ledger/*`.

        Args:
            ledgers: of all managers, after they have handed the step's groups over.
            alive: trainable tokens counted in everything that they still hold.
        """
        ledger = self.ledger(ledgers)
        moved = ledger.settle(alive)
        self._mark_before, self._mark = self._mark, ledger.marked()
        return {f"ledger/{name}": float(value) for name, value in moved.items()}

    def given_back(self) -> None:
        """The managers have undone what they handed over last."""
        self._mark = self._mark_before

    def ledger(self, ledgers: Sequence[Ledger]) -> Ledger:
        """The fate of every token of the run, from those of all managers."""
        return Ledger.joined([self._settled, *ledgers], self._mark)

    # -------------------------------------------------------------------------------------------------------- state

    def continue_from(self, saved: Continued) -> None:
        """Begin with what was saved, whose groups the managers are handed."""
        self._settled, self._mark = saved.ledger.without_pending(), saved.ledger.marked()
        self._counted = Counter(saved.counters)
        self.version, self.next_group_id = saved.version, saved.next_group_id

    def state(self, parts: Sequence[Kept]) -> State:
        """What a state file holds, from what all managers keep."""
        ledger = self.ledger([part.ledger for part in parts])
        if any(part.untrained for part in parts):
            ledger = ledger.before_training(0, self._mark_before)
        return state_of(parts, ledger, self._total(p.counters for p in parts), self.version, self.next_group_id)

    def outline(self, parts: Sequence[Begun]) -> State:
        """What an outline holds, from what all managers have begun."""
        ledger = self.ledger([part.ledger for part in parts])
        return outline_of(parts, ledger, self._total(p.counters for p in parts), self.version, self.next_group_id)

    def _total(self, parts: Iterable[dict[str, int]]) -> dict[str, int]:
        total = Counter(self._counted)
        for part in parts:
            total.update(part)
        return dict(total)
