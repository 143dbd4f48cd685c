"""`metrics.jsonl`: one JSON object a step, the source of the console, TensorBoard, W&B and the HTML report.

`log` writes a row to disk completely or not at all before it returns. On resume, a torn row is dropped and rows of
repeated steps are cut off: the file has each step once, in order. Late metrics of a step (an evaluation that runs
beside training) are one more row of that step, before the row of the next; `names.by_step` joins them. The checkpoint
keeps its own step's row in case the file loses it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from mslime.config.errors import UserError, nearest
from mslime.config.output import ObserveConfig
from mslime.observe.names import METRICS, is_known
from mslime.observe.sinks import Sink, open_sinks

FILE_NAME = "metrics.jsonl"


class MetricsLogger:
    """Appends a run's metrics to its files and sinks. One process of a run owns it."""

    def __init__(
        self,
        run_dir: Path,
        observe: ObserveConfig,
        first_step: int = 0,
        run_name: str = "run",
        run_config: Mapping[str, Any] | None = None,
        last_row: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the metrics of a run.

        Args:
            run_dir: the run's directory; created if missing.
            observe: settings of the sinks.
            first_step: the first step that will be logged. Rows from it on are cut off. 0 starts afresh: an earlier
                file is kept under a numbered name.
            run_name, run_config: for sinks that show them.
            last_row: of the step before `first_step`, as `log` returned it; added if the file lacks it.

        Raises:
            UserError: a sink's package is not installed, or the file cannot be written.
        """
        self._path = run_dir / FILE_NAME
        self._last_step = max(first_step - 1, 0)  # after a resume, this step may still get late metrics
        self._sinks: list[Sink] = open_sinks(run_dir, observe, run_name, run_config or {})
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            _prepare(self._path, first_step, last_row)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Write one step's row and return it. Non-finite values are written as null.

        Raises:
            AssertionError: a name is not in `names.METRICS`, or steps go backwards.
            UserError: the disk is full or the file cannot be written.
        """
        for name in metrics:
            assert is_known(name), f"unknown metric {name!r}: {nearest(name, METRICS)} (see mslime/observe/names.py)"
        assert step >= self._last_step, f"step {step} after step {self._last_step}"
        self._last_step = step
        values = {name: _finite(value) for name, value in metrics.items()}
        row = {"step": step, "time": round(time.time(), 3), **values}
        self._append(json.dumps(row).encode() + b"\n")
        for sink in self._sinks:
            sink.log(step, {name: value for name, value in values.items() if value is not None})
        return row

    def _append(self, line: bytes) -> None:
        """Append a line completely or not at all: a partial write is removed."""
        before = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), before)
            raise _unwritable(self._path, error) from error

    def close(self) -> None:
        """Close the file and the sinks."""
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OSError:
            if error is None:  # an earlier error is the one to report
                raise


def read_rows(path: Path, skip_torn: bool = False) -> list[dict[str, Any]]:
    """JSON objects of a JSON-lines file, in order; empty if there is no file. A torn last line is left out.

    Args:
        skip_torn: leave out torn lines anywhere, for files that several attempts of a run append to.

    Raises:
        UserError: another line is not a JSON object.
    """
    return [row for _, row in _numbered_rows(path, skip_torn)]


def _numbered_rows(path: Path, skip_torn: bool = False) -> list[tuple[int, dict[str, Any]]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is not None:
            rows.append((number, row))
        elif line.strip() and number < len(lines) and not skip_torn:
            raise UserError(f"{path}:{number}", line[:60], "is not a JSON object", "remove the line")
    return rows


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics, each with its step. Raises UserError naming the first invalid line."""
    rows = _numbered_rows(path)
    for number, row in rows:
        if type(row.get("step")) is not int:
            raise UserError(f"{path}:{number}", str(row)[:60], "must have a whole number as `step`", "remove the line")
    return [row for _, row in rows]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _prepare(path: Path, first_step: int, last_row: Mapping[str, Any] | None) -> None:
    """Cut `path` down to the complete rows of steps before `first_step`."""
    if first_step == 0:
        if path.exists():
            path.rename(free_name(path))
        return
    kept = [row for row in read_metrics(path) if row["step"] < first_step]
    if last_row is not None and not any(row["step"] == last_row["step"] for row in kept):
        kept.append(dict(last_row))
    if not kept and not path.exists():
        return
    fresh = path.with_suffix(".tmp")
    with fresh.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in kept)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def free_name(path: Path) -> Path:
    """An unused, numbered name beside `path`."""
    number = 1
    while (candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return candidate


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(str(path), error.strerror, "metrics cannot be written", "free space, or change output_dir")


# Lock of a run's directory, which names the owning process. `run.run.owned` takes and releases it.

LOCK = ".lock"
"""File in a run's directory that describes its present or last owner."""


def own_description() -> dict[str, Any]:
    """Description of this process for the lock of its run's directory."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "process_started": psutil.Process().create_time(),
    }


def owner_in(text: bytes) -> dict[str, Any]:
    """Last owner from the lock's file; empty if the text is not readable."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def lives_here(owner: Mapping[str, Any]) -> bool:
    """Whether the described process runs on this machine and is not a later one with the same id."""
    pid = owner.get("pid")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    try:
        return psutil.Process(pid).create_time() == owner.get("process_started")
    except psutil.Error:
        return False
