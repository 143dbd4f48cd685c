"""A run that is started again when it fails: `mslime train --restarts N` watches over the same command without it.

The run is a process of its own, so that whatever ends it, be it a dead trainer rank, Ray, or the kernel's out-of-memory
killer that takes the driver, leaves somebody behind. Started again it continues from its newest checkpoint, as if a
person had given the same command once more.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from mslime.config.adapters import directories
from mslime.config.schema import RunConfig
from mslime.control.stop import SIGNALS
from mslime.data.checkpoints import newest_step
from mslime.observe.metrics import FILE_NAME, read_metrics

PAUSES_S = (1.0, 15.0, 30.0, 60.0)
"""Before a start, by how many failed in a row; the last one for all after it. Dead processes let go of memory and
ports, and a machine that restarts comes back."""
_MEANT = (0, *(128 + number for number in SIGNALS))
"""How a run ends that is done, or that a person, or a scheduler, has ended."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def train_again(words: Sequence[str], config: RunConfig, restarts: int) -> int:
    """Run `mslime` with these words in a process of its own, again and again; the exit status of the last one.

    Args:
        words: what this command was given.
        config: of the run.
        restarts: how often in a row it is started again.
    """
    command = [sys.executable, "-P", "-m", "mslime.cli", *words, "--restarts", "0"]
    resumed = ["--checkpoint.resume", "auto"] if config.checkpoint.resume == "never" else []
    return keep_running(command, [*command, *resumed], config.run_dir, restarts)


def keep_running(
    first: Sequence[str],
    later: Sequence[str],
    run_dir: Path,
    restarts: int,
    pauses_s: Sequence[float] = PAUSES_S,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> int:
    """See `train_again`.

    A run that has not made a step is not started again: what is wrong from the start is no accident. Failures are in a
    row while no checkpoint is newer than the one that the run was started from.

    Args:
        first: the command that begins the run.
        later: the command that continues it.
    """
    failures, started, command = 0, False, first
    with _Child() as child:
        while True:
            saved, before = _saved(run_dir), _stamp(run_dir)
            status = child.run(command)
            if status in _MEANT or child.signalled:
                return status
            made, after = _made(run_dir), _saved(run_dir)
            started = started or after > saved or (made > saved and _stamp(run_dir) != before)
            if not started:
                return status
            failures = 1 if after > saved else failures + 1
            told = f"the run ended with status {status} after step {max(made, after)}"
            if failures > restarts:
                say(f"{told}, {failures} times in a row without a new checkpoint: it is not started again")
                return status
            pause_s, command = pauses_s[min(failures, len(pauses_s)) - 1], later
            where = f"from step {after}" if after else "from its beginning"
            say(f"{told}: it is started again {where} in {pause_s:.0f} s ({failures} of {restarts} in a row)")
            child.wait(pause_s)
            if child.signalled:
                return child.signalled


def _saved(run_dir: Path) -> int:
    """Steps that the newest checkpoint holds, 0 without one; of several adapters, those of all together."""
    return sum(newest_step(directory) for directory in directories(run_dir))


def _made(run_dir: Path) -> int:
    """The last step that the metrics tell of; of several adapters, those of all together."""
    rows = [read_metrics(directory / FILE_NAME) for directory in directories(run_dir)]
    return sum(max((row["step"] for row in each), default=0) for each in rows)


def _stamp(run_dir: Path) -> list[tuple[int, int]]:
    """Differs when the metrics were written meanwhile."""
    files = [directory / FILE_NAME for directory in directories(run_dir)]
    return [(found.st_size, found.st_mtime_ns) for file in files if file.exists() and (found := file.stat())]


class _Child:
    """One process after the other, which gets the signals that this one is sent. A context manager.

    The child is in a process group of its own, since a Ctrl-C on the terminal would reach it twice. When this process
    dies it is told to save and end.

    Attributes:
        signalled: 128 + number of the first signal, as a shell has it; 0: none came.
    """

    def __init__(self) -> None:
        self.signalled = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def run(self, command: Sequence[str]) -> int:
        """Its exit status."""
        end_with_this = partial(_end_with, os.getpid())
        self._process = subprocess.Popen(command, process_group=0, preexec_fn=end_with_this)  # noqa: PLW1509 no threads
        if self.signalled:  # while it was being started
            self._process.send_signal(self.signalled - 128)
        status = self._process.wait()
        self._process = None
        return status if status >= 0 else 128 - status

    def wait(self, seconds: float) -> None:
        """Until they are over, or a signal comes."""
        end = time.monotonic() + seconds
        while not self.signalled and time.monotonic() < end:
            time.sleep(0.1)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.signalled = self.signalled or 128 + number
        if self._process is not None:
            self._process.send_signal(number)

    def __enter__(self) -> Self:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)


def _end_with(parent: int) -> None:
    """In the child, before its program: SIGTERM when the parent dies, or has died."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
