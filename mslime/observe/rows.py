"""Rows of `metrics.jsonl` put together: optimizer steps of a rollout, rows of a step, many steps for a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
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
"""Stretches of a step's wall time. A checkpoint is saved between two steps, and belongs to neither."""
WHOLE = "perf/step_seconds"
REST = "rest"
"""Wall time of a step that no part explains: not recorded, computed for the report."""


def over_optimizer_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One row from what the trainer reports of a rollout's optimizer steps, as `names.METRICS` says of each metric.

    Sums, the largest, the last, or the mean weighted by the metric's own denominator. A step that leaves a metric out
    had no tokens for it.
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
"""What scores on held-out sets have as well, in a row of their own."""


def are_scores(row: Row) -> bool:
    """Whether a row tells of held-out sets."""
    return any(name.startswith("eval/") for name in row)


def by_step(rows: Sequence[Row]) -> list[Row]:
    """One row a step, in order; rows of the same step are joined, and what no part of its time explains is added."""
    joined: dict[int, dict[str, Any]] = {}
    for row in rows:
        joined.setdefault(row["step"], {}).update(row)
    return [{**joined[step], **_rest(joined[step])} for step in sorted(joined)]


def irregular(rows: Sequence[Row]) -> str:
    """What no run writes: steps without a row between others, steps whose numbers stand there twice; empty: neither.

    Args:
        rows: as they stand in the file, before `by_step`.
    """
    names: dict[int, set[str]] = {}
    twice: set[int] = set()
    for row in rows:
        known, own = names.setdefault(row["step"], set()), row.keys() - EVERY_ROW
        if known & own:
            twice.add(row["step"])
        known |= own
    gaps = [(a, b) for a, b in pairwise(sorted(names)) if b > a + 1]
    missing = sum(b - a - 1 for a, b in gaps)
    told = [f"steps without a row: {missing}, the first is {gaps[0][0] + 1}"] if gaps else []
    told += (
        [f"steps with two rows, of which the later counts: {len(twice)}, the first is {min(twice)}"] if twice else []
    )
    return "; ".join(told)


def _rest(row: Row) -> dict[str, float]:
    if row.get(WHOLE) is None:
        return {}
    known = sum(row.get(part) or 0.0 for part in STEP_PARTS)
    return {REST: max(row[WHOLE] - known, 0.0)}


def total(rows: Sequence[Row], name: str) -> float | None:
    """Sum of a metric over rows; None when none has it."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) if values else None


def with_any(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows that have one of the metrics."""
    return [row for row in rows if any(row.get(name) is not None for name in names)]


def thin(rows: Sequence[Row], names: Sequence[str], limit: int) -> tuple[list[Row], int]:
    """At most `limit` rows, and how many rows each of them stands for, at the last of their steps."""
    size = -(-len(rows) // limit)
    if size <= 1:
        return list(rows), 1
    chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [{"step": chunk[-1]["step"], **{name: _together(chunk, name) for name in names}} for chunk in chunks], size


def _together(rows: Sequence[Row], name: str) -> float | None:
    """Mean of a metric over rows; of an extreme, the extreme."""
    values = [row[name] for row in rows if row.get(name) is not None]
    if not values:
        return None
    if name.endswith(("max", "min")):
        return max(values) if name.endswith("max") else min(values)
    return sum(values) / len(values)
