"""Records of a run's steps, for all kinds of runs: rows of metrics, the timeline, progress, scores."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from mslime.config.schema import RunConfig
from mslime.observe.hooks import StepRecord, call_step_hook
from mslime.observe.metrics import FILE_NAME, MetricsLogger, read_metrics
from mslime.observe.names import are_scores
from mslime.observe.progress import Progress, open_progress, summary_line
from mslime.observe.timeline import STEP, Timeline
from mslime.run.run_checkpoints import RunCheckpoints


class StepRecords:
    """Steps begin one after the other, and are closed after training.

    Attributes:
        step: the last begun step; before the first, the number of steps done before this session.
        last_row: the metrics of the last closed step, also of an earlier session.
        timeline, progress: set by `open`.
    """

    timeline: Timeline
    progress: Progress

    def __init__(self, config: RunConfig, checkpoints: RunCheckpoints) -> None:
        self._config, self._checkpoints = config, checkpoints
        self._first_step = self.step = checkpoints.first_step
        self.last_row: dict[str, Any] | None = checkpoints.last_row
        self._begun: tuple[float, dict[str, float]] | None = None  # start time and record of the step in progress
        self._carried: dict[str, float] = {}  # measured between two steps, logged with the second

    def open(self, stack: ExitStack, quiet: bool, progress: Progress | None = None) -> None:
        """Open the files, which `stack` closes.

        Args:
            quiet: show no progress, regardless of `observe.progress`.
            progress: replaces the one of `observe.progress`.
        """
        config, first = self._config, self._first_step
        begins_with = first + 1 if first else 0
        self._metrics = stack.enter_context(
            MetricsLogger(config.run_dir, config.observe, begins_with, config.name, config.as_dict(), self.last_row)
        )
        self._checkpoints.read_scores()
        self.timeline = stack.enter_context(Timeline(config.run_dir))
        shown = "off" if quiet else config.observe.progress
        self.progress = progress or stack.enter_context(open_progress(shown, config.train.num_steps, first))

    @property
    def record(self) -> dict[str, float] | None:
        """Record of the step in progress, if any: metrics added to it are logged with the step."""
        return None if self._begun is None else self._begun[1]

    def begin(self, step: int) -> dict[str, float]:
        """Begin a step (1-based); returns its record."""
        self.step = step
        record, self._carried = self._carried, {}
        self._begun = (self.timeline.now(), record)
        return record

    def carry(self, metrics: Mapping[str, float]) -> None:
        """Log these with the next step."""
        self._carried |= metrics

    def drop(self) -> None:
        """Discard the step in progress without logging it."""
        self._begun = None

    def close(self, hook: bool = True) -> None:
        """Log the row of the step in progress, if any.

        Args:
            hook: call the user's hook first. If it raises, the row is logged without the hook's metrics.
        """
        if self._begun is None:
            return
        (begin, record), end, self._begun = self._begun, self.timeline.now(), None
        record |= {"version": self.step, "perf/step_seconds": end - begin}
        config, spec = self._config, self._config.hooks.step if hook else None
        try:
            if spec is not None:
                record |= call_step_hook(spec, StepRecord(self.step, config.train.num_steps, config.run_dir, record))
        finally:
            self.last_row = self._metrics.log(self.step, record)
            self._checkpoints.score(self.step, record)
            self.timeline.record("driver", STEP, begin, end, self.step)
            self.progress.step_done(self.step, record)

    def log_scores(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a separate row of scores, if their step's row is already written, or is never written (step 0)."""
        self._checkpoints.score(step, self._metrics.log(step, {**metrics, "version": float(step)}))
        if step:
            self.progress.note(f"step {step}: {summary_line(metrics)}")
        else:
            self.progress.step_done(0, metrics)

    def has_scores(self, step: int) -> bool:
        """Whether the run has recorded scores on held-out sets after `step` steps."""
        rows = read_metrics(self._config.run_dir / FILE_NAME)
        return any(row["step"] == step and are_scores(row) for row in rows)

    def record_lanes(self, name: str, spans: Mapping[str, tuple[float, float]]) -> None:
        """Work of this step on several lanes of the timeline: (start, end) by lane."""
        self.timeline.record_lanes(name, spans, self.step_of_spans)

    @property
    def step_of_spans(self) -> int:
        """The step of spans that begin now."""
        return self.of_span(self.step)

    def of_span(self, step: int) -> int:
        """The step of a span. All spans of a step are of one attempt (`timeline.read_spans`), so the work of a resumed
        session before its first step counts to that step."""
        return step + 1 if step == self._first_step > 0 else step
