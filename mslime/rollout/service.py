"""The rollout service: one asyncio loop that serves synchronous, one-step-ahead and fully asynchronous training.

With `max_staleness` 0 it generates inside `take` only, and interrupts what is left over when a step has enough; with
`max_staleness` > 0 generation stops around weight updates only. Where every group is, and what became of every token,
is in `books`; `runner` generates and scores a group; here is when that happens.

The service knows neither Ray nor Megatron. All its methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mslime.backends.sglang.client import EngineDied
from mslime.config.choices import PauseMode
from mslime.config.errors import DataError, EngineError, UserError
from mslime.config.model_facts import ModelFacts
from mslime.config.schema import EvalSetConfig, RunConfig
from mslime.data.checksums import FileSum
from mslime.data.ledger import Ledger
from mslime.data.sample import Group
from mslime.data.source import Prompt, PromptSource, PromptStream
from mslime.data.tokenizer import Tokenizer
from mslime.rollout.agents import Agents
from mslime.rollout.books import Books, new_group
from mslime.rollout.door import Door
from mslime.rollout.environments.play import EnvironmentRollout, open_workflow
from mslime.rollout.evaluate import EvalResult, answer, summarise
from mslime.rollout.generation import Generator, Sampling, Traffic
from mslime.rollout.protocols import (
    EngineLimits,
    Engines,
    EvaluatedHook,
    ProgressHook,
    Scorer,
    SpanHook,
    StepBatch,
    Teacher,
    living,
)
from mslime.rollout.rewards.scoring import Scoring
from mslime.rollout.runner import GroupRunner
from mslime.rollout.state import Columns, Stored, open_state, save_state, state_bytes
from mslime.rollout.statistics import batch_metrics
from mslime.rollout.turns import Rollout

SETTLE_S = 0.01
ABORT_EVERY_S = 0.25  # a request can slip past an abort that reaches the engine before it does


class RolloutService:
    """Generates, scores and hands out groups.

    Args:
        engines: the engine pool; see `protocols.Engines`.
        source: training prompts. tokenizer: decodes responses and encodes held-out prompts.
        scorer: the reward.
        teacher: scores finished responses, when it is served (`teacher`).
        eval_scorers: by held-out set, of those that are not scored as in training.
        on_progress, on_span: told about group counts and about stretches of work.
        on_evaluated: given the finished groups of a held-out set.

    Attributes:
        books: where every group is, and the fate of every generated token.
    """

    def __init__(
        self,
        config: RunConfig,
        engines: Engines,
        source: PromptStream,
        tokenizer: Tokenizer,
        scorer: Scorer,
        model: ModelFacts,
        limits: EngineLimits,
        *,
        teacher: Teacher | None = None,
        eval_scorers: Mapping[str, Scorer] | None = None,
        on_progress: ProgressHook | None = None,
        on_span: SpanHook | None = None,
        on_evaluated: EvaluatedHook | None = None,
    ) -> None:
        self._config, self._engines, self._source, self._tokenizer = config, engines, source, tokenizer
        self._scorer, self._model, self._limits = scorer, model, limits
        self._on_progress, self._on_span = on_progress, on_span
        self._eval_scorers, self._on_evaluated = eval_scorers or {}, on_evaluated
        self.books = Books(config, taught=teacher is not None)
        self._generator = Generator(config, engines, tokenizer, model, limits, lambda: self.version, self._request_done)
        self._sampling = Sampling.for_training(config.rollout, config.train.replay, model, limits)
        scoring = Scoring(config.reward, config.rollout.max_response_tokens, scorer, teacher, self._teaching)
        self._workflow = open_workflow(config, tokenizer)
        self._agents = Agents.with_tokenizer(config.rollout, model.renderers, tokenizer.for_thread)
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
        self._works_ahead = config.rollout.max_staleness > 0  # generates while the trainer works
        self._pause_mode: PauseMode = config.rollout.pause_mode if self._works_ahead else "abort"
        self._step = 0
        self._last_take = time.monotonic()

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

    # ------------------------------------------------------------------------------------------------- the step

    async def take(self, step: int) -> StepBatch:
        """Wait for `groups_per_step` groups and hand them over for training.

        With `max_staleness` 0 everything else is interrupted and kept for the next step. A call that fails or is
        cancelled takes nothing: what was finished waits for the next one.

        Raises:
            UserError: what went wrong in the background (EngineError, RewardError, DataError ...).
            EngineError: not enough groups within `deadlines.rollout_step_s`.
        """
        self._step, started = step, time.time()
        self._go_on()
        limit = asyncio.timeout(self._config.deadlines.rollout_step_s)
        try:
            async with limit:
                await self._enough()
                if not self._works_ahead:
                    await self.drain()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._late(step) from error
        groups, booked = self.books.take(step)
        metrics = {**batch_metrics(groups, self.version), **booked, **self._flow(booked["ledger/generated_tokens"])}
        self._span("rollout", "collect", started)
        self._pump()
        return StepBatch(step, self.version, groups, metrics)

    def give_back(self, blamed: Sequence[Group] = ()) -> bool:
        """Undo the last `take`; see `Books.give_back`."""
        return self.books.give_back(blamed)

    async def pause_for_update(self) -> None:
        """Hold the engines for a weight update. With `pause_mode: abort` running responses are interrupted and kept;
        otherwise the engines keep them and go on with the new weights."""
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
        if self._pause_mode != "in_place":
            await self._everywhere(self._engines.flush_cache)
        await self._everywhere(self._engines.resume)
        self._generator.ready.set()
        if self._works_ahead:
            self._go_on()

    async def drain(self) -> None:
        """Interrupt all generation and wait until no request of ours is at an engine. Tokens generated so far are kept.

        Raises:
            EngineError: an engine holds on to its requests for longer than `deadlines.engine_control_s`.
        """
        traffic, limit_s = self._runner.traffic, self._config.deadlines.engine_control_s
        self._runner.stop_traffic()
        deadline = time.monotonic() + limit_s
        while traffic.in_flight:
            await self._everywhere(self._engines.abort)
            left = deadline - time.monotonic()
            if not await traffic.idle(min(ABORT_EVERY_S, max(left, 0.0))) and left <= ABORT_EVERY_S:
                raise EngineError("abort", f"{traffic.in_flight} requests", f"the engines did not stop them within "
                                  f"{limit_s:g} s", "read the engines' logs")  # fmt: skip
        await self._runner.settle(SETTLE_S)

    async def evaluate(self, eval_set: EvalSetConfig) -> EvalResult:
        """Accuracy, pass@k and lengths on a held-out set, with the weights that the engines serve now.

        May run beside everything else but a weight update, which must wait for it.

        Raises DataError for a bad file, EngineError when no engine is left, RewardError as `reward.on_error` says.
        """
        started, step = time.time(), self._step
        rows = PromptSource([eval_set.path], self._config.data, self._tokenizer, self._config.seed, shuffle=False)
        sampling = Sampling.for_evaluation(self._config.rollout, self._model, self._limits, eval_set)
        groups = [new_group(i, prompt, eval_set.samples_per_prompt) for i, prompt in enumerate(rows)]
        door = Door(Traffic(open=True), admitted=True)

        async def roll(group: Group, number: int) -> None:
            rollout = Rollout(
                group, number, f"{eval_set.name}-{group.group_id}", self._config.rollout.function, self._generator,
                sampling, door, self._agents, limit_s=self._config.deadlines.rollout_function_s,
            )  # fmt: skip
            asked = rollout.task(self._config.seed, evaluation=True)
            await rollout.play(self._workflow, asked, self._config.rollout.on_error)

        await answer(groups, roll, self._eval_scorers.get(eval_set.name, self._scorer))
        self._span("rollout", "evaluate", started, step)
        if self._on_evaluated is not None:
            self._on_evaluated(eval_set.name, groups)
        return summarise(eval_set.name, groups, time.time() - started)

    async def close(self) -> None:
        """Stop generating, whatever it loses at the engines. `state_dict` may still be taken."""
        await self._runner.close()
        if isinstance(self._workflow, EnvironmentRollout):
            await self._workflow.close()
        await self._agents.close()

    # ---------------------------------------------------------------------------------------------------- state

    def state_dict(self, next_step: int | None = None) -> tuple[dict[str, Any], Columns]:
        """(JSON-able header, columns) from which a new service continues without losing a finished token.

        Groups in flight are included with what they hold; tokens still inside an engine are not ours yet. Call
        `drain` or `pause_for_update` (mode abort) first to have those as well.

        Args:
            next_step: step that a resumed run begins with; its groups are included where they are taken already.
        """
        header, columns = self.books.state_dict(next_step)
        return header | {"source": self._source.state_dict()}, columns

    def outline(self) -> bytes:
        """A small state file for the case that this service is lost; see `Books.outline`."""
        header, columns = self.books.outline()
        return state_bytes(header | {"source": self._source.state_dict()}, columns)

    def load_state_dict(self, header: Mapping[str, Any], columns: Columns | Stored) -> None:
        """Continue from `state_dict` or `outline`, before the first `take`. Raises DataError when the prompts are
        others."""
        self._source.load_state_dict(header["source"])
        self.books.load_state_dict(header, columns)

    def save(self, path: Path, next_step: int | None = None) -> FileSum:
        """Write `state_dict` to `path` (.npz without pickle), whole or not at all; returns the file's sum."""
        return save_state(path, *self.state_dict(next_step))

    async def checkpoint(self, path: Path, next_step: int | None = None) -> FileSum:
        """`save` with the tokens that engines hold at this moment: interrupts them, saves, and goes on."""
        was_open = self._runner.traffic.open
        await self.drain()
        total = self.save(path, next_step)
        if was_open:
            self._go_on()
        return total

    def load(self, path: Path) -> None:
        """Continue from a file of `save` or `outline`. Raises CheckpointError when it cannot be read."""
        with open_state(path) as (header, stored):
            self.load_state_dict(header, stored)

    # ------------------------------------------------------------------------------------------------ submission

    def _go_on(self) -> None:
        """Let groups be submitted and continued."""
        self.books.open_gate()
        self._runner.traffic.open = True
        self._pump()

    def _pump(self) -> None:
        """Submit groups while the gate has room: interrupted ones first, then new prompts."""
        while self._runner.traffic.open and self._runner.failure is None and self.books.room() > 0:
            try:
                group = self.books.resume() or self.books.begin(self._next_prompt())
            except UserError as error:
                self._runner.fail(error)
                return
            self._runner.start(group)
        self._report()

    def _next_prompt(self) -> Prompt:
        prompt = self._source.next()
        if len(prompt.tokens) >= (limit := self._sampling.longest_input):
            raise DataError(prompt.where, f"{len(prompt.tokens)} tokens",
                            f"leaves no room for a response: model and engines take fewer than {limit} tokens",
                            "set data.max_prompt_tokens, or raise rollout.max_total_tokens or the engines' "
                            "context")  # fmt: skip
        return prompt

    async def _enough(self) -> None:
        """Return when a step's worth of groups is accepted. Raises what failed meanwhile, once all is at rest."""
        while True:
            self._runner.moved.clear()
            if (failure := self._runner.take_failure()) is not None:
                if living(self._engines):
                    await self.drain()
                self._runner.stop_traffic()
                raise failure
            if self.books.enough:
                return
            self._pump()
            waits_for_weights = not self._generator.ready.is_set()
            assert self.books.running or self._runner.failure or waits_for_weights or self._works_ahead, (
                f"step {self._step} was asked for before the weights of the last one were published"
            )
            await self._runner.moved.wait()

    def _flow(self, generated: float) -> dict[str, float]:
        """What the books do not know of a step in which so many tokens were generated."""
        now = time.monotonic()
        seconds, self._last_take = now - self._last_take, now
        metrics = {
            "data/skipped_rows": float(self._source.skipped),
            "rollout/cached_tokens": float(self._generator.cached_tokens),
        }
        self._generator.cached_tokens = 0
        if generated:  # else all was ready, which says nothing of how fast the engines are
            metrics["rollout/tokens_per_s"] = generated / max(seconds, 1e-9)
        return metrics

    def _late(self, step: int) -> EngineError:
        books = self.books
        return EngineError(
            f"rollout of step {step}",
            f"{len(books.accepted)} of {self._config.rollout.groups_per_step} groups",
            f"not complete within {self._config.deadlines.rollout_step_s:g} s ({len(books.running)} groups running, "
            f"{self._runner.outside()} rollouts busy with something else than generation, "
            f"{books.counters.since_mark('failed_rollouts')} failed, "
            f"{books.counters.since_mark('filtered_groups')} refused by the dynamic filter, "
            f"{books.counters.since_mark('truncated_groups')} truncated and masked whole, "
            f"{living(self._engines)} engines alive)",
            "look at the engines' logs and the filter; raise deadlines.rollout_step_s if generation is only slow",
        )

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
