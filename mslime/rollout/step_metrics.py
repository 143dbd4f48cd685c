"""Metrics of one rollout step, named as in docs/metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

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
    told: dict[str, dict[tuple[int, int, bool], float]] = {}
    for sample in samples:
        for name, score in sample.scores.items():
            told.setdefault(name, {})[sample.rollout] = score
    return {name: float(np.mean(list(scores.values()))) for name, scores in sorted(told.items())}


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

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self.total: Counter[str] = Counter(counts or {})
        self._mark = Counter(self.total)

    def add(self, name: str, n: int = 1) -> None:
        """`n` more of `name`."""
        self.total[name] += n

    def since_mark(self, name: str) -> int:
        """Count of `name` since the last `mark`."""
        return self.total[name] - self._mark[name]

    def mark(self) -> None:
        """Begin a new step."""
        self._mark = Counter(self.total)
