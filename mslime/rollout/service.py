"""The rollout service: one asyncio loop that serves synchronous, one-step-ahead and fully asynchronous training.

With `max_staleness` 0 it generates only inside `take`, and interrupts the remaining groups when a step is complete.
With `max_staleness` > 0 it stops generation only for weight updates. Managers (`manager`) generate and score, one in
this process or several in their own. The service draws and distributes prompts, divides the gate, chooses a step's
groups over all managers, and sums the ledgers. It writes one state file, from which any number of managers can
continue.

The service is independent of Ray and Megatron. All its methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from mslime.backends.sglang.engine_pool import all_or_first_failure
from mslime.config.data import EvalSetConfig
from mslime.config.errors import DataError, EngineError, UserError
from mslime.config.rollout import RolloutConfig
from mslime.data.checkpoints import FileSum
from mslime.data.sample import Group, Sample
from mslime.data.source import PromptStream
from mslime.rollout.group_tracker import JoinedTrackers, continued, new_group
from mslime.rollout.manager import Manager, ManagerReport, ManagerStatus, TakenGroups, concurrently
from mslime.rollout.state import open_state, save_beside, state_bytes
from mslime.rollout.step_metrics import EvalResult, batch_metrics, summarise

T = TypeVar("T")
V = TypeVar("V")
ANSWER_S = 10.0
"""Time limit for the managers' reports when a step is late."""
_NOT_ASKED = ManagerReport(-1, 0, 0, 0, 0, 0, 0, 0, False)


@dataclass(frozen=True)
class StepBatch:
    """The groups of one training step.

    Attributes:
        version: the trainer's weight version when they were taken.
        metrics: `reward/*`, `rollout/*`, `staleness/*` and `ledger/*` of the step.
    """

    step: int
    version: int
    groups: list[Group]
    metrics: dict[str, float]

    @property
    def samples(self) -> list[Sample]:
        """All samples of all groups, in order."""
        return [s for g in self.groups for s in g.samples]


# Calls to an object's methods, independent of its process: this one here, another one in `run.ray_calls`.

T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
P = ParamSpec("P")


class Handle(Protocol[T_co]):
    """`await manager.ask(Manager.report)`, with the argument and result types of the method."""

    async def ask(self, method: Callable[Concatenate[T_co, P], Awaitable[R]], *args: P.args, **options: P.kwargs) -> R:
        """Call the method: return its result or raise its error."""
        ...


class LocalHandle(Generic[T]):
    """An object of this process."""

    def __init__(self, it: T) -> None:
        self.it = it

    async def ask(self, method: Callable[Concatenate[T, P], Awaitable[R]], *args: P.args, **options: P.kwargs) -> R:
        return await getattr(self.it, method.__name__)(*args, **options)


