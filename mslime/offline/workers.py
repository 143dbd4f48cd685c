"""Worker processes of a conversion. Each takes one task at a time; a dead worker, or a dead parent, blocks no process.

Processes are started afresh, not forked: the parent may run threads. A worker ends with its parent, however that ends,
so a killed conversion writes nothing more.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Self, TypeVar

from mslime.config.errors import CheckpointError, UserError
from mslime.convert.safetensors_files import Advance

T = TypeVar("T")
R = TypeVar("R")
Work = Callable[[T, Advance], R]
"""Picklable method that does one task in any process and counts its bytes."""
_REPORT_S = 0.2


class Workers:
    """Processes with a pipe each, started for more than one worker; a context manager that ends them.

    Args:
        size: number of processes; 1 works in this one.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._processes: dict[Connection, BaseProcess] = {}
        self._busy: dict[Connection, object] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()

    def run(self, work: Work[T, R], tasks: Sequence[T], advance: Advance) -> Iterator[R]:
        """Results of all tasks, as they finish; tasks are started in order.

        Raises:
            CheckpointError: raised by a worker, or a worker died.
        """
        if self._size <= 1 or len(tasks) <= 1:
            for task in tasks:
                yield work(task, advance)
            return
        waiting = list(reversed(tasks))
        for pipe in self._started(min(self._size, len(tasks))):
            pipe.send(("work", work))
            self._give(pipe, waiting)
        while self._busy:
            for pipe in wait(list(self._busy)):
                assert isinstance(pipe, Connection)
                kind, content = self._receive(pipe)
                if kind == "bytes":
                    advance(content)
                elif kind == "error":
                    raise content
                else:
                    del self._busy[pipe]
                    self._give(pipe, waiting)
                    yield content

    def _started(self, number: int) -> list[Connection]:
        context = multiprocessing.get_context("spawn")
        while len(self._processes) < number:
            ours, theirs = context.Pipe()
            process = context.Process(target=_live, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes[ours] = process
        return list(self._processes)[:number]

    def _give(self, pipe: Connection, waiting: list[T]) -> None:
        if waiting:
            task = waiting.pop()
            self._busy[pipe] = task
            pipe.send(("task", task))

    def _receive(self, pipe: Connection) -> tuple[str, Any]:
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            process = self._processes[pipe]
            process.join()
            raise CheckpointError(
                f"worker process {process.pid}", f"exit code {process.exitcode}",
                f"ended before its work did ({_brief(self._busy[pipe])}); the system kills processes for their memory",
                "run the same command again, with fewer --workers: finished files are kept",
            ) from None  # fmt: skip


def _brief(task: object) -> str:
    text = str(task)
    return text if len(text) < 100 else f"{text[:100]}..."


def _live(pipe: Connection) -> None:
    """Main loop of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    counter = _Counter(pipe)
    work: Work[Any, Any] | None = None
    while True:
        try:
            kind, content = pipe.recv()
        except EOFError:
            return
        if kind == "work":
            work = content
            continue
        assert work is not None
        try:
            result = work(content, counter.advance)
        except Exception as error:
            if not isinstance(error, UserError):
                error.add_note(traceback.format_exc())  # tracebacks do not travel between processes
            pipe.send(("error", error))
            return
        counter.flush()
        pipe.send(("done", result))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


class _Counter:
    """Adds up bytes and sends them to the parent a few times a second."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._pending, self._told = pipe, 0, time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Add `nbytes`."""
        self._pending += nbytes
        if time.monotonic() - self._told > _REPORT_S:
            self.flush()

    def flush(self) -> None:
        """Send bytes that are not sent yet."""
        self._pipe.send(("bytes", self._pending))
        self._pending, self._told = 0, time.monotonic()
