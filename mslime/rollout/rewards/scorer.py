"""Rewards: choice of grader, combination of several rewards to one number, and the handling of errors; and a served
teacher's scores.

Fast comparisons with a label run here. Other comparisons and user functions run in killable processes (`reward_pool`);
reward models and judges are called over HTTP (`servers`). If a comparison cannot grade an answer in time, the answer
scores 0 and is counted; it never ends a run. All other errors are handled according to `reward.on_error`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from mslime.backends.sglang.client import EngineDied
from mslime.backends.sglang.engine_pool import all_or_first_failure
from mslime.backends.sglang.generating import ScoreRequest
from mslime.config.base import EngineTag
from mslime.config.errors import ConfigError, EngineError, RewardError
from mslime.config.reward import GraderConfig, RewardConfig, RewardPartConfig, ScoringConfig
from mslime.data.sample import Group, Sample, SampleStatus, check_teacher_log_probs
from mslime.data.tokenizer import Tokenizer
from mslime.extensions import MOST_METRICS, raised
from mslime.rollout.filters import UNSHAPED
from mslime.rollout.generation import Traffic
from mslime.rollout.rewards.reward_kinds import RewardJob, RewardKind, RewardResult, checked, reward_kind
from mslime.rollout.rewards.reward_pool import WorkerPool
from mslime.rollout.rewards.servers import HttpGrader, JudgeGrader

if TYPE_CHECKING:
    from mslime.backends.sglang.engine_pool import EnginePool


TRIES = 4
FIRST_WAIT_S = 0.1  # doubled after each try


class ServedTeacher:
    """Scores samples on the teacher's servers; on shared GPUs only while the servers hold their memory. Belongs to one
    event loop."""

    def __init__(self, engines: EnginePool) -> None:
        self._engines = engines
        self._run, self._numbers = uuid.uuid4().hex[:8], itertools.count()
        self._awake, self._traffic = asyncio.Event(), Traffic(open=True)
        self._awake.set()

    async def hold_memory(self, tags: Collection[EngineTag]) -> None:
        """Hold these parts on shared GPUs. Without all of them nothing is scored: running requests are finished first,
        and new ones wait. Raises EngineError as the servers do."""
        self._awake.clear()
        await self._traffic.idle(None)
        await self._engines.hold_memory(tags)
        if set(tags) == set(get_args(EngineTag)):
            self._awake.set()

    async def score(self, sample: Sample) -> NDArray[np.float32]:
        """[T] float32: the teacher's log-prob of each trained token of a finished sample, 0 elsewhere.

        Raises:
            EngineError: the server refused, or its answers were inconsistent, four times; or no server is left.
        """
        scores = np.zeros(len(sample), np.float32)
        trained = np.flatnonzero(sample.loss_mask)
        if len(trained):
            # Tokens before the first trained one, and after the last one, need no log-probs.
            first, end = int(trained[0]), int(trained[-1]) + 1
            found = await self._in_turn(sample.tokens[:end], first, f"g{sample.group_id}")
            scores[trained] = found[trained]
        return scores

    async def _in_turn(self, tokens: NDArray[np.int32], start: int, session: str) -> NDArray[np.float32]:
        while not self._awake.is_set():  # its memory may be released again before this continues
            await self._awake.wait()
        refusals = 0
        with self._traffic.request():
            while True:  # ends: every death leaves one server less
                request = ScoreRequest(f"{self._run}-{session}-{next(self._numbers)}", tokens, start, session)
                try:
                    return await self._engines.score(request)
                except EngineDied:
                    if len(self._engines) == 0:
                        raise
                except EngineError:
                    refusals += 1
                    if refusals == TRIES:
                        raise
                    await asyncio.sleep(FIRST_WAIT_S * 2 ** (refusals - 1))


class TextGrader:
    """Scores with a function of response and label, synchronously. All graders have these methods."""

    def __init__(self, function: Callable[[str, Any], float]) -> None:
        self._function = function

    async def start(self) -> None:
        """Prepare before generation begins. Raises ConfigError if that fails."""

    async def score(self, sample: Sample) -> RewardResult:
        """Score a sample. Failures are returned as its error: a package's function may raise."""
        try:
            return checked(self._function(sample.response, sample.label), len(sample))
        except Exception as error:
            return RewardResult(0.0, raised(error))

    async def close(self) -> None:
        """Release all resources."""


