"""Processes of a run on Ray's cluster: started together, watched, and ended together, whatever ends the block.

`RunResources` outlive a session: a rank that crashes, dies or hangs ends the trainer, but no engine, and starting
engines is most of a start. So the session ends, and its engines are cleaned like attached ones. Another session then
continues from the newest checkpoint, with the same ledger as a run that is restarted by hand.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import ray

from mslime.backends.sglang.client import blocking
from mslime.backends.sglang.pair import client_of
from mslime.checks.resolve import ResolvedRun
from mslime.config.keys import Endpoint
from mslime.config.schema import DeadlineConfig
from mslime.observe.progress import Progress
from mslime.run.attached import AttachedEngines, groups_of, made_clean, new_group
from mslime.run.engine_actors import EngineGroup, Role
from mslime.run.ray_cluster import Cluster
from mslime.run.stop import RayWatch, StopSignals
from mslime.weights.weight_plan import Senders

if TYPE_CHECKING:
    from mslime.backends.sglang.server_process import EngineAddress


SILENT_S = 60.0
"""Seconds without a running process after which the start shows Ray's log."""
CLEAN_S = 30.0
"""Seconds for an engine's answers while it is cleaned; a slower engine is restarted."""


class RunResources:
    """Created by the first session and reused by later ones. A context manager.

    Attributes:
        stack: ends them in reverse order.
        cluster, ray: set once a session has joined Ray's cluster.
        engines, teachers: servers, once a session has launched them, or attached to them.
        groups: name prefixes of process groups that engines may be in.
    """

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.cluster: Cluster | None = None
        self.ray: RayWatch | None = None
        self.engines: EngineGroup | None = None
        self.teachers: EngineGroup | None = None
        self.groups: list[str] = []

    def clean(
        self, engines: EngineGroup, senders: Sequence[int], deadlines: DeadlineConfig, note: Callable[[str], None]
    ) -> None:
        """Remove the state of an ended session from the engines; engines without a proper answer are restarted.

        Args:
            senders: ranks that sent weights.
            note: shows a line.
        """
        limits = deadlines.controls_within(CLEAN_S)
        clients = [client_of(address, limits) for address in engines.addresses]
        unsound = blocking(made_clean(clients, groups_of(senders, self.groups), flush=True))
        engines.replace(unsound)
        for name, error in unsound.items():
            fate = "is being restarted" if name in engines.starting else "has left"
            note(f"{name} is gone ({error.brief}): it {fate}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.ray is None or not self.ray.left():
            self.stack.close()


class StartedRun(ABC):
    """A context manager; objects that `_start` puts on the stack are ended in reverse order.

    Attributes:
        config: the resolved configuration.
        progress: receives lines for the user, set by `_start`.
    """

    progress: Progress
    _attached: AttachedEngines

    def __init__(self, run: ResolvedRun, stop: StopSignals, resources: RunResources | None = None) -> None:
        """
        Args:
            resources: of an earlier session, and for the next one. None: only for this one.
        """
        self._run, self.config, self._stop = run, run.config, stop
        self._stack = ExitStack()
        self._resources = self._stack.enter_context(RunResources()) if resources is None else resources
        self._ray: RayWatch | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._ray is not None and self._ray.left():
            self.progress.__exit__(None, None, None)
            return
        self._stack.close()

    @property
    def _logs(self) -> Path:
        return self.config.run_dir / "logs"

    @property
    def _senders(self) -> Sequence[int]:
        """Ranks that send weights."""
        return Senders.at_most(self.config.layout, self.config.weights.senders).everyone()

    @abstractmethod
    def _start(self) -> None:
        """Start everything; the progress comes first."""

    def _worth_waiting(self) -> None:
        """Raise, as `_at_rest` does, if work begun before the signal has not ended within `deadlines.rescue_s`."""
        self._stop.check(self.config.deadlines.rescue_s)
        if self._ray is not None:
            self._ray.check(self.config.deadlines.rescue_s)

    def _at_rest(self) -> None:
        """A point where the run may end and be saved. Raises Stopped after a signal, TrainerError without Ray."""
        self._stop.check()
        if self._ray is not None:
            self._ray.check()

    def _print_start(self) -> None:
        ranks, layout = self.config.layout.world_size, self.config.layout.describe()
        self.progress.note(f"starting {ranks} trainer rank(s): {layout}; logs in {self._logs}")

    def _join_cluster(self, generates: bool, *, trainers: bool = True) -> tuple[Cluster, RayWatch]:
        """The run's part of Ray's cluster, and the watch over Ray."""
        held = self._resources
        if held.cluster is None or held.ray is None:
            # Ray's own handler of SIGTERM would end the driver with a stack trace.
            cluster = Cluster(self.config, generates, self._stop.install, trainers=trainers)
            held.cluster = held.stack.enter_context(cluster)
            held.ray = held.stack.enter_context(RayWatch(ray.get_runtime_context().gcs_address))
            for line in cluster.on_other_machines():
                self.progress.note(f"logs in {self._logs.absolute()} of {line}")
            silent = threading.Timer(SILENT_S, self._print_why_idle, [cluster])
            silent.daemon = True
            silent.start()
            held.stack.callback(silent.cancel)
        self._ray = held.ray
        return held.cluster, held.ray

    def _print_why_idle(self, cluster: Cluster) -> None:
        with suppress(Exception):  # Ray may have ended meanwhile
            if why := cluster.why_nothing_runs():
                self.progress.note(why)

    def _engine_group(self, cluster: Cluster, role: Role = "engine") -> EngineGroup:
        """Servers, not started yet, that end with the resources."""
        group = EngineGroup(self._run, cluster, self._logs, role)
        self._resources.stack.callback(group.stop)
        return group

    def _start_beside(
        self, trainers: Callable[[Callable[[], None]], object], *groups: EngineGroup
    ) -> list[list[EngineAddress]]:
        """Start servers and trainers side by side; returns the addresses of each group's servers.

        Args:
            trainers: starts them, and calls its argument while it waits: that raises if an engine, one of the first
                group, fails to start.
        """
        starting = [group.begin_start() for group in groups]
        watches = [group.watch_start(of, self.progress.note) for group, of in zip(groups, starting, strict=True)]
        trainers(watches[0])
        found = [group.finish_start(of, watch) for group, of, watch in zip(groups, starting, watches, strict=True)]
        self._print_places(*groups)
        return found

    def _print_places(self, *groups: EngineGroup) -> None:
        for group in groups:
            if group.addresses:
                self.progress.note(f"{group.role}s: " + ", ".join(address.url for address in group.addresses))

    def _take_over(self, endpoints: Sequence[Endpoint], disconnect: Callable[[float], None]) -> str:
        """Take over attached engines; returns the prefix of the names of their process groups.

        Args:
            endpoints: of attached engines only.
            disconnect: makes the trainer leave them at the end, within so many seconds.
        """
        group = self._new_group()
        self._attached = AttachedEngines(endpoints, group, self._senders, self.config.run_dir, self.config.deadlines)
        self._attached.take_over()
        self._stack.callback(self._attached.leave, disconnect)
        return group

    def _other_group(self) -> str:
        """Another prefix, for groups without the dead engines."""
        self._attached.also(group := self._new_group())
        return group

    def _new_group(self) -> str:
        self._resources.groups.append(group := new_group(self.config.name))
        return group


# How often Python's garbage collector searches a process for reference cycles.
#
# By default it searches the whole process whenever the number of long-lived objects has grown by a quarter. With
# thousands of requests that is several times in a step, each for some tenths of a second, in which no answer is read:
# 45% of a rollout manager's CPU (benchmarks/results/rollout.md). Rollouts make no cycles themselves, but users'
# functions, clients and agents do, so one search a minute remains.

log = logging.getLogger(__name__)

YOUNG, MIDDLE = 20_000, 20
"""New objects before a search of the youngest generation, and such searches before one of the middle generation (by
default 700 and 10)."""
NEVER = 1 << 30
EVERY_S = 60.0


def search_seldom(every_s: float = EVERY_S) -> None:
    """Exclude current objects from garbage collection, collect new ones rarely, and run a full collection every
    `every_s` seconds of the running loop. Called once, after a process has loaded its modules and services."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)
    loop = asyncio.get_running_loop()

    def search() -> None:
        gc.collect()
        loop.call_later(every_s, search)

    loop.call_later(every_s, search)
    log.info("garbage collection excludes %d objects, and scans the others every %g s",
             gc.get_freeze_count(), every_s)  # fmt: skip
