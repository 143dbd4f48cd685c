"""Several rollout managers as one service: the front, which has what there is one of.

It draws prompts and hands them out, divides the gate, chooses a step's groups over all managers, adds the ledgers up,
and writes one state file, from which any number of managers continues. Whoever has the service cannot tell how many
managers there are. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, TypeVar

from mslime.backends.sglang.pool import all_or_first_failure
from mslime.config.data import EvalSetConfig
from mslime.config.errors import UserError
from mslime.config.schema import RunConfig
from mslime.data.checksums import FileSum
from mslime.data.sample import Group
from mslime.data.source import PromptStream
from mslime.rollout.asked import Asked
from mslime.rollout.books import Books, new_group
from mslime.rollout.evaluate import EvalResult, summarise
from mslime.rollout.group_service import Standing
from mslime.rollout.joined_books import JoinedBooks, Share
from mslime.rollout.kept import Begun, Kept
from mslime.rollout.manager import HandedOver, Manager, Report
from mslime.rollout.protocols import EvaluatedHook, ProgressHook, SpanHook, StepBatch
from mslime.rollout.service import Clock, next_prompt, too_late
from mslime.rollout.state import open_state, save_beside, state_bytes
from mslime.rollout.statistics import batch_metrics

T = TypeVar("T")
V = TypeVar("V")
ANSWER_S = 10.0
"""For managers to say where they stand, when a step is late."""
_NOT_ASKED = Report(-1, 0, 0, 0, 0, 0, Share(0, 0), False)


class JoinedService:
    """The service that several managers make together; see `RolloutService`, whose verbs these are.

    Args:
        source: training prompts.
        longest_input: prompts of so many tokens, or more, leave no room for a response.
        taught: a served teacher scores responses.
        on_progress, on_span: told about group counts and about stretches of work.
        on_evaluated: given the finished groups of a held-out set.

    Attributes:
        books: of all managers.
    """

    def __init__(
        self,
        config: RunConfig,
        managers: Sequence[Asked[Manager]],
        source: PromptStream,
        longest_input: int,
        *,
        taught: bool = False,
        on_progress: ProgressHook | None = None,
        on_span: SpanHook | None = None,
        on_evaluated: EvaluatedHook | None = None,
    ) -> None:
        self._config, self._managers, self._source = config, list(managers), source
        self._longest_input, self._taught = longest_input, taught
        self._on_progress, self._on_span, self._on_evaluated = on_progress, on_span, on_evaluated
        self.books = JoinedBooks(config, len(self._managers))
        self._works_ahead = config.rollout.max_staleness > 0
        self._reports = [_NOT_ASKED] * len(self._managers)
        self._watching: list[asyncio.Task[None]] = []
        self._moved = asyncio.Event()
        self._handing = asyncio.Lock()  # held while a prompt is in no manager's books
        self._failure: BaseException | None = None
        self._chosen = [set[int]() for _ in self._managers]  # ids of the groups that were taken last, by manager
        self._step, self._clock = 0, Clock()

    @property
    def version(self) -> int:
        """Weight version that the engines serve and the trainer holds."""
        return self.books.version

    @version.setter
    def version(self, version: int) -> None:
        self.books.version = version

    # ------------------------------------------------------------------------------------------------- the step

    async def take(self, step: int) -> StepBatch:
        """See `RolloutService.take`."""
        self._step, started = step, time.time()
        limit = asyncio.timeout(self._config.deadlines.rollout_step_s)
        try:
            async with limit:
                await self._go_on()
                await self._enough()
                if not self._works_ahead:
                    await self._all(lambda manager: manager.ask(Manager.drain))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise too_late(step, self._config, await self._standing()) from error
        self._chosen = self.books.choose(await self._all(lambda manager: manager.ask(Manager.accepted)))
        parts = await self._each(self._chosen, lambda manager, ids: manager.ask(Manager.hand_over, step, ids))
        self._span("rollout", "collect", started)
        return self._batch(step, parts)

    async def give_back(self, blamed: Sequence[Group] = ()) -> bool:
        """See `RolloutService.give_back`."""
        ids = {group.group_id for group in blamed}
        theirs = [ids & chosen for chosen in self._chosen]
        dropped = await self._each(theirs, lambda manager, mine: manager.ask(Manager.give_back, mine))
        self.books.given_back()
        return bool(ids) and all(gone for gone, mine in zip(dropped, theirs, strict=True) if mine)

    async def pause_for_update(self) -> None:
        """See `GroupService.pause_for_update`."""
        await self._all(lambda manager: manager.ask(Manager.pause_for_update))

    async def resume_after_update(self, version: int) -> None:
        """See `GroupService.resume_after_update`."""
        self.books.version = version
        allowances: Sequence[int | None] = [None] * len(self._managers)
        if self._works_ahead or self.books.is_open:
            allowances = await self._allowances()
            self._watch()
        await self._each(allowances, lambda manager, allowance: manager.ask(Manager.resume_with, version, allowance))

    async def evaluate(self, eval_set: EvalSetConfig) -> EvalResult:
        """See `RolloutService.evaluate`: row i is answered, and scored, by manager i modulo their number."""
        started, step, every = time.time(), self._step, len(self._managers)
        try:
            async with asyncio.TaskGroup() as tasks:
                parts = [
                    tasks.create_task(manager.ask(Manager.answer_rows, eval_set, first=index, every=every))
                    for index, manager in enumerate(self._managers)
                ]
        except ExceptionGroup as errors:  # the first failure cancelled the others
            raise errors.exceptions[0] from None
        groups = sorted((group for part in parts for group in part.result()), key=_id)
        self._span("rollout", "evaluate", started, step)
        if self._on_evaluated is not None:
            self._on_evaluated(eval_set.name, groups)
        return summarise(eval_set.name, groups, time.time() - started)

    async def close(self) -> None:
        """Stop generating, whatever it loses at the engines. What is held may still be saved."""
        async with self._handing:
            for task in self._watching:
                task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        with suppress(UserError):  # of one that is gone
            await self._all(lambda manager: manager.ask(Manager.close))

    def _batch(self, step: int, parts: Sequence[HandedOver]) -> StepBatch:
        """The groups of a step, with the numbers of all managers together."""
        groups = sorted((group for part in parts for group in part.groups), key=_id)
        booked = self.books.taken([part.ledger for part in parts], sum(part.alive for part in parts))
        counts = {name: sum(part.counts[name] for part in parts) for name in parts[0].counts}
        for span in (span for part in parts for span in part.spans):
            if self._on_span is not None:
                self._on_span(*span)
        flow = self._clock.flow(booked, self._source.skipped, sum(part.cached_tokens for part in parts))
        metrics = {**batch_metrics(groups, self.version), **booked, **counts, **flow}
        return StepBatch(step, self.version, groups, metrics)

    # ---------------------------------------------------------------------------------------------------- state

    async def save(self, path: Path, next_step: int | None = None) -> FileSum:
        """See `RolloutService.save`."""
        return await self._save(path, next_step, interrupt=False)

    async def checkpoint(self, path: Path, next_step: int | None = None) -> FileSum:
        """See `RolloutService.checkpoint`."""
        return await self._save(path, next_step, interrupt=True)

    async def outline(self) -> bytes:
        """See `RolloutService.outline`."""
        async with self._handing:
            parts = await self._all(lambda manager: manager.ask(Manager.begun))
            begun: list[Begun] = [pickle.loads(part) for part in parts]
            header, columns = self.books.begun(begun).state(self.version, self.books.next_group_id)
            return state_bytes(header | {"source": self._source.state_dict()}, columns)

    async def load(self, path: Path) -> None:
        """See `RolloutService.load`. Groups are dealt to the managers in order of their ids."""
        books = Books(self._config, self._taught)
        with open_state(path) as (header, stored):
            self._source.load_state_dict(header["source"])
            books.load_state_dict(header, stored)
        self.books.continue_from(books)
        accepted, resting = (sorted(groups, key=_id) for groups in (books.accepted, books.partial))
        every = len(self._managers)
        await self._each(
            range(every),
            lambda manager, i: manager.ask(Manager.continue_with, books.version, accepted[i::every], resting[i::every]),
        )

    async def _save(self, path: Path, next_step: int | None, interrupt: bool) -> FileSum:
        async with self._handing:
            parts = await self._all(lambda manager: manager.ask(Manager.kept, next_step, interrupt))
            kept: list[Kept] = [pickle.loads(part) for part in parts]
            header, columns = self.books.kept(kept).state(self.version, self.books.next_group_id)
            return await save_beside(path, header | {"source": self._source.state_dict()}, columns)

    # ------------------------------------------------------------------------------------------------ submission

    async def _go_on(self) -> None:
        """Let all managers work on the step."""
        allowances, step = await self._allowances(), self._step
        self._watch()
        reports = await self._each(allowances, lambda manager, allowance: manager.ask(Manager.go_on, step, allowance))
        for index, report in enumerate(reports):
            self._note(index, report)

    async def _allowances(self) -> list[int]:
        """The gate, divided for the weights that the engines serve now."""
        reports = await self._all(lambda manager: manager.ask(Manager.report))
        return self.books.allow([report.share for report in reports])

    def _watch(self) -> None:
        if not self._watching:
            self._watching = [
                asyncio.create_task(self._follow(index), name=f"manager {index}")
                for index in range(len(self._managers))
            ]

    async def _follow(self, index: int) -> None:
        """Remember where a manager stands, and hand it the prompts that it asks for. Ends with the manager."""
        try:
            while True:
                report = await self._managers[index].ask(Manager.moved)
                self._note(index, report)
                if report.wanted and self._failure is None:
                    await self._hand(index, report.wanted)
        except Exception as error:  # whatever it is: `take` raises it
            self._fail(error)

    async def _hand(self, index: int, count: int) -> None:
        """New groups for a manager: as many as there are prompts for."""
        async with self._handing:
            groups: list[Group] = []
            try:
                groups += (self._new_group() for _ in range(count))
            except UserError as error:
                self._fail(error)
            await self._managers[index].ask(Manager.hand, groups)

    def _new_group(self) -> Group:
        prompt = next_prompt(self._source, self._longest_input)
        self.books.next_group_id += 1
        return new_group(self.books.next_group_id - 1, prompt, self._config.rollout.group_size)

    def _note(self, index: int, report: Report) -> None:
        """Remember a report, if no later one came before it."""
        if report.serial < self._reports[index].serial:
            return
        self._reports[index] = report
        self._moved.set()
        if self._on_progress is not None:
            every = self._reports
            self._on_progress(
                needed=self._config.rollout.groups_per_step,
                accepted=sum(r.accepted for r in every),
                running=sum(r.running for r in every),
                done=sum(r.done for r in every),
                aborted=sum(r.aborted for r in every),
            )

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._moved.set()

    # ------------------------------------------------------------------------------------------------- waiting

    async def _enough(self) -> None:
        """Return when a step's groups are accepted, over all managers. Raises what failed meanwhile, once all is at
        rest."""
        while True:
            self._moved.clear()
            if self._failure is not None or any(report.failed for report in self._reports):
                raise await self._end_failing()
            if sum(report.accepted for report in self._reports) >= self._config.rollout.groups_per_step:
                return
            await self._moved.wait()

    async def _end_failing(self) -> BaseException:
        """The first failure, once all managers are at rest. It is forgotten then."""
        failure, self._failure = self._failure, None
        answers = await asyncio.gather(*(m.ask(Manager.end_failing) for m in self._managers), return_exceptions=True)
        found = next((error for error in (failure, *answers) if error is not None), None)
        assert found is not None, "a manager reported a failure, and none has one"
        return found

    async def _standing(self) -> Standing:
        """Of all managers that answer."""
        asked = [asyncio.ensure_future(manager.ask(Manager.standing)) for manager in self._managers]
        answered, silent = await asyncio.wait(asked, timeout=ANSWER_S)
        for task in silent:
            task.cancel()
        found = [astuple(task.result()) for task in answered if task.exception() is None]
        return Standing(*map(sum, zip((0,) * len(fields(Standing)), *found, strict=True)))

    async def _all(self, call: Callable[[Asked[Manager]], Coroutine[Any, Any, T]]) -> list[T]:
        """One call to all managers at once. The first failure is raised, after all have answered."""
        return await self._each(self._managers, lambda manager, _: call(manager))

    async def _each(self, values: Sequence[V], call: Callable[[Asked[Manager], V], Coroutine[Any, Any, T]]) -> list[T]:
        """`_all`, with a value for each."""
        pairs = zip(self._managers, values, strict=True)
        answers = await asyncio.gather(*(call(manager, value) for manager, value in pairs), return_exceptions=True)
        return all_or_first_failure(answers)

    def _span(self, lane: str, name: str, start: float, step: int | None = None) -> None:
        if self._on_span is not None:
            self._on_span(lane, name, start, time.time(), self._step if step is None else step)


def _id(group: Group) -> int:
    return group.group_id
