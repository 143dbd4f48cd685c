"""Run a command and end it, with every process it started, as soon as its owner has ended.

`python -m mslime.backends.sglang.guard FD TMP -- COMMAND...`: FD is the read end of a pipe whose write end the owner
keeps. The kernel closes that end however the owner ends (exit, crash, SIGKILL); a handler could not guarantee that. The
guard is a subreaper, so processes that outlive their parent become its children. It exits with the command's status. It
removes TMP, the command's own TMPDIR, and shared memory that its processes leave in /dev/shm. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

GRACE_SECONDS = 3.0
"""Seconds for the command to end by itself, and again for its cleanup helpers."""
LOOK_SECONDS = 30.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SHARED_MEMORY = Path("/dev/shm")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def parent_and_group(pid: int) -> list[int]:
    """Parent and process group of a process, read from /proc; empty if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(field) for field in stat.rpartition(")")[2].split()[1:3]]


def _everyone() -> dict[int, list[int]]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {pid: found for pid in pids if (found := parent_and_group(pid))}


def descendants(root: int) -> list[int]:
    """Process ids below `root`, parents first, read from /proc."""
    parents = {pid: parent for pid, (parent, _) in _everyone().items()}
    found, edge = [], [root]
    while edge:
        edge = [pid for pid, parent in parents.items() if parent in edge]
        found += edge
    return found


def process_group(leader: int) -> list[int]:
    """Process ids of the group that `leader` made, without `leader` itself."""
    return [pid for pid, (_, group) in _everyone().items() if group == leader and pid != leader]


def kill_all(pids: Iterable[int]) -> None:
    """SIGKILL each process that still exists."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_but_cleaners(pids: Sequence[int]) -> None:
    """SIGKILL all but Python's helpers, which unlink semaphores once their users have ended."""
    for pid in pids:
        with suppress(OSError):
            if b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                continue
        kill_all([pid])


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped: their semaphores and shared blocks.

    Compared by inode: glibc creates a semaphore under another name first, and that name appears in the mappings.
    """
    mapped: set[int] = set()
    for pid in pids:
        with suppress(OSError):  # it ended meanwhile, or belongs to another user
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapped |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    found: set[Path] = set()
    for path in _SHARED_MEMORY.iterdir() if mapped else ():
        with suppress(OSError):
            if path.stat().st_ino in mapped:
                found.add(path)
    return found


def remove_unused(files: Iterable[Path]) -> None:
    """Remove files of this list in /dev/shm that no process maps any more."""
    left = {path for path in files if path.exists()}
    for path in left - shared_memory_of(_everyone() if left else ()):
        path.unlink(missing_ok=True)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Return when the condition holds, or time is up."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _reap() -> None:
    """Reap orphans that became our children, so they disappear from /proc."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _end(child: subprocess.Popen[bytes], files: set[Path]) -> int:
    """Ask the command to end, then kill all remaining processes, cleanup helpers last. Returns its wait status."""
    files |= shared_memory_of(descendants(os.getpid()))
    if child.poll() is None:
        # Like Ctrl-C: the server ends at once, while after SIGTERM it would wait for requests in flight. A second one
        # is for connections that are still open.
        for share in (0.3, 0.7):
            child.send_signal(signal.SIGINT)
            wait_for(lambda: child.poll() is not None, GRACE_SECONDS * share)
    kill_but_cleaners(descendants(os.getpid()))
    status = child.wait()
    wait_for(lambda: _reap() or not descendants(os.getpid()), GRACE_SECONDS)
    kill_all(descendants(os.getpid()))
    wait_for(lambda: _reap() or not descendants(os.getpid()), GRACE_SECONDS)
    remove_unused(files)
    return status


def _watch(owner: int, command: Sequence[str], tmp: str) -> int:
    """Run the command until it or the owner ends or a signal arrives; return its wait status."""
    flags = {"to end": False}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: flags.update({"to end": True}))
    guard = os.getpid()

    def begin() -> None:
        """In the command's process: die with the guard, and end on Ctrl-C's signal as usual."""
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    # The guard has no threads, so preexec_fn is safe.
    child = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": tmp},
        preexec_fn=begin,  # noqa: PLW1509
        stdin=subprocess.DEVNULL,
    )
    files: set[Path] = set()
    look_at = time.monotonic()
    while child.poll() is None and not flags["to end"]:
        readable, _, _ = select.select([owner], [], [], 0.2)
        if readable:  # the pipe is never written: readable means closed
            break
        if time.monotonic() > look_at:  # in case its processes are killed before we can look
            files |= shared_memory_of(descendants(guard))
            look_at = time.monotonic() + LOOK_SECONDS
    return _end(child, files)


def main(argv: Sequence[str]) -> int:
    """Guard a command; return its exit status (128 + signal if it was killed)."""
    assert argv[2] == "--", "usage: guard FD TMP -- COMMAND..."
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        status = _watch(int(argv[0]), argv[3:], argv[1])
    finally:
        shutil.rmtree(argv[1], ignore_errors=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
