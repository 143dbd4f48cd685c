"""A rollout manager: generates and scores its groups on its share of the engines.

The rollout service (`service`) holds the state that exists once: prompts, ids, the gate, the ledger since the start. It
calls its managers; this module defines all records that they exchange. Methods are coroutines, because a manager may
run in another process (`run.ray_calls`). Independent of Ray and Megatron. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import copy
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from mslime.backends.sglang.client import EngineDied
from mslime.config.base import PauseMode
from mslime.config.data import EvalSetConfig
from mslime.config.errors import EngineError, RolloutError
from mslime.config.model_facts import ModelFacts
from mslime.config.schema import RunConfig
from mslime.data.ledger import Ledger
from mslime.data.sample import Group, SampleStatus
from mslime.data.source import PromptSource
from mslime.data.tokenizer import Tokenizer, special_texts
from mslime.rollout.agents.choose import choose_renderer
from mslime.rollout.environments.environment_rollout import EnvironmentRollout, open_workflow
from mslime.rollout.generation import EngineLimits, Generator, GroupGate, Sampling, Traffic, living
from mslime.rollout.group_runner import GroupRunner
from mslime.rollout.group_tracker import Due, GroupTracker, SubmitGate, TrackerState, due, new_group, trainable
from mslime.rollout.hosted import HostedRollouts, UngroupedRequests
from mslime.rollout.rewards.scorer import RewardScorer, Scoring, ServedTeacher
from mslime.rollout.turns import Agents, Rollout
from mslime.rollout.workflow import single_turn

if TYPE_CHECKING:
    from mslime.backends.sglang.engine_pool import EnginePool

REPORT_EVERY_S = 0.02
"""Minimum time between two answers of `Manager.moved` to another process: a step of thousands of groups must not cause
as many messages."""
SETTLE_S = 0.01
ABORT_EVERY_S = 0.25
Span = tuple[str, str, float, float, int]
T = TypeVar("T")


@dataclass(frozen=True)
class ManagerStatus:
    """A manager's numbers for the error of a late step.

    Attributes:
        outside: rollouts whose function currently works outside generation.
        failed, filtered, truncated: rollouts and groups of this step that do not count.
        engines: number of living engines.
    """

    accepted: int
    running: int
    outside: int
    failed: int
    filtered: int
    truncated: int
    engines: int


@dataclass(frozen=True)
class ManagerReport:
    """Progress report of a manager.

    Attributes:
        serial: later reports have higher numbers.
        accepted, running: groups. done, aborted: responses of this step.
        wanted: new groups that it has room for, beyond groups to continue.
        ready, engines: for the division of the gate (`JoinedTrackers.allow`).
        failed: something failed, and waits to be raised.
    """

    serial: int
    accepted: int
    running: int
    done: int
    aborted: int
    wanted: int
    ready: int
    engines: int
    failed: bool


@dataclass(frozen=True)
class TakenGroups:
    """A manager's groups of a step.

    Attributes:
        ledger: of the manager, afterwards.
        alive: trainable tokens in all groups that it still holds.
        counts: `rollout/*` and `reward/errors` of the step.
        cached_tokens: prompt tokens that its engines had in their caches.
        spans: timeline spans since the last step.
    """

    groups: list[Group]
    ledger: Ledger
    alive: int
    counts: dict[str, float]
    cached_tokens: int
    spans: list[Span]


class Manager:
    """Generates and scores its groups on its share of the engines.

    Args:
        tokenizer: decodes responses and encodes held-out prompts.
        scorer: the reward.
        teacher: scores finished responses, if a teacher is served (`teacher`).
        eval_scorers: by held-out set, for sets that are not scored as in training.
        adapter, slots: see `Generator`.
        report_every_s: minimum time between two answers of `moved`.

    Attributes:
        tracker: location of every group, and the fate of every generated token.
    """

    def __init__(
        self,
        config: RunConfig,
        engines: EnginePool,
        tokenizer: Tokenizer,
        scorer: RewardScorer,
        model: ModelFacts,
        limits: EngineLimits,
        *,
        teacher: ServedTeacher | None = None,
        eval_scorers: Mapping[str, RewardScorer] | None = None,
        adapter: str = "",
        slots: Callable[[], AbstractAsyncContextManager[None]] | None = None,
        report_every_s: float = 0.0,
    ) -> None:
        self._config, self._engines, self._adapter, self._tokenizer = config, engines, adapter, tokenizer
        self._scorer, self._model, self._limits = scorer, model, limits
        self._eval_scorers = eval_scorers or {}
        self._workflow = open_workflow(config, tokenizer)
        hosted = self._workflow if isinstance(self._workflow, HostedRollouts) else None
        self.tracker = GroupTracker(config.rollout, config.on_stale, hosted.counted if hosted is not None else ())
        self._generator = Generator(
            config, engines, tokenizer, model, limits, lambda: self.tracker.version,
            lambda engine, start, end: self._note_span(engine, "generate", start, end), adapter, slots,
        )  # fmt: skip
        self._sampling = Sampling.for_training(config.rollout, config.train.replay, model, limits)
        scoring = Scoring(
            config.reward, config.rollout.max_response_tokens, scorer, teacher,
            lambda began: self._note_span("teacher", "score", began, time.time()),
        )  # fmt: skip
        self._agents = Agents(
            config.rollout,
            lambda: choose_renderer(
                config.rollout.renderer, model.renderers, tokenizer.for_thread(), config.rollout.thinking
            ),
            special_texts(tokenizer),
        )
        self._runner = GroupRunner(
            config, self._workflow, self.tracker, self._generator, self._sampling, scoring, self._agents, self._pump
        )
        self._ungrouped: UngroupedRequests | None = None
        if hosted is not None:
            self._ungrouped = UngroupedRequests(
                config.rollout.function, self._generator, self._sampling, self._runner.traffic, self._agents,
                self.tracker, self._runner.fail,
            )  # fmt: skip
            hosted.attach(self._ungrouped)
        self._works_ahead = config.rollout.max_staleness > 0  # generates while the trainer works
        self._pause_mode: PauseMode = config.rollout.pause_mode if self._works_ahead else "abort"
        self._step = 0
        self._spans: list[Span] = []  # since the last step
        self._serial, self._reported_at, self._report_every_s = 0, 0.0, report_every_s

    async def pause_for_update(self) -> None:
        """Hold the engines for a weight update. With `pause_mode: abort` running responses are interrupted and kept;
        otherwise the engines keep them and continue with the new weights. If only adapters are synced, nothing is held.
        """
        if self._config.syncs_adapters:
            return
        mode = self._pause_mode
        if mode == "abort":
            await self.drain()
            mode = "retract"  # nothing runs any more, so this only closes the gate
        self._generator.ready.clear()
        await self._everywhere(lambda: self._engines.pause(mode))

    async def resume_after_update(self, version: int, allowance: int | None) -> None:
        """Continue with weights of `version`. Prefixes cached with older weights are flushed. `pause_mode: in_place`
        has to keep the caches of running responses instead; new requests do not match old prefixes (`Generator`).

        If only adapters are synced, the engines have loaded them. Responses of older adapters are interrupted and
        continue at once with the new ones; with `pause_mode: in_place` each request ends with its own. Prefix caches of
        engines are per adapter.

        Args:
            allowance: see `go_on`; None if the gate is not open.
        """
        if allowance is not None:
            self.tracker.allowance = allowance
        self.tracker.published(version)
        if self._config.syncs_adapters:
            self._runner.forget_deaths()
            interrupt = self._pause_mode == "abort"
            await self._everywhere(lambda: self._engines.switch(version, interrupt, self._adapter))
        else:
            if self._pause_mode != "in_place":
                await self._everywhere(self._engines.flush_cache)
            await self._everywhere(self._engines.resume)
            self._runner.forget_deaths()
            self._generator.ready.set()
        if self._works_ahead:
            self._go_on()
        self._runner.moved.set()

    async def drain(self) -> None:
        """Interrupt all generation and wait until no request of this manager is at an engine. Generated tokens are
        kept. An engine without an answer for `deadlines.engine_control_s` is marked dead, and its responses are sampled
        again. A second period of the same length detects an engine that hung just after an answer.

        Raises:
            EngineError: an engine still answers, but did not stop its requests within twice that time.
        """
        traffic, limit_s = self._runner.traffic, self._config.deadlines.engine_control_s
        self._runner.stop_traffic()
        for _ in range(2):
            began = time.monotonic()
            if await self._obeyed(began + limit_s):
                break
            self._engines.give_up(began)
        if not await traffic.idle(ABORT_EVERY_S):
            raise EngineError("abort", f"{traffic.in_flight} requests", f"the engines did not stop them within "
                              f"{2 * limit_s:g} s", "read the engines' logs")  # fmt: skip
        await self._runner.settle(SETTLE_S)

    async def _obeyed(self, deadline: float) -> bool:
        """Whether engines stopped all requests before `deadline` (`time.monotonic`). The abort is repeated, because a
        request can arrive after an abort that was sent later."""
        traffic = self._runner.traffic
        while traffic.in_flight:
            await self._everywhere(lambda: self._engines.abort(self._adapter))
            left = deadline - time.monotonic()
            if not await traffic.idle(min(ABORT_EVERY_S, max(left, 0.0))) and left <= ABORT_EVERY_S:
                return False
        return True

    async def answer_rows(self, eval_set: EvalSetConfig, first: int = 0, every: int = 1) -> list[Group]:
        """Generate and score rows `first`, `first + every`, ... of a held-out set, with the weights that the engines
        serve now; a group's id is its row number.

        Raises DataError for a bad file, EngineError if no engine is left, RewardError according to `reward.on_error`.
        """
        rows = PromptSource([eval_set.path], self._config.data, self._tokenizer, self._config.seed, shuffle=False)
        sampling = Sampling.for_evaluation(self._config.rollout, self._model, self._limits, eval_set)
        groups = [new_group(i, rows.at(i), eval_set.samples_per_prompt) for i in range(first, len(rows), every)]
        group_gate = GroupGate(Traffic(open=True), admitted=True)

        async def roll(group: Group, number: int) -> None:
            rollout = Rollout(
                group, number, f"{eval_set.name}-{group.group_id}", self._config.rollout.function, self._generator,
                sampling, group_gate, self._agents, limit_s=self._config.deadlines.rollout_function_s,
            )  # fmt: skip
            task = rollout.task(self._config.seed, evaluation=True)
            await rollout.play(self._workflow, task, self._config.rollout.on_error)

        scorer = self._eval_scorers.get(eval_set.name, self._scorer)
        rollout = self._config.rollout
        most = SubmitGate.of(rollout).limit(0) * rollout.group_size  # limit of groups in flight before a step is taken
        at_once = sys.maxsize if self._workflow is single_turn else most
        await answer(groups, roll, scorer, at_once)
        return groups

    async def close(self) -> None:
        """Stop generating; data at the engines is lost. The groups held here can still be saved."""
        await self._runner.close()
        if isinstance(self._workflow, EnvironmentRollout | HostedRollouts):
            await self._workflow.close()
        await self._agents.close()

    # ------------------------------------------------------------------------------------------------- the step

    async def go_on(self, step: int, allowance: int) -> ManagerReport:
        """Work on `step`: at most `allowance` groups may be taken, accepted or running since the gate opened."""
        self._step, self.tracker.allowance = step, allowance
        self._go_on()
        self._runner.moved.set()
        return await self.report()

    async def moved(self) -> ManagerReport:
        """`report`, after a group has ended or something failed since the last call. One caller at a time."""
        await self._runner.moved.wait()
        await asyncio.sleep(max(0.0, self._reported_at + self._report_every_s - time.monotonic()))
        self._runner.moved.clear()
        self._reported_at = time.monotonic()
        return await self.report()

    async def report(self) -> ManagerReport:
        """Current progress of this manager."""
        tracker, runner = self.tracker, self._runner
        self._serial += 1
        going = runner.traffic.open and runner.failure is None
        return ManagerReport(
            self._serial,
            len(tracker.accepted),
            len(tracker.running),
            tracker.counters.since_mark("done"),
            tracker.counters.since_mark("aborted"),
            max(0, tracker.room() - len(tracker.partial)) if going else 0,
            tracker.ready,
            living(self._engines),
            runner.failure is not None,
        )

    async def add(self, groups: Sequence[Group]) -> None:
        """Add new groups, which rest until there is room for them."""
        self._take_in(groups)
        self._pump()

    async def accepted(self) -> list[Due]:
        """Accepted groups, which wait for the trainer."""
        return [due(group) for group in self.tracker.accepted]

    async def take(self, step: int, ids: Collection[int]) -> TakenGroups:
        """Hand these accepted groups to the trainer for `step`; see `GroupTracker.take`."""
        groups, booked = self.tracker.take(step, ids)
        counts = {name: value for name, value in booked.items() if not name.startswith("ledger/")}
        spans, self._spans = self._spans, []
        cached, self._generator.cached_tokens = self._generator.cached_tokens, 0
        return TakenGroups(groups, self.tracker.ledger.copy(), trainable(self.tracker.held()), counts, cached, spans)

    async def give_back(self, ids: Collection[int]) -> bool:
        """Undo the last `take`; see `GroupTracker.give_back`. `ids`: blamed groups, if any are of this manager."""
        return self.tracker.give_back([group for group in self.tracker.taken if group.group_id in ids])

    async def end_failing(self) -> BaseException | None:
        """Interrupt everything after a failure of any manager. Returns and clears this manager's own failure,
        if any."""
        failure = self._runner.take_failure()
        if living(self._engines):
            await self.drain()
        self._runner.stop_traffic()  # begin nothing more
        return failure

    async def standing(self) -> ManagerStatus:
        """Numbers for the error of a late step."""
        tracker, counters = self.tracker, self.tracker.counters
        return ManagerStatus(
            len(tracker.accepted), len(tracker.running), self._runner.outside(), counters.since_mark("failed_rollouts"),
            counters.since_mark("filtered_groups"), counters.since_mark("truncated_groups"), living(self._engines),
        )  # fmt: skip

    # ---------------------------------------------------------------------------------------------------- state

    async def continue_with(self, version: int, accepted: Sequence[Group], resting: Sequence[Group]) -> None:
        """Start with these groups of a saved state, before anything is begun."""
        self.tracker.version = version
        self._take_in(accepted, accepted=True)
        self._take_in(resting)

    async def kept(self, next_step: int | None, interrupt: bool) -> TrackerState:
        """State of this manager for a checkpoint. Its groups may continue to change.

        Args:
            interrupt: interrupt requests to include the tokens at the engines; generation continues afterwards. Raises
                EngineError.
        """
        was_open = self._runner.traffic.open
        if interrupt:
            await self.drain()
        kept = self.tracker.kept(next_step)
        if interrupt and was_open:
            self._go_on()
        return kept

    async def begun(self) -> TrackerState:
        """Outline of this manager for a checkpoint."""
        return self.tracker.begun()

    def _take_in(self, groups: Sequence[Group], accepted: bool = False) -> None:
        """Add groups; copy groups that come from another process, because their arrays are read-only."""
        for group in groups:
            mine = all(sample.loss_mask.flags.writeable for sample in group.samples)
            self.tracker.add(group if mine else copy.deepcopy(group), accepted)

    # ------------------------------------------------------------------------------------------------ submission

    def _go_on(self) -> None:
        """Allow groups to be submitted and continued."""
        self._runner.traffic.open = True
        if self._ungrouped is not None:
            self._ungrouped.admit()
        self._pump()

    def _pump(self) -> None:
        """Begin and continue groups while the gate has room, interrupted ones first."""
        while self._runner.traffic.open and self._runner.failure is None and self.tracker.room() > 0:
            if (group := self.tracker.resume()) is None:
                break
            self._runner.start(group)

    async def _everywhere(self, call: Callable[[], Awaitable[None]]) -> None:
        """Send a control call to all engines; repeat it if one dies meanwhile. Raises EngineError if none is left."""
        while True:
            try:
                return await call()
            except EngineDied:
                if living(self._engines) == 0:
                    raise

    # ------------------------------------------------------------------------------------------------- reports

    def _note_span(self, lane: str, name: str, start: float, end: float) -> None:
        self._spans.append((lane, name, start, end, self._step))


async def answer(
    groups: Sequence[Group],
    roll: Callable[[Group, int], Awaitable[None]],
    scorer: RewardScorer,
    at_once: int = sys.maxsize,
) -> None:
    """Finish and score all rollouts of `groups`. Raises the first error and cancels the others.

    Args:
        roll: runs a rollout of a group to its end.
        at_once: limit of concurrent rollouts.
    """
    slots = asyncio.Semaphore(at_once)

    async def run(group: Group, number: int) -> None:
        async with slots:
            await roll(group, number)
        last = group.parts(number)[-1]
        if not scorer.per_group and last.reward is None and last.status is not SampleStatus.FAILED:
            last.reward = await scorer.score(last)

    async def score(group: Group) -> None:
        last = [parts[-1] for parts in group.rollouts() if parts[-1].status is not SampleStatus.FAILED]
        if all(s.reward is not None for s in last):
            return  # the rollout function set them, as in training
        for sample, reward in zip(last, await scorer.score_group(last), strict=True):
            sample.reward = reward

    await concurrently(run(g, number) for g in groups for number in g.numbers)
    await concurrently(score(group) for group in groups if scorer.per_group)


async def concurrently(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of concurrent calls. The first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            begun = [tasks.create_task(each) for each in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if any(task.cancelled() for task in begun):  # a TaskGroup ignores this
        raise RolloutError("eval", "a rollout", "raised CancelledError",
                           "catch CancelledError in the function that answers or scores it")  # fmt: skip
    return [task.result() for task in begun]


# Settings of one of several rollout managers: limits of shared servers are divided, fixed ports counted up.
#
# Processes (`reward.workers`, environments) and limits for each engine hold per manager, since they grow with the
# engines.


def share_of(config: RunConfig, index: int) -> RunConfig:
    """Settings of manager `index` of `rollout.managers`. A fixed port of the agents' server is used by manager 0, and
    the others count up from it. Concurrency limits for served teachers and rewards are divided."""
    every, rollout, data = config.rollout.managers, config.rollout, config.data

    def divided(section: Any) -> Any:
        return section.model_copy(update={"concurrency": max(1, section.concurrency // every)})

    def grader(section: Any, **changed: Any) -> Any:
        servers = {"http": divided(section.http), "judge": divided(section.judge)}
        return section.model_copy(update=servers | changed)

    def scoring(section: Any) -> Any:
        return grader(section, parts=[grader(part) for part in section.parts])

    port = rollout.server.port + index if rollout.server.port else 0
    sets = [s.model_copy(update={"reward": scoring(s.reward)}) if s.reward else s for s in data.eval_sets]
    return config.model_copy(
        update={
            "teacher": divided(config.teacher),
            "rollout": rollout.model_copy(update={"server": rollout.server.model_copy(update={"port": port})}),
            "reward": scoring(config.reward),
            "data": data.model_copy(update={"eval_sets": sets}),
        }
    )
