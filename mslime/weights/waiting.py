"""Waiting for engines: the first failure ends a wait for all of them, and an engine's own words are what is raised."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from mslime.config.errors import ChangesRefused, WeightSyncError, sync_error
from mslime.weights.plan import Bucket


def all_done(futures: Sequence[Future[Any]], phase: str, where: str, deadline_s: float) -> None:
    """Return when all are done.

    Raises:
        WeightSyncError: one failed, or they are not done in time.
    """
    done, waiting = wait(futures, timeout=deadline_s, return_when=FIRST_EXCEPTION)
    # An engine's own words first: a broken collective is only their echo.
    failures = [error for future in done if (error := future.exception()) is not None]
    for error in sorted(failures, key=lambda e: not isinstance(e, WeightSyncError)):
        if isinstance(error, WeightSyncError):
            raise error
        raise sync_error(phase, where, f"{type(error).__name__}: {error}") from error
    if waiting:
        raise sync_error(phase, where, f"not finished within {deadline_s:.0f} s")


def until_answered(bucket: Bucket, futures: Iterable[Future[Any]]) -> list[ChangesRefused]:
    """Return when all are done, each of which keeps a deadline of its own; who refused changes.

    Raises:
        WeightSyncError: naming the bucket. The first other failure.
    """
    waiting: set[Future[Any]] = set(futures)
    refused: list[ChangesRefused] = []
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_EXCEPTION)
        for answer in done:
            error = answer.exception()
            if isinstance(error, ChangesRefused):
                refused.append(error)
            elif error is not None:
                raise naming(bucket.describe(), error)
    return refused


def naming(what: str, error: BaseException) -> WeightSyncError:
    """What an engine's answer comes to, for what was sent to it."""
    rule = error.rule if isinstance(error, WeightSyncError) else repr(error)
    where = error.value if isinstance(error, WeightSyncError) else "engine"
    return sync_error("send", f"{what} to {where}", rule)
