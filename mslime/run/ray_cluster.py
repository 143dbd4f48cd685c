"""Ray: starting or joining a cluster, placing trainer ranks and engines, and leaving nothing behind."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import ray
from ray._private import services as ray_services
from ray.exceptions import AuthenticationError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from mslime.backends.sglang.guard import kill_all
from mslime.config.cluster import RAY_START, ClusterConfig, RunParts, worker_environment
from mslime.config.engines import SGLangConfig
from mslime.config.errors import ConfigError, TrainerError, WorkerError
from mslime.config.resolved import Role
from mslime.config.schema import RunConfig
from mslime.logs import log_process
from mslime.run.placement import (
    ActorPlacement,
    BundleLocation,
    check_tensor_groups,
    gpus_of,
    in_order,
    machines,
    on_other_machines,
    refuse_small_cluster,
    spots_of,
)
from mslime.run.stop import leave_without_ray
from mslime.run.sweeper import Sweeper, ray_processes

_log = logging.getLogger(__name__)
_raylet = cast("Any", ray)._raylet  # compiled, without types

PLACEMENT_SECONDS = 120.0
MORE_SECONDS = 10.0
"""Seconds to place one more engine, while the others generate."""
STOP_SECONDS = 30.0
"""Seconds for Ray to release its resources and end; after that, this process ends without it."""
_KNOCK_SECONDS = 10.0
_RAYLET_LINES = 5
_RAY_STARTS = 3
_TOO_SLOW = "timed out during startup"
"""Ray's error text if its own processes were not up in time."""
_LOCAL_OBJECT_STORE = 512 * 2**20


def resolved_device(config: RunConfig) -> RunConfig:
    """The configuration with `cluster.device` decided, so all processes use the same one: for auto, cuda if a GPU is
    visible."""
    if config.cluster.device != "auto":
        return config
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": device})})


class Cluster:
    """The run's part of a Ray cluster: one bundle per trainer rank, one per engine. A context manager."""

    def __init__(
        self, config: RunConfig, engines: bool, on_init: Callable[[], None] = lambda: None, trainers: bool = True
    ) -> None:
        """
        Args:
            engines: whether the run launches engines (or attaches to running ones).
            trainers: whether it has trainer ranks, and a critic's.
            on_init: called once Ray is initialised, because Ray sets its own signal handlers.
        """
        self._config, self._on_init, self._parts = config, on_init, RunParts(trainers, engines)
        self._num_engines = config.sglang.num_engines if engines and not config.sglang.urls else 0
        self._num_teachers = config.teacher.launched if engines else 0
        self._cuda = config.cluster.device == "cuda"
        self._sweeper = ExitStack()
        self._groups: list[PlacementGroup] = []
        self._trainers: PlacementGroup | None = None
        self._order: dict[str, list[int]] = {}
        self._spots: list[BundleLocation] = []  # of trainer ranks, in their order
        self._shared = config.colocated and trainers and self._num_engines > 0
        self._teacher_shares = self._shared and config.teacher_shares
        self._placed = 0  # engines placed on GPUs of the trainer
        self._critics: PlacementGroup | None = None
        self._connected = False
        self._engines: PlacementGroup | None = None
        self._teachers: PlacementGroup | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()

    def _start(self) -> None:
        config, world = self._config, self._config.layout.world_size
        engines, teachers = self._num_engines, self._num_teachers
        if ray.is_initialized():
            raise ConfigError(
                "cluster.ray_address", config.cluster.ray_address, "this process is already connected to a Ray cluster",
                "call ray.shutdown() first, or start mslime in a separate process",
            )  # fmt: skip
        local: dict[str, Any] = {}
        if config.cluster.ray_address is None:
            # Logical CPUs: on a laptop there are more ranks than cores, and they take turns.
            processes = sum(claim.count for claim in config.claims(self._parts))
            local = {"num_cpus": processes + 2, "include_dashboard": False}
            if not self._cuda:
                local |= {"object_store_memory": _LOCAL_OBJECT_STORE}
            self._sweeper.enter_context(Sweeper())
        self._sweeper.enter_context(_ray_environment(config.cluster.ray_address, config.deadlines.rescue_s))
        self._connected = True
        self._connect(local | {"runtime_env": _runtime_environment(config.cluster, config.sglang.extra)})
        self._on_init()
        refuse_small_cluster(config.cluster, config.claims(self._parts))
        if self._parts.trainers:
            self._trainers, self._spots = self._place_ranks("cluster.trainer_ranks", world)
        if self._parts.trainers and config.critic_ranks:
            self._critics, _ = self._place_ranks("critic.placement", config.critic_ranks)
        if self._shared:
            self._engines = self._trainers
        elif engines:
            self._engines = self._place(
                "sglang.num_engines",
                [self._bundle(config.sglang.gpus_a_machine) for _ in range(engines * config.sglang.parts)],
            )
        if teachers and not self._teacher_shares:
            self._teachers = self._place(
                "teacher.num_engines",
                [self._bundle(config.teacher.gpus_a_machine) for _ in range(teachers * config.teacher.nnodes)],
            )

    def _connect(self, options: dict[str, Any]) -> None:
        # Ray's library read both at its import, or for an earlier run of this process.
        _raylet.Config.initialize("")
        _raylet.AuthenticationTokenLoader.instance().reset_cache()
        address = self._config.cluster.ray_address
        if address is None:
            _start_ray(options)
            return
        try:
            _knock(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except AuthenticationError:
            raise ConfigError(
                "cluster.ray_address", address, "this Ray cluster requires another token than the one of this process",
                "set RAY_AUTH_TOKEN to the token that its machines were started with (docs/clusters.md)",
            ) from None  # fmt: skip
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                "cluster.ray_address", address, f"the Ray cluster cannot be joined: {error}",
                f"start it ({RAY_START}), with this Python and Ray version, and run mslime on one of its machines",
            ) from error  # fmt: skip

    def _place_ranks(self, field: str, ranks: int) -> tuple[PlacementGroup, list[BundleLocation]]:
        """Bundles for ranks that share layers, numbered by machine and GPU; and each rank's location."""
        group = self._place(field, [self._bundle(1) for _ in range(ranks)])
        spots = spots_of(group, self._cuda)
        self._order[field] = order = in_order(spots)
        mine = [spots[bundle] for bundle in order]
        check_tensor_groups(mine, self._config.layout.tp)
        return group, mine

    def _bundle(self, gpus: int) -> dict[str, float]:
        return {"CPU": 1.0, "GPU": float(gpus)} if self._cuda else {"CPU": 1.0}

    def _place(
        self, field: str, bundles: list[dict[str, float]], patience_s: float = PLACEMENT_SECONDS
    ) -> PlacementGroup:
        group = placement_group(bundles, strategy="PACK")
        self._groups.append(group)
        if not group.wait(patience_s):
            remove_placement_group(group)
            self._groups.remove(group)
            free, where = ray.available_resources(), self._config.cluster.ray_address or "this machine"
            have = {k: free.get(k, 0) for k in ("CPU", "GPU")}
            raise ConfigError(
                field,
                len(bundles),
                f"the Ray cluster at {where} cannot place this many bundles of {bundles[0]} within "
                f"{patience_s:.0f} s; "
                f"free: {have}",
                "stop other jobs there (`ray status`), use fewer ranks or engines, or add machines",
            )
        return group

    @property
    def process(self) -> ActorProcess:
        """Start-up of the actors' processes."""
        return ActorProcess(self._config.observe.log_level, self._config.cluster)

    def trainer_options(self, rank: int) -> dict[str, Any]:
        """Actor options that place trainer `rank` in its bundle: neighbours in rank order share machines."""
        assert self._trainers is not None
        return self._options(self._trainers, self._order["cluster.trainer_ranks"][rank], gpus=1)

    def check_trainer_machines(self) -> None:
        """Raise TrainerError if a machine of trainer ranks is gone: their bundles then have no resources."""
        for group in (self._trainers, self._critics):
            if group is not None and (state := placement_group_table(group)["state"]) != "CREATED":
                raise TrainerError(
                    "cluster", f"placement group {state}", "a machine of the trainer is gone",
                    "start again with as many machines: the run continues from its newest checkpoint",
                )  # fmt: skip

    def why_nothing_runs(self) -> str:
        """Last lines of this machine's raylet log while no process of the run is up; empty once one is."""
        job, worker = ray.get_runtime_context().get_job_id(), cast("Any", ray)._private
        if any(a["State"] == "ALIVE" for a in worker.state.actors().values() if a["JobID"] == job):
            return ""
        log = Path(worker.worker._global_node.get_logs_dir_path()) / "raylet.err"
        lines = log.read_text(errors="replace").splitlines()[-_RAYLET_LINES:] if log.exists() else []
        return "\n  ".join([f"no process of the run has started yet; last lines of {log}:", *(lines or ["(nothing)"])])

    def on_other_machines(self) -> list[str]:
        """One line for each other machine with the run's processes there, by the names of their logs."""
        groups = {
            "trainer_rank": (self._trainers, self._order.get("cluster.trainer_ranks"), 1),
            "critic_rank": (self._critics, self._order.get("critic.placement"), 1),
            "engine": (None if self._shared else self._engines, None, self._config.sglang.parts),
            "teacher": (self._teachers, None, self._config.teacher.nnodes),
        }
        placed: dict[str, list[str]] = {}
        for called, (group, order, every) in groups.items():
            if group is None:
                continue
            where = placement_group_table(group)["bundles_to_node_id"]
            nodes = [where[bundle] for bundle in order or sorted(where)]
            placed[called] = nodes[::every]
            placed |= {f"part {part} of {called}": nodes[part::every] for part in range(1, every)}
        return on_other_machines(placed, ray.get_runtime_context().get_node_id(), machines())

    def critic_options(self, rank: int) -> dict[str, Any]:
        """Actor options that place rank `rank` of a separate critic in its bundle."""
        assert self._critics is not None
        return self._options(self._critics, self._order["critic.placement"][rank], gpus=1)

    def engine_places(self, index: int, role: Role = "engine") -> list[ActorPlacement]:
        """Places of engine or teacher `index`: one for each of its machines, or for each half of a pair."""
        teaches = role == "teacher"
        if teaches and self._teacher_shares:  # from the last GPU on, to leave GPUs before them for more engines
            teacher = self._config.teacher
            return self._on_trainer_gpus(teacher, len(self._spots) - (index + 1) * teacher.tp_size)
        if self._shared and not teaches:
            return self._beside_trainer()
        group, section = (self._teachers, self._config.teacher) if teaches else (self._engines, self._config.sglang)
        assert group is not None
        bundles = range(index * section.parts, (index + 1) * section.parts)
        return [ActorPlacement(self._options(group, bundle, gpus=section.gpus_a_machine)) for bundle in bundles]

    def _beside_trainer(self) -> list[ActorPlacement]:
        """Places for the next engine on the trainer's GPUs."""
        engine, number = self._config.sglang, self._placed
        free = len(self._spots) - (self._config.teacher.gpus if self._teacher_shares else 0)
        if (number + 1) * engine.tp_size > free:
            raise ConfigError(
                "sglang.num_engines", number + 1,
                f"engines share {free} of the trainer's GPUs, {engine.tp_size} each (cluster.placement)",
                "remove another engine first",
            )  # fmt: skip
        self._placed += 1
        return self._on_trainer_gpus(engine, number * engine.tp_size)

    def _on_trainer_gpus(self, server: SGLangConfig, begin: int) -> list[ActorPlacement]:
        """Places for a server: neighbouring GPUs of the trainer, beside its ranks, from rank `begin`'s on."""
        assert self._trainers is not None
        places: list[ActorPlacement] = []
        for part in range(server.nnodes):
            first = begin + part * server.gpus_a_machine
            gpus = gpus_of(self._spots[first : first + server.gpus_a_machine])
            bundle = self._order["cluster.trainer_ranks"][first]
            places.append(ActorPlacement(self._options(self._trainers, bundle, gpus=0), gpus if self._cuda else None))
        return places

    def one_more_engine(self) -> list[ActorPlacement]:
        """Places for an engine beyond the initial ones. Raises ConfigError if there are no resources for it."""
        engine = self._config.sglang
        if self._shared:
            return self._beside_trainer()
        if not self._cuda and self._config.cluster.ray_address is None:
            # Cores are logical here, so the engine needs no reserved one.
            return [ActorPlacement(beside_the_driver() | {"max_restarts": 0})] * engine.parts
        gpus, machines = engine.gpus_a_machine, range(engine.parts)
        group = self._place("sglang.num_engines", [self._bundle(gpus) for _ in machines], MORE_SECONDS)
        return [ActorPlacement(self._options(group, bundle, gpus)) for bundle in machines]

    def _options(self, group: PlacementGroup, bundle: int, gpus: float) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        return {
            "num_cpus": 0.5,
            "num_gpus": gpus if self._cuda else 0,
            "scheduling_strategy": strategy,
            "max_restarts": 0,
        }

    def _stop(self) -> None:
        if self._connected and ray.is_initialized() and not _ends_within(STOP_SECONDS, self._leave):
            leave_without_ray()  # without a message to the sweeper, which then ends the rest of a local Ray
            return
        self._sweeper.close()

    def _leave(self) -> None:
        for group in self._groups:
            remove_placement_group(group)
        ray.shutdown()


def _ends_within(seconds: float, work: Callable[[], None]) -> bool:
    """Whether `work` succeeds in this time: in a thread, because a call into Ray's library cannot be interrupted."""
    well = threading.Event()

    def run() -> None:
        try:
            work()
        except Exception as error:  # any error of Ray: the run has ended, and only clean-up is left
            _log.warning("Ray did not shut down cleanly: %s: %s", type(error).__name__, error)
        else:
            well.set()

    thread = threading.Thread(target=run, name="end of ray", daemon=True)
    thread.start()
    thread.join(seconds)
    return well.is_set()


@contextmanager
def _apart() -> Iterator[None]:
    """Put Ray's processes that start in this block into a separate session, like the sweeper.

    A signal to this process's group (`timeout`, a closed terminal, batch systems) would end them, and the trainer ranks
    below them, before anything is saved. Ray 2.60 only shields them from SIGINT, and has no setting for it.
    """
    before: type = ray_services.ConsolePopen
    ray_services.ConsolePopen = partial(before, start_new_session=True)
    try:
        yield
    finally:
        ray_services.ConsolePopen = before


def _start_ray(options: dict[str, Any]) -> None:
    """Start Ray, several times if its processes miss Ray's fixed limit of 30 s on a crowded machine.

    Raises:
        WorkerError: they were too slow `_RAY_STARTS` times.
    """
    for _ in range(_RAY_STARTS):
        try:
            with _apart():
                ray.init(address="local", log_to_driver=False, logging_level=logging.ERROR, **options)
        except Exception as error:  # Ray has no class for it
            if _TOO_SLOW not in str(error):
                raise
            _log.warning("Ray did not start within 30 s; trying again")
            kill_all(ray_processes(os.getpid()))
        else:
            return
    raise WorkerError(
        "ray", f"{_RAY_STARTS} starts", "its processes on this machine did not come up within 30 s each",
        f"stop other jobs on this machine, or start Ray yourself ({RAY_START}) and set cluster.ray_address",
    )  # fmt: skip


@contextmanager
def _ray_environment(address: str | None, rescue_s: float) -> Iterator[None]:
    """Set Ray's own settings in this process unless the environment names them; they are removed afterwards.

    The token of a Ray cluster permits running code as the user who started it. Each local run draws a new one, readable
    only by other processes of this user. By default Ray would keep one permanently in a world-readable file.
    """
    ours = {
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Ray would run its workers, our trainer ranks among them, at niceness 15, behind the engines on the same cores.
        "RAY_worker_niceness": "0",
        # Errors of other ranks after a lost one are in their logs, and are not separate failures.
        "RAY_IGNORE_UNHANDLED_ERRORS": "1",
        # A job submitted to Ray has its own runtime environment; see `_runtime_environment`.
        "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",
        # Ray's code would end the driver a minute after its control process, in the middle of a rescue.
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(int(rescue_s) + 600),
    }
    if os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        ours["RAY_AUTH_MODE"] = "token"
    elif address is None and os.environ.get("RAY_AUTH_MODE", "token") == "token":
        # Any earlier `ray.init` of this process has set the mode, and Ray would then use the token of its file.
        ours |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    added = {name: value for name, value in ours.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def beside_the_driver() -> dict[str, Any]:
    """Actor options for a service that mostly waits: on this machine, without a reserved core."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return {"num_cpus": 0, "scheduling_strategy": here}


def remote_class(cls: type, **options: Any) -> Any:
    """`cls` as a Ray actor class. Untyped on purpose: calls on its handles return references."""
    return ray.remote(**options)(cls) if options else ray.remote(cls)


def _runtime_environment(cluster: ClusterConfig, engine_fields: dict[str, Any]) -> dict[str, Any]:
    """Runtime environment of all processes of the run.

    Variables of `ray job submit` or a RayJob stay unchanged, unless `cluster.env` names them. This process's import
    path already includes theirs.
    """
    job: dict[str, Any] = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}").get("runtime_env") or {}
    variables = {
        **worker_environment(cluster, engine_fields),
        **job.get("env_vars", {}),
        **cluster.env,
    }
    quoted = shlex.quote(sys.executable)  # Ray 2.60 passes it to a shell unquoted
    own = {} if quoted == sys.executable else {"py_executable": quoted}
    # The driver's import path, so workers find mslime and the user's reward modules.
    path = os.pathsep.join([str(Path.cwd()), *(p for p in sys.path if p)])
    return {"env_vars": {**variables, "PYTHONPATH": path}, **own}


def _knock(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT, AuthenticationError if the listener requires another token. Ray
    itself would wait for minutes, and would not report the second case."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS).close()
    except OSError:
        if host not in ("127.0.0.1", "localhost"):
            raise
        # Ray takes these two for this machine's own address, and may listen there only.
        host = ray.util.get_node_ip_address()
        socket.create_connection((host, int(port)), _KNOCK_SECONDS).close()
    _raylet.GcsClient(address=f"{host}:{port}")


def interface_of(address: str) -> str | None:
    """The network interface with this address; all of 127.0.0.0/8 belongs to the one of 127.0.0.1."""
    import psutil

    interfaces, address = psutil.net_if_addrs(), "127.0.0.1" if address.startswith("127.") else address
    return next((name for name, held in interfaces.items() if any(a.address == address for a in held)), None)


@dataclass(frozen=True)
class ActorProcess:
    """Start-up of an actor's process.

    Attributes:
        log_level: `observe.log_level`.
        settings: `cluster`.
    """

    log_level: str
    settings: ClusterConfig

    def begin(self, name: str, log_path: Path) -> None:
        """Redirect output to a separate log, and make gloo listen on the process's address."""
        redirect_output(log_path)
        log_process(name, self.log_level)
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or "none"
        _log.info("placed on %s, process %d, GPU %s", socket.gethostname(), os.getpid(), gpus)
        # By default gloo resolves the host's name, which many distributions map to 127.0.1.1: unreachable for others.
        if (interface := interface_of(self.host)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    @property
    def host(self) -> str:
        """Address for the process's services: loopback unless the cluster may span machines."""
        return "127.0.0.1" if self.settings.ray_address is None else ray.util.get_node_ip_address()


def redirect_output(log_path: Path) -> None:
    """Send this process's stdout and stderr, those of its libraries included, to `log_path` (appending)."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
