"""Progress bars of a conversion: bytes, bytes a second, time left."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class Bars:
    """A bar for each phase; `mslime.offline.jobs.Progress`. A context manager.

    Args:
        quiet: show nothing.
    """

    def __init__(self, console: Console, quiet: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description:8}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
            TimeRemainingColumn(), console=console, disable=quiet,
        )  # fmt: skip
        self._current: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def phase(self, name: str, total_bytes: int, done_bytes: int) -> None:
        """A new bar; what an earlier run did is done, and does not count as speed."""
        self._current = self._progress.add_task(name, total=total_bytes - done_bytes)
        if done_bytes:
            self._progress.console.print(f"{done_bytes / 2**30:.2f} GiB were finished by an earlier run")

    def advance(self, nbytes: int) -> None:
        """So many bytes more."""
        assert self._current is not None
        self._progress.advance(self._current, nbytes)
