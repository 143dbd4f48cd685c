"""Processes of a run on Ray's cluster: started together, watched, and ended together, whatever ends the block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import ray

from mslime.config.keys import Endpoint
from mslime.config.schema import RunConfig
from mslime.control.attached import AttachedEngines, new_group
from mslime.control.cluster import Cluster
from mslime.control.ray_watch import RayWatch, leave_without_ray
from mslime.control.stop import StopSignals
from mslime.observe.progress import Progress


class Started(ABC):
    """A context manager; what `_start` puts on the stack is ended in reverse order.

    Attributes:
        config: the resolved configuration.
        progress: where lines go, from `_start` on.
    """

    progress: Progress
    _attached: AttachedEngines

    def __init__(self, config: RunConfig, stop: StopSignals) -> None:
        self.config, self._stop = config, stop
        self._stack = ExitStack()
        self._ray: RayWatch | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ray is not None and self._ray.gone:
            self.progress.__exit__(None, None, None)
            leave_without_ray()
            return
        self._stack.close()

    @property
    def _logs(self) -> Path:
        return self.config.run_dir / "logs"

    @abstractmethod
    def _start(self) -> None:
        """Start everything; the progress comes first."""

    def _join_cluster(self, generates: bool, *, trainers: bool = True) -> tuple[Cluster, RayWatch]:
        """Room on Ray's cluster for the parts of the run, and the watch over Ray."""
        # Ray's own handler of SIGTERM would end the driver with a stack trace.
        cluster = self._stack.enter_context(Cluster(self.config, generates, self._stop.install, trainers=trainers))
        self._ray = self._stack.enter_context(RayWatch(ray.get_runtime_context().gcs_address))
        for line in cluster.on_other_machines():
            self.progress.note(f"logs in {self._logs.absolute()} of {line}")
        return cluster, self._ray

    def _take_over(self, endpoints: Sequence[Endpoint], disconnect: Callable[[float], None]) -> str:
        """Take over engines that somebody else runs, if these are; what names of groups with the engines begin with.

        Args:
            disconnect: lets the trainer leave them at the end, within so many seconds.
        """
        group = new_group(self.config)
        self._attached = AttachedEngines(self.config, endpoints if self.config.sglang.urls else (), group)
        self._attached.take_over()
        self._stack.callback(self._attached.leave, disconnect)
        return group

    def _other_group(self) -> str:
        """The beginning of other names, for groups without the engines that are gone."""
        group = new_group(self.config)
        self._attached.also(group)
        return group
