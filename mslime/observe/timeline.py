"""Time spans on lanes in `timeline.jsonl`, for the report's picture of a step.

A lane is a part of the run that works in parallel to others: `engine 0`, ..., `trainer 0`, ..., `sender 0` (of
weights), ..., `driver`. The driver's span named `step` bounds a step. Recording costs an append to a list. At the end
of a step overlapping spans of one kind (concurrent requests of an engine) are merged, and the step is written.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mslime.config.errors import UserError
from mslime.observe.metrics import read_rows

FILE_NAME = "timeline.jsonl"
STEP = "step"
MERGE_GAP_SECONDS = 0.002


@dataclass(frozen=True)
class Span:
    """One span of work.

    Attributes:
        lane: part of the run that worked.
        name: kind of work (`generate`, `train`, `sync`, ...).
        start, end: seconds since the epoch.
        step: the training step it belongs to.
        attempt: start time of the process that recorded it; a resumed run has several.
    """

    lane: str
    name: str
    start: float
    end: float
    step: int
    attempt: float = 0.0


class Timeline:
    """Records spans from any thread of one process."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / FILE_NAME
        torn = _is_torn(path)
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")
        self._lock = threading.Lock()
        self._pending: list[Span] = []
        self._epoch = time.time() - time.monotonic()
        self._attempt = round(time.time(), 3)

    def now(self) -> float:
        """Seconds since the epoch on a clock that never goes back."""
        return self._epoch + time.monotonic()

    def record(self, lane: str, name: str, start: float, end: float, step: int) -> None:
        """Add a span; times are from `now` or, in other processes, `time.time`."""
        span = Span(lane, name, round(start, 4), round(end, 4), step, self._attempt)
        with self._lock:
            self._pending.append(span)
            if name == STEP:
                try:
                    self._write()
                except OSError as error:
                    raise UserError(
                        str(self._file.name),
                        error.strerror,
                        "cannot be written",
                        "free space, or change output_dir",
                    ) from error

    def record_lanes(self, name: str, spans: Mapping[str, tuple[float, float]], step: int) -> None:
        """Add the same work on several lanes: (start, end) by lane."""
        for lane, (start, end) in spans.items():
            self.record(lane, name, start, end, step)

    def _write(self) -> None:
        self._file.writelines(json.dumps(asdict(span)) + "\n" for span in merge_spans(self._pending))
        self._file.flush()
        self._pending = []

    def close(self) -> None:
        """Write buffered spans. Errors are ignored: a run must not fail at its end because of a picture."""
        with self._lock, suppress(OSError):
            self._write()
        with suppress(OSError):
            self._file.close()

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _is_torn(path: Path) -> bool:
    """Whether a crash left the file without a final newline."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_spans(run_dir: Path) -> list[Span]:
    """Recorded spans by start time. For a step repeated after a resume, the last attempt counts."""
    spans = [Span(**row) for row in read_rows(run_dir / FILE_NAME, skip_torn=True)]
    last: dict[int, float] = {}
    for span in spans:
        last[span.step] = max(last.get(span.step, 0.0), span.attempt)
    return sorted((s for s in spans if s.attempt == last[s.step]), key=lambda s: s.start)


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Sort by start time, and merge overlapping or touching spans of the same lane, name and step."""
    merged: list[Span] = []
    last: dict[tuple[str, str, int], int] = {}
    for span in sorted(spans, key=lambda s: s.start):
        key = (span.lane, span.name, span.step)
        before = last.get(key)
        if before is not None and span.start <= merged[before].end + MERGE_GAP_SECONDS:
            merged[before] = replace(merged[before], end=max(merged[before].end, span.end))
            continue
        last[key] = len(merged)
        merged.append(span)
    return merged


def step_window(spans: Iterable[Span], step: int) -> tuple[float, float] | None:
    """(start, end) of a step: the driver's `step` span, else the extent of the step's spans; None without any."""
    own = [s for s in spans if s.step == step]
    own = [s for s in own if s.name == STEP] or own
    return (min(s.start for s in own), max(s.end for s in own)) if own else None
