"""Watch over Ray's control process (the GCS). Without it the driver continues for a minute after the GCS has died. Then
Ray's own code ends it without a message, although the trainer could still save.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from mslime.config.errors import TrainerError

_EVERY_S, _CONNECT_S, _MISSES = 2.0, 3.0, 3
_LEFT = threading.Event()
"""Seconds for this process to end once it is to end without Ray."""


class RayWatch:
    """Connects to an address every few seconds. A context manager.

    Args:
        address: `host:port` of the GCS.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address, self._target = address, (host.strip("[]"), int(port))
        self._gone_since: float | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray watch", daemon=True)

    @property
    def gone(self) -> bool:
        """Whether the process has stopped answering."""
        return self._gone_since is not None

    def left(self) -> bool:
        """Whether the process is dead at the end of a run: then `leave_without_ray` is called."""
        if self.gone or not self._answers():
            leave_without_ray()
            return True
        return False

    def check(self, patience_s: float = 0.0) -> None:
        """Raise TrainerError if the process has been gone for longer than `patience_s` seconds."""
        if self._gone_since is not None and time.monotonic() - self._gone_since > patience_s:
            raise TrainerError(
                "Ray", f"gcs_server at {self._address}", "Ray's control process is gone",
                "start again: the run continues from its newest checkpoint; Ray's logs are in "
                "/tmp/ray/session_latest/logs, and the kernel's out-of-memory killer is a frequent cause",
            )  # fmt: skip

    def _watch(self) -> None:
        misses = 0
        while not self._end.wait(_EVERY_S):
            misses = 0 if self._answers() else misses + 1
            if misses == _MISSES:
                self._gone_since = time.monotonic()

    def _answers(self) -> bool:
        try:
            socket.create_connection(self._target, _CONNECT_S).close()
        except OSError:
            return False
        return True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join(_CONNECT_S)


def leave_without_ray() -> None:
    """Make this process end without Ray's own shutdown, which waits for processes that are gone. The sweeper then ends
    the rest of a local Ray, engines included, after this process."""
    if not _LEFT.is_set():
        _LEFT.set()
        sys.excepthook = sys.__excepthook__  # Ray's hook first reports to its control process, and waits
        atexit.register(end, 2)  # runs before Ray's earlier registrations


def end(status: int) -> None:
    """End this process with this exit status if it is to end without Ray; otherwise return."""
    if _LEFT.is_set():
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
