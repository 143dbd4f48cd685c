"""Starting a run from its configuration, and everything around the loop: directories, signals, the last word."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from mslime import __version__
from mslime.config.errors import ConfigError
from mslime.config.schema import RunConfig
from mslime.control.cluster import resolved_device
from mslime.control.loop import train_rl, train_sft
from mslime.control.run_directory import changed_settings, owned, write_resolved
from mslime.control.session import Session
from mslime.control.stop import StopSignals
from mslime.logs import log_file
from mslime.preflight.describe import describe
from mslime.preflight.environment import refuse_without_gpu
from mslime.preflight.resolve import resolve

_log = logging.getLogger(__name__)
_ONE_AT_A_TIME = threading.Lock()
"""Ray, and the process groups of weight syncs, are one for each process."""


def run(config: RunConfig, quiet: bool = False, asked: Callable[[], bool] | None = None) -> int:
    """Train. Returns 0.

    Args:
        quiet: print nothing, whatever `observe.progress` says.
        asked: whether the run is to be saved and ended, as by a signal; called often.

    Raises:
        UserError: a user's mistake, or a failed part of the run.
        Stopped: a signal ended it, or `asked`. Signals are followed in the main thread only.
    """
    with only_run(config):
        return _run(config, quiet, asked)


@contextmanager
def only_run(config: RunConfig) -> Iterator[None]:
    """Raise ConfigError while this process runs something else."""
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        raise ConfigError("name", config.name, "another run is going on in this process",
                          "wait for its end, or start this one as a process of its own")  # fmt: skip
    try:
        yield
    finally:
        _ONE_AT_A_TIME.release()


def _run(config: RunConfig, quiet: bool, asked: Callable[[], bool] | None) -> int:
    config = resolved_device(config)
    refuse_without_gpu(config)
    resolved = resolve(config)
    config = resolved.config
    console = Console(stderr=True, quiet=quiet)
    if config.observe.progress != "off":
        console.print(describe(resolved))

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)
        _log.info("%s", text)

    log = log_file(config.run_dir / "logs" / "driver.log", "driver", config.observe.log_level)
    with StopSignals(asked) as stop, owned(config.run_dir), log:
        _log.info("start of mslime %s in process %d on %s", __version__, os.getpid(), socket.gethostname())
        session = Session(resolved, stop, quiet)
        if session.first_step >= config.train.num_steps:
            say(f"{config.run_dir}: all {config.train.num_steps} steps are done already")
            return 0
        for change in changed_settings(session.checkpoints.config or {}, config.as_dict()):
            say(f"changed since {session.checkpoints.loaded}: {change}")
        write_resolved(config, config.run_dir / "config.yaml")
        with session:
            (train_sft if config.train.task == "sft" else train_rl)(session)
        say(f"done: {config.run_dir}")
    return 0
