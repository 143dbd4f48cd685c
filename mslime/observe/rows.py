"""Merges rows of `metrics.jsonl`: optimizer steps of a rollout, and rows of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mslime.observe.names import metric_of

Row = Mapping[str, Any]

STEP_PARTS = (
    "perf/wait_seconds",
    "perf/log_prob_seconds",
    "perf/train_seconds",
    "perf/critic_seconds",
    "weights/seconds",
    "perf/eval_seconds",
)
"""Parts of a step's wall time. Saving a checkpoint happens between steps and belongs to neither."""
WHOLE = "perf/step_seconds"
REST = "rest"
"""Wall time of a step outside all parts: not recorded, computed for the report."""


def over_optimizer_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the trainer's rows of a rollout's optimizer steps into one, as `names.METRICS` defines for each metric.

    Sums, the largest, the last, or the mean weighted by the metric's own denominator. A step without tokens for a
    metric leaves it out.
    """
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: _joined([step for step in steps if name in step], name) for name in names}


def _joined(steps: Sequence[Mapping[str, float]], name: str) -> float:
    metric, values = metric_of(name), [step[name] for step in steps]
    assert metric is not None, f"unknown metric {name!r} (see mslime/observe/names.py)"
    if metric.over_steps == "sum":
        return sum(values)
    if metric.over_steps == "max":
        return max(values)
    if metric.over_steps == "last":
        return values[-1]
    weights = [step.get(metric.per, 1.0) for step in steps]
    if not sum(weights):
        weights = [1.0] * len(steps)
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


EVERY_ROW = {"step", "time", "version"}
"""Additional metrics in rows of scores on held-out sets."""


def are_scores(row: Row) -> bool:
    """Whether a row holds scores on held-out sets."""
    return any(name.startswith("eval/") for name in row)


def by_step(rows: Sequence[Row]) -> list[Row]:
    """One row per step, in order: rows of one step are joined, and the unexplained time is added."""
    joined: dict[int, dict[str, Any]] = {}
    for row in rows:
        joined.setdefault(row["step"], {}).update(row)
    return [{**joined[step], **_rest(joined[step])} for step in sorted(joined)]


def _rest(row: Row) -> dict[str, float]:
    if row.get(WHOLE) is None:
        return {}
    known = sum(row.get(part) or 0.0 for part in STEP_PARTS)
    return {REST: max(row[WHOLE] - known, 0.0)}


def total(rows: Sequence[Row], name: str) -> float | None:
    """Sum of a metric over rows; None if none has it."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) if values else None
