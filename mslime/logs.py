"""Logging of every process of a run: lines start with time and process; phases log their start and end.

mslime's own lines use the loggers `mslime` and `mslime_plugins`. A process of mslime (a rank, an engine's actor, the
rollout service) logs to its standard error, its file in RUN/logs, including warnings of libraries. The driver may be a
user's notebook: only mslime's own lines go into RUN/logs/driver.log. Standard library only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

OURS = ("mslime", "mslime_plugins")
"""Names of mslime's loggers."""
_HIDDEN: set[str] = set()
_log = logging.getLogger(__name__)


def hide(*secrets: str) -> None:
    """Mask these texts in all later lines of this process."""
    _HIDDEN.update(secret for secret in secrets if secret)


class LineFormatter(logging.Formatter):
    """`2026-11-22 12:03:04.123+0000 trainer 3 INFO text`, in local time; lines of libraries also name their logger."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line, with a traceback if the record has one, and without secrets."""
        when = datetime.fromtimestamp(record.created).astimezone()
        stamp = f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03d}{when:%z}"
        source = "" if record.name.partition(".")[0] in OURS else f"{record.name}: "
        line = f"{stamp} {self._process} {record.levelname} {source}{super().format(record)}"
        for secret in _HIDDEN:
            line = line.replace(secret, "(redacted)")
        return line


def log_process(process: str, level: str) -> None:
    """Log to the standard error of this process of mslime; once for each process.

    Args:
        process: its name, for example `trainer 3`.
        level: lowest level of mslime's own lines (`observe.log_level`); warning for libraries.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(process))
    logging.getLogger().addHandler(handler)
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())


@contextmanager
def log_file(path: Path, process: str, level: str) -> Iterator[None]:
    """Append mslime's lines to a file inside the block; an exception that ends the block is the last of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler, loggers = logging.FileHandler(path, encoding="utf-8"), [logging.getLogger(name) for name in OURS]
    handler.setFormatter(LineFormatter(process))
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(level.upper())
    try:
        yield
    except BaseException as error:
        _log.error("ended by %s: %s", type(error).__name__, error)
        raise
    finally:
        for logger, own_level in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(own_level)
        handler.close()


@contextmanager
def phase(log: logging.Logger, name: str) -> Iterator[None]:
    """Log the start of a piece of work, and its duration or its error."""
    log.info("%s", name)
    begin = time.monotonic()
    try:
        yield
    except BaseException as error:
        first = (str(error).splitlines() or [""])[0]
        log.error("%s: failed after %.2f s: %s: %s", name, time.monotonic() - begin, type(error).__name__, first)
        raise
    log.info("%s: done in %.2f s", name, time.monotonic() - begin)