Grader: TypeAlias = TextGrader | WorkerPool | HttpGrader | JudgeGrader


def open_grader(config: GraderConfig, kind: RewardKind | None, place: str, tokenizer: Tokenizer | None) -> Grader:
    """Create the grader of one section.

    Args:
        kind: the kind of `config.kind` (`reward_kind`).

    Raises:
        ConfigError: its function or URL is missing.
    """
    if kind is not None:
        if callable(kind.function):
            return TextGrader(kind.function)
        limit_s = config.timeout_s or kind.limit_s
        job = RewardJob(kind.function, f"{place}.kind", limit_s, kind.more_memory, interrupt=True)
        return WorkerPool(job, config.workers)
    if config.servers is not None and not config.servers[1].urls:
        raise ConfigError(f"{place}.{config.kind}.url", None, f"kind {config.kind} needs a server", "set its URL")
    if config.kind == "http":
        return HttpGrader(config.http, f"{place}.http", config.limit_s, tokenizer)
    if config.kind == "judge":
        return JudgeGrader(config.judge, f"{place}.judge", config.limit_s, tokenizer)
    if config.function is None:
        raise ConfigError(f"{place}.function", None, "kind custom needs a function", "name it as module:function")
    job = RewardJob(config.function, f"{place}.function", config.limit_s, per_group=config.per == "group")
    return WorkerPool(job, config.workers)


