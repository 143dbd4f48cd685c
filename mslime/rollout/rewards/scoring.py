"""What becomes of finished responses before their group is complete: rewards, what is taken off them for length and for
repetition (not in evaluations), and a served teacher's scores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mslime.config.reward import RewardConfig
from mslime.data.sample import Group, Sample, SampleStatus, check_teacher_log_probs
from mslime.rollout.filters import UNSHAPED
from mslime.rollout.protocols import Scorer, Teacher


class Scoring:
    """Rewards and teaches rollouts as they finish, or rewards a whole group once it has. What was done before an
    interruption is not done again."""

    def __init__(
        self,
        shaping: RewardConfig,
        limit: int,
        scorer: Scorer,
        teacher: Teacher | None,
        span: Callable[[], Callable[[], None]],
    ) -> None:
        """
        Args:
            shaping: what is taken off a reward. limit: `rollout.max_response_tokens`.
            span: called when the teacher begins; what it returns, when it has ended.
        """
        self._shaping, self._limit = shaping, limit
        self._scorer, self._teacher, self._span = scorer, teacher, span

    async def rollout_finished(self, samples: Sequence[Sample]) -> None:
        """Reward a rollout and teach its samples, all at once. Raises the first error, when all are through.

        A reward of one sample is asked about the last one, and is that of all.
        """
        done = await asyncio.gather(self._reward(samples), *map(self._teach, samples), return_exceptions=True)
        for error in done:
            if error is not None:
                raise error

    async def group_finished(self, group: Group) -> None:
        """Reward the rollouts of a group together, where the reward is of groups."""
        rollouts = [r for r in group.rollouts() if r[0].status is not SampleStatus.FAILED]
        if self._scorer.per_group and any(r[-1].reward is None for r in rollouts):
            rewards = await self._scorer.score_group([r[-1] for r in rollouts])
            for samples, reward in zip(rollouts, rewards, strict=True):
                self._settle(samples, reward)

    async def _reward(self, samples: Sequence[Sample]) -> None:
        if not self._scorer.per_group and samples[-1].reward is None:
            self._settle(samples, await self._scorer.score(samples[-1]))

    def _settle(self, samples: Sequence[Sample], reward: float | None) -> None:
        """Give all samples of a rollout its reward, or let it fail."""
        if reward is not None:
            reward = shaped(samples, reward, self._shaping, self._limit)
        for sample in samples:
            sample.reward = reward
            sample.status = SampleStatus.FAILED if reward is None else sample.status

    async def _teach(self, sample: Sample) -> None:
        if self._teacher is not None and sample.teacher_log_probs is None:
            ended = self._span()
            scores = await self._teacher.score(sample)
            check_teacher_log_probs(scores, sample.loss_mask)
            sample.teacher_log_probs = scores
            ended()


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), between -1 and 0.

    0 up to limit - buffer tokens, then falling in proportion, -1 at the limit and beyond.

    Args:
        length: tokens of the response. limit: L_max. buffer: L_cache, between 1 and the limit.
    """
    assert 0 < buffer <= limit
    return -min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def repeated_share(tokens: NDArray[np.int32], n: int) -> float:
    """Share of a response's n-grams that occurred before in it: 1 - distinct / all. 0 for less than n tokens."""
    if len(tokens) < n:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(tokens, np.int32), n)
    rows = np.ascontiguousarray(grams).view(np.dtype((np.void, 4 * n)))
    return 1.0 - len(np.unique(rows)) / len(rows)


def shaped(samples: Sequence[Sample], reward: float, config: RewardConfig, limit: int) -> float:
    """A rollout's reward with penalties, those of its worst sequence. They and the reward without them are noted in the
    `scores` of the last sequence.

    Args:
        limit: `rollout.max_response_tokens`.
    """
    overlong, repetition, unshaped, told = config.overlong, config.repetition, reward, samples[-1].scores
    if overlong.buffer_tokens:
        longest = max(s.sampled_tokens for s in samples)
        told["reward/overlong/mean"] = overlong.factor * overlong_penalty(longest, limit, overlong.buffer_tokens)
        reward += told["reward/overlong/mean"]
    if repetition.ngram:
        share = max(repeated_share(_sampled(s), repetition.ngram) for s in samples)
        told["reward/repetition/mean"] = -repetition.factor * share
        reward += told["reward/repetition/mean"]
    if overlong.buffer_tokens or repetition.ngram:
        told[UNSHAPED] = unshaped
    return reward


def _sampled(sample: Sample) -> NDArray[np.int32]:
    """The tokens that the model wrote: what an environment repeats is not the model's fault."""
    spans = [sample.tokens[s.start : s.end] for s in sample.segments if s.version is not None]
    return np.concatenate([np.empty(0, np.int32), *spans])
