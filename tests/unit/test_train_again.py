"""scripts/train_again.sh starts a run that fails again. The run is a stand-in: its words are its fate."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mslime.config.lora import DIRECTORY

ROOT = Path(__file__).parents[2]

FAKE_RUN = """
import json, os, pathlib, signal, sys, time
directory = pathlib.Path(sys.argv[1])
fates = directory / "fates"
fate, *rest = fates.read_text().splitlines()
fates.write_text("\\n".join(rest))
with (directory / "starts").open("a") as file:
    print(*sys.argv[2:], file=file)
def stopped(number, frame):
    with (directory / "signals").open("a") as file:
        print(number, file=file)
    time.sleep(0.5)  # a second signal would be noted too
    sys.exit(128 + number)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, stopped)
for word in fate.split():
    kind, _, number = word.partition(":")
    number, _, adapter = number.partition("@")
    if kind == "step":
        with (directory / adapter / "metrics.jsonl").open("a") as file:
            print(json.dumps({"step": int(number)}), file=file)
    elif kind == "save":
        (directory / adapter / "checkpoints" / f"step_{number}").mkdir(parents=True)
    elif kind == "die":
        os.kill(os.getpid(), int(number))
    elif kind == "until":
        while not (directory / number).exists():
            time.sleep(0.02)
    elif kind == "wait":
        (directory / "waiting").touch()
        time.sleep(float(number))
    else:
        sys.exit(int(number))
"""


class FakeRun:
    """What the script made of a run with these fates, one for each start. Pauses are noted and not waited for."""

    def __init__(self, directory: Path, *fates: str, restarts: int = 2) -> None:
        fake, pauses = directory / "bin", directory / "pauses"
        fake.mkdir(exist_ok=True)
        (fake / "sleep").write_text(f"#!/bin/sh\necho $1 >>{pauses}\n")
        (fake / "sleep").chmod(0o755)
        environment = {**os.environ, "PATH": f"{fake}:{os.environ['PATH']}", "RESTARTS": str(restarts)}
        done = subprocess.run(
            command(directory, *fates), env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        self.status, self.lines = done.returncode, done.stderr.splitlines()
        self.starts = (directory / "starts").read_text().count("\n")
        self.pauses = [int(line) for line in pauses.read_text().split()] if pauses.exists() else []


def command(directory: Path, *fates: str) -> list[str]:
    (directory / "fates").write_text("\n".join(fates))
    script = ["bash", str(ROOT / "scripts/train_again.sh"), str(directory)]
    return [*script, sys.executable, "-c", FAKE_RUN, str(directory)]


def test_a_run_that_fails_after_a_step_is_started_again_until_it_is_done(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "step:1 save:1 step:2 end:2", "step:2 die:9", "step:2 step:3 save:3 end:0")
    assert (run.status, run.starts) == (0, 3)
    assert [line for line in run.lines if line.startswith("the run")] == [
        "the run failed with status 2; restarting it in 1 s (1 of 2 in a row)",
        "the run failed with status 137; restarting it in 16 s (2 of 2 in a row)",
    ]


def test_what_fails_before_the_first_step_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    run = FakeRun(tmp_path, "end:2", "end:0")
    assert (run.status, run.starts) == (2, 1)


@pytest.mark.parametrize("status", [129, 130, 143])
def test_a_run_that_a_signal_of_its_own_has_ended_is_not_started_again(tmp_path: Path, status: int) -> None:
    run = FakeRun(tmp_path, f"step:1 save:1 end:{status}", "end:0")
    assert (run.status, run.starts) == (status, 1)


def test_a_start_that_fails_later_counts_as_a_failure(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "step:1 end:2", "end:2", "end:3", "end:0")
    assert (run.status, run.starts, run.pauses) == (3, 3, [1, 16])


def test_a_new_checkpoint_begins_the_count_anew(tmp_path: Path) -> None:
    fates = [f"step:{n} save:{n} end:2" for n in (1, 2, 3, 4)]
    run = FakeRun(tmp_path, *fates, "end:2", "step:5 end:0", restarts=2)
    assert (run.status, run.starts, run.pauses) == (0, 6, [1, 1, 1, 1, 16])


def test_steps_and_checkpoints_of_an_adapter_count(tmp_path: Path) -> None:
    (tmp_path / DIRECTORY / "maths").mkdir(parents=True)
    fates = ["step:1@adapters/maths save:1@adapters/maths end:2", "save:2@adapters/maths end:2", "end:0"]
    run = FakeRun(tmp_path, *fates, restarts=1)
    assert (run.status, run.starts, run.pauses) == (0, 3, [1, 1])


def start(directory: Path, *fates: str, ignored: str = "") -> subprocess.Popen[str]:
    """The script as a process of its own, as on a terminal."""
    default = ["env", "--default-signal=INT,TERM", *([f"--ignore-signal={ignored}"] if ignored else [])]
    return subprocess.Popen(
        [*default, *command(directory, *fates)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "whole_group"), [(signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGHUP, True)]
)
def test_a_signal_reaches_the_run_once_and_ends_both(tmp_path: Path, number: signal.Signals, whole_group: bool) -> None:
    script = start(tmp_path, "step:1 wait:60", "end:0")
    until((tmp_path / "waiting").exists)
    (os.killpg if whole_group else os.kill)(script.pid, number)  # a terminal signals all of the foreground
    reached = signal.SIGHUP if number == signal.SIGHUP else signal.SIGTERM
    assert script.wait(60) == 128 + reached
    assert (tmp_path / "signals").read_text().split() == [str(int(reached))]
    assert (tmp_path / "starts").read_text().count("\n") == 1, "a run that a person ends is not started again"


def test_a_signal_while_nothing_runs_ends_the_wait(tmp_path: Path) -> None:
    script = start(tmp_path, "step:1 end:2", "step:2 end:2", "step:2 end:0")
    assert script.stderr is not None
    while "in 16 s" not in script.stderr.readline():
        pass
    script.terminate()
    assert script.wait(10) == 128 + signal.SIGTERM
    assert (tmp_path / "starts").read_text().count("\n") == 2


def test_a_signal_that_is_ignored_is_not_passed_on(tmp_path: Path) -> None:
    """As under nohup, when the terminal is closed."""
    script = start(tmp_path, "step:1 wait:0 until:go end:2", "end:0", ignored="HUP")
    until((tmp_path / "waiting").exists)
    os.killpg(script.pid, signal.SIGHUP)
    (tmp_path / "go").touch()
    assert script.wait(60) == 0
    assert (tmp_path / "starts").read_text().count("\n") == 2
