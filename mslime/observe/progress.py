"""Progress of a run on the console: live bars on a terminal, one line a step elsewhere, or nothing.

The loop reports phases as they move (`rollout`, `train`, `weights`) and closes each step with `step_done`. Conversions
show bytes, bytes a second and the time left.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars
from rich.text import Text

from mslime.config.base import ProgressMode

_log = logging.getLogger(__name__)
_SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("loss", "loss/total", "{:.4f}"),
    ("kl", "mismatch/kl", "{:.1e}"),
    ("stale", "staleness/mean", "{:.1f}"),
    ("len", "rollout/response_len_mean", "{:.0f}"),
    ("tok/s", "rollout/tokens_per_s", "{:.0f}"),
    ("step", "perf/step_seconds", "{:.1f}s"),
    ("train", "perf/train_seconds", "{:.1f}s"),
    ("weights", "weights/seconds", "{:.1f}s"),
    ("wait", "perf/wait_seconds", "{:.1f}s"),
)


@dataclass(frozen=True)
class RolloutCounts:
    """Groups of the step being collected: number needed, and counts of those in flight by state."""

    needed: int
    accepted: int
    running: int
    done: int = 0
    aborted: int = 0


class Progress:
    """Base of the progress displays; shows nothing. A context manager."""

    def __init__(self, total_steps: int, done_steps: int = 0) -> None:
        self._total, self._done = total_steps, done_steps
        self._last: float | None = None  # end of the last step of this session, without the start of the run
        self._durations: deque[float] = deque(maxlen=10)

    def rollout(self, counts: RolloutCounts) -> None:
        """Report changed counts of groups."""

    def train(self, done: int, total: int) -> None:
        """Report that `done` of `total` micro-batches are trained."""

    def weights(self, done: int, total: int) -> None:
        """Report that `done` of `total` buckets are sent."""

    def note(self, text: str) -> None:
        """Show one line, such as starting, resuming, saving. The driver's log always gets it."""
        _log.info("%s", text)

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report the end of step `step`; `metrics` is the row just logged."""
        _log.info("step %d/%d  %s", step, self._total, summary_line(metrics))
        if step <= self._done:
            return
        now = time.monotonic()
        if self._last is not None:
            self._durations.append((now - self._last) / (step - self._done))
        self._last, self._done = now, step

    def eta_seconds(self) -> float | None:
        """Seconds to the end at the pace of the last ten steps; None until this session has done two."""
        if self._done >= self._total:
            return 0.0
        if not self._durations:
            return None
        return (self._total - self._done) * sum(self._durations) / len(self._durations)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class PlainProgress(Progress):
    """One line a step, for logs and pipes."""

    def __init__(self, total_steps: int, done_steps: int, console: Console) -> None:
        super().__init__(total_steps, done_steps)
        self._console = console

    def note(self, text: str) -> None:
        """Print the line."""
        super().note(text)
        self._print(text)

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's line."""
        super().step_done(step, metrics)
        self._print(f"step {step}/{self._total}  {summary_line(metrics)}  eta {format_seconds(self.eta_seconds())}")

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)


class NamedProgress(Progress):
    """Progress of one of several adapters: prints its lines through the run's progress, with its name.

    Args:
        name: of the adapter.
        shown: the run's progress.
    """

    def __init__(self, name: str, shown: Progress, total_steps: int, done_steps: int) -> None:
        super().__init__(total_steps, done_steps)
        self._name, self._shown = name, shown

    def note(self, text: str) -> None:
        """Show the line."""
        self._shown.note(f"{self._name}: {text}")

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the step's line."""
        super().step_done(step, metrics)
        eta = format_seconds(self.eta_seconds())
        self.note(f"step {step}/{self._total}  {summary_line(metrics)}  eta {eta}")


class LiveProgress(Progress):
    """Bars that redraw in place; each step also leaves its line above them."""

    def __init__(self, total_steps: int, done_steps: int, console: Console) -> None:
        super().__init__(total_steps, done_steps)
        self._bars = Bars(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=28),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[detail]}", style="dim"),
            console=console,
        )
        self._tasks = {name: self._task(name) for name in ("steps", "rollout", "train", "weights")}
        self._bars.update(self._tasks["steps"], total=max(total_steps, 1), completed=done_steps)
        self._line = Text("", style="dim")
        self._live = Live(Group(self._line, self._bars), console=console, refresh_per_second=4, transient=True)
        self._console = console

    def _task(self, name: str) -> TaskID:
        return self._bars.add_task(f"{name:<8}", total=1, detail="")

    def rollout(self, counts: RolloutCounts) -> None:
        """Move the rollout bar."""
        detail = f"groups: {counts.running} running, {counts.done} done, {counts.aborted} aborted"
        self._move("rollout", counts.accepted, counts.needed, detail)

    def train(self, done: int, total: int) -> None:
        """Move the trainer's bar."""
        self._move("train", done, total, "micro-batches")

    def weights(self, done: int, total: int) -> None:
        """Move the weight sync's bar."""
        self._move("weights", done, total, "buckets")

    def note(self, text: str) -> None:
        """Print the line above the bars."""
        super().note(text)
        self._print(text)

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Advance the bar of the run, empty the others, and print the step's line."""
        super().step_done(step, metrics)
        for name in ("rollout", "train", "weights"):
            self._move(name, 0, 1, "")
        self._move("steps", step, max(self._total, 1), f"eta {format_seconds(self.eta_seconds())}")
        self._print(f"step {step}/{self._total}  {summary_line(metrics)}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def _move(self, name: str, done: int, total: int, detail: str) -> None:
        self._bars.update(self._tasks[name], completed=done, total=max(total, 1), detail=detail)

    def __enter__(self) -> Progress:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()


def open_progress(
    mode: ProgressMode, total_steps: int, done_steps: int = 0, console: Console | None = None
) -> Progress:
    """The progress for `observe.progress`: auto is live on a terminal and plain lines elsewhere.

    Args:
        total_steps: steps of the whole run.
        done_steps: steps done before a resume.
        console: output; default standard error.
    """
    if mode == "off":
        return Progress(total_steps, done_steps)
    console = console or Console(file=sys.stderr)
    kind = LiveProgress if mode == "on" or console.is_terminal else PlainProgress
    return kind(total_steps, done_steps, console)


def open_lines(mode: ProgressMode) -> Progress:
    """Progress of a run of several adapters, whose steps interleave: lines on standard error, or nothing."""
    return Progress(0) if mode == "off" else PlainProgress(0, 0, Console(file=sys.stderr))


def summary_line(metrics: Mapping[str, float]) -> str:
    """The main numbers of a step in one line; missing ones are left out."""
    parts = [f"{label} {form.format(metrics[name])}" for label, name, form in _SHOWN if name in metrics]
    if metrics.get("ledger/generated_tokens") == 0:
        parts.append("(the batch was ready)")
    return "  ".join(_scores(metrics) + parts)


def _scores(metrics: Mapping[str, float]) -> list[str]:
    """Scores of each held-out set: the loss, or the accuracy and, with several responses, pass@k for the largest k."""
    shown: list[str] = []
    for name, accuracy in metrics.items():
        held_out, _, kind = name.removeprefix("eval/").rpartition("/")
        if name.startswith("eval/") and kind == "nll":
            shown.append(f"{held_out} nll {accuracy:.4f}")
        if name.startswith("eval/") and kind == "accuracy":
            ks = [int(n.rpartition("@")[2]) for n in metrics if n.startswith(f"eval/{held_out}/pass@")]
            best = max(ks, default=1)
            more = f" (pass@{best} {metrics[f'eval/{held_out}/pass@{best}']:.3f})" if best > 1 else ""
            shown.append(f"{held_out} {accuracy:.3f}{more}")
    return shown


def format_seconds(seconds: float | None) -> str:
    """`42s`, `3m 05s`, `2h 07m`, `3d 04h`, or `?`."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


class ConversionBars:
    """A bar for each phase; `mslime.offline.jobs.ConversionProgress`. A context manager.

    Args:
        quiet: show nothing.
    """

    def __init__(self, console: Console, quiet: bool) -> None:
        self._progress = Bars(
            TextColumn("{task.description:8}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
            TimeRemainingColumn(), console=console, disable=quiet,
        )  # fmt: skip
        self._current: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def phase(self, name: str, total_bytes: int, done_bytes: int) -> None:
        """Start a new bar; bytes done by an earlier run do not count for the speed."""
        self._current = self._progress.add_task(name, total=total_bytes - done_bytes)
        if done_bytes:
            self._progress.console.print(f"{done_bytes / 2**30:.2f} GiB were finished by an earlier run")

    def advance(self, nbytes: int) -> None:
        """Advance by `nbytes`."""
        assert self._current is not None
        self._progress.advance(self._current, nbytes)
