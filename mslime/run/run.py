"""Start a run from its configuration, and do everything around the loop: directories, signals, the last line."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import yaml
from rich.console import Console

from mslime import __version__
from mslime.checks.environment import refuse_without_gpu
from mslime.checks.resolve import ResolvedRun, resolve
from mslime.checks.run_tables import describe
from mslime.config.errors import ConfigError, WorkerError
from mslime.config.schema import RunConfig
from mslime.data.checkpoints import newest_step
from mslime.logs import log_file
from mslime.observe.metrics import LOCK, free_name, lives_here, own_description, owner_in
from mslime.run.adapter_session import AdaptersSession
from mslime.run.loop import train_rl, train_sft
from mslime.run.ray_cluster import resolved_device
from mslime.run.started import RunResources
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
    console = Console(stderr=True, quiet=quiet)

    def print_status(text: str) -> None:
        console.print(text, markup=False, highlight=False)
        _log.info("%s", text)

    with ExitStack() as stack:
        stack.enter_context(only_run(config.name))
        config = resolved_device(config)
        refuse_without_gpu(config.cluster)
        resolved = resolve(config)
        config = resolved.config
        if config.observe.progress != "off":
            console.print(describe(resolved))
        stop = stack.enter_context(StopSignals(asked))
        stack.enter_context(owned(config.run_dir))
        stack.enter_context(log_file(config.run_dir / "logs" / "driver.log", "driver", config.observe.log_level))
        _log.info("start of mslime %s in process %d on %s", __version__, os.getpid(), socket.gethostname())
        if config.adapters:
            return _run_adapters(AdaptersSession(resolved, stop, quiet), print_status)
        with RunResources() as resources:
            session = TrainingRun(resolved, stop, quiet, resources)
            if session.first_step >= config.train.num_steps:
                print_status(f"{config.run_dir}: all {config.train.num_steps} steps are already done")
                return 0
            for change in changed_settings(session.checkpoints.config or {}, config.as_dict()):
                print_status(f"changed since {session.checkpoints.loaded}: {change}")
            write_resolved(config, config.run_dir / "config.yaml")
            _train(session, lambda: TrainingRun(_continued(resolved), stop, quiet, resources), resources, print_status)
        print_status(f"done: {config.run_dir}")
    return 0


@contextmanager
def only_run(name: str) -> Iterator[None]:
    """Raise ConfigError while this process runs anything other than run `name`."""
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        raise ConfigError("name", name, "another run is active in this process",
                          "wait for it to end, or start this one in a separate process")  # fmt: skip
    try:
        yield
    finally:
        _ONE_AT_A_TIME.release()


def _run_adapters(session: AdaptersSession, print_status: Callable[[str], None]) -> int:
    """Train several adapters of one base."""
    config = session.config
    if not session.adapters:
        print_status(f"{config.run_dir}: all steps of all adapters are already done")
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
    resources: RunResources,
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
            why = attempts.another(session.first_step, session.trained, saved)
            if not why:
                raise
            print_status(f"{error.brief}: {why}")
            session = make_session()


def _continued(run: ResolvedRun) -> ResolvedRun:
    """The same run, now continuing from its own checkpoint, even if it was configured to begin without one."""
    checkpoint = run.config.checkpoint
    if checkpoint.resume != "never":
        return run
    checkpoint = checkpoint.model_copy(update={"resume": "auto"})
    return replace(run, config=run.config.model_copy(update={"checkpoint": checkpoint}))


class Attempts:
    """Counts how often a run continues with another session.

    A run ends if it has not made a step: a fault present from the start would recur. Failures count as consecutive
    while no checkpoint is newer than the one that the session began with.

    Args:
        most: largest number of consecutive failures.
    """

    def __init__(self, most: int) -> None:
        self._most, self._failures, self._started = most, 0, False

    def another(self, began: int, trained: int, saved: int) -> str:
        """Count a failure; returns a message for the user before the run continues. Empty: the run ends.

        Args:
            began: steps done before the failed session.
            trained: steps done in the end, including lost ones.
            saved: steps in the newest checkpoint; 0 without one.
        """
        self._started = self._started or trained > began
        self._failures = 1 if saved > began else self._failures + 1
        if not self._started or self._failures > self._most:
            return ""
        where = f"from step {saved}" if saved else "from the beginning"
        return f"the run continues {where} ({self._failures} of {self._most} in a row)"


def can_go_on(resources: RunResources, *, colocated: bool) -> bool:
    """Whether another session may use the resources of this one. On shared GPUs an engine may have released its memory,
    or hold memory that the trainer's next start needs."""
    return not colocated and resources.ray is not None and not resources.ray.gone


# A run's directory: one process owns it, and its config.yaml holds the resolved configuration.
#
# The lock lasts for the life of a session. It is a system lock (`flock`), which ends with the process for any cause.
# The owner's name is written into the file for people. Over NFS it holds between machines if the mount supports it. A
# file system without locks is detected, and only processes of this machine are then distinguished.

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Own a run directory, which is created if missing.

    Raises:
        ConfigError: another process owns it (the error names it), or it cannot be written.
    """
    path = run_dir / LOCK
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            "output_dir", str(run_dir), f"the run's directory cannot be written: {error.strerror}",
            "choose a writable directory with output_dir and name",
        ) from error  # fmt: skip
    try:
        _lock(descriptor, path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(own_description()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _taken(path, owner_in(os.pread(descriptor, 4096, 0))) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        owner = owner_in(os.pread(descriptor, 4096, 0))
        if owner.get("pid") != os.getpid() and lives_here(owner):
            raise _taken(path, owner) from None


def _taken(path: Path, owner: Mapping[str, Any]) -> ConfigError:
    holder = f"process {owner.get('pid', '?')} on {owner.get('host', '?')} since {owner.get('started', '?')}"
    return ConfigError(
        "output_dir/name", str(path.parent), f"another process runs in this directory: {holder}",
        "wait for it, stop it, or give this run another name",
    )  # fmt: skip


def write_resolved(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration as YAML, atomically. An earlier, different file is kept under a numbered name.
    Paths are absolute, because the file is also read from other directories."""
    text = yaml.safe_dump(_absolute(config.model_dump(), config.as_dict()), sort_keys=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        if path.read_text(encoding="utf-8", errors="replace") == text:
            return
        os.link(path, free_name(path))
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _absolute(values: Any, plain: Any) -> Any:
    """The plain values with every path absolute: of type Path, or of a file of rows (with its slice)."""
    if isinstance(values, dict):
        found = {key: _absolute(value, plain[key]) for key, value in cast("dict[str, Any]", values).items()}
        if isinstance(found.get("data"), dict):
            found["data"]["prompts"] = [str(Path(path).absolute()) for path in found["data"]["prompts"]]
            for held_out in found["data"]["eval_sets"]:
                held_out["path"] = str(Path(held_out["path"]).absolute())
        return found
    if isinstance(values, list):
        both = zip(cast("list[Any]", values), plain, strict=True)
        return [_absolute(value, as_plain) for value, as_plain in both]
    return str(values.absolute()) if isinstance(values, Path) else plain


def changed_settings(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """`section.key: old -> new` of every setting that differs; nothing if the earlier value is unknown.

    Args:
        before, now: `RunConfig.as_dict`.
    """
    if not before:
        return []
    old, new = _flat(before), _flat(now)
    keys = [*new, *(key for key in old if key not in new)]
    return [
        f"{key}: {old.get(key, 'unknown')} -> {new.get(key, 'removed')}" for key in keys if old.get(key) != new.get(key)
    ]


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
