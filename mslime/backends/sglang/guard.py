"""Runs a command and ends it, with every process it started, as soon as whoever asked for it is gone.

`python -m mslime.backends.sglang.guard FD -- COMMAND...`: FD is the read end of a pipe whose write end the owner keeps.
The kernel closes that end however the owner ends (exit, crash, SIGKILL), which no handler in the owner could promise.
The guard is a subreaper, so processes that outlive their parent become its children and are found. It exits with the
command's status. The command's TMPDIR is a directory of its own that goes with it. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

GRACE_SECONDS = 1.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_guard() -> None:
    """In the command's process: killed when the guard itself is killed."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """Process ids below `root`, parents first, read from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended meanwhile
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found, edge = [], [root]
    while edge:
        edge = [pid for pid, parent in parents.items() if parent in edge]
        found += edge
    return found


def kill_all(pids: Sequence[int]) -> None:
    """SIGKILL each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _end(child: subprocess.Popen[bytes]) -> int:
    """SIGTERM to the command, SIGKILL to everything that is left after the grace period."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    kill_all(descendants(os.getpid()))
    return child.wait()


def _watch(owner: int, command: Sequence[str], tmp: str) -> int:
    """Run the command until it ends, the owner does, or a signal asks for it; return its wait status."""
    asked = {"to end": False}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: asked.update({"to end": True}))
    # The guard has no threads, which is what makes preexec_fn safe.
    child = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": tmp},
        preexec_fn=_die_with_guard,  # noqa: PLW1509
        stdin=subprocess.DEVNULL,
    )
    while child.poll() is None and not asked["to end"]:
        readable, _, _ = select.select([owner], [], [], 0.2)
        if readable:  # nobody writes to the pipe: readable means closed
            break
    return _end(child)


def main(argv: Sequence[str]) -> int:
    """Guard a command; return its exit status (128 + signal when it was killed)."""
    assert argv[1] == "--", "usage: guard FD -- COMMAND..."
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory(prefix="mslime-", ignore_cleanup_errors=True) as tmp:
        status = _watch(int(argv[0]), argv[2:], tmp)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
