"""Ends the processes of a local Ray whose driver was killed.

`python -m mslime.run.sweeper FD DRIVER`: FD is the read end of a pipe whose write end the driver (process DRIVER)
keeps. Ray's own processes end with their driver, but two of its agents may wait a minute or more for a dead server.
This process tracks the processes of the driver's Ray. A driver that ends properly writes to the pipe; if the pipe
closes without that, the driver was killed. After a short grace period the remaining processes are then killed. Their
unmapped shared memory is removed, because Ray may have killed the guards that otherwise do so.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from mslime.backends.sglang.guard import descendants, kill_all, remove_unused, shared_memory_of, wait_for

GRACE_SECONDS = 8.0
STARTING_SECONDS, LOOK_OFTEN_SECONDS, LOOK_SECONDS = 120.0, 1.0, 10.0
"""During a run's start new processes appear every second; later hardly any."""
_RAY = b"/ray/"

Started = Mapping[int, str]
"""Processes by id, with their start times: an id alone may be reused by another process."""


class Sweeper:
    """The sweeper of this process's local Ray; a context manager around it."""

    def __enter__(self) -> Self:
        read_end, self._write_end = os.pipe()
        command = [sys.executable, "-m", "mslime.run.sweeper", str(read_end), str(os.getpid())]
        package = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            command, pass_fds=(read_end,), start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
        os.close(read_end)
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            os.write(self._write_end, b".")
        except BrokenPipeError:  # the sweeper was killed first
            pass
        finally:
            os.close(self._write_end)
        self._process.wait()


def _started(pid: int) -> str | None:
    """Start time of a process, in clock ticks; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def _is_ray(pid: int) -> bool:
    try:
        return _RAY in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def ray_processes(driver: int) -> dict[int, str]:
    """Ray's processes below the driver, and all their descendants."""
    below = descendants(driver)
    roots = [pid for pid in below if _is_ray(pid)]
    found = {pid: _started(pid) for root in roots for pid in (root, *descendants(root))}
    return {pid: when for pid, when in found.items() if when is not None}


def alive(processes: Started) -> list[int]:
    """Ids of the processes that still run."""
    return [pid for pid, when in processes.items() if _started(pid) == when]


def watch(pipe: int, driver: int) -> None:
    """Return when the driver has ended properly, or when no process is left of a killed driver's Ray."""
    known: dict[int, str] = {}
    files: set[Path] = set()  # of engines whose guards Ray may have killed
    begin = time.monotonic()

    def pause() -> float:
        return LOOK_OFTEN_SECONDS if time.monotonic() - begin < STARTING_SECONDS else LOOK_SECONDS

    while not select.select([pipe], [], [], pause())[0]:
        known |= ray_processes(driver)
        known = {pid: known[pid] for pid in alive(known)}
        files |= shared_memory_of(known)
    if os.read(pipe, 1):
        return
    files |= shared_memory_of({*known, *(below for pid in known for below in descendants(pid))})
    deadline = time.monotonic() + GRACE_SECONDS
    while alive(known) and time.monotonic() < deadline:
        time.sleep(0.2)
    kill_all(alive(known))
    wait_for(lambda: not alive(known), GRACE_SECONDS)
    remove_unused(files)


def main(argv: Sequence[str]) -> None:
    """See the module."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(int(argv[0]), int(argv[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
