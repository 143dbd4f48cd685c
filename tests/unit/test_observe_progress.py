"""Progress on the console."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from mslime.observe import progress
from mslime.observe.progress import (
    LiveProgress,
    PlainProgress,
    RolloutCounts,
    format_seconds,
    open_progress,
    summary_line,
)

ROW = {"reward/mean": 0.5, "eval/held_out/accuracy": 0.75, "mismatch/kl": 1.2e-4, "perf/step_seconds": 4.2}


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120)


def written(to: Console) -> str:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def run_two_steps(mode: str, to: Console) -> None:
    with open_progress(mode, total_steps=10, console=to) as bars:  # pyright: ignore[reportArgumentType]
        bars.note("starting")
        for step in (1, 2):
            bars.rollout(RolloutCounts(needed=16, accepted=7, running=9, done=3, aborted=2))
            bars.train(3, 8)
            bars.weights(1, 4)
            bars.step_done(step, ROW)


def test_without_a_terminal_each_step_is_one_line_without_control_characters() -> None:
    to = console(terminal=False)
    run_two_steps("auto", to)
    lines = written(to).splitlines()
    assert lines[0] == "starting" and len(lines) == 3
    assert lines[1].startswith("step 1/10  held_out 0.750  reward 0.500  kl 1.2e-04  step 4.2s  eta ")
    assert "\x1b" not in written(to)


def test_on_a_terminal_bars_show_groups_micro_batches_buckets_and_steps() -> None:
    to = console(terminal=True)
    bars = open_progress("auto", total_steps=10, console=to)
    assert isinstance(bars, LiveProgress)
    with bars:
        bars.step_done(1, ROW)
        bars.rollout(RolloutCounts(needed=16, accepted=7, running=9, done=3, aborted=2))
        bars.train(3, 8)
        bars.weights(1, 4)
        bars._live.refresh()
        text = written(to)
    for part in ("7/16", "9 running, 3 done, 2 aborted", "3/8", "1/4", "1/10", "eta", "step 1/10  held_out"):
        assert part in text, part


def test_off_writes_nothing() -> None:
    to = console(terminal=True)
    run_two_steps("off", to)
    assert written(to) == ""


def test_on_draws_bars_even_without_a_terminal() -> None:
    assert isinstance(open_progress("on", 10, console=console(terminal=False)), LiveProgress)
    assert isinstance(open_progress("auto", 10, console=console(terminal=False)), PlainProgress)


def test_eta_is_the_steps_left_at_the_pace_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    bars = open_progress("auto", total_steps=14, done_steps=4, console=console(terminal=False))
    assert bars.eta_seconds() is None
    bars.step_done(4, {})
    for step in (5, 6):
        clock[0] += 3.0
        bars.step_done(step, {})
    assert bars.eta_seconds() == pytest.approx(8 * 3.0)


@pytest.mark.parametrize("evaluated_first", [False, True])
def test_the_start_of_a_run_is_no_part_of_the_estimate(monkeypatch: pytest.MonkeyPatch, evaluated_first: bool) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    bars = open_progress("auto", total_steps=3, console=console(terminal=False))
    clock[0] += 300.0
    if evaluated_first:
        bars.step_done(0, {})
    clock[0] += 60.0
    bars.step_done(1, {})
    assert bars.eta_seconds() is None, "the first step waits for engines and for a whole batch"
    clock[0] += 2.0
    bars.step_done(2, {})
    assert bars.eta_seconds() == pytest.approx(2.0)


def test_nothing_is_left_after_the_last_step_of_a_session_of_one() -> None:
    bars = open_progress("auto", total_steps=5, done_steps=4, console=console(terminal=False))
    bars.step_done(5, {})
    assert bars.eta_seconds() == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "?"),
        (0.4, "0s"),
        (59.4, "59s"),
        (185, "3m 05s"),
        (7620, "2h 07m"),
        (3 * 86400 + 4 * 3600, "3d 04h"),
    ],
)
def test_durations_read_well(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


def test_square_brackets_in_a_note_are_not_markup() -> None:
    to = console(terminal=False)
    open_progress("auto", 1, console=to).note("prompts.jsonl@[0:20] [bold]")
    assert written(to) == "prompts.jsonl@[0:20] [bold]\n"


def test_a_line_shows_each_held_out_set_once_with_its_largest_pass_at_k() -> None:
    row = {
        "eval/a/accuracy": 0.5,
        "eval/a/pass@1": 0.5,
        "eval/b/accuracy": 0.25,
        "eval/b/pass@1": 0.25,
        "eval/b/pass@8": 0.75,
    }
    assert summary_line(row) == "a 0.500  b 0.250 (pass@8 0.750)"
