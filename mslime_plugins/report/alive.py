"""Whether a run is alive: by the process in its directory's lock, and by the age of its last row."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from mslime.config.lora import DIRECTORY
from mslime.observe.metrics import LOCK, lives_here, owner_in
from mslime.observe.names import Row
from mslime.observe.progress import format_seconds
from mslime_plugins.report.verdict import Tone

PACE_STEPS = 10
SLOW = 10
"""A row this many times older than a step takes is late: the step hangs, or does much other work."""


def progress_of(run_dir: Path, rows: Sequence[Row], planned: int | None) -> tuple[Tone, str, str] | None:
    """(tone, sentence, advice) for an incomplete run; None if it is complete, or its number of steps is unknown.

    Args:
        planned: `train.num_steps`.
    """
    last = rows[-1]["step"]
    if planned is None or last >= planned:
        return None
    times = [row["time"] for row in rows if row.get("time") is not None]
    age = max(time.time() - times[-1], 0.0) if times else None
    row_age = f"the last row is {format_seconds(age)} old" if age is not None else "rows have no time"
    owner = _owner(run_dir)
    who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
    done = f"{last} of {planned} steps are done, {row_age}"
    if not owner:
        return "note", f"{done}; no lock in its directory says which process runs it.", ""
    if owner.get("host") != socket.gethostname():
        return "note", f"{done}; whether {who} still runs cannot be seen from this machine.", ""
    if not lives_here(owner):
        again = "The same command continues it from its newest checkpoint; logs/driver.log says how it ended."
        return "bad", f"The run is not running: {done}, {who} is gone.", again
    paces = [b - a for a, b in pairwise([t for t in times if t >= owner["process_started"]])][-PACE_STEPS:]
    if age is not None and paces and age > SLOW * max(median(paces), 1.0):
        hangs = "logs/ says what each process began last (docs/report.md)."
        return "note", f"{who} runs, but {done}: a step took {format_seconds(median(paces))}.", hangs
    eta = (
        f" It will be done in {format_seconds(max((planned - last) * fmean(paces) - (age or 0.0), 0.0))}."
        if paces
        else ""
    )
    return "good", f"The run goes on: {done}, {who} runs.{eta}", ""


def _owner(run_dir: Path) -> dict[str, Any]:
    """Owner in the run's lock; an adapter's run has the lock of the run that contains it."""
    path = run_dir.resolve()
    path = path.parents[1] if path.parent.name == DIRECTORY and not (path / LOCK).exists() else path
    try:
        return owner_in((path / LOCK).read_bytes())
    except OSError:
        return {}
