"""The trainer group: one Ray actor per rank around `MegatronTrainer`, called together and failing together."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from mslime.config.schema import RunConfig
from mslime.control.calls import call, gather
from mslime.control.cluster import Cluster, own_host, redirect_output, remote_class

if TYPE_CHECKING:
    from mslime.data.shard import TrainShard
    from mslime.weights.sync import SendReport
    from mslime.weights.transport import EngineInfo


class TrainerActor:
    """One trainer rank. Its stdout and stderr go to its own log; engines are imported here, not in the driver."""

    def __init__(self, config: RunConfig, rank: int, log_path: str) -> None:
        redirect_output(Path(log_path))
        self._config, self._rank = config, rank
        self._done, self._total = 0, 0
        self._sent, self._buckets = 0, 0

    def address(self) -> str:
        """`tcp://host:port` that the other ranks can reach: the rendezvous, asked of rank 0."""
        host = own_host(self._config)
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def start(self, rendezvous: str) -> dict[str, Any]:
        """Build the model and optimizer; returns this rank's MoE layers and grid position."""
        from mslime.backends.megatron.trainer import MegatronTrainer

        layout = self._config.layout
        self._trainer = MegatronTrainer(self._config, self._rank, layout.world_size, rendezvous)
        self._trainer.on_micro_batch = self._report
        self._sender = self._trainer.weight_sender(self._report_bucket)
        return {"moe_layer_ids": self._trainer.moe_layer_ids}

    def train(self, shards: Sequence[Any]) -> dict[str, Any]:
        """One optimizer step per shard; returns metrics of each and the span of time this rank was busy."""
        begin = time.time()
        own: list[TrainShard] = [ray.get(s) if isinstance(s, ray.ObjectRef) else s for s in shards]
        metrics = self._trainer.train(own)
        return {"metrics": metrics, "span": (begin, time.time())}

    def progress(self) -> tuple[int, int]:
        """(micro-batches done, of how many) of the step in progress; answered beside the work."""
        return self._done, self._total

    def buckets(self) -> tuple[int, int]:
        """(weight buckets sent, of how many) of the sync in progress; answered beside the work."""
        return self._sent, self._buckets

    def connect(self, engine_urls: Sequence[str]) -> tuple[EngineInfo, ...]:
        """Meet the engines; returns what they are."""
        self._sender.connect(engine_urls)
        return self._sender.engines

    def send_weights(self, version: int, verify: bool) -> tuple[SendReport, tuple[float, float]]:
        """Send every bucket; returns the report and the span of time this rank was busy."""
        begin = time.time()
        report = self._sender.send(version, verify)
        return report, (begin, time.time())

    def export_hf(self, directory: str) -> None:
        """Write the current weights as a Hugging Face checkpoint."""
        self._sender.export(Path(directory), self._config.model.path)

    def save(self, directory: str, extra: dict[str, Any]) -> None:
        """Write a resumable checkpoint."""
        self._trainer.save(Path(directory), extra)

    def load(self, directory: str, new_run: bool) -> None:
        """Read a checkpoint; of another run when `new_run`."""
        self._trainer.load(Path(directory), new_run)

    def _report(self, done: int, total: int) -> None:
        self._done, self._total = done, total

    def _report_bucket(self, sent: int, buckets: int) -> None:
        self._sent, self._buckets = sent, buckets


