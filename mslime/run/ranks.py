"""One Ray actor per rank of a trained model: started together, called together and failing together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import ray
from ray.exceptions import RayError

from mslime.config.resolved import TrainingSpec
from mslime.run.ray_calls import call, gather
from mslime.run.ray_cluster import ActorProcess, remote_class

Report = Callable[[int, int], None]
"""Called with (units of work done, total)."""
Span = tuple[float, float]
"""Begin and end of a period of work, Unix seconds."""


class RankActor:
    """One rank. Its stdout and stderr go to a log of this rank; engines are imported here, not in the driver.

    Attributes:
        role: name of the rank in its log, before its number.
    """

    role: ClassVar[str]

    def __init__(self, spec: TrainingSpec, process: ActorProcess, rank: int, log_path: str) -> None:
        process.begin(f"{self.role} {rank}", Path(log_path))
        self._process, self._rank, self._step = process, rank, 0
        self._world, self._limits = spec.layout.world_size, spec.deadlines
        self._done, self._total = 0, 0

    def address(self) -> str:
        """`tcp://host:port` that the other ranks can reach: the rendezvous, made by rank 0."""
        from mslime.weights.broadcast import open_store

        host, limit = self._process.host, timedelta(seconds=self._limits.trainer_start_s)
        # It stays open, so no other process can take the port; torch's rendezvous in this process finds it there.
        self._store = open_store(host, self._world, limit, multi_tenant=True)
        return f"tcp://{host}:{self._store.port}"

    def rest(self) -> None:
        """Do nothing; returns when all earlier work is done."""

    def progress(self) -> tuple[int, int]:
        """(micro-batches done, total) of the step in progress; answered while the step runs."""
        return self._done, self._total

    def _report(self, done: int, total: int) -> None:
        self._done, self._total = done, total


class RankGroup:
    """All ranks of one model.

    Attributes:
        role: name of its ranks, before their number.
        log_paths: each rank's log, by its name, in rank order.
    """

    def __init__(
        self, actor: type[RankActor], spec: TrainingSpec, process: ActorProcess,
        placed: Callable[[int], Mapping[str, Any]], log_dir: Path, *given: object,
    ) -> None:  # fmt: skip
        """
        Args:
            process: start-up of the ranks' processes.
            placed: Ray's options that place a rank.
            given: arguments of the actor beyond those of every rank.
        """
        self.role, self._limits, world = actor.role, spec.deadlines, spec.layout.world_size
        remote = remote_class(actor, concurrency_groups={"progress": 1})
        self.log_paths = {self.name(r): str(log_dir / f"{self.role}_rank{r}.log") for r in range(world)}
        threads = str(spec.threads)
        env = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        self._submitting = threading.Lock()
        self._actors = [
            remote.options(**placed(r), runtime_env={"env_vars": env}).remote(spec, process, r, log_path, *given)
            for r, log_path in enumerate(self.log_paths.values())
        ]
        self._first = self._actors[0]

    def name(self, rank: int) -> str:
        """Name of a rank, for messages."""
        return f"{self.role} rank {rank}"

    def begin_start(self, on_wait: Callable[[], None] | None = None) -> dict[str, ray.ObjectRef]:
        """Connect the ranks and build the model; pass the result to `ray_calls.gather`.

        Args:
            on_wait: called a few times a second until the first rank is up.
        """
        worker, deadline = self.name(0), self._limits.trainer_start_s
        reference = self._actors[0].address.remote()
        rendezvous = call(reference, worker, "trainer start", deadline, self.log_paths[worker], on_wait)
        return self.submit(lambda a, _: a.start.remote(rendezvous))

    def submit(self, work: Callable[[Any, int], ray.ObjectRef]) -> dict[str, ray.ObjectRef]:
        """`work(actor, rank)` of every rank, by name, in rank order.

        Threads may share a group. All ranks get their work in the same order, because it consists of collectives.
        """
        with self._submitting:
            return {self.name(r): work(actor, r) for r, actor in enumerate(self._actors)}

    def all(
        self,
        task: str,
        deadline_s: float,
        work: Callable[[Any, int], ray.ObjectRef],
        on_wait: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Results of `work(actor, rank)`, in rank order; fails like `ray_calls.gather`."""
        return list(gather(self.submit(work), task, deadline_s, self.log_paths, on_wait).values())

    def stop(self) -> None:
        """Kill every rank at once: a rank that hangs in a collective answers no other request."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)

    def poller(self, method: str, report: Report, check: Callable[[], None]) -> Callable[[], None]:
        """Poll rank 0's progress without ever waiting for the answer. `check` raises when waiting is to end."""
        pending: list[ray.ObjectRef] = []

        def poll() -> None:
            check()
            ready = ray.wait(pending, timeout=0)[0] if pending else []
            if ready:
                with suppress(RayError):  # the awaited call raises the error
                    report(*ray.get(pending.pop()))
            if not pending:
                pending.append(getattr(self._first, method).options(concurrency_group="progress").remote())

        return poll


def fetched(shards: Sequence[Any]) -> list[Any]:
    """Shards, or Ray references to them, as shards."""
    return [ray.get(s) if isinstance(s, ray.ObjectRef) else s for s in shards]
