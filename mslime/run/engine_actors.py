"""The engine group: one Ray actor per SGLang server, which it launches on its own node and ends with itself.

A run has one group that generates, and one of teachers if `teacher` requires served ones.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from mslime.config.errors import ConfigError, EngineError, TrainerError, UserError
from mslime.config.keys import NO_KEYS, Endpoint, EngineKeys
from mslime.config.resolved import Role, ServerSpec, engine_spec, teacher_spec
from mslime.logs import hide, phase
from mslime.run.placement import ActorPlacement
from mslime.run.ray_calls import POLL_SECONDS, call, gather
from mslime.run.ray_cluster import ActorProcess, Cluster, remote_class

if TYPE_CHECKING:
    from mslime.backends.sglang.server_process import EngineAddress
    from mslime.checks.resolve import ResolvedRun

_log = logging.getLogger(__name__)
STOP_SECONDS = 20.0
PART_SECONDS = 60.0
"""Seconds for a server's part on another machine to carry out a command."""
BACKOFF_SECONDS, MOST_BACKOFF_SECONDS = 15.0, 120.0
"""Wait before a server's second restart, doubled for its third: a missing resource may come back."""
REPEAT_SECONDS = 30.0
"""Seconds after which a lasting phase is logged again."""


def _begin_actor(process: ActorProcess, name: str, log_dir: str, keys: EngineKeys) -> str:
    """Set the log and the network interface of the process around a server or a part of one; returns its address."""
    process.begin(f"{name} actor", Path(log_dir) / f"{name}_actor.log")
    hide(keys.api, keys.admin)
    return process.host


class PartActor:
    """Launches a server's part on another machine than its first, on request. It dies with this process."""

    def __init__(
        self, process: ActorProcess, spec: ServerSpec, index: int, rank: int, log_dir: str, keys: EngineKeys,
        routes: bool, gpus: Sequence[str] | None,
    ) -> None:  # fmt: skip
        host = _begin_actor(process, f"{spec.role}{index}_part{rank}", log_dir, keys)
        from mslime.backends.sglang.server_process import ServerPart

        self._part = ServerPart(spec, index, rank, Path(log_dir), host, keys, routes, gpus)

    def launch(self, rendezvous: str) -> None:
        """See `ServerPart`, as for the next two."""
        with phase(_log, f"starting this part; the first part is at {rendezvous}"):
            self._part.launch(rendezvous)

    def check(self) -> None:
        self._part.check()

    def stop(self) -> None:
        with phase(_log, "stopping the part"):
            self._part.stop()


def _of_engine(error: UserError) -> EngineError:
    """Convert an error of an engine's actor to an EngineError, so it counts as a failure of the engine."""
    return EngineError(error.field, error.value, error.rule, error.hint)


class RemotePart:
    """An `OtherMachine` backed by a `PartActor`."""

    def __init__(self, actor: Any, name: str, log_path: str) -> None:
        self._actor, self._name, self._log = actor, name, log_path

    def launch(self, rendezvous: str) -> None:
        self._call(self._actor.launch.remote(rendezvous))

    def check(self) -> None:
        self._call(self._actor.check.remote())

    def stop(self) -> None:
        """End the part if its actor is alive; the part of a dead actor has ended with it."""
        with suppress(EngineError, TrainerError):
            self._call(self._actor.stop.remote())

    def _call(self, ref: ray.ObjectRef) -> None:
        try:
            call(ref, self._name, "engine start", PART_SECONDS, self._log)
        except TrainerError as error:  # its actor is dead, or does not answer
            raise _of_engine(error) from error


class PrefillActor:
    """Launches the prefill half of a pair. The server dies with this process."""

    def __init__(
        self, process: ActorProcess, spec: ServerSpec, index: int, log_dir: str, keys: EngineKeys, routes: bool,
        gpus: Sequence[str] | None,
    ) -> None:  # fmt: skip
        host = _begin_actor(process, f"{spec.role}{index}_prefill", log_dir, keys)
        from mslime.backends.sglang.server_process import ServerProcess

        self._server = ServerProcess(
            spec, index, Path(log_dir), host=host, gpus=gpus, keys=keys, routes=routes, half="prefill"
        )

    def start(self) -> EngineAddress:
        """See `EngineActor`, as for the next one."""
        with phase(_log, "starting the server"):
            return self._server.start()

    def stop(self) -> None:
        with phase(_log, "stopping the server"):
            self._server.stop()


