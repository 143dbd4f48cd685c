"""Waiting for Ray calls: with a deadline, with progress, and with the first failure reported as itself.

A rank that dies leaves its peers stuck in a collective, so nobody waits for all: the first call that fails ends the
wait, and its own traceback and log path are what the user sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from mslime.config.errors import TrainerError, UserError, WeightSyncError, WorkerError

POLL_SECONDS = 0.25
DEATH_SECONDS = 5.0
"""In which Ray notices that a process is gone."""


def gather(
    refs: Mapping[str, ray.ObjectRef],
    what: str,
    deadline_s: float,
    log_paths: Mapping[str, str],
    on_wait: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Results of all calls by name.

    Args:
        refs: running calls by the name of who works on them, for example `trainer rank 3`.
        what: the work, for messages.
        deadline_s: seconds after which those who have not answered are declared stuck.
        log_paths: where each of them writes.
        on_wait: called a few times a second, for progress.

    Raises:
        UserError: as raised by the worker, when it was a user's mistake.
        WorkerError: a worker crashed, died, or missed the deadline. TrainerError: Ray failed.
    """
    names = {ref: name for name, ref in refs.items()}
    pending, results = list(refs.values()), {}
    end = time.monotonic() + deadline_s
    while pending:
        done, pending = _wait(pending, what)
        for ref in done:
            try:
                results[names[ref]] = _value(ref, names[ref], what, log_paths)
            except WeightSyncError as error:
                raise _death_among(pending, names, what, log_paths) or error from None
        if on_wait is not None:
            on_wait()
        if pending and time.monotonic() > end:
            stuck = sorted(names[ref] for ref in pending)
            logs = ", ".join(log_paths.get(n, "?") for n in stuck)
            raise WorkerError(
                what,
                ", ".join(stuck),
                f"no answer within {deadline_s:.0f} s",
                f"read {logs}; `py-spy dump` shows where a live rank waits; raise the deadline if it was slow",
            )
    return {name: results[name] for name in refs}


def _death_among(
    pending: list[ray.ObjectRef], names: Mapping[ray.ObjectRef, str], what: str, log_paths: Mapping[str, str]
) -> WorkerError | None:
    """Why a sync failed on a rank that merely lost another: Ray may tell of that one's death a moment later."""
    done, _ = _wait(pending, what, len(pending), DEATH_SECONDS) if pending else ([], [])
    for ref in done:
        try:
            _value(ref, names[ref], what, log_paths)
        except WorkerError as death:
            return death
        except UserError:
            continue
    return None


def _wait(
    pending: list[ray.ObjectRef], what: str, number: int = 1, seconds: float = POLL_SECONDS
) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
    try:
        return ray.wait(pending, num_returns=number, timeout=seconds)
    except RayError as error:
        raise _ray_failed(what, "Ray", error) from None


def call(
    ref: ray.ObjectRef,
    who: str,
    what: str,
    deadline_s: float,
    log_path: str = "?",
    on_wait: Callable[[], None] | None = None,
) -> Any:
    """The result of one call; see `gather`."""
    return gather({who: ref}, what, deadline_s, {who: log_path}, on_wait)[who]


def _value(ref: ray.ObjectRef, who: str, what: str, log_paths: Mapping[str, str]) -> Any:
    log = log_paths.get(who, "?")
    try:
        return ray.get(ref)
    except RayError as error:
        raise told(error, who, what, log) from None


def told(error: RayError, who: str, what: str, log: str) -> Exception:
    """What a call's failure is to the user: the worker's own words if the mistake is the user's, else that `who`
    crashed, died, or that Ray failed."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, UserError):
            return error.cause
        # Not `error.traceback_str`: Ray forwards it to the cause, and an AttributeError of that kind eats it.
        return WorkerError(what, who, f"crashed with\n{error}", f"the whole log is {log}")
    if isinstance(error, RayActorError):
        return WorkerError(
            what,
            who,
            f"the process died ({str(error).splitlines()[0]})",
            f"read the end of {log}; a death without a traceback is often the kernel's out-of-memory killer",
        )
    return _ray_failed(what, who, error)


def _ray_failed(what: str, who: str, error: RayError) -> TrainerError:
    reason = str(error).strip().splitlines() or [""]
    return TrainerError(
        what, who, f"Ray failed: {type(error).__name__}: {reason[0]}",
        "Ray's logs are in /tmp/ray/session_latest/logs; the kernel's out-of-memory killer may have ended its raylet",
    )  # fmt: skip
