"""One of several rollout managers: it generates and scores the groups that it is handed, over its share of engines.

The front (`joined`) has what there is one of: prompts, ids, the gate, the ledger since the start. It asks, and a
manager answers: everything that either sends the other is here. Methods are coroutines, because the front may be in
another process (`control.remote`).
"""

from __future__ import annotations

import asyncio
import copy
import pickle
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mslime.config.model_facts import ModelFacts
from mslime.config.schema import RunConfig
from mslime.data.ledger import Ledger
from mslime.data.sample import Group
from mslime.data.tokenizer import Tokenizer
from mslime.rollout.books import due
from mslime.rollout.group_service import GroupService, Standing
from mslime.rollout.joined_books import Due, Share
from mslime.rollout.kept import trainable
from mslime.rollout.protocols import EngineLimits, Engines, Scorer, Teacher, living

REPORT_EVERY_S = 0.02
"""Between two answers of `Manager.moved`: a step of thousands of groups must not become as many messages."""
Span = tuple[str, str, float, float, int]


@dataclass(frozen=True)
class Report:
    """Where a manager stands.

    Attributes:
        serial: later reports have higher numbers.
        accepted, running: groups. done, aborted: responses of this step.
        wanted: new groups that it has room for, and nothing to continue.
        share: what the gate is divided by.
        failed: something failed, and waits to be raised.
    """

    serial: int
    accepted: int
    running: int
    done: int
    aborted: int
    wanted: int
    share: Share
    failed: bool


@dataclass(frozen=True)
class HandedOver:
    """A manager's groups of a step.

    Attributes:
        ledger: of the manager, afterwards.
        alive: trainable tokens counted in what it still holds.
        counts: `rollout/*` and `reward/errors` of the step.
        cached_tokens: prompt tokens that its engines had in their caches.
        spans: stretches of work since the last step.
    """

    groups: list[Group]
    ledger: Ledger
    alive: int
    counts: dict[str, float]
    cached_tokens: int
    spans: list[Span]


class Manager(GroupService):
    """Generates and scores the groups that it is handed; see `GroupService` for the arguments."""

    def __init__(
        self,
        config: RunConfig,
        engines: Engines,
        tokenizer: Tokenizer,
        scorer: Scorer,
        model: ModelFacts,
        limits: EngineLimits,
        *,
        teacher: Teacher | None = None,
        eval_scorers: Mapping[str, Scorer] | None = None,
    ) -> None:
        super().__init__(
            config, engines, tokenizer, scorer, model, limits, teacher, eval_scorers, None, self._keep_span
        )  # fmt: skip
        self.books.allowance = 0
        self._spans: list[Span] = []
        self._serial, self._told_at = 0, 0.0

    def _begin(self) -> None:
        """New groups come from the front, which is told how many are wanted."""

    def _keep_span(self, lane: str, name: str, start: float, end: float, step: int) -> None:
        self._spans.append((lane, name, start, end, step))

    # ------------------------------------------------------------------------------------------------- the step

    async def go_on(self, step: int, allowance: int) -> Report:
        """Work on `step`: at most `allowance` groups may be taken, accepted or running since the gate opened."""
        self._step, self.books.allowance = step, allowance
        self._go_on()
        self._runner.moved.set()
        return await self.report()

    async def moved(self) -> Report:
        """`report`, once a group has ended or something failed since the last answer. One caller at a time."""
        await self._runner.moved.wait()
        await asyncio.sleep(max(0.0, self._told_at + REPORT_EVERY_S - time.monotonic()))
        self._runner.moved.clear()
        self._told_at = time.monotonic()
        return await self.report()

    async def report(self) -> Report:
        """Where this manager stands now."""
        books, runner = self.books, self._runner
        self._serial += 1
        going = runner.traffic.open and runner.failure is None
        return Report(
            self._serial,
            len(books.accepted),
            len(books.running),
            books.counters.since_mark("done"),
            books.counters.since_mark("aborted"),
            max(0, books.room() - len(books.partial)) if going else 0,
            Share(books.ready, living(self._engines)),
            runner.failure is not None,
        )

    async def hand(self, groups: Sequence[Group]) -> None:
        """New groups, which rest until there is room for them."""
        self._take_in(groups)
        self._pump()

    async def accepted(self) -> list[Due]:
        """The groups that wait for the trainer."""
        return [due(group) for group in self.books.accepted]

    async def hand_over(self, step: int, ids: Collection[int]) -> HandedOver:
        """These accepted groups go to the trainer, for `step`; see `Books.take`."""
        groups, booked = self.books.take(step, ids)
        counts = {name: value for name, value in booked.items() if not name.startswith("ledger/")}
        spans, self._spans = self._spans, []
        cached, self._generator.cached_tokens = self._generator.cached_tokens, 0
        return HandedOver(groups, self.books.ledger.copy(), trainable(self.books.held()), counts, cached, spans)

    async def give_back(self, ids: Collection[int]) -> bool:
        """Undo the last `hand_over`; see `Books.give_back`. `ids`: of the blamed groups, if any are of this manager."""
        return self.books.give_back([group for group in self.books.taken if group.group_id in ids])

    async def end_failing(self) -> BaseException | None:
        """Come to rest, because some manager failed; what failed here, if anything did, which is forgotten then."""
        failure = self._runner.take_failure()
        await self._come_to_rest()
        return failure

    async def standing(self) -> Standing:
        """What is told of a step that is late."""
        return self._standing()

    async def resume_with(self, version: int, allowance: int | None) -> None:
        """`resume_after_update`, with a new allowance (see `go_on`) where the gate is open."""
        if allowance is not None:
            self.books.allowance = allowance
        await self.resume_after_update(version)
        self._runner.moved.set()

    # ---------------------------------------------------------------------------------------------------- state

    async def continue_with(self, version: int, accepted: Sequence[Group], resting: Sequence[Group]) -> None:
        """Hold these groups, before anything was begun."""
        self.version = version
        self._take_in(accepted, accepted=True)
        self._take_in(resting)

    async def kept(self, next_step: int | None, interrupt: bool) -> bytes:
        """What a state holds of this manager, a `Kept`, pickled at once: its groups go on changing.

        Args:
            interrupt: with the tokens that engines hold at this moment, which go on afterwards. Raises EngineError.
        """
        was_open = self._runner.traffic.open
        if interrupt:
            await self.drain()
        kept = pickle.dumps(self.books.kept(next_step), pickle.HIGHEST_PROTOCOL)
        if interrupt and was_open:
            self._go_on()
        return kept

    async def begun(self) -> bytes:
        """What an outline holds of this manager, a `Begun`, pickled likewise."""
        return pickle.dumps(self.books.begun(), pickle.HIGHEST_PROTOCOL)

    def _take_in(self, groups: Sequence[Group], accepted: bool = False) -> None:
        """The groups are copied: what comes from another process cannot be written to."""
        for group in groups:
            self.books.hand(copy.deepcopy(group), accepted)
