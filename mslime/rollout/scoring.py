"""What becomes of finished responses before their group is complete: rewards, and a served teacher's scores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mslime.config.schema import RunConfig
from mslime.data.sample import Group, Sample, SampleStatus, check_teacher_log_probs
from mslime.rollout.protocols import Scorer, Teacher
from mslime.rollout.shaping import shaped


class Scoring:
    """Rewards and teaches samples as they finish, or rewards a whole group once it has. What was done before an
    interruption is not done again."""

    def __init__(
        self, config: RunConfig, scorer: Scorer, teacher: Teacher | None, span: Callable[[], Callable[[], None]]
    ) -> None:
        """
        Args:
            span: called when the teacher begins; what it returns, when it has ended.
        """
        self._config, self._scorer, self._teacher, self._span = config, scorer, teacher, span

    async def sample_finished(self, sample: Sample) -> None:
        """Reward and teach a sample, both at once. Raises the first error of the two, when both are through."""
        both = await asyncio.gather(self._reward(sample), self._teach(sample), return_exceptions=True)
        for error in both:
            if error is not None:
                raise error

    async def group_finished(self, group: Group) -> None:
        """Reward the samples of a group together, where the reward is of groups."""
        samples = [s for s in group.samples if s.status is not SampleStatus.FAILED]
        if self._scorer.per_group and any(s.reward is None for s in samples):
            self._settle(samples, await self._scorer.score_group(samples))

    async def _reward(self, sample: Sample) -> None:
        if not self._scorer.per_group and sample.reward is None:
            self._settle([sample], [await self._scorer.score(sample)])

    def _settle(self, samples: Sequence[Sample], rewards: Sequence[float | None]) -> None:
        for sample, reward in zip(samples, rewards, strict=True):
            if reward is None:
                sample.status = SampleStatus.FAILED
            else:
                limit = self._config.rollout.max_response_tokens
                sample.reward = shaped(sample, reward, self._config.reward, limit)

    async def _teach(self, sample: Sample) -> None:
        if self._teacher is not None and sample.teacher_log_probs is None:
            ended = self._span()
            scores = await self._teacher.score(sample)
            check_teacher_log_probs(scores, sample.loss_mask)
            sample.teacher_log_probs = scores
            ended()
