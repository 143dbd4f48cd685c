"""Runs `mslime train` as a user does: in its own process, observed from outside with all its child processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Run:
    """A started run.

    Attributes:
        process: the driver.
        directory: the run's output directory.
        seen: every process that was found below the driver so far.
    """

    process: subprocess.Popen[str]
    directory: Path
    output: Path
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    def look(self) -> list[psutil.Process]:
        """Processes below the driver now; remembered for `left_over`."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.seen.update({p.pid: p for p in found})
        return found

    def find(self, title: str) -> psutil.Process:
        """The process below the driver that runs `title`, or else the oldest whose command line contains it.

        Ray's helpers name each other in their options. If process ids have wrapped around, they come before the process
        that they name.
        """
        found = sorted(self.look(), key=lambda p: p.create_time())
        matches = [p for p in found if title in " ".join(_command(p))]
        assert matches, f"no process {title!r} among {[_command(p)[:3] for p in found]}"
        return next((p for p in matches if title in [Path(word).name for word in _command(p)[:1]]), matches[0])

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        """Poll until `condition`; fails when the run ends or time is up first."""
        end = time.monotonic() + seconds
        while not condition():
            self.look()
            assert self.process.poll() is None, f"the run ended early:\n{self.text()}"
            assert time.monotonic() < end, f"nothing within {seconds} s:\n{self.text()}"
            time.sleep(0.2)

    def finish(self, seconds: float) -> int:
        """Exit status; fails when the run takes longer."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            self.look()
            assert time.monotonic() < end, f"still running after {seconds} s:\n{self.text()}"
            time.sleep(0.2)
        return self.process.returncode

    def left_over(self, grace_s: float = 15.0) -> list[str]:
        """Processes of this run that still live after a grace period."""
        end = time.monotonic() + grace_s
        while (alive := [p for p in self.seen.values() if _alive(p)]) and time.monotonic() < end:
            time.sleep(0.2)
        return [" ".join(_command(p))[:200] for p in alive]

    def text(self) -> str:
        """Everything the driver printed."""
        return self.output.read_text()

    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl so far."""
        path = self.directory / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def stop(self) -> None:
        """End everything, for the end of a test that failed."""
        for process in [*self.look(), *self.seen.values()]:
            if _alive(process):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def start_run(
    values: dict[str, Any],
    directory: Path,
    *flags: str,
    command: str = "train",
    config: Path | None = None,
    package: Path = ROOT,
) -> Run:
    """`mslime train`, or another command, on these settings, with logs and outputs under `directory`; or on a file as
    it is. The package is the one below `package`."""
    directory.mkdir(parents=True, exist_ok=True)
    if config is None:
        values = {"name": "run", "output_dir": str(directory), **values}
        config = directory / "run.yaml"
        config.write_text(yaml.safe_dump(values))
    return _start(["-m", "mslime", command, str(config), *flags], directory, package)


def start_program(source: str, values: dict[str, Any], directory: Path) -> Run:
    """Start a Python program in a directory whose `run.yaml` holds these settings."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.yaml").write_text(yaml.safe_dump({"name": "run", "output_dir": str(directory), **values}))
    return _start(["-c", source], directory, directory)


def _start(arguments: list[str], directory: Path, cwd: Path) -> Run:
    output = directory / f"driver{len(list(directory.glob('driver*')))}.log"
    with output.open("w") as log:
        process = subprocess.Popen(
            # A test session in the background ignores SIGINT, and so would its children.
            ["env", "--default-signal=INT", sys.executable, *arguments],
            stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True, cwd=cwd,
            env={**os.environ, "PYTHONPATH": f"{cwd}:{ROOT}"},
        )  # fmt: skip
    return Run(process, directory / "run", output)


def assert_balanced(rows: Sequence[Mapping[str, Any]]) -> None:
    """Every token that was generated is accounted for in each of a run's steps, from the first on."""
    for before, row in pairwise([{"ledger/pending_tokens": 0.0}, *rows]):
        spent = sum(row[f"ledger/{fate}_tokens"] for fate in ("trained", "masked", "dropped", "pending"))
        assert before["ledger/pending_tokens"] + row["ledger/generated_tokens"] == spent, f"step {row['step']}"


LISTENERS = {
    "mslime.backends.sglang": "SGLang over HTTP", "sglang::": "rendezvous of trainer",
    "ray::": "Ray (GCS, raylet", "/ray/": "Ray (GCS, raylet", "mslime train": "control of a training run",
    "mslime serve": "`mslime serve`",
}  # fmt: skip
"""Part of a command line -> the row of SECURITY.md that documents the addresses and clients of such a process."""


def assert_listeners_are_documented(run: Run) -> None:
    """Every process of a run that listens now has a row in SECURITY.md. Beyond this machine Ray's processes listen, and
    one port of each of its workers, of which the driver is one, whatever these open besides; no engine does."""
    security = (ROOT / "SECURITY.md").read_text()
    heard = set[str]()
    for process in [psutil.Process(run.process.pid), *run.look()]:
        command = " ".join(_command(process))
        try:
            listening = [c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if not listening:
            continue
        part = next((part for part in LISTENERS if part in command), None)
        assert part is not None, f"{command[:200]} listens on {listening}, and SECURITY.md has no row for it"
        assert f"| {LISTENERS[part]}" in security, LISTENERS[part]
        beyond = sum(not ip.startswith(("127.", "::1", "::ffff:127.")) for ip in listening)
        allowed = 0 if "sglang" in part else 1 if part != "/ray/" else beyond
        assert beyond <= allowed, f"{command[:200]} listens on {listening}"
        heard.add(part)
    assert {"mslime.backends.sglang", "ray::", "/ray/"} <= heard, f"a run of which only {heard} listen?"


def interrupt(run: Run) -> None:
    """Interrupt like Ctrl-C on a terminal: SIGINT to the driver's whole process group."""
    os.killpg(run.process.pid, signal.SIGINT)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []
