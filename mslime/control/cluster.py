"""Ray: starting or joining a cluster, placing trainer ranks and engines, and leaving nothing behind."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mslime.config.errors import ConfigError
from mslime.config.schema import RunConfig

if TYPE_CHECKING:
    from mslime.backends.sglang.server import Role

PLACEMENT_SECONDS = 120.0
_LOCAL_OBJECT_STORE = 512 * 2**20


def use_cuda(config: RunConfig) -> bool:
    """Whether this run uses GPUs: `cluster.device`, or what is visible when it says auto."""
    if config.cluster.device != "auto":
        return config.cluster.device == "cuda"
    import torch

    return torch.cuda.is_available()


def resolved_device(config: RunConfig) -> RunConfig:
    """The configuration with `cluster.device` decided, so that every process agrees on it."""
    device = "cuda" if use_cuda(config) else "cpu"
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": device})})


class Cluster:
    """Our part of a Ray cluster: one bundle per trainer rank, one per engine. A context manager."""

    def __init__(self, config: RunConfig, engines: bool) -> None:
        """
        Args:
            engines: whether the run launches engines (unless it attaches to running ones).
        """
        self._config = config
        self._num_engines = config.sglang.num_engines if engines and not config.sglang.urls else 0
        self._num_teachers = config.teacher.launched if engines else 0
        self._cuda = config.cluster.device == "cuda"
        self._groups: list[PlacementGroup] = []
        self._trainers: PlacementGroup | None = None
        self._critics: PlacementGroup | None = None
        self._engines: PlacementGroup | None = None
        self._teachers: PlacementGroup | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _start(self) -> None:
        config, world = self._config, self._config.layout.world_size
        engines, teachers = self._num_engines, self._num_teachers
        local: dict[str, Any] = {}
        if config.cluster.ray_address is None:
            # Logical CPUs: on a laptop there are more ranks than cores, and they take turns.
            processes = world + config.critic_ranks + engines + teachers
            local = {"num_cpus": processes + 2, "include_dashboard": False}
            if not self._cuda:
                local |= {"object_store_memory": _LOCAL_OBJECT_STORE}
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Ray would run its workers, our trainer ranks among them, at niceness 15, behind the engines on the same cores.
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(
            address=config.cluster.ray_address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **local,
            runtime_env={"env_vars": {"PYTHONPATH": _python_path()}},
        )
        self._trainers = self._place("cluster.trainer_ranks", [self._bundle(1) for _ in range(world)])
        if config.critic_ranks:
            self._critics = self._place("critic.placement", [self._bundle(1) for _ in range(config.critic_ranks)])
        if engines:
            self._engines = self._place(
                "sglang.num_engines",
                [self._bundle(config.sglang.tp_size) for _ in range(engines)],
            )
        if teachers:
            self._teachers = self._place(
                "teacher.num_engines", [self._bundle(config.teacher.tp_size) for _ in range(teachers)]
            )

    def _bundle(self, gpus: int) -> dict[str, float]:
        return {"CPU": 1.0, "GPU": float(gpus)} if self._cuda else {"CPU": 1.0}

    def _place(self, field: str, bundles: list[dict[str, float]]) -> PlacementGroup:
        group = placement_group(bundles, strategy="PACK")
        self._groups.append(group)
        if not group.wait(PLACEMENT_SECONDS):
            free = ray.available_resources()
            have = {k: free.get(k, 0) for k in ("CPU", "GPU")}
            raise ConfigError(
                field,
                len(bundles),
                f"the Ray cluster cannot place {bundles[0]} that often; free: {have}",
                "use fewer ranks or engines, or add nodes",
            )
        return group

    def trainer_options(self, rank: int) -> dict[str, Any]:
        """Actor options that put trainer `rank` into its bundle. Ranks fill nodes in order (PACK)."""
        assert self._trainers is not None
        return self._options(self._trainers, rank, gpus=1)

    def critic_options(self, rank: int) -> dict[str, Any]:
        """Actor options that put rank `rank` of a critic of its own into its bundle."""
        assert self._critics is not None
        return self._options(self._critics, rank, gpus=1)

    def engine_options(self, index: int, role: Role = "engine") -> dict[str, Any]:
        """Actor options that put engine or teacher `index` into its bundle."""
        teaches = role == "teacher"
        group, section = (self._teachers, self._config.teacher) if teaches else (self._engines, self._config.sglang)
        assert group is not None
        return self._options(group, index, gpus=section.tp_size)

    def _options(self, group: PlacementGroup, bundle: int, gpus: float) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        return {
            "num_cpus": 0.5,
            "num_gpus": gpus if self._cuda else 0,
            "scheduling_strategy": strategy,
            "max_restarts": 0,
        }

    def _stop(self) -> None:
        if not ray.is_initialized():
            return
        for group in self._groups:
            remove_placement_group(group)
        ray.shutdown()


def remote_class(cls: type, **options: Any) -> Any:
    """`cls` as a Ray actor class. Untyped on purpose: calls on its handles return references."""
    return ray.remote(**options)(cls) if options else ray.remote(cls)


def _python_path() -> str:
    """The driver's import path, so that workers find mslime and the user's reward modules as it does."""
    return os.pathsep.join([str(Path.cwd()), *(p for p in sys.path if p)])


def own_host(config: RunConfig) -> str:
    """The address under which this process's services are found: loopback unless the cluster may span machines."""
    return "127.0.0.1" if config.cluster.ray_address is None else ray.util.get_node_ip_address()


def redirect_output(log_path: Path) -> None:
    """Send this process's stdout and stderr, those of its libraries included, to `log_path` (appending)."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
