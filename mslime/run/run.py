"""Start a run from its configuration, and do everything around the loop: directories, signals, the last line."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console

from mslime import __version__
from mslime.checks.environment import refuse_without_gpu
from mslime.checks.resolve import ResolvedRun, resolve
from mslime.checks.run_tables import describe
from mslime.config.errors import ConfigError, WorkerError
from mslime.config.schema import RunConfig
from mslime.data.checkpoints import newest_step
from mslime.logs import log_file
from mslime.run.adapter_session import AdaptersSession
from mslime.run.loop import train_rl, train_sft
from mslime.run.ray_cluster import resolved_device
from mslime.run.resources import Attempts, Resources, can_go_on
from mslime.run.run_directory import changed_settings, owned, write_resolved
from mslime.run.stop import StopSignals
from mslime.run.training_run import TrainingRun

_log = logging.getLogger(__name__)
_ONE_AT_A_TIME = threading.Lock()
"""A process has only one Ray connection, and one set of process groups for weight syncs."""


def run(config: RunConfig, quiet: bool = False, asked: Callable[[], bool] | None = None) -> int:
    """Train. Returns 0.

    Args:
        quiet: print nothing, regardless of `observe.progress`.
        asked: whether the run is to be saved and ended, as by a signal; called often.

    Raises:
        UserError: a user's mistake, or a failed part of the run.
        Stopped: a signal ended it, or `asked`. Signals are followed in the main thread only.
    """
    with only_run(config.name):
        return _run(config, quiet, asked)


@contextmanager
def only_run(name: str) -> Iterator[None]:
    """Raise ConfigError while this process runs anything other than run `name`."""
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        raise ConfigError("name", name, "another run is going on in this process",
                          "wait for its end, or start this one in a separate process")  # fmt: skip
    try:
        yield
    finally:
        _ONE_AT_A_TIME.release()


def _run(config: RunConfig, quiet: bool, asked: Callable[[], bool] | None) -> int:
    config = resolved_device(config)
    refuse_without_gpu(config.cluster)
    resolved = resolve(config)
    config = resolved.config
    console = Console(stderr=True, quiet=quiet)
    if config.observe.progress != "off":
        console.print(describe(resolved))

    def print_status(text: str) -> None:
        console.print(text, markup=False, highlight=False)
        _log.info("%s", text)

    log = log_file(config.run_dir / "logs" / "driver.log", "driver", config.observe.log_level)
    with StopSignals(asked) as stop, owned(config.run_dir), log:
        _log.info("start of mslime %s in process %d on %s", __version__, os.getpid(), socket.gethostname())
        if config.adapters:
            return _run_adapters(AdaptersSession(resolved, stop, quiet), print_status)
        with Resources() as resources:
            session = TrainingRun(resolved, stop, quiet, resources)
            if session.first_step >= config.train.num_steps:
                print_status(f"{config.run_dir}: all {config.train.num_steps} steps are done already")
                return 0
            for change in changed_settings(session.checkpoints.config or {}, config.as_dict()):
                print_status(f"changed since {session.checkpoints.loaded}: {change}")
            write_resolved(config, config.run_dir / "config.yaml")
            _train(session, lambda: TrainingRun(_continued(resolved), stop, quiet, resources), resources, print_status)
        print_status(f"done: {config.run_dir}")
    return 0


def _run_adapters(session: AdaptersSession, print_status: Callable[[str], None]) -> int:
    """Train several adapters of one base."""
    config = session.config
    if not session.adapters:
        print_status(f"{config.run_dir}: all steps of all adapters are done already")
        return 0
    for each in session.adapters:
        for change in changed_settings(each.checkpoints.config or {}, each.config.as_dict()):
            print_status(f"{each.name}: changed since {each.checkpoints.loaded}: {change}")
        each.config.run_dir.mkdir(parents=True, exist_ok=True)
        write_resolved(each.config, each.config.run_dir / "config.yaml")
    write_resolved(config, config.run_dir / "config.yaml")
    with session:
        session.train(train_rl)
    print_status(f"done: {config.run_dir}")
    return 0


def _train(
    session: TrainingRun,
    make_session: Callable[[], TrainingRun],
    resources: Resources,
    print_status: Callable[[str], None],
) -> None:
    """Train to the end; if a process is lost and the engines remain usable, with another session (`resources`)."""
    config, attempts = session.config, Attempts(session.config.cluster.restarts)
    while True:
        try:
            with session:
                (train_sft if config.train.task == "sft" else train_rl)(session)
            return
        except WorkerError as error:
            if not can_go_on(resources, colocated=config.colocated):
                raise
            saved = newest_step(config.run_dir)
            told = attempts.another(session.first_step, session.trained, saved)
            if not told:
                raise
            print_status(f"{error.brief}: {told}")
            session = make_session()


def _continued(run: ResolvedRun) -> ResolvedRun:
    """The same run, now continuing from its own checkpoint, even if it was configured to begin without one."""
    checkpoint = run.config.checkpoint
    if checkpoint.resume != "never":
        return run
    checkpoint = checkpoint.model_copy(update={"resume": "auto"})
    return replace(run, config=run.config.model_copy(update={"checkpoint": checkpoint}))
