"""Rewards: which grader scores a sample, how several become one number, and what an error means for the run.

Fast comparisons with a label run here; others and users' functions run in processes that can be killed (`pool`), served
reward models and judges are asked over HTTP (`http`, `judge`). An answer that a comparison cannot grade in time is the
answer's fault: it scores 0, is counted, and never ends a run. What any other error means is `reward.on_error`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mslime.config.errors import ConfigError, RewardError
from mslime.config.reward import GraderConfig, RewardPartConfig, ScoringConfig
from mslime.data.sample import Sample
from mslime.data.tokenizer import Tokenizer
from mslime.extensions import MOST_METRICS, raised
from mslime.rollout.rewards.http import HttpGrader
from mslime.rollout.rewards.judge import JudgeGrader
from mslime.rollout.rewards.kinds import RewardKind, reward_kind
from mslime.rollout.rewards.pool import WorkerPool
from mslime.rollout.rewards.result import RewardJob, RewardResult, checked


class Grader(Protocol):
    """Scores samples."""

    async def start(self) -> None:
        """Get ready, before anything is generated. Raises ConfigError when that fails."""
        ...

    async def score(self, sample: Sample) -> RewardResult:
        """The result of a sample; what went wrong with it is its error."""
        ...

    async def close(self) -> None:
        """End what was started."""
        ...


class TextGrader:
    """Scores by a function of response and label, at once."""

    def __init__(self, function: Callable[[str, Any], float]) -> None:
        self._function = function

    async def start(self) -> None:
        """Nothing to do."""

    async def score(self, sample: Sample) -> RewardResult:
        """The result of a sample; a package's function may raise, or return what is no number."""
        try:
            return checked(self._function(sample.response, sample.label), len(sample))
        except Exception as error:
            return RewardResult(0.0, raised(error))

    async def close(self) -> None:
        """Nothing to do."""


def open_grader(config: GraderConfig, kind: RewardKind | None, place: str, tokenizer: Tokenizer | None) -> Grader:
    """The grader of one section.

    Args:
        kind: what `config.kind` names (`reward_kind`).

    Raises:
        ConfigError: it lacks its function or URL.
    """
    if kind is not None:
        if callable(kind.function):
            return TextGrader(kind.function)
        limit_s = config.timeout_s or kind.limit_s
        job = RewardJob(kind.function, f"{place}.kind", limit_s, kind.more_memory, interrupt=True)
        return WorkerPool(job, config.workers)
    if config.servers is not None and not config.servers[1].urls:
        raise ConfigError(f"{place}.{config.kind}.url", None, f"kind {config.kind} needs a URL", "name its server")
    if config.kind == "http":
        return HttpGrader(config.http, f"{place}.http", config.limit_s, tokenizer)
    if config.kind == "judge":
        return JudgeGrader(config.judge, f"{place}.judge", config.limit_s, tokenizer)
    if config.function is None:
        raise ConfigError(f"{place}.function", None, "kind custom needs a function", "name it as module:function")
    job = RewardJob(config.function, f"{place}.function", config.limit_s, per_group=config.per == "group")
    return WorkerPool(job, config.workers)


