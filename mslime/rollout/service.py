"""The rollout service: one asyncio loop that serves synchronous, one-step-ahead and fully asynchronous training.

With `max_staleness` 0 it generates inside `take` only, and interrupts what is left over when a step has enough; with
`max_staleness` > 0 generation stops around weight updates only. Where every group is, and what became of every token,
is in `books`; `runner` generates and scores a group; `group_service` begins, interrupts and continues them; here is
when that happens.

The service knows neither Ray nor Megatron. All its methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from mslime.config.data import EvalSetConfig
from mslime.config.errors import DataError, EngineError
from mslime.config.model_facts import ModelFacts
from mslime.config.schema import RunConfig
from mslime.data.checksums import FileSum
from mslime.data.sample import Group
from mslime.data.source import Prompt, PromptStream
from mslime.data.tokenizer import Tokenizer
from mslime.rollout.evaluate import EvalResult, summarise
from mslime.rollout.group_service import GroupService, Standing
from mslime.rollout.protocols import (
    EngineLimits,
    Engines,
    EvaluatedHook,
    ProgressHook,
    Scorer,
    SpanHook,
    StepBatch,
    Teacher,
)
from mslime.rollout.state import Columns, Stored, open_state, save_beside, state_bytes
from mslime.rollout.statistics import batch_metrics


class RolloutService(GroupService):
    """Generates, scores and hands out groups; see `GroupService` for what is not said here.

    Args:
        source: training prompts.
        on_evaluated: given the finished groups of a held-out set.
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
        places: AbstractAsyncContextManager[None] | None = None,
    ) -> None:
        super().__init__(
            config, engines, tokenizer, scorer, model, limits, teacher, eval_scorers, on_progress, on_span, places
        )  # fmt: skip
        self._source, self._on_evaluated = source, on_evaluated
        self._clock = Clock()

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
            raise too_late(step, self._config, self._standing()) from error
        groups, booked = self.books.take(step)
        flow = self._clock.flow(booked, self._source.skipped, self._generator.cached_tokens)
        self._generator.cached_tokens = 0
        metrics = {**batch_metrics(groups, self.version), **booked, **flow}
        self._span("rollout", "collect", started)
        self._pump()
        return StepBatch(step, self.version, groups, metrics)

    async def give_back(self, blamed: Sequence[Group] = ()) -> bool:
        """Undo the last `take`; see `Books.give_back`."""
        return self.books.give_back(blamed)

    async def evaluate(self, eval_set: EvalSetConfig) -> EvalResult:
        """Accuracy, pass@k and lengths on a held-out set, with the weights that the engines serve now.

        May run beside everything else but a weight update, which must wait for it.

        Raises DataError for a bad file, EngineError when no engine is left, RewardError as `reward.on_error` says.
        """
        started, step = time.time(), self._step
        groups = await self.answer_rows(eval_set)
        self._span("rollout", "evaluate", started, step)
        if self._on_evaluated is not None:
            self._on_evaluated(eval_set.name, groups)
        return summarise(eval_set.name, groups, time.time() - started)

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

    async def outline(self) -> bytes:
        """A small state file for the case that this service is lost; see `Books.outline`."""
        header, columns = self.books.outline()
        return state_bytes(header | {"source": self._source.state_dict()}, columns)

    def load_state_dict(self, header: Mapping[str, Any], columns: Columns | Stored) -> None:
        """Continue from `state_dict` or `outline`, before the first `take`. Raises DataError when the prompts are
        others."""
        self._source.load_state_dict(header["source"])
        self.books.load_state_dict(header, columns)

    async def save(self, path: Path, next_step: int | None = None) -> FileSum:
        """Write `state_dict` to `path` (.npz without pickle), whole or not at all; returns the file's sum."""
        return await save_beside(path, *self.state_dict(next_step))

    async def checkpoint(self, path: Path, next_step: int | None = None) -> FileSum:
        """`save` with the tokens that engines hold at this moment: interrupts them, and goes on while it writes."""
        was_open = self._runner.traffic.open
        await self.drain()
        state = self.state_dict(next_step)
        if was_open:
            self._go_on()
        return await save_beside(path, *state)

    async def load(self, path: Path) -> None:
        """Continue from a file of `save` or `outline`. Raises CheckpointError when it cannot be read."""
        with open_state(path) as (header, stored):
            self.load_state_dict(header, stored)

    # ------------------------------------------------------------------------------------------------- the parts

    def _begin(self) -> Group:
        return self.books.begin(next_prompt(self._source, self._sampling.longest_input))

    async def _enough(self) -> None:
        """Return when a step's worth of groups is accepted. Raises what failed meanwhile, once all is at rest."""
        while True:
            self._runner.moved.clear()
            if (failure := self._runner.take_failure()) is not None:
                await self._come_to_rest()
                raise failure
            if self.books.enough:
                return
            self._pump()
            waits_for_weights = not self._generator.ready.is_set()
            assert self.books.running or self._runner.failure or waits_for_weights or self._works_ahead, (
                f"step {self._step} was asked for before the weights of the last one were published"
            )
            await self._runner.moved.wait()


class Clock:
    """The time between two steps."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def flow(self, booked: Mapping[str, float], skipped: int, cached: int) -> dict[str, float]:
        """What the books do not know of a step, which ends now.

        Args:
            booked: by the books. skipped: prompts that were too long. cached: prompt tokens that engines had in caches.
        """
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        metrics = {"data/skipped_rows": float(skipped), "rollout/cached_tokens": float(cached)}
        if generated := booked["ledger/generated_tokens"]:  # else all was ready, which says nothing of the engines
            metrics["rollout/tokens_per_s"] = generated / max(seconds, 1e-9)
        return metrics


def next_prompt(source: PromptStream, longest_input: int) -> Prompt:
    """The next prompt, which leaves room for a response. Raises UserError when there is none."""
    prompt = source.next()
    if len(prompt.tokens) >= longest_input:
        raise DataError(prompt.where, f"{len(prompt.tokens)} tokens",
                        f"leaves no room for a response: model and engines take fewer than {longest_input} tokens",
                        "set data.max_prompt_tokens, or raise rollout.max_total_tokens or the engines' "
                        "context")  # fmt: skip
    return prompt


def too_late(step: int, config: RunConfig, found: Standing) -> EngineError:
    """The error of a step that has not enough groups in time."""
    return EngineError(
        f"rollout of step {step}",
        f"{found.accepted} of {config.rollout.groups_per_step} groups",
        f"not complete within {config.deadlines.rollout_step_s:g} s ({found.running} groups running, "
        f"{found.outside} rollouts busy with something else than generation, {found.failed} failed, "
        f"{found.filtered} refused by the dynamic filter, {found.truncated} truncated and masked whole, "
        f"{found.engines} engines alive)",
        "look at the engines' logs and the filter; raise deadlines.rollout_step_s if generation is only slow",
    )