class RewardScorer:
    """Scores samples according to `reward`. Belongs to one event loop; close it there.

    Args:
        place: the configuration section, for messages.
        tokenizer: for graders that use the prompt's text.

    Attributes:
        name: of the function or kind, for messages.
        per_group: a part needs all samples of a prompt at once, so `score_group` scores all of them.
    """

    def __init__(self, config: ScoringConfig, place: str = "reward", tokenizer: Tokenizer | None = None) -> None:
        self._config = config
        self._graders: list[tuple[RewardPartConfig, Grader]] = []
        self._kinds: dict[str, RewardKind | None] = {}
        for i, part in enumerate(config.graders):
            where = f"{place}.parts[{i}]" if config.parts else place
            self._kinds[part.kind] = kind = reward_kind(part.kind, where)
            self._graders.append((part, open_grader(part, kind, where, tokenizer)))
        self.name = " + ".join(part.function or part.name for part, _ in self._graders)
        self.per_group = any(part.per == "group" for part, _ in self._graders)
        self._metrics: set[str] = set()

    async def start(self) -> None:
        """Import functions before generation begins. Raises ConfigError if that fails."""
        for _, grader in self._graders:
            await grader.start()

    async def score(self, sample: Sample) -> float | None:
        """The reward of a finished sample, and set its process rewards and metrics; None if the sample is to be
        dropped.

        Raises:
            RewardError: it could not be scored and `reward.on_error` is `fail`.
            ConfigError: a function cannot be imported.
        """
        assert not self.per_group, "samples are scored with their group"
        (reward,) = await self.score_group([sample])
        return reward

    async def score_group(self, samples: Sequence[Sample]) -> list[float | None]:
        """`score` of each sample of a prompt; a part of kind `per: group` is called once for all of them."""
        bare = [dataclasses.replace(s, routes=None, supports=None) for s in samples]  # large, and no reward reads them
        by_part = await asyncio.gather(*(self._results(part, grader, bare) for part, grader in self._graders))
        self._metrics |= {name for results in by_part for v in results for name in v.metrics}
        if len(self._metrics) > MOST_METRICS:
            rule = f"a run has {MOST_METRICS} at most; do not put values into names"
            raise RewardError(f"reward {self.name}", f"{len(self._metrics)} names of metrics", rule, "return fewer")
        pairs = [(sample, [v[i] for v in by_part]) for i, sample in enumerate(samples)]
        dropped = [self._is_dropped(*one) for one in pairs]  # raises before any change: it is scored again then
        return [None if gone else self._add_up(*one) for one, gone in zip(pairs, dropped, strict=True)]

    def _is_dropped(self, sample: Sample, results: list[RewardResult]) -> bool:
        """Whether errors of the parts drop the sample. Raises RewardError if they end the run."""
        failed = [(part, v) for (part, _), v in zip(self._graders, results, strict=True) if v.error]
        sample.error = "; ".join(v.error for _, v in failed)
        fatal = list[tuple[RewardPartConfig, RewardResult]]()
        for part, v in failed:
            kind = self._kinds[part.kind]  # a comparison that fails in its process: the response's fault
            if kind is None or callable(kind.function) or kind.label_problem(sample.label):
                fatal.append((part, v))
        if fatal and self._config.on_error == "fail":
            raise self._error(sample, *fatal[0])
        return bool(fatal) and self._config.on_error == "drop"

    async def close(self) -> None:
        """End the worker processes and connections."""
        for _, grader in self._graders:
            await grader.close()

    async def _results(self, part: RewardPartConfig, grader: Grader, samples: Sequence[Sample]) -> list[RewardResult]:
        if part.per == "group":
            assert isinstance(grader, WorkerPool), "only functions score groups"
            return await grader.score_group(samples)

        async def result(sample: Sample) -> RewardResult:
            problem = self._label_problem(part, sample)
            return RewardResult(0.0, problem) if problem else await grader.score(sample)

        return await asyncio.gather(*map(result, samples))

    def _label_problem(self, part: RewardPartConfig, sample: Sample) -> str:
        kind = self._kinds[part.kind]
        return "" if kind is None else kind.label_problem(sample.label)

    def _error(self, sample: Sample, part: RewardPartConfig, result: RewardResult) -> RewardError:
        bad_label = self._label_problem(part, sample)
        return RewardError(
            f"reward {part.function or part.name}",
            f"group {sample.group_id}, sample {sample.index}: {sample.response[:200]!r}",
            result.error,
            "fix the row's label; `mslime check` reports the row" if bad_label else
            f"fix the {'function' if part.servers is None else 'server'}, or set reward.on_error to zero or drop",
        )  # fmt: skip

    def _add_up(self, sample: Sample, results: list[RewardResult]) -> float:
        """The weighted sum of rewards; process rewards and metrics of the parts are added to the sample."""
        parts = [part for part, _ in self._graders]
        sample.process_rewards = [*sample.process_rewards, *(
            (at, part.weight * step) for part, v in zip(parts, results, strict=True) for at, step in v.steps
        )]  # fmt: skip
        sample.scores |= {f"user/{name}": number for v in results for name, number in v.metrics.items()}
        if self._config.parts:
            sample.scores |= {f"reward/{p.name}/mean": v.reward for p, v in zip(parts, results, strict=True)}
        return sum(part.weight * v.reward for part, v in zip(parts, results, strict=True))


# Steps between a finished response and its complete group: rewards, penalties for length and repetition (not in
# evaluations), and a served teacher's scores.