class RewardScorer:
    """Scores samples as `reward` says. Belongs to one event loop; close it there.

    Args:
        place: the configuration section, for messages.
        tokenizer: for graders that want the prompt's text.

    Attributes:
        name: of the function or kind, for messages.
        per_group: a part wants all samples of a prompt at once, so all are scored by `score_group`.
        errors: rewards that raised, ran out of time or were no finite number.
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
        self.errors = 0
        self._metrics: set[str] = set()

    async def start(self) -> None:
        """Import functions before anything is generated. Raises ConfigError when that fails."""
        for _, grader in self._graders:
            await grader.start()

    async def score(self, sample: Sample) -> float | None:
        """The reward of a finished sample, whose process rewards and metrics are set; None when it is to be dropped.

        Raises:
            RewardError: it could not be scored and `reward.on_error` is `fail`.
            ConfigError: a function cannot be imported.
        """
        assert not self.per_group, "samples are scored with their group"
        (reward,) = await self.score_group([sample])
        return reward

    async def score_group(self, samples: Sequence[Sample]) -> list[float | None]:
        """`score` of each of the samples of a prompt; a part of kind `per: group` is asked once for all of them."""
        bare = [dataclasses.replace(s, routes=None, supports=None) for s in samples]  # large, and no reward reads them
        by_part = await asyncio.gather(*(self._results(part, grader, bare) for part, grader in self._graders))
        self._metrics |= {name for results in by_part for v in results for name in v.metrics}
        if len(self._metrics) > MOST_METRICS:
            rule = f"a run has {MOST_METRICS} at most; names are not for values"
            raise RewardError(f"reward {self.name}", f"{len(self._metrics)} names of metrics", rule, "return fewer")
        told = [(sample, [v[i] for v in by_part]) for i, sample in enumerate(samples)]
        dropped = [self._is_dropped(*one) for one in told]  # raises before anything is added: it is scored again then
        return [None if gone else self._add_up(*one) for one, gone in zip(told, dropped, strict=True)]

    def _is_dropped(self, sample: Sample, results: list[RewardResult]) -> bool:
        """Whether errors of the parts drop the sample. Raises RewardError where they end the run."""
        failed = [(part, v) for (part, _), v in zip(self._graders, results, strict=True) if v.error]
        self.errors += bool(failed)
        sample.error = "; ".join(v.error for _, v in failed)
        fatal = [(part, v) for part, v in failed if not self._is_answers_fault(part, sample)]
        if fatal and self._config.on_error == "fail":
            raise self._error(sample, *fatal[0])
        return bool(fatal) and self._config.on_error == "drop"

    async def close(self) -> None:
        """End the worker processes and connections."""
        for _, grader in self._graders:
            await grader.close()

    async def _results(self, part: RewardPartConfig, grader: Grader, samples: Sequence[Sample]) -> list[RewardResult]:
        if part.per == "group":
            assert isinstance(grader, WorkerPool), "only functions are asked for groups"
            return await grader.score_group(samples)
        return await asyncio.gather(*(self._result(part, grader, sample) for sample in samples))

    async def _result(self, part: RewardPartConfig, grader: Grader, sample: Sample) -> RewardResult:
        problem = self._label_problem(part, sample)
        return RewardResult(0.0, problem) if problem else await grader.score(sample)

    def _is_answers_fault(self, part: RewardPartConfig, sample: Sample) -> bool:
        """Whether an error of this part says something about the response, and not about the row or the function."""
        kind = self._kinds[part.kind]
        return kind is not None and not callable(kind.function) and not kind.label_problem(sample.label)

    def _label_problem(self, part: RewardPartConfig, sample: Sample) -> str:
        kind = self._kinds[part.kind]
        return "" if kind is None else kind.label_problem(sample.label)

    def _error(self, sample: Sample, part: RewardPartConfig, result: RewardResult) -> RewardError:
        bad_label = self._label_problem(part, sample)
        return RewardError(
            f"reward {part.function or part.name}",
            f"group {sample.group_id}, sample {sample.index}: {sample.response[:200]!r}",
            result.error,
            "mend the row's label; `mslime check` names the row" if bad_label else
            f"mend the {'function' if part.servers is None else 'server'}, or set reward.on_error to zero or drop",
        )  # fmt: skip

    def _add_up(self, sample: Sample, results: list[RewardResult]) -> float:
        """The sum of weighted rewards; what the parts said goes to the sample."""
        parts = [part for part, _ in self._graders]
        sample.process_rewards = [*sample.process_rewards, *(
            (at, part.weight * step) for part, v in zip(parts, results, strict=True) for at, step in v.steps
        )]  # fmt: skip
        sample.scores |= {f"user/{name}": number for v in results for name, number in v.metrics.items()}
        if self._config.parts:
            sample.scores |= {f"reward/{p.name}/mean": v.reward for p, v in zip(parts, results, strict=True)}
        return sum(part.weight * v.reward for part, v in zip(parts, results, strict=True))
