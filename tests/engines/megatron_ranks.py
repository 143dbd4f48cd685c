"""Real trainer ranks for tests: processes forked from a server that has already imported megatron-core.

Importing costs three seconds, so it is done once a session. Every run has a deadline. If it passes, or if a rank fails,
only the processes of that run are killed.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.fixtures.forked import forking, preload

preload("mslime.backends.megatron.step.trainer")


class RankFailed(AssertionError):
    """A rank raised, died or ran out of time; the message holds its traceback."""


def run_ranks(worker: Callable[..., Any], world_size: int, *args: Any, deadline_s: float = 120.0) -> list[Any]:
    """Run `worker(rank, world_size, init_method, *args)` in `world_size` processes; returns their results in rank
    order.

    Args:
        worker: a module-level function; it and its arguments and results are pickled.
        deadline_s: for the whole run.

    Raises:
        RankFailed: with the traceback of the first rank that failed; the others are killed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = forking()
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            call = (theirs, worker, rank, world_size, f"file://{directory}/store", args)
            processes.append(context.Process(target=_run, args=call, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            return _collect(pipes, time.monotonic() + deadline_s, deadline_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], end: float, deadline_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(end - time.monotonic(), 0))
        if not ready:
            missing = sorted(set(range(len(pipes))) - set(results))
            raise RankFailed(f"ranks {missing} did not finish in {deadline_s:.0f} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            results[rank] = _receive(rank, pipe)  # type: ignore[arg-type]
    return [results[rank] for rank in range(len(pipes))]


def _receive(rank: int, pipe: Connection) -> Any:
    try:
        worked, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise RankFailed(f"rank {rank} died without a word") from None
    if not worked:
        raise RankFailed(f"rank {rank}:\n{value}")
    return value


def _run(
    pipe: Connection, worker: Callable[..., Any], rank: int, world_size: int, init_method: str, args: tuple[Any, ...]
) -> None:
    try:
        message = (True, worker(rank, world_size, init_method, *args))
    except BaseException:
        message = (False, traceback.format_exc())
    # Tensors are copied into the message: sharing their memory would need this process to outlive it.
    pipe.send_bytes(pickle.dumps(message))
    pipe.close()
    os._exit(0)
