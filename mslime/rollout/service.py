"""The rollout service: one asyncio loop that serves synchronous, one-step-ahead and fully asynchronous training.

A group lives in exactly one place: `running` (a task generates and scores it), `partial` (interrupted, waits to be
continued) or `accepted` (complete, waits for the trainer). `max_staleness` = 0 generates inside `take` only and
interrupts what is left over when a step has enough; with `max_staleness` > 0 generation stops around weight updates
only. The submit gate bounds the age of what is begun. Responses that take longer than the bound have tokens that are
older all the same: those are kept, masked, generated again or dropped, as `rollout.on_stale` says. Every token is in
the ledger.

The service knows neither Ray nor Megatron. All its methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mslime.backends.sglang.client import EngineDied
from mslime.config.errors import DataError, EngineError, UserError
from mslime.config.schema import EvalSetConfig, RunConfig
from mslime.data.checksums import FileSum
from mslime.data.ledger import Ledger
from mslime.data.sample import Group, Sample, SampleStatus, check_invariants
from mslime.data.source import Prompt, PromptSource
from mslime.data.tokenizer import Tokenizer
from mslime.rollout.buffer import PartialBuffer
from mslime.rollout.evaluate import EvalResult, summarise
from mslime.rollout.filters import load_filter
from mslime.rollout.gate import SubmitGate
from mslime.rollout.generation import Generator, Sampling, Traffic
from mslime.rollout.protocols import (
    Engines,
    EvaluatedHook,
    ModelInfo,
    ProgressHook,
    Scorer,
    SpanHook,
    StepBatch,
    Teacher,
    living,
)
from mslime.rollout.scoring import Scoring
from mslime.rollout.state import (
    Stored,
    begun_anew,
    check_stored,
    open_state,
    pack_begun,
    pack_groups,
    save_state,
    state_bytes,
    unpack_groups,
)
from mslime.rollout.statistics import StepCounters, batch_metrics

COUNTED = ("aborted", "recycled", "filtered_groups", "failed_groups")
POLL_S = 0.01
ABORT_EVERY_S = 0.25  # a request can slip past an abort that reaches the engine before it does


def new_group(group_id: int, prompt: Prompt, size: int) -> Group:
    """`size` fresh samples of one prompt."""
    samples = [Sample.from_prompt(group_id, i, prompt.tokens, prompt.label) for i in range(size)]
    for sample in samples:
        sample.metadata = dict(prompt.metadata)
    return Group(group_id, samples, prompt.where)


@dataclass(frozen=True)
class _Taken:
    """The groups of a step that the trainer has, until it has trained on them.

    Attributes:
        tokens: that were booked as trained.
        mark: of the ledger, before they were.
    """

    step: int
    groups: list[Group]
    tokens: int
    mark: dict[str, int]


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
        ledger: the fate of every generated token.
    """

    def __init__(
        self,
        config: RunConfig,
        engines: Engines,
        source: PromptSource,
        tokenizer: Tokenizer,
        scorer: Scorer,
        model: ModelInfo,
        *,
        teacher: Teacher | None = None,
        eval_scorers: Mapping[str, Scorer] | None = None,
        on_progress: ProgressHook | None = None,
        on_span: SpanHook | None = None,
        on_evaluated: EvaluatedHook | None = None,
    ) -> None:
        r = config.rollout
        self._config, self._engines, self._source, self._tokenizer = config, engines, source, tokenizer
        self._scorer, self._model, self._on_progress, self._on_span = scorer, model, on_progress, on_span
        self._scoring = Scoring(config, scorer, teacher, self._teaching)
        self._teacher, self._eval_scorers, self._on_evaluated = teacher, eval_scorers or {}, on_evaluated
        self._gate = SubmitGate(r.groups_per_step, r.max_staleness, config.spare_groups)
        self._filter_name, self._keep = load_filter(r.dynamic_filter)
        self._generator = Generator(config, engines, tokenizer, model, self._request_done)
        self._optional_counts = ("truncated_groups",) if r.mask_truncated else ()
        self._sampling = Sampling.for_training(config, model)
        self._on_stale = config.on_stale
        self.ledger, self._counters = Ledger(), StepCounters()
        self._base_version: int | None = None
        self._taken = 0
        self._in_training: _Taken | None = None
        self._next_group_id = 0
        self._running: dict[int, tuple[Group, asyncio.Task[None]]] = {}
        self._partial, self._accepted = PartialBuffer(), list[Group]()
        self._traffic = Traffic()  # of training groups; closed between steps when max_staleness is 0
        self._moved = asyncio.Event()
        self._failure: BaseException | None = None
        self._forgiven: set[int] = set()  # groups in flight when a failure was raised: theirs is the same one
        self._step = 0
        self._last_take = time.monotonic()

    @property
    def version(self) -> int:
        """Weight version that the engines serve and the trainer holds."""
        return self._generator.version

    @version.setter
    def version(self, version: int) -> None:
        self._generator.version = version

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
        self._open_gate()
        limit = asyncio.timeout(self._config.deadlines.rollout_step_s)
        try:
            async with limit:
                await self._enough()
                if self._config.rollout.max_staleness == 0:
                    await self.drain()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._late(step) from error
        groups = self._pick()
        tokens, mark = sum(s.trainable_tokens for g in groups for s in g.samples), self.ledger.marked()
        metrics = self._settle(groups)
        self._in_training = _Taken(step, groups, tokens, mark)
        self._span("rollout", "collect", started)
        self._pump()
        return StepBatch(step, self.version, groups, metrics)

    async def pause_for_update(self) -> None:
        """Hold the engines for a weight update. With `pause_mode: abort` running responses are interrupted and kept;
        otherwise the engines keep them and go on with the new weights."""
        mode = self._config.rollout.pause_mode
        if mode == "abort" or self._config.rollout.max_staleness == 0:
            await self.drain()
            mode = "retract"  # nothing runs any more, so this only closes the door
        self._generator.ready.clear()
        await self._everywhere(lambda: self._engines.pause(mode))

    async def resume_after_update(self, version: int) -> None:
        """Go on with weights of `version`. Prefixes cached with older weights are forgotten, unless `pause_mode` is
        `in_place`, which keeps the caches of running responses by its nature."""
        self.version = version
        if self._in_training is not None and self._in_training.step < version:
            self._in_training = None
        if self._config.rollout.pause_mode != "in_place" or self._config.rollout.max_staleness == 0:
            await self._everywhere(self._engines.flush_cache)
        await self._everywhere(self._engines.resume)
        self._generator.ready.set()
        self._accepted = [g for g in self._accepted if self._young_enough(g)]
        if self._config.rollout.max_staleness > 0:
            self._open_gate()

    async def drain(self) -> None:
        """Interrupt all generation and wait until no request of ours is at an engine. Tokens generated so far are kept.

        Raises:
            EngineError: an engine holds on to its requests for longer than `deadlines.engine_control_s`.
        """
        self._traffic.open = False
        deadline = time.monotonic() + self._config.deadlines.engine_control_s
        next_abort = 0.0
        while self._traffic.in_flight:
            if time.monotonic() > deadline:
                limit_s = self._config.deadlines.engine_control_s
                raise EngineError("abort", f"{self._traffic.in_flight} requests", "the engines did not stop them "
                                  f"within {limit_s:g} s", "read the engines' logs")  # fmt: skip
            if time.monotonic() > next_abort:
                await self._everywhere(self._engines.abort)
                next_abort = time.monotonic() + ABORT_EVERY_S
            await asyncio.sleep(POLL_S)
        settling = [task for group, task in self._running.values() if not group.finished]
        if settling:  # into the buffer, unless a sample of the group is still being scored
            await asyncio.wait(settling, timeout=POLL_S)

    async def evaluate(self, eval_set: EvalSetConfig) -> EvalResult:
        """Accuracy, pass@k and lengths on a held-out set, with the weights that the engines serve now.

        May run beside everything else but a weight update, which must wait for it.

        Raises DataError for a bad file, EngineError when no engine is left, RewardError as `reward.on_error` says.
        """
        started, step = time.time(), self._step
        rows = PromptSource([eval_set.path], self._config.data, self._tokenizer, self._config.seed, shuffle=False)
        sampling = Sampling.for_evaluation(self._config, self._model, eval_set)
        groups = [new_group(i, prompt, eval_set.samples_per_prompt) for i, prompt in enumerate(rows)]

        scorer, traffic = self._eval_scorers.get(eval_set.name, self._scorer), Traffic(open=True)

        async def run(sample: Sample) -> None:
            while not sample.status.finished:
                await self._generator.advance(sample, sampling, f"{eval_set.name}-{sample.group_id}", traffic)
            if not scorer.per_group:
                sample.reward = await scorer.score(sample)

        async def score(group: Group) -> None:
            rewards = await scorer.score_group(group.samples)
            for sample, reward in zip(group.samples, rewards, strict=True):
                sample.reward = reward

        try:
            async with asyncio.TaskGroup() as tasks:
                for sample in (s for g in groups for s in g.samples):
                    tasks.create_task(run(sample))
            async with asyncio.TaskGroup() as tasks:
                for group in groups if scorer.per_group else []:
                    tasks.create_task(score(group))
        except ExceptionGroup as errors:  # the first failure cancelled the others
            raise errors.exceptions[0] from None
        self._span("rollout", "evaluate", started, step)
        if self._on_evaluated is not None:
            self._on_evaluated(eval_set.name, groups)
        return summarise(eval_set.name, [g.samples for g in groups], time.time() - started)

    async def close(self) -> None:
        """Stop generating, whatever it loses at the engines. `state_dict` may still be taken."""
        self._traffic.open = False
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---------------------------------------------------------------------------------------------------- state

    def give_back(self, blamed: Sequence[Group] = ()) -> bool:
        """Undo the last `take`: its groups wait for the next one.

        Args:
            blamed: those of its groups that cannot be trained. One that failed before is dropped.

        Returns:
            Whether all blamed groups were dropped, so that another `take` may go on without them.
        """
        taken, self._in_training = self._in_training, None
        assert taken is not None, "nothing was taken"
        self.ledger = self.ledger.before_training(taken.tokens, taken.mark)
        self._taken -= len(taken.groups)
        dropped = [g for g in blamed if self._blame(g, "cannot be trained")]
        self._accepted = [*(g for g in taken.groups if g not in dropped), *self._accepted]
        return bool(blamed) and len(dropped) == len(blamed)

    def state_dict(self, next_step: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """(JSON-able header, columns) from which a new service continues without losing a finished token.

        Groups in flight are included with what they hold; tokens still inside an engine are not ours yet. Call
        `drain` or `pause_for_update` (mode abort) first to have those as well.

        Args:
            next_step: step that a resumed run begins with; its groups are included where they are taken already.
        """
        taken = self._in_training
        untrained = taken is not None and next_step is not None and taken.step >= next_step
        ledger = self.ledger.copy()
        if taken is not None and untrained:
            ledger = ledger.before_training(taken.tokens, taken.mark)
        accepted = _sound([*(taken.groups if taken is not None and untrained else []), *self._accepted], ledger)
        resting = _sound([*self._partial, *(g for g, _ in self._running.values())], ledger)
        headers, columns = pack_groups([*accepted, *resting])
        header = {"accepted": len(accepted), "groups": headers, **self._books(ledger)}
        return header, columns

    def outline(self) -> bytes:
        """A small state file for the case that this service is lost: groups that are not trained begin anew from their
        prompts, and their tokens are booked as dropped. Holds for a checkpoint after the step taken last."""
        ledger = self.ledger.copy()
        ledger.drop(ledger.pending, "lost")
        headers, columns = pack_begun(sorted(self._held(), key=lambda g: g.group_id))
        return state_bytes({"accepted": 0, "groups": [], "begun": headers, **self._books(ledger)}, columns)

    def _books(self, ledger: Ledger) -> dict[str, Any]:
        """What a state holds beside groups."""
        return {
            "version": self.version,
            "next_group_id": self._next_group_id,
            "source": self._source.state_dict(),
            "ledger": ledger.state_dict(),
            "counters": dict(self._counters.total),
        }

    def load_state_dict(self, header: Mapping[str, Any], columns: Mapping[str, Any] | Stored) -> None:
        """Continue from `state_dict` or `outline`, before the first `take`. Raises DataError when the prompts are
        others."""
        assert not self._running and not self._accepted and not len(self._partial), "the service has begun already"
        self._source.load_state_dict(header["source"])
        groups = unpack_groups(header["groups"], columns)
        accepted, resting = groups[: header["accepted"]], groups[header["accepted"] :]
        check_stored(groups)
        resting += begun_anew(header.get("begun", []), columns, new_group)
        self._accepted = [g for g in accepted if not self._untaught(g)]
        for group in [g for g in accepted if self._untaught(g)] + resting:
            self._partial.put(group)
        self.version, self._next_group_id = int(header["version"]), int(header["next_group_id"])
        self.ledger, self._counters = Ledger.from_state(header["ledger"]), StepCounters(header["counters"])
        alive = sum(s.trainable_tokens for g in self._held() for s in g.samples)
        if alive != self.ledger.pending:
            raise ValueError(f"{self.ledger.pending} tokens are pending in the books, {alive} are held")

    def _untaught(self, group: Group) -> bool:
        """Whether the teacher has not scored the group: it is of a run that had none."""
        return self._teacher is not None and any(s.teacher_log_probs is None for s in group.samples)

    def save(self, path: Path, next_step: int | None = None) -> FileSum:
        """Write `state_dict` to `path` (.npz without pickle), whole or not at all; returns the file's sum."""
        return save_state(path, *self.state_dict(next_step))

    async def checkpoint(self, path: Path, next_step: int | None = None) -> FileSum:
        """`save` with the tokens that engines hold at this moment: interrupts them, saves, and goes on."""
        was_open = self._traffic.open
        await self.drain()
        total = self.save(path, next_step)
        if was_open:
            self._open_gate()
        return total

    def load(self, path: Path) -> None:
        """Continue from a file of `save` or `outline`. Raises CheckpointError when it cannot be read."""
        with open_state(path) as (header, stored):
            self.load_state_dict(header, stored)

    # --------------------------------------------------------------------------------------- gate and submission

    def _open_gate(self) -> None:
        """Let groups be submitted and continued. Counts for the gate begin the first time."""
        if self._base_version is None:
            self._base_version = self.version
        self._traffic.open = True
        self._pump()

    def _pump(self) -> None:
        """Submit groups while the gate has room: interrupted ones first, then new prompts."""
        while self._traffic.open and self._failure is None and self._room() > 0:
            try:
                group = self._next_group()
            except UserError as error:
                self._fail(error)
                return
            task = asyncio.create_task(self._run_group(group), name=f"group {group.group_id}")
            self._running[group.group_id] = (group, task)
            task.add_done_callback(self._notice_crash)
        self._report()

    def _room(self) -> int:
        assert self._base_version is not None
        ready = self._taken + len(self._accepted)
        return self._gate.room(ready, len(self._running), self.version - self._base_version)

    def _next_group(self) -> Group:
        """The most urgent interrupted group that may still be trained, else a new one."""
        while (group := self._partial.pop()) is not None:
            if self._on_stale in ("keep", "mask") or self._fresh_again(group):
                self._counters.add(
                    "recycled", sum(not s.status.finished and s.response_length > 0 for s in group.samples)
                )
                return group
        prompt = self._source.next()
        if len(prompt.tokens) >= (limit := self._sampling.longest_input):
            raise DataError(prompt.where, f"{len(prompt.tokens)} tokens",
                            f"leaves no room for a response: model and engines take fewer than {limit} tokens",
                            "set data.max_prompt_tokens, or raise rollout.max_total_tokens or the engines' "
                            "context")  # fmt: skip
        group = new_group(self._next_group_id, prompt, self._config.rollout.group_size)
        self._next_group_id += 1
        return group

    # ---------------------------------------------------------------------------------------------- one group

    async def _run_group(self, group: Group) -> None:
        """Generate and score all samples of a group, and put it where it then belongs."""
        outcomes: list[BaseException | None] = []
        try:
            runs = [self._run_sample(s, f"g{group.group_id}") for s in group.samples]
            generated = await asyncio.gather(*runs, return_exceptions=True)
            if group.finished and not any(generated):
                generated += await asyncio.gather(self._scoring.group_finished(group), return_exceptions=True)
            outcomes = generated
        finally:
            del self._running[group.group_id]
            errors = [e for e in outcomes if e is not None]
            if self._is_culprit(group, errors) and self._blame(group, str(errors[0])):
                errors = []
            elif errors or not outcomes:  # `outcomes` is empty when the task was cancelled
                self._partial.put(group)
            elif not group.finished:
                self._shelve(group)
            else:
                self._complete(group)
            for error in errors if group.group_id not in self._forgiven else []:
                self._fail(error)
            self._forgiven.discard(group.group_id)
            self._moved.set()
        self._pump()

    async def _run_sample(self, sample: Sample, session: str) -> None:
        """Bring a sample to its end and score it; stop early when the gate closes."""
        while self._traffic.open and not sample.status.finished:
            sample.status = SampleStatus.PENDING
            added = await self._generator.advance(sample, self._sampling, session, self._traffic)
            self.ledger.generate(added)
            if sample.status is SampleStatus.ABORTED:
                self._counters.add("aborted")
            elif sample.status.finished:
                self._counters.add("done")
                self._report()
        if sample.status.finished and sample.status is not SampleStatus.FAILED:
            await self._scoring.sample_finished(sample)

    def _teaching(self) -> Callable[[], None]:
        started = time.time()
        return lambda: self._span("teacher", "score", started)

    def _shelve(self, group: Group) -> None:
        """Keep an interrupted group; without partial rollouts it begins again from its prompt."""
        if not self._config.rollout.partial:
            self.ledger.drop(sum(s.restart() for s in group.samples), "aborted")
        self._partial.put(group)

    def _complete(self, group: Group) -> None:
        """Accept a scored group, or drop it."""
        failed = [s for s in group.samples if s.status is SampleStatus.FAILED]
        for sample in failed:
            self.ledger.drop(sample.trainable_tokens, "reward")
            group.samples.remove(sample)
        self._counters.add("reward_errors", sum(bool(s.error) for s in [*failed, *group.samples]))
        if len(group.samples) < min(2, self._config.rollout.group_size):
            self._drop(group, "reward")
            return
        try:
            kept = self._keep is None or self._keep(group)
        except UserError as error:
            if not self._blame(group, str(error)):
                self._partial.put(group)
                self._fail(error)
            return
        if kept:
            if self._finished_in_time(group) and self._young_enough(group):
                self._accepted.append(group)
        else:
            self._counters.add("filtered_groups")
            self._drop(group, self._filter_name)

    def _finished_in_time(self, group: Group) -> bool:
        """Take truncated responses out of the loss, as `rollout.mask_truncated` says; whether anything is left."""
        if self._config.rollout.mask_truncated:
            cut = [s for s in group.samples if s.status is SampleStatus.TRUNCATED]
            self.ledger.mask(sum(s.mask_all() for s in cut), "truncated")
            if len(cut) == len(group.samples):
                self._counters.add("truncated_groups")
                return False
        return True

    def _is_culprit(self, group: Group, errors: Sequence[BaseException]) -> bool:
        """Whether these failures are the group's own: not an engine's death, nor what befell every group at once."""
        own = bool(errors) and not any(isinstance(e, EngineDied | asyncio.CancelledError) for e in errors)
        return own and group.group_id not in self._forgiven and (bool(group.failures) or self._failure is None)

    def _blame(self, group: Group, reason: str) -> bool:
        """Count a failure of the group's own. Whether it is the second one: the group is dropped then, so that a run
        and its resumes do not end at one group again and again."""
        group.failures += 1
        if group.failures < 2:
            return False
        print(f"group {group.group_id} of {group.source} failed twice and is dropped: {reason}", flush=True)
        self._drop(group, "failed")
        self._counters.add("failed_groups")
        return True

    def _drop(self, group: Group, reason: str) -> None:
        self.ledger.drop(sum(s.trainable_tokens for s in group.samples), reason)

    def _notice_crash(self, task: asyncio.Task[None]) -> None:
        """A group's task ends without an error of its own making; anything else is ours, and must not be silent."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Remember the first failure for `take`, and wake it."""
        self._failure = self._failure or error
        self._moved.set()

    # ---------------------------------------------------------------------------------------------- the age test

    def _oldest_allowed(self) -> int:
        return self.version - self._config.rollout.max_staleness

    def _young_enough(self, group: Group) -> bool:
        """Apply the age test to an accepted group: whether it stays accepted."""
        oldest = group.oldest_version
        if self._on_stale != "keep" and oldest is not None and oldest < self._oldest_allowed():
            if self._on_stale != "mask":
                if self._fresh_again(group):
                    self._partial.put(group)
                return False
            self.ledger.mask(sum(s.mask_before(self._oldest_allowed()) for s in group.samples))
        if any(s.trainable_tokens for s in group.samples):
            return True
        self._counters.add("stale_groups")  # nothing is left to train; its tokens are in the ledger as masked
        return False

    def _fresh_again(self, group: Group) -> bool:
        """Re-roll the stale samples of a group, or drop the group; whether it is still to be generated."""
        limit = self._oldest_allowed()
        stale = [s for s in group.samples if (v := s.oldest_version) is not None and v < limit]
        if stale and self._on_stale == "drop":
            self._drop(group, "stale")
            self._counters.add("stale_groups")
            return False
        self.ledger.drop(sum(s.restart() for s in stale), "stale")
        return True

    # ------------------------------------------------------------------------------------------------- the take

    async def _enough(self) -> None:
        """Return when a step's worth of groups is accepted. Raises what failed meanwhile, once all is at rest."""
        while True:
            self._moved.clear()
            if self._failure is not None:
                failure, self._failure = self._failure, None
                self._forgiven = set(self._running)
                if living(self._engines):
                    await self.drain()
                self._traffic.open = False
                raise failure
            if len(self._accepted) >= self._config.rollout.groups_per_step:
                return
            self._pump()
            waits_for_weights = not self._generator.ready.is_set()
            assert self._running or self._failure or waits_for_weights or self._config.rollout.max_staleness, (
                f"step {self._step} was asked for before the weights of the last one were published"
            )
            await self._moved.wait()

    def _pick(self) -> list[Group]:
        """Take a step's groups off the accepted ones: oldest tokens first, then in order of their ids."""
        self._accepted.sort(key=lambda g: (g.oldest_version or 0, g.group_id))
        n = self._config.rollout.groups_per_step
        groups = sorted(self._accepted[:n], key=lambda g: g.group_id)
        for group in groups:
            for sample in group.samples:
                check_invariants(sample)
        self._accepted = self._accepted[n:]
        self._taken += n
        return groups

    def _settle(self, groups: list[Group]) -> dict[str, float]:
        """Book the groups as trained, and describe the step."""
        self.ledger.train(sum(s.trainable_tokens for g in groups for s in g.samples))
        books = self.ledger.settle(sum(s.trainable_tokens for g in self._held() for s in g.samples))
        now = time.monotonic()
        seconds, self._last_take = now - self._last_take, now
        moved = {n: float(self._counters.since_mark(n)) for n in (*COUNTED, *self._optional_counts)}
        metrics = {
            **batch_metrics(groups, self.version),
            **{f"ledger/{name}": float(value) for name, value in books.items()},
            **{f"rollout/{name}": value for name, value in moved.items()},
            "reward/errors": float(self._counters.since_mark("reward_errors")),
            "data/skipped_rows": float(self._source.skipped),
            "rollout/cached_tokens": float(self._generator.cached_tokens),
        }
        if books["generated_tokens"]:  # else all was ready, which says nothing of how fast the engines are
            metrics["rollout/tokens_per_s"] = books["generated_tokens"] / max(seconds, 1e-9)
        self._counters.mark()
        self._generator.cached_tokens = 0
        return metrics

    def _held(self) -> Iterable[Group]:
        """Every group that is somewhere in the service."""
        return [*self._accepted, *self._partial, *(g for g, _ in self._running.values())]

    def _late(self, step: int) -> EngineError:
        return EngineError(
            f"rollout of step {step}",
            f"{len(self._accepted)} of {self._config.rollout.groups_per_step} groups",
            f"not complete within {self._config.deadlines.rollout_step_s:g} s ({len(self._running)} groups running, "
            f"{self._counters.since_mark('filtered_groups')} refused by the dynamic filter, "
            f"{self._counters.since_mark('truncated_groups')} truncated and masked whole, "
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
            self._on_progress(
                needed=self._config.rollout.groups_per_step,
                accepted=len(self._accepted),
                running=len(self._running),
                done=self._counters.since_mark("done"),
                aborted=self._counters.since_mark("aborted"),
            )

    def _request_done(self, engine: str, start: float, end: float) -> None:
        if self._on_span is not None:
            self._on_span(engine, "generate", start, end, self._step)

    def _span(self, lane: str, name: str, start: float, step: int | None = None) -> None:
        if self._on_span is not None:
            self._on_span(lane, name, start, time.time(), self._step if step is None else step)


def _sound(groups: Sequence[Group], ledger: Ledger) -> list[Group]:
    """The groups that may be saved: one that breaks an invariant would be refused at every resume. It is booked as
    dropped."""
    kept: list[Group] = []
    for group in groups:
        try:
            for sample in group.samples:
                check_invariants(sample)
            kept.append(group)
        except AssertionError as error:
            print(f"group {group.group_id} of {group.source} is left out of the checkpoint: {error}", flush=True)
            ledger.drop(sum(s.trainable_tokens for s in group.samples), "failed")
    return kept
