"""Ends what a local Ray leaves behind when the driver that started it is killed.

`python -m mslime.run.sweeper FD DRIVER`: FD is the read end of a pipe whose write end the driver (process DRIVER)
keeps. Ray's own processes end when their driver does, but two of its agents may wait a minute or more for a server that
is gone. This process remembers which processes the driver's Ray consists of. When the pipe closes without a word, the
driver was killed: what is left of them after a moment's grace is killed too, and shared memory of theirs that nobody
maps any more is removed: Ray may have killed the guards that do so otherwise. A driver that ends properly says so.
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
from types import TracebackType
from typing import Self

from mslime.backends.sglang.guard import descendants, kill_all, remove_unused, shared_memory_of, wait_for

GRACE_SECONDS = 8.0
STARTING_SECONDS, LOOK_OFTEN_SECONDS, LOOK_SECONDS = 120.0, 1.0, 10.0
"""While a run starts, new processes come every second; later hardly any."""
_RAY = b"/ray/"

Started = Mapping[int, str]
"""Processes by id, with when they started: an id alone may be another process's by now."""


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            os.write(self._write_end, b".")
        except BrokenPipeError:  # it was killed before us
            pass
        finally:
            os.close(self._write_end)
        self._process.wait()


def _started(pid: int) -> str | None:
    """When a process started, in clock ticks; None when it has ended."""
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
    """Ray's processes below the driver, and all that those have started."""
    below = descendants(driver)
    roots = [pid for pid in below if _is_ray(pid)]
    found = {pid: _started(pid) for root in roots for pid in (root, *descendants(root))}
    return {pid: when for pid, when in found.items() if when is not None}


def alive(processes: Started) -> list[int]:
    """Those that still run."""
    return [pid for pid, when in processes.items() if _started(pid) == when]


def watch(pipe: int, driver: int) -> None:
    """Return when the driver has ended properly, or when nothing is left of the Ray of one that was killed."""
    known: dict[int, str] = {}
    files: set[Path] = set()  # of engines, whose guards Ray may have killed
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