class RolloutService:
    """Distributes groups to managers that generate and score them.

    Args:
        step_limit_s: time limit for completing the groups of a step.
        source: training prompts.
        longest_input: prompts of this many tokens, or more, leave no room for a response.
        has_teacher: a served teacher scores responses.
        on_progress: called whenever groups move: (groups that a step needs, accepted, running, responses that ended in
            this step, responses interrupted in it).
        on_span: called with every timeline span: (lane, name, start, end, step), in seconds since the epoch.
        on_evaluated: called with a held-out set's name and its scored groups, which the service does not use
            afterwards.

    Attributes:
        joined: the tracker of all managers together.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        step_limit_s: float,
        managers: Sequence[Handle[Manager]],
        source: PromptStream,
        longest_input: int,
        *,
        has_teacher: bool = False,
        on_progress: Callable[[int, int, int, int, int], None] = lambda *counts: None,
        on_span: Callable[[str, str, float, float, int], None] = lambda *span: None,
        on_evaluated: Callable[[str, Sequence[Group]], None] = lambda name, groups: None,
    ) -> None:
        self._managers, self._source = list(managers), source
        self._group_size, self._groups_per_step = rollout.group_size, rollout.groups_per_step
        self._step_limit_s = step_limit_s
        self._longest_input, self._has_teacher = longest_input, has_teacher
        self._on_progress, self._on_span, self._on_evaluated = on_progress, on_span, on_evaluated
        self.joined = JoinedTrackers(rollout, len(self._managers))
        self._works_ahead = rollout.max_staleness > 0
        self._reports = [_NOT_ASKED] * len(self._managers)
        self._watching: list[asyncio.Task[None]] = []
        self._moved = asyncio.Event()
        self._handing = asyncio.Lock()  # held while a prompt is in no manager's tracker
        self._failure: BaseException | None = None
        self._chosen = [set[int]() for _ in self._managers]  # ids of the groups that were taken last, by manager
        self._step, self._step_began = 0, time.monotonic()

    @property
    def version(self) -> int:
        """Weight version that the engines serve and the trainer holds."""
        return self.joined.version

    @version.setter
    def version(self, version: int) -> None:
        self.joined.version = version

    # ------------------------------------------------------------------------------------------------- the step

    async def take(self, step: int) -> StepBatch:
        """Wait for `groups_per_step` groups and hand them over for training.

        With `max_staleness` 0 everything else is interrupted and kept for the next step. A call that fails or is
        cancelled takes nothing: finished groups wait for the next one.

        Raises:
            UserError: a failure in the background (EngineError, RewardError, DataError ...).
            EngineError: not enough groups within `deadlines.rollout_step_s`.
        """
        self._step, started = step, time.time()
        limit = asyncio.timeout(self._step_limit_s)
        try:
            async with limit:
                allowances = await self._allowances()
                self._watch()
                self._note_all(
                    await self._each(allowances, lambda manager, mine: manager.ask(Manager.go_on, step, mine))
                )
                await self._enough()
                if not self._works_ahead:
                    await self._all(Manager.drain)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise await self._too_late() from error
        self._chosen = self.joined.choose(await self._all(Manager.accepted))
        parts = await self._each(self._chosen, lambda manager, ids: manager.ask(Manager.take, step, ids))
        self._note_all(await self._all(Manager.report))
        self._span("rollout", "collect", started)
        return self._batch(step, parts)

    async def give_back(self, blamed: Sequence[Group] = ()) -> bool:
        """Undo the last `take`: its groups wait for the next one.

        Args:
            blamed: groups that cannot be trained. A blamed group that failed before is dropped.

        Returns:
            Whether all blamed groups were dropped, so another `take` can proceed without them.
        """
        ids = {group.group_id for group in blamed}
        theirs = [ids & chosen for chosen in self._chosen]
        dropped = await self._each(theirs, lambda manager, mine: manager.ask(Manager.give_back, mine))
        self.joined.given_back()
        return bool(ids) and all(gone for gone, mine in zip(dropped, theirs, strict=True) if mine)

    async def pause_for_update(self) -> None:
        """Hold the engines for a weight update; see `Manager.pause_for_update`."""
        await self._all(Manager.pause_for_update)

    async def resume_after_update(self, version: int) -> None:
        """Continue with weights of `version`; see `Manager.resume_after_update`."""
        self.joined.version = version
        allowances: Sequence[int | None] = [None] * len(self._managers)
        if self._works_ahead or self.joined.base_version is not None:
            allowances = await self._allowances()
            self._watch()
        await self._each(allowances, lambda manager, mine: manager.ask(Manager.resume_after_update, version, mine))

    async def evaluate(self, eval_set: EvalSetConfig) -> EvalResult:
        """Accuracy, pass@k and lengths on a held-out set, with the weights that the engines serve now. Manager i modulo
        their number generates and scores row i.

        May run beside everything except a weight update, which must wait for it.

        Raises DataError for a bad file, EngineError if no engine is left, RewardError according to `reward.on_error`.
        """
        started, step, every = time.time(), self._step, len(self._managers)
        parts = await concurrently(
            manager.ask(Manager.answer_rows, eval_set, first=index, every=every)
            for index, manager in enumerate(self._managers)
        )
        groups = sorted((group for part in parts for group in part), key=_id)
        self._span("rollout", "evaluate", started, step)
        self._on_evaluated(eval_set.name, groups)
        return summarise(eval_set.name, groups, time.time() - started)

    async def close(self) -> None:
        """Stop generating; data at the engines is lost. The groups held here can still be saved."""
        async with self._handing:
            for task in self._watching:
                task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        with suppress(UserError):  # of a manager that has ended
            await self._all(Manager.close)

    def _batch(self, step: int, parts: Sequence[TakenGroups]) -> StepBatch:
        """The groups of a step, with the numbers of all managers together."""
        groups = sorted((group for part in parts for group in part.groups), key=_id)
        booked = self.joined.taken([part.ledger for part in parts], sum(part.alive for part in parts))
        counts = {name: sum(part.counts[name] for part in parts) for name in parts[0].counts}
        for span in (span for part in parts for span in part.spans):
            self._on_span(*span)
        metrics = {**batch_metrics(groups, self.version), **booked, **counts}
        metrics["data/skipped_rows"] = float(self._source.skipped)
        metrics["rollout/cached_tokens"] = float(sum(part.cached_tokens for part in parts))
        now = time.monotonic()
        seconds, self._step_began = now - self._step_began, now
        if generated := booked["ledger/generated_tokens"]:  # else all was ready: no measure of the engines
            metrics["rollout/tokens_per_s"] = generated / max(seconds, 1e-9)
        return StepBatch(step, self.version, groups, metrics)

    # ---------------------------------------------------------------------------------------------------- state

    async def save(self, path: Path, next_step: int | None = None, interrupt: bool = False) -> FileSum:
        """Write the service's state atomically to `path` (.npz without pickle); returns the file's checksum.

        Args:
            next_step: first step of a resumed run; its groups are included even if they are taken already.
            interrupt: include tokens at the engines: interrupts generation, and continues it during the write.
        """
        async with self._handing:
            parts = await self._all(Manager.kept, next_step, interrupt)
            header, columns = self.joined.state(parts)
            header |= {"source": self._source.state_dict()}
        return await save_beside(path, header, columns)

    async def outline(self) -> bytes:
        """A small state file for the case that this service is lost: untrained groups begin again from their prompts.
        Valid for a checkpoint after the step taken last."""
        async with self._handing:
            parts = await self._all(Manager.begun)
            header, columns = self.joined.state(parts)
            return state_bytes(header | {"source": self._source.state_dict()}, columns)

    async def load(self, path: Path) -> None:
        """Continue from a file of `save` or `outline`, before the first `take`. Groups are dealt to the managers in
        order of their ids. Raises CheckpointError if it cannot be read, DataError if the prompts differ."""
        with open_state(path) as (header, stored):
            self._source.load_state_dict(header["source"])
            saved = continued(header, stored, has_teacher=self._has_teacher)
            self.joined.continue_from(saved)
            every, version = len(self._managers), saved.version
            accepted, resting = (sorted(groups, key=_id) for groups in (saved.accepted, saved.resting))
            await self._each(
                range(every),
                lambda manager, i: manager.ask(Manager.continue_with, version, accepted[i::every], resting[i::every]),
            )

    # ------------------------------------------------------------------------------------------------ submission

    async def _allowances(self) -> list[int]:
        """The divided gate for the weights that the engines serve now."""
        reports = await self._all(Manager.report)
        return self.joined.allow([report.ready for report in reports], [report.engines for report in reports])

    def _watch(self) -> None:
        if not self._watching:
            self._watching = [
                asyncio.create_task(self._follow(index), name=f"manager {index}")
                for index in range(len(self._managers))
            ]

    async def _follow(self, index: int) -> None:
        """Record a manager's reports, and send it the prompts that it requests. Ends with the manager."""
        try:
            while True:
                report = await self._managers[index].ask(Manager.moved)
                self._note(index, report)
                if report.wanted and self._failure is None:
                    await self._add(index, report.wanted)
        except Exception as error:  # any error: `take` raises it
            self._fail(error)

    async def _add(self, index: int, count: int) -> None:
        """Send new groups to a manager, as far as prompts are available."""
        async with self._handing:
            groups: list[Group] = []
            try:
                for _ in range(count):
                    prompt = self._source.next()
                    if len(prompt.tokens) >= self._longest_input:
                        rule = f"model and engines accept fewer than {self._longest_input} tokens"
                        raise DataError(
                            prompt.where, f"{len(prompt.tokens)} tokens", f"leaves no room for a response: {rule}",
                            "set data.max_prompt_tokens, or raise rollout.max_total_tokens or the engines' context",
                        )  # fmt: skip
                    groups.append(new_group(self.joined.next_group_id, prompt, self._group_size))
                    self.joined.next_group_id += 1
            except UserError as error:
                self._fail(error)
            await self._managers[index].ask(Manager.add, groups)

    def _note_all(self, reports: Sequence[ManagerReport]) -> None:
        for index, report in enumerate(reports):
            self._note(index, report)

    def _note(self, index: int, report: ManagerReport) -> None:
        """Record a report unless a later one came first."""
        if report.serial < self._reports[index].serial:
            return
        self._reports[index] = report
        self._moved.set()
        sums = (sum(getattr(r, name) for r in self._reports) for name in ("accepted", "running", "done", "aborted"))
        self._on_progress(self._groups_per_step, *sums)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._moved.set()

    # ------------------------------------------------------------------------------------------------- waiting

    async def _too_late(self) -> EngineError:
        """The error of a step without enough groups in time, with sums over all managers that answer in time."""
        calls = [asyncio.ensure_future(manager.ask(Manager.standing)) for manager in self._managers]
        answered, silent = await asyncio.wait(calls, timeout=ANSWER_S)
        for task in silent:
            task.cancel()
        parts = [astuple(task.result()) for task in answered if task.exception() is None]
        found = ManagerStatus(*map(sum, zip((0,) * len(fields(ManagerStatus)), *parts, strict=True)))
        return EngineError(
            f"rollout of step {self._step}",
            f"{found.accepted} of {self._groups_per_step} groups",
            f"not complete within {self._step_limit_s:g} s ({found.running} groups running, "
            f"{found.outside} rollouts busy outside generation, {found.failed} failed, "
            f"{found.filtered} rejected by the dynamic filter, {found.truncated} truncated and fully masked, "
            f"{found.engines} engines alive)",
            "check the engines' logs and the filter; raise deadlines.rollout_step_s if generation is merely slow",
        )

    async def _enough(self) -> None:
        """Return when a step's groups are accepted, over all managers. Raises a failure after all managers have
        stopped."""
        while True:
            self._moved.clear()
            if self._failure is not None or any(report.failed for report in self._reports):
                raise await self._end_failing()
            if sum(report.accepted for report in self._reports) >= self._groups_per_step:
                return
            await self._moved.wait()

    async def _end_failing(self) -> BaseException:
        """Stop all managers, then return and clear the first failure."""
        failure, self._failure = self._failure, None
        answers = await asyncio.gather(*(m.ask(Manager.end_failing) for m in self._managers), return_exceptions=True)
        found = next((error for error in (failure, *answers) if error is not None), None)
        assert found is not None, "a manager reported a failure, and none has one"
        return found

    async def _all(
        self, method: Callable[Concatenate[Manager, P], Awaitable[R]], *args: P.args, **options: P.kwargs
    ) -> list[R]:
        """Call a method of all managers concurrently. Raises the first failure after all have answered."""
        return await self._each(self._managers, lambda manager, _: manager.ask(method, *args, **options))

    async def _each(self, values: Sequence[V], call: Callable[[Handle[Manager], V], Coroutine[Any, Any, T]]) -> list[T]:
        """`_all`, with one value per manager."""
        pairs = zip(self._managers, values, strict=True)
        answers = await asyncio.gather(*(call(manager, value) for manager, value in pairs), return_exceptions=True)
        return all_or_first_failure(answers)

    def _span(self, lane: str, name: str, start: float, step: int | None = None) -> None:
        self._on_span(lane, name, start, time.time(), self._step if step is None else step)


def _id(group: Group) -> int:
    return group.group_id
