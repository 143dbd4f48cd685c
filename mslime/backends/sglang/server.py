"""An SGLang server as a supervised child process: started, waited for, watched, and ended without leftovers.

The server runs under `guard`, in a session of its own: signals of our terminal do not reach it, and it ends when this
process does, whatever ends this process. Nothing here talks to the engine beyond asking whether it is ready; that is
`client`'s part.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mslime.backends.cpu.sglang import check_version
from mslime.backends.sglang.flags import command_line, environment, server_fields
from mslime.backends.sglang.guard import GRACE_SECONDS, descendants, kill_all
from mslime.config.errors import EngineError
from mslime.config.schema import RunConfig

Role = Literal["engine", "teacher"]
"""What a server is for: generating with the student's weights, or scoring with a teacher's."""

TAIL_LINES = 30
PORT_ATTEMPTS = 3
_PORT_TAKEN = ("address already in use", "port is already in use", "is not available")


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine is: its name in samples and messages, its URL, and its log if we own it."""

    name: str
    url: str
    log_path: Path | None = None


def attach(url: str, index: int, role: Role = "engine") -> EngineAddress:
    """The address of a server that somebody else runs. Raises EngineError when the URL is not one."""
    if not url.startswith(("http://", "https://")):
        field = "teacher.urls" if role == "teacher" else "sglang.urls"
        raise EngineError(field, url, "is not the URL of a server", "write http://host:port")
    return EngineAddress(f"{role}{index}", url.rstrip("/"))


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def port_in_use(host: str, port: int) -> bool:
    """Whether somebody listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
        return False


def log_tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The end of a log, without the empty lines."""
    if not path.exists():
        return "(no log was written)"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        text = file.read().decode(errors="replace")
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


class SupervisedProcess:
    """A command under guard, writing to one log.

    Args:
        name: for messages.
        command: program and arguments.
        env: its whole environment.
        log_path: stdout and stderr are appended here.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self.name, self.log_path = name, log_path
        read_end, self._write_end = os.pipe()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        guard = [sys.executable, "-m", "mslime.backends.sglang.guard", str(read_end), "--", *command]
        with log_path.open("ab") as log:
            log.write((" ".join(command) + "\n").encode())
            log.flush()
            self._guard = subprocess.Popen(
                guard,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(read_end,),
                start_new_session=True,
            )
        os.close(read_end)

    @property
    def pid(self) -> int:
        """The guard's process id; the server and its workers are below it."""
        return self._guard.pid

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._guard.poll()

    def log_text(self) -> str:
        """What this process has written so far."""
        with self.log_path.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def died(self) -> EngineError:
        """The error for a process that ended although it is needed."""
        return EngineError(
            self.name,
            f"exit status {self.poll()}",
            f"the server ended while the run needs it; the end of its log:\n{log_tail(self.log_path)}",
            f"read {self.log_path}",
        )

    def stop(self) -> None:
        """End the command and everything below it; returns when it is gone. Safe to call twice."""
        if self._write_end < 0:
            return
        os.close(self._write_end)
        self._write_end = -1
        try:
            self._guard.wait(GRACE_SECONDS + 5)
        except subprocess.TimeoutExpired:
            kill_all([*descendants(self.pid), self.pid])
            self._guard.wait()


