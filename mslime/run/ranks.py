"""One Ray actor per rank of a model that is trained: started together, called together and failing together."""

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
"""Called with (how much is done, of how much)."""
Span = tuple[float, float]
"""Begin and end of a stretch of work, Unix seconds."""


class RankActor:
    """One rank. Its stdout and stderr go to its own log; engines are imported here, not in the driver.

    Attributes:
        role: what it is called, with its rank, in its log.
    """

    role: ClassVar[str]

    def __init__(self, spec: TrainingSpec, process: ActorProcess, rank: int, log_path: str) -> None:
        process.begin(f"{self.role} {rank}", Path(log_path))
        self._process, self._rank, self._step = process, rank, 0
        self._world, self._limits = spec.layout.world_size, spec.deadlines
        self._done, self._total = 0, 0

    def address(self) -> str:
        """`tcp://host:port` that the other ranks can reach: the rendezvous, asked of rank 0."""
        from mslime.weights.broadcast import open_store

        host, limit = self._process.host, timedelta(seconds=self._limits.trainer_start_s)
        # Open from now on, so that nobody else can take the port; torch's rendezvous in this process finds it there.
        self._store = open_store(host, self._world, limit, multi_tenant=True)
        return f"tcp://{host}:{self._store.port}"

    def rest(self) -> None:
        """Nothing; answered when all work given before is done."""

    def progress(self) -> tuple[int, int]:
        """(micro-batches done, of how many) of the step in progress; answered beside the work."""
        return self._done, self._total

    def _report(self, done: int, total: int) -> None:
        self._done, self._total = done, total


class RankGroup:
    """All ranks of one model.

    Attributes:
        role: what its ranks are called.
        log_paths: where each rank writes, by its name, in rank order.
    """

    def __init__(
        self, actor: type[RankActor], spec: TrainingSpec, process: ActorProcess,
        placed: Callable[[int], Mapping[str, Any]], log_dir: Path, *given: object,
    ) -> None:  # fmt: skip
        """
        Args:
            process: how those of the ranks begin.
            placed: Ray's options that put a rank where it belongs.
            given: what the actor takes beside what every rank does.
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
        """A rank's, for messages."""
        return f"{self.role} rank {rank}"

    def begin_start(self, on_wait: Callable[[], None] | None = None) -> dict[str, ray.ObjectRef]:
        """Let the ranks meet and build the model; `ray_calls.gather` what this returns.

        Args:
            on_wait: called a few times a second until the first rank is there.
        """
        who, deadline = self.name(0), self._limits.trainer_start_s
        asked = self._actors[0].address.remote()
        rendezvous = call(asked, who, "trainer start", deadline, self.log_paths[who], on_wait)
        return self.submit(lambda a, _: a.start.remote(rendezvous))

    def start(self, on_wait: Callable[[], None] | None = None) -> list[tuple[int, ...]]:
        """Let the ranks meet and build the model; global MoE layer ids of each, in rank order.

        Args:
            on_wait: called a few times a second until all of them are there.
        """
        refs, deadline = self.begin_start(on_wait), self._limits.trainer_start_s
        started = gather(refs, "trainer start", deadline, self.log_paths, on_wait)
        return [tuple(started[name]["moe_layer_ids"]) for name in self.log_paths]

    def submit(self, work: Callable[[Any, int], ray.ObjectRef]) -> dict[str, ray.ObjectRef]:
        """`work(actor, rank)` of every rank, by name, in rank order.

        Threads may share a group: each rank is given their work in the same order, since it is made of collectives.
        """
        with self._submitting:
            return {self.name(r): work(actor, r) for r, actor in enumerate(self._actors)}

    def all(
        self,
        what: str,
        deadline_s: float,
        work: Callable[[Any, int], ray.ObjectRef],
        on_wait: Callable[[], None] | None = None,
    ) -> list[Any]:
        """What `work(actor, rank)` gave, in rank order; `ray_calls.gather` says how it may fail."""
        return list(gather(self.submit(work), what, deadline_s, self.log_paths, on_wait).values())

    def stop(self) -> None:
        """Kill every rank at once: one that hangs in a collective answers nothing else."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)

    def poller(self, method: str, report: Report, check: Callable[[], None]) -> Callable[[], None]:
        """Ask rank 0 how far it is, without ever waiting for the answer. `check` raises when waiting is to end."""
        asked: list[ray.ObjectRef] = []

        def poll() -> None:
            check()
            ready = ray.wait(asked, timeout=0)[0] if asked else []
            if ready:
                with suppress(RayError):  # the call that is waited for says what happened
                    report(*ray.get(asked.pop()))
            if not asked:
                asked.append(getattr(self._first, method).options(concurrency_group="progress").remote())

        return poll


def fetched(shards: Sequence[Any]) -> list[Any]:
    """Shards, or Ray references to them, as shards."""
    return [ray.get(s) if isinstance(s, ray.ObjectRef) else s for s in shards]