class EngineActor:
    """Launches one server, or a pair, and watches it. The server dies with this process, for any reason.

    Args:
        parts: a `PartActor` for each of the server's other machines, in order; or the `PrefillActor` of a pair.
        gpus: GPUs for the server; None: those that Ray gives this process.
    """

    def __init__(
        self, process: ActorProcess, spec: ServerSpec, index: int, log_dir: str, keys: EngineKeys, routes: bool,
        parts: Sequence[Any] = (), gpus: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        host = _begin_actor(process, name := f"{spec.role}{index}", log_dir, keys)
        from mslime.backends.sglang.server_process import ServerProcess

        pair = spec.settings.pairs is not None
        self._prefill = parts[0] if pair else None
        self._prefill_name, self._start_s = f"{name}_prefill", spec.start_s
        self._prefill_log = str(Path(log_dir) / f"{self._prefill_name}.log")
        others = [
            RemotePart(part, f"{name}_part{rank}", str(Path(log_dir) / f"{name}_part{rank}.log"))
            for rank, part in enumerate(() if pair else parts, 1)
        ]
        self._server = ServerProcess(
            spec, index, Path(log_dir), host=host, gpus=gpus, keys=keys, routes=routes, others=others,
            half="decode" if pair else None,
        )  # fmt: skip

    def start(self) -> EngineAddress:
        """Launch and wait until it serves; for a pair, until both halves do."""
        with phase(_log, "starting the server"):
            address = self._server.start() if self._prefill is None else self._start_pair(self._prefill)
        _log.info("serving at %s, log in %s", address.url, address.log_path)
        return address

    def _start_pair(self, prefill: Any) -> EngineAddress:
        """Start both halves concurrently; if one does not start, neither is left."""
        other = prefill.start.remote()
        try:
            address = self._server.start()
            return replace(
                address, prefill=call(other, self._prefill_name, "engine start", self._start_s, self._prefill_log)
            )
        except UserError as error:
            self.stop()
            raise error if isinstance(error, EngineError) else _of_engine(error) from error

    def restart(self, wait_s: float) -> EngineAddress:
        """Launch another server in the place of a dead one, after so many seconds; for a pair, both."""
        self.stop()
        time.sleep(wait_s)
        return self.start()

    def phase(self) -> str:
        """Current phase of the starting server; answered while `start` runs."""
        return self._server.phase()

    def stop(self) -> None:
        """End the server and its children, or the rest of them; for a pair, both."""
        with phase(_log, "stopping the server"):
            self._server.stop()
        if self._prefill is not None:
            with suppress(EngineError, TrainerError):  # a dead actor's server has ended with it
                call(self._prefill.stop.remote(), self._prefill_name, "engine stop", PART_SECONDS, self._prefill_log)


class EngineGroup:
    """All engines of a run, or all teachers: launched, or attached to by URL.

    Args:
        log_dir: for the logs of servers and of the processes around them.

    Attributes:
        role: prefix of each server's name, before its number.
    """

    def __init__(self, run: ResolvedRun, cluster: Cluster, log_dir: Path, role: Role = "engine") -> None:
        config, routes = run.config, role == "engine" and run.sends_routes
        settings = config.teacher if role == "teacher" else config.sglang
        count = config.teacher.launched if role == "teacher" else config.sglang.num_engines
        self._config, self._urls, self._adapted = config, settings.urls, run.adapted_modules
        self.role: Role = role
        self._keys = settings.keys() or (NO_KEYS if settings.urls else EngineKeys.random())
        hide(self._keys.api, self._keys.admin)
        self._cluster, self._log_dir, self._routes = cluster, log_dir, routes
        self._actors: dict[str, Any] = {}
        self._parts: dict[str, list[Any]] = {}  # on a server's other machines, or of a pair's other half
        self._places: dict[str, list[ActorPlacement]] = {}
        self._free_places: list[list[ActorPlacement]] = []
        self._waiting: list[str] = []
        self._may_start = True
        self._starting: dict[str, ray.ObjectRef] = {}
        self._restarts = Counter[str]()
        self._made = 0
        self.log_paths: dict[str, str] = {}
        self.addresses: list[EngineAddress] = []
        for _ in range(0 if self._urls else count):
            self._make(cluster.engine_places(self._made, role))

    def _make(self, places: list[ActorPlacement]) -> str:
        """Create processes for one more engine, one on each of its machines or for each half of a pair; returns its
        name."""
        name, index = f"{self.role}{self._made}", self._made
        self._made += 1
        of_teacher = self.role == "teacher"
        spec = teacher_spec(self._config) if of_teacher else engine_spec(self._config, self._adapted)
        logs, process = str(self._log_dir), self._cluster.process
        pair, rest = spec.settings.pairs is not None, places[1:]
        self._parts[name] = parts = [
            remote_class(PrefillActor).options(**each.options).remote(
                process, spec, index, logs, self._keys, self._routes, each.gpus
            )
            if pair
            else remote_class(PartActor).options(**each.options).remote(
                process, spec, index, rank, logs, self._keys, self._routes, each.gpus
            )
            for rank, each in enumerate(rest, 1)
        ]  # fmt: skip
        remote = remote_class(EngineActor, concurrency_groups={"progress": 1})
        made = remote.options(**places[0].options).remote(
            process, spec, index, logs, self._keys, self._routes, parts, places[0].gpus
        )
        self._places[name] = places
        self._actors[name], self.log_paths[name] = made, str(self._log_dir / f"{name}.log")
        return name

    def begin_start(self) -> dict[str, ray.ObjectRef]:
        """Start all servers without waiting, so trainers can start beside them."""
        return {name: actor.start.remote() for name, actor in self._actors.items()}

    def watch_start(
        self, starting: dict[str, ray.ObjectRef], print_status: Callable[[str], None]
    ) -> Callable[[], None]:
        """Make a function to call regularly during the start: it prints each server's phase when it changes, or lasts.

        It raises EngineError as soon as a server has failed to start, also while the caller waits for something else.
        """
        pending: dict[str, ray.ObjectRef] = {}
        printed: dict[str, tuple[str, float]] = {}

        def poll() -> None:
            for name in starting:
                actor = self._actors[name]
                if ray.wait([starting[name]], timeout=0)[0]:
                    call(starting[name], name, f"{self.role} start", 1.0, self.log_paths[name])
                    continue
                if name in pending and ray.wait([pending[name]], timeout=0)[0]:
                    phase = str(call(pending.pop(name), name, f"{self.role} start", 1.0, self.log_paths[name]))
                    doing, when = phase.partition(",")[0], time.monotonic()
                    before, at = printed.get(name, ("", 0.0))
                    if doing != before or when - at > REPEAT_SECONDS:
                        printed[name] = (doing, when)
                        print_status(f"{name}: {phase}")
                if name not in pending:
                    pending[name] = actor.phase.options(concurrency_group="progress").remote()

        return poll

    def finish_start(
        self, starting: dict[str, ray.ObjectRef], on_wait: Callable[[], None] | None = None
    ) -> list[EngineAddress]:
        """Wait until every server serves. Raises EngineError with the end of the failed server's log."""
        from mslime.backends.sglang.server_process import attach

        if self._urls:
            self.addresses = [attach(url, i, self.role, self._keys) for i, url in enumerate(self._urls)]
            self._made = len(self._urls)
        else:
            deadline = self._config.deadlines.engine_start_s + STOP_SECONDS
            self.addresses = list(gather(starting, f"{self.role} start", deadline, self.log_paths, on_wait).values())
        return self.addresses

    # ------------------------------------------------------------------------------------ after a session has ended

    @property
    def attached(self) -> list[Endpoint]:
        """Endpoints of the engines not launched by mslime."""
        return [address.endpoint for address in self.addresses if not self.launched(address.name)]

    def replace(self, unsound: Collection[str]) -> None:
        """Restart these engines and all dead launched ones; attached ones are removed from the run."""
        self.addresses = [address for address in self.addresses if address.name not in unsound]
        there = {address.name for address in self.addresses}
        self._restarts.clear()
        for name in self._actors:
            if name not in there and name not in self.starting:
                self.restart(name)

    def wait_for_one(self, on_wait: Callable[[], None]) -> None:
        """Return when an engine is up. Raises EngineError or TrainerError if none starts.

        Args:
            on_wait: called a few times a second.
        """
        failed: UserError | None = None
        while not self.addresses:
            for found in self.started().values():
                if isinstance(found, UserError):
                    failed = found
                else:
                    self.take(found)
            if self.addresses:
                return
            if not self.starting:
                raise failed or EngineError(f"{self.role}s", "none", "no server is left, and none is being started",
                                            f"read the logs in {self._log_dir}")  # fmt: skip
            on_wait()
            time.sleep(POLL_SECONDS)

    # ------------------------------------------------------------------------------------------ while the run trains

    @property
    def starting(self) -> list[str]:
        """Names of servers that start, wait for their start, or have started but not been returned by `started`."""
        return [*self._starting, *self._waiting]

    def let_start(self, may: bool) -> None:
        """Allow or forbid starts of servers, which are allowed at first; starts requested meanwhile are deferred."""
        self._may_start = may
        waiting, self._waiting = (self._waiting, []) if may else ([], self._waiting)
        for name in waiting:
            self._begin(name)

    def _begin(self, name: str) -> None:
        """Start a server, or another one in its place; deferred until starts are allowed."""
        if not self._may_start:
            self._waiting.append(name)
            return
        actor, before = self._actors[name], self._restarts[name] - 1
        wait_s = min(max(before, 0) * BACKOFF_SECONDS, MOST_BACKOFF_SECONDS)
        self._starting[name] = actor.restart.remote(wait_s) if before >= 0 else actor.start.remote()

    def halt(self, name: str) -> None:
        """End the server of this name and its children, if launched by mslime. It may be started again."""
        if name in self._actors and name not in self.starting:
            ref = self._actors[name].stop.remote()
            call(ref, name, "engine stop", STOP_SECONDS + PART_SECONDS, self.log_paths[name])

    @property
    def launches(self) -> bool:
        """Whether mslime starts the engines of this run; else they are attached."""
        return not self._urls

    def launched(self, name: str) -> bool:
        """Whether mslime launched the engine of this name."""
        return name in self._actors

    def restart(self, name: str) -> str:
        """Begin to restart a dead engine of this name; returns the outcome in words."""
        if name not in self._actors:
            return "mslime restarts only engines that it launched"
        if self._restarts[name] >= self._config.sglang.restarts:
            return f"it is not restarted (sglang.restarts: {self._config.sglang.restarts})"
        self._restarts[name] += 1
        self._begin(name)
        return "it is being restarted" if self._may_start else "it will be restarted when the trainer is offloaded"

    def reset_failures(self, name: str) -> None:
        """Reset the restart count of an engine that has served well since its start."""
        del self._restarts[name]

    def start_another(self) -> str:
        """Begin to start one more server; returns its name. Raises ConfigError if the cluster has no resources for
        it."""
        name = self._make(self._free_places.pop() if self._free_places else self._cluster.one_more_engine())
        self._begin(name)
        return name

    def attach(self, url: str, keys: EngineKeys) -> EngineAddress:
        """Attach an engine not launched by mslime, under a new name. Raises EngineError for an invalid URL, and
        ConfigError if engines share GPUs with the trainer."""
        from mslime.backends.sglang.server_process import attach

        if self._config.colocated:
            raise ConfigError("attach", url, "engines of this run share the trainer's GPUs (cluster.placement)",
                              "add engines with --engines N")  # fmt: skip
        address = attach(url, self._made, self.role, keys)
        self._made += 1
        return address

    def started(self) -> dict[str, EngineAddress | EngineError | TrainerError]:
        """Servers by name that have started since the last call, or the error of a failed start."""
        found: dict[str, EngineAddress | EngineError | TrainerError] = {}
        for name, ref in list(self._starting.items()):
            if not ray.wait([ref], timeout=0)[0]:
                continue
            del self._starting[name]
            try:
                found[name] = call(ref, name, "engine start", 1.0, self.log_paths[name])
            except (EngineError, TrainerError) as error:
                found[name] = error
        return found

    def take(self, address: EngineAddress) -> None:
        """Add an engine to the run, or record its new address."""
        names = [known.name for known in self.addresses]
        if address.name in names:
            self.addresses[names.index(address.name)] = address
        else:
            self.addresses.append(address)

    def end(self, name: str) -> None:
        """Remove an engine from the run, and end its server if mslime launched it. The run keeps its place in the
        cluster for the next engine."""
        self.addresses = [address for address in self.addresses if address.name != name]
        self._starting.pop(name, None)
        self._waiting = [other for other in self._waiting if other != name]
        if (actor := self._actors.pop(name, None)) is not None:
            actor.stop.remote()
            actor.__ray_terminate__.remote()  # after it has stopped
            for part in self._parts.pop(name):
                part.__ray_terminate__.remote()
            self._free_places.append(self._places.pop(name))

    def stop(self) -> None:
        """End every server, gracefully first."""
        stopping = [actor.stop.remote() for actor in self._actors.values()]
        ray.wait(stopping, num_returns=len(stopping), timeout=STOP_SECONDS) if stopping else None
        for actor in (*self._actors.values(), *(part for parts in self._parts.values() for part in parts)):
            ray.kill(actor, no_restart=True)
