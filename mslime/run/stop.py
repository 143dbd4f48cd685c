"""SIGTERM, SIGHUP and Ctrl-C: trained steps are saved, and the run ends with a message and exit status 128 + number.

The first signal is acknowledged at once and takes effect when the trainer is next at rest. A second one stops at once,
without saving; a second SIGTERM in the same moment is ignored (`TOGETHER_S`). Handlers are set in the main thread only;
a run in another thread is left to its caller.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self, TextIO, cast

from mslime.config.errors import TrainerError

_log = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
TOGETHER_S = 0.5
"""Seconds. `ray job stop`, `timeout` and systemd send SIGTERM to scripts/train_again.sh, which passes it on, and to its
child."""


class Stopped(KeyboardInterrupt):
    """A signal ends the run.

    Attributes:
        signum: its number.
        save: whether trained steps are to be saved first.
        outcome: result of that, in words.
    """

    def __init__(self, signum: int, save: bool) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum, self.save, self.outcome = signum, save, ""

    @property
    def exit_status(self) -> int:
        """Exit status with which a shell reports a process that the signal ended."""
        return 128 + self.signum

    def describe(self) -> str:
        """The last line of the run."""
        return f"stopped by {self}" + (f": {self.outcome}" if self.outcome else "")


class StopSignals:
    """Handlers for the life of a run. A context manager.

    Attributes:
        patient: if true, the first signal waits for `check`; otherwise it raises at the current instruction.
        describe: returns the effect of the first signal, in words.
    """

    def __init__(self, asked: Callable[[], bool] | None = None) -> None:
        """
        Args:
            asked: whether the run is to end without a signal; polled together with signals.
        """
        self.patient = False
        self._asked = asked
        self.describe: Callable[[], str] = lambda: "stopping"
        self._count = 0
        self._pending: int | None = None
        self._since = 0.0
        self._first = (0, 0.0)  # number and time of the first signal
        self._raised: Stopped | None = None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def install(self) -> None:
        """Set the handlers; again after something else, such as `ray.init`, has set its own."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:  # set by nohup, or for a shell's background job
                continue
            before = signal.signal(number, self._handle)
            self._before.setdefault(number, before)

    def check(self, patience_s: float = 0.0) -> None:
        """Raise `Stopped` if a signal, or a request to end, came at least so many seconds ago."""
        if self._pending is None and self._asked is not None and self._asked():
            self._pending, self._since = signal.SIGTERM, time.monotonic()
        if self._pending is not None and time.monotonic() - self._since >= patience_s:
            raise self._stopped(self._pending, save=True)

    def to_user_error(self, error: BaseException) -> BaseException:
        """The signal behind an error: Ray converts any exception of a handler within it to a plain
        KeyboardInterrupt."""
        plain = isinstance(error, KeyboardInterrupt) and not isinstance(error, Stopped)
        return self._raised if plain and self._raised is not None else error

    def _stopped(self, number: int, save: bool) -> Stopped:
        self._raised = Stopped(number, save)
        return self._raised

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGTERM == self._first[0] and now - self._first[1] < TOGETHER_S:
            return
        if not self._count:
            self._first = (number, now)
        self._count += 1
        if self._count > 2:  # only the end of processes is left, and an exception would leave some behind
            _say("The run is already stopping.")
        elif self._count == 2:
            _say("Stopping at once.")
            raise self._stopped(number, save=False)
        else:
            _say(self.describe())
            if not self.patient:
                raise self._stopped(number, save=True)
            self._pending, self._since = number, now

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():  # empty outside the main thread
            signal.signal(number, before if before is not None else signal.SIG_DFL)
        if error is not None and (shown := self.to_user_error(error)) is not error:
            raise shown from None


def _say(text: str) -> None:
    """Write one line to standard error; safe within a signal handler."""
    try:
        os.write(2, f"\n{text}\n".encode())
    except OSError:
        _leave_terminal()


