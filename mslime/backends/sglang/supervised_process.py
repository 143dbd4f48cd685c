"""A command under guard: its log, its death, its end, and cleanup after it.

The guard (see `guard`) ends the command when this process ends. This module handles a killed guard: a thread waits for
its end, kills the rest of its process group, and removes their recorded shared memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mslime.backends.sglang.guard import (
    GRACE_SECONDS,
    descendants,
    kill_all,
    kill_but_cleaners,
    process_group,
    remove_unused,
    shared_memory_of,
    wait_for,
)
from mslime.config.errors import EngineError

TAIL_LINES = 30
_NOISE = "Ignore import error when loading"  # SGLang logs it for every model file with missing packages


def log_tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The end of a log, without empty lines and import errors of model files."""
    if not path.exists():
        return "(no log was written)"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        text = file.read().decode(errors="replace")
    return "\n".join([line for line in text.splitlines() if line.strip() and _NOISE not in line][-lines:])


class SupervisedProcess:
    """A command under guard, writing to one log.

    Args:
        name: for messages.
        command: program and arguments.
        env: its whole environment.
        log_path: stdout and stderr are appended here.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self.name, self.log_path = name, log_path
        read_end, self._write_end = os.pipe()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._tmp = tempfile.mkdtemp(prefix="mslime-", dir=env.get("TMPDIR"))
        self._shared_memory: set[Path] = set()
        guard = [sys.executable, "-m", "mslime.backends.sglang.guard", str(read_end), self._tmp, "--", *command]
        with log_path.open("ab") as log:
            log.write((" ".join(command) + "\n").encode())
            log.flush()
            self._log_start = log.tell()
            self._guard = subprocess.Popen(
                guard,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(read_end,),
                start_new_session=True,
            )
        os.close(read_end)
        self._ended = threading.Event()
        threading.Thread(target=self._clean_up_after_guard, daemon=True, name=f"{name}-guard").start()

    def _clean_up_after_guard(self) -> None:
        """After the guard has ended: do nothing in the normal case; if it was killed, clean up everything."""
        with suppress(ChildProcessError):  # not reaped here, so the group id stays its own
            os.waitid(os.P_PID, self._guard.pid, os.WEXITED | os.WNOWAIT)
        left = process_group(self._guard.pid)
        if left:
            kill_but_cleaners(left)
            wait_for(lambda: not process_group(self._guard.pid), GRACE_SECONDS)
            kill_all(process_group(self._guard.pid))
        remove_unused(self._shared_memory)
        shutil.rmtree(self._tmp, ignore_errors=True)
        self._ended.set()

    def remember_shared_memory(self) -> None:
        """Record which files in /dev/shm belong to the command now; they are removed if its guard is killed."""
        self._shared_memory |= shared_memory_of(descendants(self.pid))

    @property
    def pid(self) -> int:
        """The guard's process id; the server and its workers are below it."""
        return self._guard.pid

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._guard.poll()

    def log_text(self) -> str:
        """Output of this process so far."""
        with self.log_path.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def died(self) -> EngineError:
        """The error for a process that ended while still needed."""
        return EngineError(
            self.name,
            f"exit status {self.poll()}",
            f"the server ended while the run needs it; the end of its log:\n{log_tail(self.log_path)}",
            f"read {self.log_path}",
        )

    def stop(self) -> None:
        """End the command and everything below it; returns when it is gone. Safe to call twice."""
        if self._write_end < 0:
            return
        os.close(self._write_end)
        self._write_end = -1
        try:
            self._guard.wait(4 * GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            kill_all([*descendants(self.pid), self.pid])
            self._guard.wait()
        self._ended.wait(GRACE_SECONDS)