class ServerProcess:
    """One SGLang server of a run.

    Args:
        config: the run; `cluster.device` must have been decided (auto counts as cpu when no GPU driver is found).
        index: which of the run's engines this is.
        log_dir: `<name>.log` is written there.
        host: address to listen on; loopback unless engines and rollout live on different machines.
        gpus: devices for this server; None takes what this process may see.
        port: fixed port; None picks a free one, and another one should somebody be quicker.
        skip_patches: names of CPU patches to leave out (only tests do that).
        role: the server is called `<role><index>`; a teacher's `config` is that of `flags.teacher_run`.
    """

    def __init__(
        self,
        config: RunConfig,
        index: int,
        log_dir: Path,
        host: str = "127.0.0.1",
        gpus: Sequence[str] | None = None,
        port: int | None = None,
        skip_patches: Sequence[str] = (),
        role: Role = "engine",
    ) -> None:
        self.config, self.index, self.host, self.gpus, self.port = config, index, host, gpus, port
        self.name = f"{role}{index}"
        self.log_path = Path(log_dir) / f"{self.name}.log"
        self.cpu = runs_on_cpu(config)
        self._skip = tuple(skip_patches)
        self._process: SupervisedProcess | None = None

    def start(self) -> EngineAddress:
        """Launch the server and wait until it serves.

        Raises:
            EngineError: it died (with the end of its log), missed `deadlines.engine_start_s`, or its port is taken.
        """
        if self.cpu:
            check_version()
        attempts = 1 if self.port is not None else PORT_ATTEMPTS
        for attempt in range(attempts):
            port = self.port if self.port is not None else free_port(self.host)
            if port_in_use(self.host, port):
                raise self._port_taken(port)
            self._launch(port)
            if self._wait_ready(port):
                return EngineAddress(self.name, f"http://{self.host}:{port}", self.log_path)
            assert self._process is not None
            error, taken = self._process.died(), _names_taken_port(self._process.log_text())
            self.stop()
            if not taken:
                raise error
            if attempt == attempts - 1:
                raise self._port_taken(port)
        raise AssertionError("unreachable")

    def poll(self) -> int | None:
        """None while the server runs, else its exit status."""
        assert self._process is not None, "the server was not started"
        return self._process.poll()

    @property
    def alive(self) -> bool:
        """Whether the server was started and still runs."""
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Raise EngineError with the end of the log when the server has ended."""
        assert self._process is not None, "the server was not started"
        if self._process.poll() is not None:
            raise self._process.died()

    @property
    def pids(self) -> list[int]:
        """The guard and every process below it."""
        return [self._process.pid, *descendants(self._process.pid)] if self._process is not None else []

    def stop(self) -> None:
        """End the server and all its processes. Safe to call twice."""
        if self._process is not None:
            self._process.stop()

    def _launch(self, port: int) -> None:
        fields = server_fields(self.config, self.index, self.host, port, self.cpu)
        env = environment(os.environ, cpu=self.cpu, ranks=self.config.sglang.tp_size, gpus=self.gpus)
        if self._skip:
            env["MSLIME_SGLANG_SKIP"] = " ".join(self._skip)
        self._process = SupervisedProcess(self.name, command_line(fields), env, self.log_path)

    def _wait_ready(self, port: int) -> bool:
        """True once the server is ready, False when it died. Raises EngineError (and stops it) at the deadline."""
        assert self._process is not None
        limit = self.config.deadlines.engine_start_s
        deadline = time.monotonic() + limit
        while self._process.poll() is None:
            if _is_ready(f"http://{self.host}:{port}/ready"):
                return True
            if time.monotonic() > deadline:
                self.stop()
                raise EngineError(
                    self.name,
                    f"not ready after {limit:g} s",
                    f"the server missed deadlines.engine_start_s; the end of its log:\n{log_tail(self.log_path)}",
                    f"read {self.log_path}, or raise deadlines.engine_start_s",
                )
            time.sleep(0.2)
        return False

    def _port_taken(self, port: int) -> EngineError:
        return EngineError(
            self.name,
            f"{self.host}:{port}",
            "another process listens on this port",
            "end that process, or let mslime pick a free port",
        )


def runs_on_cpu(config: RunConfig) -> bool:
    """Whether engines of this run use the CPU: as configured, or for `auto` because no GPU driver is installed."""
    return config.cluster.device == "cpu" or (config.cluster.device == "auto" and shutil.which("nvidia-smi") is None)


def _is_ready(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):  # refused while it loads, 503 while it warms up
        return False


def _names_taken_port(log: str) -> bool:
    return any(sign in log.lower() for sign in _PORT_TAKEN)
