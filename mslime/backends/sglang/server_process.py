"""An SGLang server as a supervised child process: started, waited for, watched, and ended without leftovers.

The server runs under `guard`, in its own session: signals of our terminal do not reach it, and it ends with this
process, however that ends. This module only queries whether the engine is ready.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mslime.backends.cpu.sglang import check_version
from mslime.backends.sglang.client import EngineClient, blocking
from mslime.backends.sglang.flags import command_line, environment, server_fields
from mslime.backends.sglang.guard import (
    GRACE_SECONDS,
    descendants,
    kill_all,
    kill_but_cleaners,
    process_group,
    remove_unused,
    shared_memory_of,
    wait_for,
)
from mslime.backends.sglang.launch import ADMIN_KEY_VARIABLE, KEY_VARIABLE
from mslime.config.base import Half
from mslime.config.errors import EngineError
from mslime.config.keys import NO_KEYS, Endpoint, EngineKeys
from mslime.config.resolved import Role, ServerSpec
from mslime.config.schema import DeadlineConfig
from mslime.network import free_port, port_in_use, url_of

READY_ANSWER_S = 5.0
ASK_OTHERS_S = 2.0
PORT_ATTEMPTS = 5
_PORT_TAKEN = re.compile(r"address already in use|port is already in use| at \d+ is not available", re.IGNORECASE)
"""SGLang's log message if one of its ports is taken. The process stays alive after that and never serves."""

# Log lines of a starting server (0.5.23), in order, and the phase that begins with each.
_PHASES = (
    ("", "starting"),
    ("server_args=", "starting its processes"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "allocating the cache"),
    ("CUDA graph begin", "capturing CUDA graphs"),
    ("max_total_num_tokens=", "opening its port"),
    ("Uvicorn running", "warming up"),
)


@dataclass(frozen=True)
class EngineAddress:
    """Address and credentials of an engine.

    Attributes:
        name: in samples and messages.
        log_path: its log, if we own it.
        keys: API keys for its clients.
        identity: the name under which it serves its model, random if mslime launched it; empty for others.
        bootstrap_port: port of a prefill server for the decode server's connections.
        prefill: the prefill server of a pair, in which this is the decode server. None: it does both.
    """

    name: str
    url: str
    log_path: Path | None = None
    keys: EngineKeys = NO_KEYS
    identity: str = ""
    bootstrap_port: int = 0
    prefill: EngineAddress | None = None

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, self.keys)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Addresses of all its servers, each of which receives weights."""
        return (self.endpoint,) if self.prefill is None else (self.endpoint, self.prefill.endpoint)


def attach(url: str, index: int, role: Role = "engine", keys: EngineKeys = NO_KEYS) -> EngineAddress:
    """The address of an externally started server. Raises EngineError if the URL is invalid."""
    if not url.startswith(("http://", "https://")):
        field = "teacher.urls" if role == "teacher" else "sglang.urls"
        raise EngineError(field, url, "is not the URL of a server", "use the form http://host:port")
    return EngineAddress(f"{role}{index}", url.rstrip("/"), keys=keys)


class OtherMachine(Protocol):
    """Another host of a server that spans several. Calls may cross the network."""

    def launch(self, rendezvous: str) -> None:
        """Start its part of the server, whose part 0 waits at `host:port`. Raises EngineError."""
        ...

    def check(self) -> None:
        """Raise EngineError if its part has ended."""
        ...

    def stop(self) -> None:
        """End its part, if there is one. Safe to call twice."""
        ...


class ServerPart:
    """The part of a server on a host other than its first. It serves no requests; an `OtherMachine` is its remote end.

    Args:
        rank: index of the host in the server, from 1 on. Other arguments are as for `ServerProcess`.
    """

    def __init__(
        self, spec: ServerSpec, index: int, rank: int, log_dir: Path, host: str, keys: EngineKeys, routes: bool,
        gpus: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self._spec, self._index, self._rank, self._host, self._keys, self._gpus = spec, index, rank, host, keys, gpus
        self._routes, self._name = routes, f"{spec.role}{index}_part{rank}"
        self.log_path = Path(log_dir) / f"{self._name}.log"
        self._process: SupervisedProcess | None = None

    def launch(self, rendezvous: str) -> None:
        """Start it, replacing an earlier one."""
        self.stop()
        fields = server_fields(
            self._spec, self._index, self._host, free_port(self._host), None, self._routes, (self._rank, rendezvous)
        )
        env = _environment(self._spec, self._keys, self._gpus)
        self._process = SupervisedProcess(self._name, command_line(fields), env, self.log_path)

    def check(self) -> None:
        """Raise EngineError with the end of the log if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise self._process.died()

    def stop(self) -> None:
        """End it and all its processes. Safe to call twice."""
        if self._process is not None:
            self._process.stop()