def _leave_terminal() -> None:
    """The terminal is gone: discard further output, so that it does not fail while the run is saved."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
            gone = os.isatty(descriptor) or descriptor == 2
        except OSError:
            gone = True
        if gone:
            _to_nowhere(descriptor)


def _to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class _Lasting:
    """A standard stream that may lose its reader: further output is then discarded, with a line in the driver's log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        _to_nowhere(self._stream.fileno())
        _log.warning("%s cannot be written: %s; the run continues and logs here", self._stream.name, error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def outliving_readers() -> Iterator[None]:
    """A closed pipe (`| head`), a dead `tee`, or a full disk behind standard output does not end the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", _Lasting(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


# A run's trained and saved steps, and the messages about them when the run ends early.


@dataclass
class RescueState:
    """Steps of a run.

    Attributes:
        trained: number of steps done, also before this session.
        saved: number of steps in the newest checkpoint.
        training: inside a step of the trainer, while the weights belong to neither step.
        save_failed: the last checkpoint could not be written.
    """

    trained: int
    saved: int
    training: bool = False
    save_failed: bool = False

    def stopping(self, step: int) -> str:
        """Message after the first signal, in `step`."""
        if (step if self.training else self.trained) > self.saved:
            saved = step if self.training else self.trained
            return f"Stopping after saving step {saved}. Press Ctrl-C again to stop without saving."
        return f"Stopping: {self.nothing_to_save()}. Press Ctrl-C again to stop at once."

    def nothing_to_save(self) -> str:
        """Why a run that ends saves nothing."""
        return f"step {self.saved} is already saved" if self.saved else "there is nothing to save yet"

    def lost(self, why: str) -> str:
        """Message that names the unsaved steps."""
        if self.trained <= self.saved:
            return f"nothing was saved: {why}"
        first = self.saved + 1
        which = f"step {first} is" if self.trained == first else f"steps {first} to {self.trained} are"
        return f"{which} not saved: {why}"

    def hinders_saving(self, step: int, stopped: bool) -> str:
        """Why the trainer's weights cannot be saved, if there is anything to save; empty: they can.

        Args:
            stopped: the run ends by a signal, which waited for `step`.
        """
        if self.training:
            return f"step {step} did not finish in time" if stopped else f"the trainer failed within step {step}"
        return "saving failed" if self.save_failed else ""


# The loss of Ray's control process (the GCS). Without it the driver continues for a minute. Then Ray's own code ends it
# without a message, although the trainer could still save.

_EVERY_S, _CONNECT_S, _MISSES = 2.0, 3.0, 3
_LEFT = threading.Event()  # set once this process is to end without Ray


class RayWatch:
    """Connects to an address every few seconds. A context manager.

    Args:
        address: `host:port` of the GCS.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address, self._target = address, (host.strip("[]"), int(port))
        self._gone_since: float | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray watch", daemon=True)

    @property
    def gone(self) -> bool:
        """Whether the process has stopped answering."""
        return self._gone_since is not None

    def left(self) -> bool:
        """Whether the process is dead at the end of a run: then `leave_without_ray` is called."""
        if self.gone or not self._answers():
            leave_without_ray()
            return True
        return False

    def check(self, patience_s: float = 0.0) -> None:
        """Raise TrainerError if the process has been gone for longer than `patience_s` seconds."""
        if self._gone_since is not None and time.monotonic() - self._gone_since > patience_s:
            raise TrainerError(
                "Ray", f"gcs_server at {self._address}", "Ray's control process is gone",
                "start again: the run continues from its newest checkpoint; Ray's logs are in "
                "/tmp/ray/session_latest/logs, and the kernel's out-of-memory killer is a frequent cause",
            )  # fmt: skip

    def _watch(self) -> None:
        misses = 0
        while not self._end.wait(_EVERY_S):
            misses = 0 if self._answers() else misses + 1
            if misses == _MISSES:
                self._gone_since = time.monotonic()

    def _answers(self) -> bool:
        try:
            socket.create_connection(self._target, _CONNECT_S).close()
        except OSError:
            return False
        return True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join(_CONNECT_S)


def leave_without_ray() -> None:
    """Make this process end without Ray's own shutdown, which waits for processes that are gone. The sweeper then ends
    the rest of a local Ray, engines included, after this process."""
    if not _LEFT.is_set():
        _LEFT.set()
        sys.excepthook = sys.__excepthook__  # Ray's hook first reports to its control process, and waits
        atexit.register(end, 2)  # runs before Ray's earlier registrations


def end(status: int) -> None:
    """End this process with this exit status if it is to end without Ray; otherwise return."""
    if _LEFT.is_set():
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
