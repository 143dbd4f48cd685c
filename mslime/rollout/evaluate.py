"""Evaluation on a held-out set: the rollout function plays its prompts, which are scored; accuracy, pass@k and
lengths."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mslime.config.errors import RolloutError
from mslime.data.sample import Group, SampleStatus
from mslime.rollout.rewards.scorer import RewardScorer

RIGHT_ABOVE = 0.5


@dataclass(frozen=True)
class EvalResult:
    """One held-out set under one weight version.

    Attributes:
        prompts: rows of the set.
        accuracy: share of responses that are right, that is, whose reward exceeds 0.5.
        mean_reward: mean over responses; one that failed or could not be scored counts 0.
        pass_at: k -> probability that one of k responses is right, mean over prompts; k = 1, 2, 4 ... up to n.
        response_len_mean: tokens. truncated: share of responses cut at the length limit.
        version: weight version that sampled every token; None when no token was sampled.
    """

    name: str
    prompts: int
    accuracy: float
    mean_reward: float
    pass_at: dict[int, float]
    response_len_mean: float
    truncated: float
    seconds: float
    version: int | None = None

    def metrics(self) -> dict[str, float]:
        """`eval/<name>/...` values."""
        head = f"eval/{self.name}"
        return {
            f"{head}/accuracy": self.accuracy,
            f"{head}/reward": self.mean_reward,
            f"{head}/response_len_mean": self.response_len_mean,
            f"{head}/truncated": self.truncated,
            f"{head}/seconds": self.seconds,
            **{f"{head}/pass@{k}": v for k, v in self.pass_at.items()},
        }


def pass_at_k(n: int, right: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k responses is right, from n of which `right` are.

    1 - C(n - right, k) / C(n, k), Chen et al. 2021 (arXiv 2107.03374), eq. 1.
    """
    assert 0 < k <= n and 0 <= right <= n
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def summarise(name: str, groups: Sequence[Group], seconds: float) -> EvalResult:
    """Result of `groups`: finished rollouts of each prompt, n for every prompt, all of one weight version."""
    rollouts = [group.rollouts() for group in groups]
    n = len(rollouts[0])
    assert all(len(g) == n for g in rollouts)
    samples = [s for g in groups for s in g.samples]
    versions = {p.version for s in samples for p in s.segments if p.version is not None}
    assert len(versions) <= 1, f"weights were replaced during the evaluation of {name}: versions {sorted(versions)}"
    rewards = np.asarray([[parts[-1].reward or 0.0 for parts in g] for g in rollouts], np.float64)
    right = (rewards > RIGHT_ABOVE).sum(axis=1)
    ks = [2**i for i in range(n.bit_length()) if 2**i <= n]
    return EvalResult(
        name,
        len(groups),
        float((rewards > RIGHT_ABOVE).mean()),
        float(rewards.mean()),
        {k: float(np.mean([pass_at_k(n, int(c), k) for c in right])) for k in ks},
        float(np.mean([s.response_length for s in samples])),
        float(np.mean([s.status is SampleStatus.TRUNCATED for s in samples])),
        seconds,
        next(iter(versions), None),
    )


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
    places = asyncio.Semaphore(at_once)

    async def run(group: Group, number: int) -> None:
        async with places:
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

    async def all_of(work: Iterable[Coroutine[Any, Any, None]]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                begun = [tasks.create_task(each) for each in work]
        except ExceptionGroup as errors:  # the first failure cancelled the others
            raise errors.exceptions[0] from None
        if any(task.cancelled() for task in begun):  # which a TaskGroup ignores
            raise RolloutError("eval", "a rollout", "was cancelled from within",
                               "catch CancelledError in the function that answers or scores it")  # fmt: skip

    await all_of(run(g, number) for g in groups for number in g.numbers)
    await all_of(score(group) for group in groups if scorer.per_group)
