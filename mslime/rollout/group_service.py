"""What the rollout service, and each manager of several, is made of: groups that are begun, continued, interrupted and
scored over a set of engines. Where prompts come from, and when a step has enough, is not said here.

Knows neither Ray nor Megatron. All methods belong to one event loop.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from mslime.backends.sglang.client import EngineDied
from mslime.config.choices import PauseMode
from mslime.config.data import EvalSetConfig
from mslime.config.errors import EngineError, UserError
from mslime.config.model_facts import ModelFacts
from mslime.config.schema import RunConfig
from mslime.data.ledger import Ledger
from mslime.data.sample import Group
from mslime.data.source import PromptSource
from mslime.data.tokenizer import Tokenizer, special_texts
from mslime.rollout.agents import Agents
from mslime.rollout.atropos.play import AtroposRollouts
from mslime.rollout.books import Books, new_group
from mslime.rollout.door import Door
from mslime.rollout.environments.play import EnvironmentRollout, open_workflow
from mslime.rollout.evaluate import answer
from mslime.rollout.generation import Generator, Sampling, Traffic
from mslime.rollout.guests import Guests
from mslime.rollout.protocols import EngineLimits, Engines, ProgressHook, Scorer, SpanHook, Teacher, living
from mslime.rollout.rewards.scoring import Scoring
from mslime.rollout.runner import GroupRunner
from mslime.rollout.turns import Rollout
from mslime.rollout.workflow import single_turn

SETTLE_S = 0.01
ABORT_EVERY_S = 0.25


@dataclass(frozen=True)
class Standing:
    """What is told of a step that is late.

    Attributes:
        outside: rollouts whose function works on something else than generation.
        failed, filtered, truncated: rollouts and groups that do not count, in this step.
        engines: that are alive.
    """

    accepted: int
    running: int
    outside: int
    failed: int
    filtered: int
    truncated: int
    engines: int


class GroupService(ABC):
    """Generates and scores groups.

    Args:
        engines: the engine pool; see `protocols.Engines`.
        tokenizer: decodes responses and encodes held-out prompts.
        scorer: the reward.
        teacher: scores finished responses, when it is served (`teacher`).
        eval_scorers: by held-out set, of those that are not scored as in training.
        on_progress, on_span: told about group counts and about stretches of work.
        places: at the engines, see `Generator`.

    Attributes:
        books: where every group is, and the fate of every generated token.
    """

    def __init__(
        self,
        config: RunConfig,
        engines: Engines,
        tokenizer: Tokenizer,
        scorer: Scorer,
        model: ModelFacts,
        limits: EngineLimits,
        teacher: Teacher | None,
        eval_scorers: Mapping[str, Scorer] | None,
        on_progress: ProgressHook | None,
        on_span: SpanHook | None,
        places: AbstractAsyncContextManager[None] | None = None,
    ) -> None:
        self._config, self._engines, self._tokenizer = config, engines, tokenizer
        self._scorer, self._model, self._limits = scorer, model, limits
        self._on_progress, self._on_span = on_progress, on_span
        self._eval_scorers = eval_scorers or {}
        self.books = Books(config, taught=teacher is not None)
        self._generator = Generator(
            config, engines, tokenizer, model, limits, lambda: self.version, self._request_done, places
        )
        self._sampling = Sampling.for_training(config.rollout, config.train.replay, model, limits)
        scoring = Scoring(config.reward, config.rollout.max_response_tokens, scorer, teacher, self._teaching)
        self._workflow = open_workflow(config, tokenizer)
        self._agents = Agents.with_tokenizer(
            config.rollout, model.renderers, tokenizer.for_thread, special_texts(tokenizer)
        )
        self._runner = GroupRunner(
            config,
            self._workflow,
            self.books,
            self._generator,
            self._sampling,
            scoring,
            self._agents,
            self._report,
            self._pump,
        )
        self._guests: Guests | None = None
        if isinstance(self._workflow, AtroposRollouts):
            self._guests = Guests(
                config.rollout.function, self._generator, self._sampling, self._runner.traffic, self._agents,
                self.books, self._runner.fail,
            )  # fmt: skip
            self._workflow.attach(self._guests)
        self._works_ahead = config.rollout.max_staleness > 0  # generates while the trainer works
        self._pause_mode: PauseMode = config.rollout.pause_mode if self._works_ahead else "abort"
        self._step = 0

    @property
    def version(self) -> int:
        """Weight version that the engines serve and the trainer holds."""
        return self.books.version

    @version.setter
    def version(self, version: int) -> None:
        self.books.version = version

    @property
    def ledger(self) -> Ledger:
        """The fate of every generated token."""
        return self.books.ledger

    async def pause_for_update(self) -> None:
        """Hold the engines for a weight update. With `pause_mode: abort` running responses are interrupted and kept;
        otherwise the engines keep them and go on with the new weights. For adapters alone nothing is held."""
        if self._config.syncs_adapters:
            return
        mode = self._pause_mode
        if mode == "abort":
            await self.drain()
            mode = "retract"  # nothing runs any more, so this only closes the door
        self._generator.ready.clear()
        await self._everywhere(lambda: self._engines.pause(mode))

    async def resume_after_update(self, version: int) -> None:
        """Go on with weights of `version`. Prefixes cached with older weights are forgotten, unless `pause_mode` is
        `in_place`, which keeps the caches of running responses by its nature; new requests do not find them
        (`Generator`)."""
        self.books.published(version)
        if self._config.syncs_adapters:
            await self._switch(version)
            return
        if self._pause_mode != "in_place":
            await self._everywhere(self._engines.flush_cache)
        await self._everywhere(self._engines.resume)
        self._runner.forget_deaths()
        self._generator.ready.set()
        if self._works_ahead:
            self._go_on()

    async def _switch(self, version: int) -> None:
        """Go on with the adapters of `version`, which the engines have loaded. Responses that run under older ones are
        interrupted, and go on at once under these; with `pause_mode: in_place` each request ends under its own.
        Prefixes are an adapter's own in the engines' caches."""
        self._runner.forget_deaths()
        interrupt = self._pause_mode == "abort"
        await self._everywhere(lambda: self._engines.switch(version, interrupt))
        if self._works_ahead:
            self._go_on()

    async def drain(self) -> None:
        """Interrupt all generation and wait until no request of ours is at an engine. Tokens generated so far are kept.
        An engine that answers nothing for `deadlines.engine_control_s` is given up: what it has is sampled anew. One
        that began to hang just after an answer is found in a second term of the same length.

        Raises:
            EngineError: one that goes on answering holds on to its requests for longer than twice that.
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
        """Whether engines have stopped all requests by then (`time.monotonic`). They are told again and again: a
        request can slip past an abort that reaches the engine before it does."""
        traffic = self._runner.traffic
        while traffic.in_flight:
            await self._everywhere(self._engines.abort)
            left = deadline - time.monotonic()
            if not await traffic.idle(min(ABORT_EVERY_S, max(left, 0.0))) and left <= ABORT_EVERY_S:
                return False
        return True

    async def answer_rows(self, eval_set: EvalSetConfig, first: int = 0, every: int = 1) -> list[Group]:
        """Rows `first`, `first + every`, ... of a held-out set, answered and scored with the weights that the engines
        serve now; each group has the number of its row.

        Raises DataError for a bad file, EngineError when no engine is left, RewardError as `reward.on_error` says.
        """
        rows = PromptSource([eval_set.path], self._config.data, self._tokenizer, self._config.seed, shuffle=False)
        sampling = Sampling.for_evaluation(self._config.rollout, self._model, self._limits, eval_set)
        groups = [new_group(i, rows.at(i), eval_set.samples_per_prompt) for i in range(first, len(rows), every)]
        door = Door(Traffic(open=True), admitted=True)

        async def roll(group: Group, number: int) -> None:
            rollout = Rollout(
                group, number, f"{eval_set.name}-{group.group_id}", self._config.rollout.function, self._generator,
                sampling, door, self._agents, limit_s=self._config.deadlines.rollout_function_s,
            )  # fmt: skip
            asked = rollout.task(self._config.seed, evaluation=True)
            await rollout.play(self._workflow, asked, self._config.rollout.on_error)

        scorer = self._eval_scorers.get(eval_set.name, self._scorer)
        at_once = sys.maxsize if self._workflow is single_turn else self.books.most_rollouts
        await answer(groups, roll, scorer, at_once)
        return groups

    async def close(self) -> None:
        """Stop generating, whatever it loses at the engines. What is held may still be saved."""
        await self._runner.close()
        if isinstance(self._workflow, EnvironmentRollout | AtroposRollouts):
            await self._workflow.close()
        await self._agents.close()

    # ------------------------------------------------------------------------------------------------ submission

    def _go_on(self) -> None:
        """Let groups be submitted and continued."""
        self.books.open_gate()
        self._runner.traffic.open = True
        if self._guests is not None:
            self._guests.admit()
        self._pump()

    def _pump(self) -> None:
        """Submit groups while the gate has room: interrupted ones first, then new prompts."""
        while self._runner.traffic.open and self._runner.failure is None and self.books.room() > 0:
            try:
                group = self.books.resume() or self._begin()
            except UserError as error:
                self._runner.fail(error)
                return
            if group is None:
                break
            self._runner.start(group)
        self._report()

    @abstractmethod
    def _begin(self) -> Group | None:
        """A group of a new prompt, which the books call running; None while there is none. Raises UserError."""

    async def _come_to_rest(self) -> None:
        """Something failed: interrupt everything, if an engine lives, and begin nothing more."""
        if living(self._engines):
            await self.drain()
        self._runner.stop_traffic()

    def _standing(self) -> Standing:
        books, counters = self.books, self.books.counters
        return Standing(
            len(books.accepted), len(books.running), self._runner.outside(), counters.since_mark("failed_rollouts"),
            counters.since_mark("filtered_groups"), counters.since_mark("truncated_groups"), living(self._engines),
        )  # fmt: skip

    async def _everywhere(self, call: Callable[[], Awaitable[None]]) -> None:
        """A control call to all engines, again when one dies meanwhile. Raises EngineError when none is left."""
        while True:
            try:
                return await call()
            except EngineDied:
                if living(self._engines) == 0:
                    raise

    # ------------------------------------------------------------------------------------------------- telling

    def _report(self) -> None:
        if self._on_progress is not None:
            counters = self.books.counters
            self._on_progress(
                needed=self._config.rollout.groups_per_step,
                accepted=len(self.books.accepted),
                running=len(self.books.running),
                done=counters.since_mark("done"),
                aborted=counters.since_mark("aborted"),
            )

    def _teaching(self) -> Callable[[], None]:
        started = time.time()
        return lambda: self._span("teacher", "score", started)

    def _request_done(self, engine: str, start: float, end: float) -> None:
        if self._on_span is not None:
            self._on_span(engine, "generate", start, end, self._step)

    def _span(self, lane: str, name: str, start: float, step: int | None = None) -> None:
        if self._on_span is not None:
            self._on_span(lane, name, start, time.time(), self._step if step is None else step)
