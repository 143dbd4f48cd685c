"""Signals: the first is obeyed at the next rest, a second one at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mslime.run import stop as stop_module
from mslime.run.stop import TOGETHER_S, Stopped, StopSignals

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that signals come at, in seconds; to be changed in place."""
    now = [100.0]
    monkeypatch.setattr(stop_module.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("signals", "later_s", "counted"),
    [
        ((signal.SIGTERM, signal.SIGTERM), 0.5 * TOGETHER_S, 1),
        ((signal.SIGTERM, signal.SIGTERM), 2 * TOGETHER_S, 2),
        ((signal.SIGINT, signal.SIGINT), 0.5 * TOGETHER_S, 2),
        ((signal.SIGHUP, signal.SIGTERM), 0.5 * TOGETHER_S, 2),
    ],
)
def test_sigterm_from_whoever_ends_parent_and_child_counts_once(
    clock: list[float], signals: tuple[int, int], later_s: float, counted: int
) -> None:
    with StopSignals() as stop:
        stop.patient = True
        signal.raise_signal(signals[0])
        clock[0] += later_s
        if counted == 2:
            with pytest.raises(Stopped) as caught:
                signal.raise_signal(signals[1])
            assert not caught.value.save
            return
        signal.raise_signal(signals[1])
        with pytest.raises(Stopped) as caught:
            stop.check()
        assert caught.value.save and caught.value.exit_status == 128 + signals[0]


# Prints as a run does, by rich and by print, before and after its reader goes; says on file descriptor 3 how it ended.
PRINTS = """
import logging, os, sys
from rich.console import Console
from mslime.cli import commands
from mslime.cli.command import Command

def run(args):
    logging.getLogger("mslime").addHandler(logging.FileHandler(sys.argv[1]))
    console = Console()
    print("first", flush=True)
    sys.stdin.readline()
    for _ in range(3):
        console.print("more")
        print("more", flush=True)
    os.write(int(sys.argv[2]), b"trained to the end")
    return 0


commands.COMMANDS["train"] = Command("prints", lambda parser: None, run, runs_for_hours=True)
sys.exit(commands.main(["train"]))
"""


def test_a_run_goes_on_when_nobody_reads_what_it_prints(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    log = tmp_path / "driver.log"
    run = subprocess.Popen(
        [sys.executable, "-c", PRINTS, str(log), str(writing)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, pass_fds=(writing,), env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    os.close(writing)
    assert run.stdout is not None and run.stdout.readline() == "first\n"
    run.stdout.close()
    run.stdout = None
    _, errors = run.communicate("go on\n", timeout=60)
    assert (run.returncode, errors) == (0, "")
    with os.fdopen(reading) as told:
        assert told.read() == "trained to the end"
    assert log.read_text().count("cannot be written: [Errno 32]") == 1