class ServerProcess:
    """One SGLang server of a run; if it spans several hosts, its first part, which controls the others.

    Args:
        spec: settings of servers of its role; this one is named `<role><index>`.
        index: its number among them.
        log_dir: `<name>.log` is written there.
        host: address to listen on; loopback unless engines and rollouts are on different hosts.
        gpus: devices for this server; None takes the devices visible to this process.
        port: fixed port; None picks a free one, and another if it is taken meanwhile.
        keys: API keys for its clients; default: a new random key.
        routes: whether it can return the experts of tokens.
        others: its parts on other hosts, in order.
        half: its role in a pair; None: it prefills and decodes.
    """

    def __init__(
        self,
        spec: ServerSpec,
        index: int,
        log_dir: Path,
        host: str = "127.0.0.1",
        gpus: Sequence[str] | None = None,
        port: int | None = None,
        keys: EngineKeys | None = None,
        routes: bool = False,
        others: Sequence[OtherMachine] = (),
        half: Half | None = None,
    ) -> None:
        assert len(others) == spec.settings.nnodes - 1, f"{len(others)} other machines, nnodes {spec.settings.nnodes}"
        self._others = others
        self.spec, self.index, self.host, self.gpus, self.port = spec, index, host, gpus, port
        self.name = f"{spec.role}{index}" + ("_prefill" if half == "prefill" else "")
        self._half: Half | None = half
        self.log_path = Path(log_dir) / f"{self.name}.log"
        assert spec.device != "auto", "`run.ray_cluster.resolved_device` decides it"
        self.cpu = spec.device == "cpu"
        self.keys, self.routes = keys or EngineKeys.random(), routes
        self._process: SupervisedProcess | None = None
        self._started = self._asked_others = time.monotonic()

    def start(self) -> EngineAddress:
        """Launch the server and wait until it serves.

        Raises:
            EngineError: it died (message with the end of its log), missed `deadlines.engine_start_s`, or its port is
                taken.
        """
        if self.cpu:
            check_version()
        self._started = time.monotonic()
        for _ in range(1 if self.port is not None else PORT_ATTEMPTS):
            port = self.port if self.port is not None else free_port(self.host)
            if port_in_use(self.host, port):
                raise self._port_taken(port)
            identity = f"{self.name}-{secrets.token_hex(8)}"
            bootstrap_port = free_port(self.host) if self._half == "prefill" else 0
            process = self._launch(port, identity, bootstrap_port)
            address = EngineAddress(
                self.name, url_of(self.host, port), self.log_path, self.keys, identity, bootstrap_port
            )
            if self._wait_ready(process, address):
                process.remember_shared_memory()
                return address
            self.stop()
        raise self._port_taken(port)

    def phase(self) -> str:
        """Phase of a starting server and its duration, for example `loading weights, 20 s`."""
        log = self._process.log_text() if self._process is not None else ""
        current = next(phase for marker, phase in reversed(_PHASES) if marker in log)
        return f"{current}, {time.monotonic() - self._started:.0f} s"

    def poll(self) -> int | None:
        """None while the server runs, else its exit status."""
        assert self._process is not None, "the server was not started"
        return self._process.poll()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Raise EngineError with the end of the log if the server has ended."""
        assert self._process is not None, "the server was not started"
        if self._process.poll() is not None:
            raise self._process.died()

    @property
    def pids(self) -> list[int]:
        return [self._process.pid, *descendants(self._process.pid)] if self._process is not None else []

    def stop(self) -> None:
        """End the server and all its processes. Safe to call twice."""
        if self._process is not None:
            self._process.stop()
        for other in self._others:
            other.stop()

    def _launch(self, port: int, identity: str, bootstrap_port: int) -> SupervisedProcess:
        rendezvous = f"{self.host}:{free_port(self.host)}"
        fields = server_fields(
            self.spec, self.index, self.host, port, identity, self.routes,
            (0, rendezvous) if self._others else None, self._half, bootstrap_port,
        )  # fmt: skip
        env = _environment(self.spec, self.keys, self.gpus)
        self._process = SupervisedProcess(self.name, command_line(fields), env, self.log_path)
        for other in self._others:
            other.launch(rendezvous)
        return self._process

    def _wait_ready(self, process: SupervisedProcess, address: EngineAddress) -> bool:
        """True once the server is ready, False if another process has its port.

        Raises:
            EngineError: it or its part on another host died, or it missed the deadline of the whole start; all of it
                was stopped.
        """
        limit = self.spec.start_s
        while True:
            running, log = process.poll() is None, process.log_text()  # in this order: a dead process writes no more
            if _PORT_TAKEN.search(log):
                return False
            if not running:
                error = process.died()
                self.stop()
                raise error
            if time.monotonic() - self._asked_others >= ASK_OTHERS_S:
                self._asked_others = time.monotonic()
                try:
                    for other in self._others:
                        other.check()
                except EngineError:
                    self.stop()
                    raise
            ready, identity = blocking(_ready_as(address))
            if ready:
                return identity == address.identity
            if time.monotonic() - self._started > limit:
                self.stop()
                raise EngineError(
                    self.name,
                    f"not ready after {limit:g} s",
                    f"the server missed deadlines.engine_start_s; the end of its log:\n{log_tail(self.log_path)}",
                    f"read {self.log_path}, or raise deadlines.engine_start_s",
                )
            time.sleep(0.2)

    def _port_taken(self, port: int) -> EngineError:
        tried = "" if self.port is not None else f" (after {PORT_ATTEMPTS} other ports)"
        return EngineError(
            self.name,
            f"{self.host}:{port}",
            f"another process listens on this port{tried}",
            "stop that process, or let mslime pick a free port",
        )


def _environment(spec: ServerSpec, keys: EngineKeys, gpus: Sequence[str] | None = None) -> dict[str, str]:
    """Environment of a server's process, derived from this one's."""
    env = environment(
        os.environ, cpu=spec.device == "cpu", ranks=spec.settings.tp_size, gpus=gpus, recorded=spec.recorded,
        masks=spec.settings.pairs is not None and spec.mask_tokens is not None,
    )  # fmt: skip
    return env | {KEY_VARIABLE: keys.api, ADMIN_KEY_VARIABLE: keys.admin}


async def _ready_as(address: EngineAddress) -> tuple[bool, str | None]:
    """Whether a server answers there (503 during warm-up), and the name under which it serves its model; None if it
    denies access."""
    limits = DeadlineConfig(engine_control_s=READY_ANSWER_S)  # another process with our port may not answer at all
    async with EngineClient(address.url, address.name, limits, keys=address.keys) as client:
        if not await client.ready():
            return False, None
        try:
            return True, (await client.model_info()).get("served_model_name")
        except EngineError:
            return True, None


# A command under guard: its log, its death, its end, and cleanup after it.
#
# The guard (see `guard`) ends the command when this process ends. `SupervisedProcess` handles a killed guard: a thread
# waits for its end, kills the rest of its process group, and removes their recorded shared memory.


TAIL_LINES = 30
_NOISE = "Ignore import error when loading"  # SGLang logs it for every model file with missing packages


def log_tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The end of a log, without empty lines and import errors of model files."""
    if not path.exists():
        return "(no log was written)"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        text = file.read().decode(errors="replace")
    return "\n".join([line for line in text.splitlines() if line.strip() and _NOISE not in line][-lines:])


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
        self._tmp = tempfile.mkdtemp(prefix="mslime-", dir=env.get("TMPDIR"))
        self._shared_memory: set[Path] = set()
        guard = [sys.executable, "-m", "mslime.backends.sglang.guard", str(read_end), self._tmp, "--", *command]
        with log_path.open("ab") as log:
            log.write((" ".join(command) + "\n").encode())
            log.flush()
            self._log_start = log.tell()
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
        self._ended = threading.Event()
        threading.Thread(target=self._clean_up_after_guard, daemon=True, name=f"{name}-guard").start()

    def _clean_up_after_guard(self) -> None:
        """After the guard has ended: do nothing in the normal case; if it was killed, clean up everything."""
        with suppress(ChildProcessError):  # not reaped here, so the group id stays its own
            os.waitid(os.P_PID, self._guard.pid, os.WEXITED | os.WNOWAIT)
        left = process_group(self._guard.pid)
        if left:
            kill_but_cleaners(left)
            wait_for(lambda: not process_group(self._guard.pid), GRACE_SECONDS)
            kill_all(process_group(self._guard.pid))
        remove_unused(self._shared_memory)
        shutil.rmtree(self._tmp, ignore_errors=True)
        self._ended.set()

    def remember_shared_memory(self) -> None:
        """Record which files in /dev/shm belong to the command now; they are removed if its guard is killed."""
        self._shared_memory |= shared_memory_of(descendants(self.pid))

    @property
    def pid(self) -> int:
        """The guard's process id; the server and its workers are below it."""
        return self._guard.pid

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._guard.poll()

    def log_text(self) -> str:
        with self.log_path.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def died(self) -> EngineError:
        """The error for a process that ended while still needed."""
        return EngineError(
            self.name,
            f"exit status {self.poll()}",
            f"the server exited while the run needs it; the end of its log:\n{log_tail(self.log_path)}",
            f"read {self.log_path}",
        )

    def stop(self) -> None:
        """End the command and everything below it; returns when it is gone. Safe to call twice."""
        if self._write_end < 0:
            return
        os.close(self._write_end)
        self._write_end = -1
        try:
            self._guard.wait(4 * GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            kill_all([*descendants(self.pid), self.pid])
            self._guard.wait()
        self._ended.wait(GRACE_SECONDS)
