"""A run that fails is started again, by a process that outlives it. The run is a stand-in: its words are its fate."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mslime.cli.commands import main
from mslime.control import again
from mslime.control.again import keep_running

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
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stopped)
for word in fate.split():
    kind, _, number = word.partition(":")
    if kind == "step":
        with (directory / "metrics.jsonl").open("a") as file:
            print(json.dumps({"step": int(number)}), file=file)
    elif kind == "save":
        (directory / "checkpoints" / f"step_{number}").mkdir(parents=True)
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
    """What `keep_running` made of a run with these fates, one for each start."""

    def __init__(self, directory: Path, *fates: str, restarts: int = 2) -> None:
        self.said: list[str] = []
        (directory / "fates").write_text("\n".join(fates))
        first = [sys.executable, "-c", FAKE_RUN, str(directory)]
        self.status = keep_running([*first, "first"], [*first, "later"], directory, restarts, [0.01], self.said.append)
        self.starts = (directory / "starts").read_text().split()


def test_a_run_that_fails_after_a_step_is_started_again_until_it_is_done(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "step:1 save:1 step:2 end:2", "step:2 die:9", "step:2 step:3 save:3 end:0")
    assert (run.status, run.starts) == (0, ["first", "later", "later"])
    assert run.said == [
        "the run ended with status 2 after step 2: it is started again from step 1 in 0 s (1 of 2 in a row)",
        "the run ended with status 137 after step 2: it is started again from step 1 in 0 s (2 of 2 in a row)",
    ]


def test_what_fails_before_the_first_step_is_not_tried_again(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "end:2", "end:0")
    assert (run.status, run.starts, run.said) == (2, ["first"], [])


@pytest.mark.parametrize("status", [129, 130, 143])
def test_a_run_that_a_signal_of_its_own_has_ended_is_not_started_again(tmp_path: Path, status: int) -> None:
    run = FakeRun(tmp_path, f"step:1 save:1 end:{status}", "end:0")
    assert (run.status, run.starts, run.said) == (status, ["first"], [])


def test_a_step_of_an_earlier_day_is_no_sign_that_this_start_went_well(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    assert FakeRun(tmp_path, "end:2", "end:0").starts == ["first"]
    (tmp_path / "starts").unlink()
    assert FakeRun(tmp_path, "step:8 end:2", "end:0").starts == ["first", "later"]


def test_a_start_that_fails_later_counts_as_a_failure(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "step:1 end:2", "end:2", "end:2", "end:0")
    assert (run.status, len(run.starts)) == (2, 3)
    assert run.said[-1] == (
        "the run ended with status 2 after step 1, 3 times in a row without a new checkpoint: it is not started again"
    )


def test_a_new_checkpoint_begins_the_count_anew(tmp_path: Path) -> None:
    fates = [f"step:{n} save:{n} end:2" for n in (1, 2, 3, 4)]
    run = FakeRun(tmp_path, *fates, "end:2", "step:5 end:0", restarts=2)
    assert (run.status, len(run.starts)) == (0, 6)
    assert [text.rpartition("(")[2] for text in run.said] == ["1 of 2 in a row)"] * 4 + ["2 of 2 in a row)"]


def test_pauses_grow_with_failures_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(again._Child, "wait", lambda self, seconds: pauses.append(seconds))  # pyright: ignore
    (tmp_path / "fates").write_text("step:1 end:2\n" + "end:2\n" * 6)
    fake = [sys.executable, "-c", FAKE_RUN, str(tmp_path)]
    assert keep_running(fake, fake, tmp_path, 6, say=lambda text: None) == 2
    assert pauses == [1.0, 15.0, 30.0, 60.0, 60.0, 60.0]


WATCHER = """
import sys
from pathlib import Path
from mslime.control.again import keep_running
command = [sys.executable, *sys.argv[2:]]
sys.exit(keep_running(command, command, Path(sys.argv[1]), 3, [float(sys.argv[-1])]))
"""


def watch(directory: Path, fate: str, pause_s: float, *signals: str) -> subprocess.Popen[str]:
    """A watching process of its own, as on a terminal."""
    (directory / "fates").write_text(fate)
    words = ["-c", WATCHER, str(directory), "-c", FAKE_RUN, str(directory), str(pause_s)]
    default = ["env", "--default-signal=INT,TERM", *signals, sys.executable]
    return subprocess.Popen([*default, *words], stderr=subprocess.PIPE, text=True, start_new_session=True)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_run_once_and_ends_both(tmp_path: Path, number: signal.Signals) -> None:
    watcher = watch(tmp_path, "step:1 wait:60", 0.01)
    until((tmp_path / "waiting").exists)
    os.killpg(watcher.pid, number)  # as a terminal sends it: to all of the foreground
    assert watcher.wait(60) == 128 + number
    assert (tmp_path / "signals").read_text().split() == [str(int(number))]
    assert (tmp_path / "starts").read_text().count("\n") == 1, "what a person ends is not started again"


def test_a_signal_while_nothing_runs_ends_the_wait(tmp_path: Path) -> None:
    watcher = watch(tmp_path, "step:1 end:2\nstep:2 end:0", 600)
    assert watcher.stderr is not None and "started again" in watcher.stderr.readline()
    watcher.terminate()
    assert watcher.wait(60) == 128 + signal.SIGTERM
    assert (tmp_path / "starts").read_text().count("\n") == 1


def test_a_run_whose_watcher_is_killed_is_told_to_end(tmp_path: Path) -> None:
    watcher = watch(tmp_path, "step:1 wait:60", 0.01)
    until((tmp_path / "waiting").exists)
    watcher.kill()
    until((tmp_path / "signals").exists)
    assert (tmp_path / "signals").read_text().split() == [str(int(signal.SIGTERM))]


def test_a_signal_that_comes_while_the_run_is_being_started_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def interrupted(*args: object, **kwargs: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return start(*args, **kwargs)  # pyright: ignore

    monkeypatch.setattr(again.subprocess, "Popen", interrupted)
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert keep_running(sleeping, sleeping, tmp_path, 3) == 128 + signal.SIGTERM


def test_nothing_is_started_after_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(self: again._Child, seconds: float) -> None:  # pyright: ignore
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(again._Child, "wait", wait)  # pyright: ignore
    (tmp_path / "fates").write_text("step:1 end:2")
    fake = [sys.executable, "-c", FAKE_RUN, str(tmp_path)]
    assert keep_running(fake, ["/no/such/program"], tmp_path, 3) == 128 + signal.SIGINT


def test_a_signal_that_is_ignored_is_not_passed_on(tmp_path: Path) -> None:
    """As under nohup, when the terminal is closed."""
    watcher = watch(tmp_path, "step:1 wait:0 until:go end:2\nend:0", 0.01, "--ignore-signal=HUP")
    until((tmp_path / "waiting").exists)
    watcher.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    assert watcher.wait(60) == 0
    assert (tmp_path / "starts").read_text().count("\n") == 2


# ---------------------------------------------------------------------------------------------------------- the option


def commands_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[list[str], list[str], int]:
    """The two commands and the number that `mslime train` comes to with these words."""
    file, found = tmp_path / "run.yaml", []
    file.write_text(f"model: {{path: {tmp_path}}}\ndata: {{prompts: [p.jsonl]}}\n")

    def keep(first: list[str], later: list[str], run_dir: Path, restarts: int) -> int:
        assert run_dir.name == "a"
        found.append((first, later, restarts))
        return 3

    monkeypatch.setattr(again, "keep_running", keep)
    assert main(["train", str(file), "--name", "a", *words]) == 3
    return found[0]


def test_the_run_itself_is_the_same_command_without_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, later, restarts = commands_of(tmp_path, monkeypatch, "--restarts", "5", "--train.num_steps", "7")
    words = ["train", str(tmp_path / "run.yaml"), "--name", "a", "--restarts", "5", "--train.num-steps", "7"]
    assert first == later == [sys.executable, "-P", "-m", "mslime.cli", *words, "--restarts", "0"] and restarts == 5


def test_a_run_that_never_resumes_goes_on_from_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, later, _ = commands_of(tmp_path, monkeypatch, "--restarts=1", "--checkpoint.resume", "never")
    assert later == [*first, "--checkpoint.resume", "auto"]


@pytest.mark.parametrize("word", ["-1", "1.5", "many"])
def test_restarts_are_a_number(tmp_path: Path, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path / "run.yaml"), f"--restarts={word}"]) == 2
    assert "--restarts" in capsys.readouterr().err


def test_restarts_and_replay_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path / "run.yaml"), "--restarts=1", "--replay", str(tmp_path)]) == 2
    assert "saves no checkpoint" in capsys.readouterr().err
