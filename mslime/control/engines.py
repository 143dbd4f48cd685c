"""The engine group: one Ray actor per SGLang server, which it launches on its own node and ends with itself.

A run has one group that generates, and one of teachers when `teacher` says so.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from mslime.config.errors import EngineError, TrainerError
from mslime.config.keys import NO_KEYS, EngineKeys
from mslime.config.schema import RunConfig
from mslime.config.serving import Role, ServerSpec, engine_spec, teacher_spec
from mslime.control.calls import call, gather
from mslime.control.cluster import Cluster, own_host, redirect_output, remote_class, use_own_interface
from mslime.logs import hide, log_process, phase

if TYPE_CHECKING:
    from mslime.backends.sglang.server import EngineAddress
    from mslime.preflight.resolve import ResolvedRun

_log = logging.getLogger(__name__)
STOP_SECONDS = 20.0
SAY_AGAIN_SECONDS = 30.0
"""A phase that lasts is told again after so long."""


class EngineActor:
    """Launches one server and watches it. The server dies with this process, whatever ends it."""

    def __init__(
        self, config: RunConfig, spec: ServerSpec, index: int, log_dir: str, keys: EngineKeys, routes: bool
    ) -> None:
        name = f"{spec.role}{index}"
        redirect_output(Path(log_dir) / f"{name}_actor.log")
        log_process(f"{name} actor", config.observe.log_level)
        hide(keys.api, keys.admin)
        _log.info("placed on %s, process %d", socket.gethostname(), os.getpid())
        use_own_interface(config)
        from mslime.backends.sglang.server import ServerProcess

        host = own_host(config)
        self._server = ServerProcess(spec, index, Path(log_dir), host=host, keys=keys, routes=routes)

    def start(self) -> EngineAddress:
        """Launch and wait until it serves."""
        with phase(_log, "starting the server"):
            address = self._server.start()
        _log.info("serving at %s, log in %s", address.url, address.log_path)
        return address

    def start_again(self) -> EngineAddress:
        """Launch another server in the place of one that died."""
        with phase(_log, "clearing away what is left of the server"):
            self._server.stop()
        return self.start()

    def phase(self) -> str:
        """What the starting server is doing; answered beside `start`."""
        return self._server.phase()

    def stop(self) -> None:
        """End the server and its children."""
        with phase(_log, "stopping the server"):
            self._server.stop()


class EngineGroup:
    """All engines of a run, or all teachers: launched, or attached to by URL.

    Args:
        log_dir: of the servers and of the processes around them.
    """

    def __init__(self, run: ResolvedRun, cluster: Cluster, log_dir: Path, role: Role = "engine") -> None:
        config, routes = run.config, role == "engine" and bool(run.replayed_layers)
        settings = config.teacher if role == "teacher" else config.sglang
        count = config.teacher.launched if role == "teacher" else config.sglang.num_engines
        self._config, self._urls = config, settings.urls
        self._role: Role = role
        self._keys = settings.keys() or (NO_KEYS if settings.urls else EngineKeys.random())
        hide(self._keys.api, self._keys.admin)
        self._actors: list[Any] = []
        self._again: dict[str, ray.ObjectRef] = {}
        self._starts = Counter[str]()
        self.log_paths: dict[str, str] = {}
        self.addresses: list[EngineAddress] = []
        if self._urls or not count:
            return
        remote = remote_class(EngineActor, concurrency_groups={"progress": 1})
        spec = teacher_spec(config) if role == "teacher" else engine_spec(config)
        for index in range(count):
            self.log_paths[self._name(index)] = str(log_dir / f"{role}{index}.log")
            options = cluster.engine_options(index, role)
            self._actors.append(remote.options(**options).remote(config, spec, index, str(log_dir), self._keys, routes))

    def begin_start(self) -> dict[str, ray.ObjectRef]:
        """Start all servers without waiting, so that trainers can start beside them."""
        return {self._name(i): actor.start.remote() for i, actor in enumerate(self._actors)}

    def watch_start(self, starting: dict[str, ray.ObjectRef], say: Callable[[str], None]) -> Callable[[], None]:
        """What to call now and then while they start: says what each is doing when that changes, or lasts.

        It raises EngineError as soon as a server has failed to start, also while something else is waited for.
        """
        asked: dict[int, ray.ObjectRef] = {}
        said: dict[int, tuple[str, float]] = {}

        def poll() -> None:
            for index, actor in enumerate(self._actors):
                name = self._name(index)
                if ray.wait([starting[name]], timeout=0)[0]:
                    call(starting[name], name, f"{self._role} start", 1.0, self.log_paths[name])
                    continue
                if index in asked and ray.wait([asked[index]], timeout=0)[0]:
                    phase = str(call(asked.pop(index), name, f"{self._role} start", 1.0, self.log_paths[name]))
                    doing, when = phase.partition(",")[0], time.monotonic()
                    before, at = said.get(index, ("", 0.0))
                    if doing != before or when - at > SAY_AGAIN_SECONDS:
                        said[index] = (doing, when)
                        say(f"{self._role}{index}: {phase}")
                if index not in asked:
                    asked[index] = actor.phase.options(concurrency_group="progress").remote()

        return poll

    def finish_start(
        self, starting: dict[str, ray.ObjectRef], on_wait: Callable[[], None] | None = None
    ) -> list[EngineAddress]:
        """Wait until every server serves. Raises EngineError with the end of the log of the one that does not."""
        from mslime.backends.sglang.server import attach

        if self._urls:
            self.addresses = [attach(url, i, self._role, self._keys) for i, url in enumerate(self._urls)]
        else:
            deadline = self._config.deadlines.engine_start_s + STOP_SECONDS
            self.addresses = list(gather(starting, f"{self._role} start", deadline, self.log_paths, on_wait).values())
        return self.addresses

    def start_again(self, name: str) -> str:
        """Begin to start an engine of this name that died; says what comes of that."""
        if self._urls:
            return "mslime does not start it"
        if self._starts[name] >= self._config.sglang.restarts:
            return f"it is not started again (sglang.restarts: {self._config.sglang.restarts})"
        self._starts[name] += 1
        index = [address.name for address in self.addresses].index(name)
        self._again[name] = self._actors[index].start_again.remote()
        return "it is started again"

    def came_back(self) -> dict[str, EngineAddress | EngineError | TrainerError]:
        """Engines by name that have been started again since the last call, or why they could not be."""
        found: dict[str, EngineAddress | EngineError | TrainerError] = {}
        for name, ref in list(self._again.items()):
            if not ray.wait([ref], timeout=0)[0]:
                continue
            del self._again[name]
            try:
                found[name] = call(ref, name, "engine start", 1.0, self.log_paths.get(name, "?"))
            except (EngineError, TrainerError) as error:
                found[name] = error
        back = {name: address for name, address in found.items() if not isinstance(address, Exception)}
        self.addresses = [back.get(address.name, address) for address in self.addresses]
        return found

    def stop(self) -> None:
        """End every server, politely first."""
        stopping = [actor.stop.remote() for actor in self._actors]
        ray.wait(stopping, num_returns=len(stopping), timeout=STOP_SECONDS) if stopping else None
        for actor in self._actors:
            ray.kill(actor, no_restart=True)

    def _name(self, index: int) -> str:
        return f"{self._role} {index}"