class Scoring:
    """Scores finished rollouts by reward and teacher, or a whole group by a group reward. Steps done before an
    interruption are not repeated."""

    def __init__(
        self, shaping: RewardConfig, limit: int, scorer: RewardScorer, teacher: ServedTeacher | None,
        on_taught: Callable[[float], None],
    ) -> None:  # fmt: skip
        """
        Args:
            shaping: penalties of a reward. limit: `rollout.max_response_tokens`.
            on_taught: called when the teacher has scored a sample, with the second since the epoch when it began.
        """
        self._shaping, self._limit = shaping, limit
        self._scorer, self._teacher, self._on_taught = scorer, teacher, on_taught

    async def rollout_finished(self, samples: Sequence[Sample]) -> None:
        """Score a rollout's reward and teacher log-probs concurrently. Raises the first error, after all have ended.

        A per-sample reward scores the last sample and applies to all.
        """
        all_or_first_failure(
            await asyncio.gather(self._reward(samples), *map(self._teach, samples), return_exceptions=True)
        )

    async def group_finished(self, group: Group) -> None:
        """Score the rollouts of a group together, if the reward is per group."""
        rollouts = [r for r in group.rollouts() if r[0].status is not SampleStatus.FAILED]
        if self._scorer.per_group and any(r[-1].reward is None for r in rollouts):
            rewards = await self._scorer.score_group([r[-1] for r in rollouts])
            for samples, reward in zip(rollouts, rewards, strict=True):
                self._settle(samples, reward)

    async def _reward(self, samples: Sequence[Sample]) -> None:
        if not self._scorer.per_group and samples[-1].reward is None:
            self._settle(samples, await self._scorer.score(samples[-1]))

    def _settle(self, samples: Sequence[Sample], reward: float | None) -> None:
        """Set the reward of all samples of a rollout, or mark the rollout as failed."""
        if reward is not None:
            reward = shaped(samples, reward, self._shaping, self._limit)
        for sample in samples:
            sample.reward = reward
            sample.status = SampleStatus.FAILED if reward is None else sample.status

    async def _teach(self, sample: Sample) -> None:
        if self._teacher is not None and sample.teacher_log_probs is None:
            began = time.time()
            scores = await self._teacher.score(sample)
            check_teacher_log_probs(scores, sample.loss_mask)
            sample.teacher_log_probs = scores
            self._on_taught(began)


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), between -1 and 0.

    0 up to limit - buffer tokens, then falling in proportion, -1 at the limit and beyond.

    Args:
        length: tokens of the response. limit: L_max. buffer: L_cache, between 1 and the limit.
    """
    assert 0 < buffer <= limit
    return -min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def repeated_share(tokens: NDArray[np.int32], n: int) -> float:
    """Share of a response's repeated n-grams: 1 - distinct / all. 0 for fewer than n tokens."""
    if len(tokens) < n:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(tokens, np.int32), n)
    rows = np.ascontiguousarray(grams).view(np.dtype((np.void, 4 * n)))
    return 1.0 - len(np.unique(rows)) / len(rows)


def shaped(samples: Sequence[Sample], reward: float, config: RewardConfig, limit: int) -> float:
    """A rollout's reward with the penalties of its worst sequence. Penalties and unpenalised reward are recorded in the
    `scores` of the last sequence.

    Args:
        limit: `rollout.max_response_tokens`.
    """
    overlong, repetition, unshaped, pairs = config.overlong, config.repetition, reward, samples[-1].scores
    if overlong.buffer_tokens:
        longest = max(s.sampled_tokens for s in samples)
        pairs["reward/overlong/mean"] = overlong.factor * overlong_penalty(longest, limit, overlong.buffer_tokens)
        reward += pairs["reward/overlong/mean"]
    if repetition.ngram:
        share = max(repeated_share(_sampled(s), repetition.ngram) for s in samples)
        pairs["reward/repetition/mean"] = -repetition.factor * share
        reward += pairs["reward/repetition/mean"]
    if overlong.buffer_tokens or repetition.ngram:
        pairs[UNSHAPED] = unshaped
    return reward


def _sampled(sample: Sample) -> NDArray[np.int32]:
    """The tokens sampled by the model: repetitions in an environment's text are not penalised."""
    spans = [sample.tokens[s.start : s.end] for s in sample.segments if s.version is not None]
    return np.concatenate([np.empty(0, np.int32), *spans])
