"""A run's timeline for the report: the lanes of each step, and their idle shares."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from mslime.observe.timeline import STEP, Span, merge_spans, step_window

MAX_TIMELINE_STEPS = 60
MAX_LANES = 12


def idle_by_step(spans: Sequence[Span]) -> dict[int, dict[str, float]]:
    """Mean idle share of the engines and of the trainers in each step, as `idle/engines` and `idle/trainers`.

    Args:
        spans: sorted by start, as `read_spans` returns them.
    """
    starts = [s.start for s in spans]
    longest = max((s.end - s.start for s in spans), default=0.0)
    out: dict[int, dict[str, float]] = {}
    for bound in (s for s in spans if s.name == STEP):
        near = spans[bisect_left(starts, bound.start - longest) : bisect_left(starts, bound.end)]
        shares = idle_shares((s for s in near if s.end > bound.start), (bound.start, bound.end))
        for kind in ("engine", "trainer"):
            own = [share for lane, share in shares.items() if lane.startswith(kind)]
            if own:
                out.setdefault(bound.step, {})[f"idle/{kind}s"] = sum(own) / len(own)
    return out


def timeline_data(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """The last steps, each with its lanes; times in seconds from the step's start."""
    steps = sorted({span.step for span in spans if span.step > 0 or span.name == STEP})[-MAX_TIMELINE_STEPS:]
    windows = {step: window for step in steps if (window := step_window(spans, step))}
    return [
        _step_data(step, [s for s in spans if s.end > start and s.start < end], (start, end))
        for step, (start, end) in windows.items()
        if end > start
    ]


def _step_data(step: int, spans: Sequence[Span], window: tuple[float, float]) -> dict[str, Any]:
    shown = [s for s in spans if s.name != STEP]
    idle = idle_shares(shown, window)
    lanes, hidden = _shown_lanes({s.lane for s in shown})
    return {
        "step": step,
        "seconds": round(window[1] - window[0], 3),
        "hidden": hidden,
        "lanes": [
            {"name": lane, "idle": idle.get(lane) if _works(lane) else None, "spans": _lane_spans(shown, lane, window)}
            for lane in lanes
        ],
    }


def _shown_lanes(lanes: set[str]) -> tuple[list[str], int]:
    """Lanes in drawing order, at most MAX_LANES of a kind, and the number of omitted ones."""
    kept: list[str] = []
    of_kind: Counter[str] = Counter()
    for lane in sorted(lanes, key=_lane_order):
        of_kind[_kind(lane)] += 1
        if of_kind[_kind(lane)] <= MAX_LANES:
            kept.append(lane)
    return kept, len(lanes) - len(kept)


def _kind(lane: str) -> str:
    return lane.rstrip("0123456789 -_")


def _works(lane: str) -> bool:
    """Whether idleness of a lane is a loss: engines and trainers, not the lanes of mere events."""
    return _kind(lane) in ("engine", "trainer")


def _lane_order(lane: str) -> tuple[int, int, str]:
    """The driver's view first, then engines and trainers by number."""
    order = {"driver": 0, "rollout": 1, "engine": 2, "trainer": 3, "sender": 4}
    number = lane.removeprefix(_kind(lane)).strip(" -_")
    return order.get(_kind(lane), 5), int(number) if number else 0, lane


def _lane_spans(spans: Sequence[Span], lane: str, window: tuple[float, float]) -> list[list[Any]]:
    """[name, start, end, step] of a lane, clipped to the window and relative to its start."""
    start, end = window
    own = merge_spans(s for s in spans if s.lane == lane)
    return [[s.name, round(max(s.start, start) - start, 4), round(min(s.end, end) - start, 4), s.step] for s in own]


def idle_shares(spans: Iterable[Span], window: tuple[float, float]) -> dict[str, float]:
    """Fraction of `window` in which each lane has no span. The driver is excluded; overlapping spans count once."""
    start, end = window
    by_lane: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        if span.lane != "driver":
            by_lane.setdefault(span.lane, []).append((max(span.start, start), min(span.end, end)))
    length = max(end - start, 1e-9)
    return {lane: 1.0 - _covered(parts) / length for lane, parts in by_lane.items()}


def _covered(parts: Iterable[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(parts):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
