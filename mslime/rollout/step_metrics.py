"""Metrics of a rollout step, named as in docs/metrics, and results of held-out sets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mslime.data.sample import Group, Sample, SampleStatus


def batch_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """`reward/*`, `rollout/*` and `staleness/*` of the groups that weights of `version` are about to train on.

    Rewards count once per rollout, lengths once per response: a rollout may consist of several responses.
    """
    samples = [s for g in groups for s in g.samples]
    rewards = np.asarray(list({s.rollout: s.reward for s in samples}.values()), np.float64)
    lengths = np.asarray([s.response_length for s in samples], np.float64)
    p10, p50, p90 = np.percentile(lengths, [10, 50, 90])
    mean_age, max_age = staleness(groups, version)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/zero_variance_groups": float(sum(len({s.reward for s in g.samples}) == 1 for g in groups)),
        "rollout/groups": float(len(groups)),
        "rollout/responses": float(len(samples)),
        "rollout/sequences_per_rollout": len(samples) / len(rewards),
        "rollout/prompt_len_mean": float(np.mean([s.prompt_length for s in samples])),
        "rollout/response_len_mean": float(lengths.mean()),
        "rollout/response_len_p10": float(p10),
        "rollout/response_len_p50": float(p50),
        "rollout/response_len_p90": float(p90),
        "rollout/response_len_max": float(lengths.max()),
        "rollout/truncated": float(np.mean([s.status is SampleStatus.TRUNCATED for s in samples])),
        "staleness/mean": mean_age,
        "staleness/max": max_age,
        **support_metrics(samples),
        **score_metrics(samples),
    }


def support_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Sizes of the supports of trained tokens; empty if all were drawn from the whole vocabulary."""
    recorded = [s.supports.sizes[s.loss_mask] for s in samples if s.supports is not None]
    sizes = np.concatenate([np.empty(0, np.int64), *(r[r > 0] for r in recorded)])
    if not len(sizes):
        return {}
    return {
        "rollout/support_tokens": float(len(sizes)),
        "rollout/support_mean": float(sizes.mean()),
        "rollout/support_p99": float(np.percentile(sizes, 99)),
        "rollout/support_max": float(sizes.max()),
    }


def score_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Means of additional reward metrics (`Sample.scores`), over the rollouts that have them."""
    by_name: dict[str, dict[tuple[int, int, bool], float]] = {}
    for sample in samples:
        for name, score in sample.scores.items():
            by_name.setdefault(name, {})[sample.rollout] = score
    return {name: float(np.mean(list(scores.values()))) for name, scores in sorted(by_name.items())}


def staleness(groups: Sequence[Group], version: int) -> tuple[float, float]:
    """(mean, max) age in versions over the trainable tokens; zeros if there are none."""
    ages = [
        (version - seg.version, seg.end - seg.start)
        for g in groups
        for s in g.samples
        for seg in s.segments
        if seg.trainable and seg.version is not None
    ]
    tokens = sum(n for _, n in ages)
    if not tokens:
        return 0.0, 0.0
    return sum(age * n for age, n in ages) / tokens, float(max(age for age, _ in ages))


class StepCounters:
    """Counts of events, in total and since the last step."""

    def __init__(self) -> None:
        self.total, self._mark = Counter[str](), Counter[str]()

    def add(self, name: str, n: int = 1) -> None:
        """`n` more of `name`."""
        self.total[name] += n

    def since_mark(self, name: str) -> int:
        """Count of `name` since the last `mark`."""
        return self.total[name] - self._mark[name]

    def mark(self) -> None:
        """Begin a new step."""
        self._mark = Counter(self.total)


# Held-out sets.

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