class TrainerGroup:
    """All trainer ranks. Every method runs on all of them and returns when all are done."""

    def __init__(self, config: RunConfig, cluster: Cluster, log_dir: Path) -> None:
        self._config = config
        world = config.layout.world_size
        remote = remote_class(TrainerActor, concurrency_groups={"progress": 1})
        self.log_paths = {_name(r): str(log_dir / f"trainer_rank{r}.log") for r in range(world)}
        threads = str(config.cluster.trainer_threads)
        env = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        self._actors = [
            remote.options(**cluster.trainer_options(r), runtime_env={"env_vars": env}).remote(
                config, r, self.log_paths[_name(r)]
            )
            for r in range(world)
        ]

    def start(self) -> list[tuple[int, ...]]:
        """Build the model on all ranks; returns every rank's global MoE layer ids."""
        deadline = self._config.deadlines.trainer_start_s
        who = _name(0)
        rendezvous = call(
            self._actors[0].address.remote(),
            who,
            "trainer start",
            deadline,
            self.log_paths[who],
        )
        started = self._all("trainer start", deadline, lambda a, _: a.start.remote(rendezvous))
        return [tuple(r["moe_layer_ids"]) for r in started]

    def train(
        self, shards: Sequence[Sequence[Any]], on_progress: Callable[[int, int], None]
    ) -> tuple[list[dict[str, float]], list[tuple[float, float]]]:
        """One optimizer step for each element of `shards[rank]`.

        Returns:
            Metrics of each optimizer step (equal on all ranks), and when each rank was busy (Unix seconds).
        """
        poll = self._poller("progress", on_progress)
        results = self._all(
            "train step",
            self._config.deadlines.train_step_s,
            lambda a, r: a.train.remote(shards[r]),
            poll,
        )
        return results[0]["metrics"], [r["span"] for r in results]

    def connect(self, engine_urls: Sequence[str]) -> tuple[EngineInfo, ...]:
        """Meet the engines; returns what they are."""
        urls = list(engine_urls)
        return self._sync("connect", lambda a, _: a.connect.remote(urls))[0]

    def send_weights(
        self, version: int, verify: bool, on_progress: Callable[[int, int], None]
    ) -> tuple[SendReport, list[tuple[float, float]]]:
        """Send all buckets; returns the report and every rank's busy span."""
        poll = self._poller("buckets", on_progress)
        results = self._sync("send", lambda a, _: a.send_weights.remote(version, verify), poll)
        return results[0][0], [span for _, span in results]

    def export_hf(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint."""
        self._all(
            "export",
            self._config.deadlines.checkpoint_s,
            lambda a, _: a.export_hf.remote(str(directory)),
        )

    def save(self, directory: Path, extra: dict[str, Any]) -> None:
        """Write a resumable checkpoint."""
        self._all(
            "checkpoint save",
            self._config.deadlines.checkpoint_s,
            lambda a, _: a.save.remote(str(directory), extra),
        )

    def load(self, directory: Path, new_run: bool) -> None:
        """Read a checkpoint; of another run when `new_run`, which begins the learning-rate schedule anew."""
        deadline = self._config.deadlines.checkpoint_s
        self._all("checkpoint load", deadline, lambda a, _: a.load.remote(str(directory), new_run))

    def stop(self) -> None:
        """Kill every rank at once: one that hangs in a collective answers nothing else."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)

    def _sync(
        self, phase: str, submit: Callable[[Any, int], ray.ObjectRef], on_wait: Callable[[], None] | None = None
    ) -> list[Any]:
        # The sender keeps deadlines of its own that name bucket and engine; ours is for a rank that is gone.
        return self._all(f"weight sync: {phase}", self._config.deadlines.weight_sync_s + 60, submit, on_wait)

    def _all(
        self,
        what: str,
        deadline_s: float,
        submit: Callable[[Any, int], ray.ObjectRef],
        on_wait: Callable[[], None] | None = None,
    ) -> list[Any]:
        refs = {_name(r): submit(actor, r) for r, actor in enumerate(self._actors)}
        return list(gather(refs, what, deadline_s, self.log_paths, on_wait).values())

    def _poller(self, method: str, report: Callable[[int, int], None]) -> Callable[[], None]:
        """Ask rank 0 how far it is, without ever waiting for the answer."""
        asked: list[ray.ObjectRef] = []

        def poll() -> None:
            ready = ray.wait(asked, timeout=0)[0] if asked else []
            if ready:
                report(*ray.get(asked.pop()))
            if not asked:
                asked.append(getattr(self._actors[0], method).options(concurrency_group="progress").remote())

        return poll


def _name(rank: int) -> str:
    return f"trainer rank {rank}"
