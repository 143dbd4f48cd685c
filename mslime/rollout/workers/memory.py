"""Memory that a process may take. Linux only: elsewhere there is no limit."""

from __future__ import annotations

import resource
import sys


def limit_memory(more_bytes: int) -> None:
    """Let this process map `more_bytes` beyond what it has; what asks for more gets a MemoryError."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + more_bytes, held + more_bytes))


class DataLimit:
    """Likewise for memory that a process writes to, which address space that its threads only reserve is not part of.
    It may be set again: what the process held at first is what counts."""

    def __init__(self) -> None:
        self._held = _data_bytes()

    def set(self, more_bytes: int) -> None:
        """`more_bytes` beyond what the process held at first."""
        if sys.platform == "linux":
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (self._held + more_bytes, hard))


def _data_bytes() -> int:
    if sys.platform != "linux":
        return 0
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
