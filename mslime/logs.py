"""How every process of a run logs: a line begins with the time and the process; phases say when they begin and end.

Our lines go through `logging` under the names `mslime` and `mslime_plugins`. A process that is all ours (a rank, an
engine's actor, the rollout service) logs to its standard error, which is its file in RUN/logs, warnings of its
libraries included. The driver may be somebody's notebook: there only our own lines are taken, into RUN/logs/driver.log.
Standard library only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

OURS = ("mslime", "mslime_plugins")
"""Names of our packages' loggers."""
_HIDDEN: set[str] = set()
_log = logging.getLogger(__name__)


def hide(*secrets: str) -> None:
    """From now on no line of this process shows these texts."""
    _HIDDEN.update(secret for secret in secrets if secret)


class Lines(logging.Formatter):
    """`2026-11-22 12:03:04.123+0000 trainer 3 INFO text`, in local time; a library's line also says whose it is."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line, with a traceback if the record has one, and without secrets."""
        when = datetime.fromtimestamp(record.created).astimezone()
        stamp = f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03d}{when:%z}"
        whose = "" if record.name.partition(".")[0] in OURS else f"{record.name}: "
        line = f"{stamp} {self._process} {record.levelname} {whose}{super().format(record)}"
        for secret in _HIDDEN:
            line = line.replace(secret, "(redacted)")
        return line


def log_process(process: str, level: str) -> None:
    """Let this process, which is all ours, log to its standard error; once for each process.

    Args:
        process: what it is called, for example `trainer 3`.
        level: the least of our own lines that is written (`observe.log_level`); of libraries it is warning.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(Lines(process))
    logging.getLogger().addHandler(handler)
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())


@contextmanager
def log_file(path: Path, process: str, level: str) -> Iterator[None]:
    """Append our lines to a file as long as the block lasts; what ends it early is the last of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler, loggers = logging.FileHandler(path, encoding="utf-8"), [logging.getLogger(name) for name in OURS]
    handler.setFormatter(Lines(process))
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
def phase(log: logging.Logger, what: str) -> Iterator[None]:
    """Say that a piece of work begins, and how long it took or what it failed with."""
    log.info("%s", what)
    begin = time.monotonic()
    try:
        yield
    except BaseException as error:
        first = (str(error).splitlines() or [""])[0]
        log.error("%s: failed after %.2f s: %s: %s", what, time.monotonic() - begin, type(error).__name__, first)
        raise
    log.info("%s: done in %.2f s", what, time.monotonic() - begin)
