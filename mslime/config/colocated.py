"""Rules of `cluster.placement: colocated`: what can take turns on one GPU, and what cannot.

Engines and trainer never compute at the same time, so whatever needs both of them at once is refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mslime.config.choices import AUTO
from mslime.config.errors import ConfigError

if TYPE_CHECKING:
    from mslime.config.cluster import ClusterConfig
    from mslime.config.engines import SGLangConfig
    from mslime.config.schema import RunConfig

BY_COLLECTIVE = (AUTO, "broadcast", "relay")
"""Transports in which a trainer rank and an engine are two members of one process group."""

SHARED_DIRECTORY = "disk or delta with a weights.directory that all machines share"

_FIXED_ADDRESSES = {
    "enable_cuda_graph": "CUDA graphs hold addresses of parameters, which change while they are away",
    "external_cuda_graph": "CUDA graphs hold addresses of parameters, which change while they are away",
    "nccl_ub": "NCCL keeps the addresses of registered buffers, which change while they are away",
}


def check_colocated(config: RunConfig) -> None:
    """Raise ConfigError for the first setting that does not go together with the placement."""
    cluster = config.cluster
    if config.teacher.placement == "colocated":
        _check_teacher(config)
    _check_handed(config)
    if not config.colocated:
        for name in ("asleep_in", "asleep_directory"):
            value = getattr(cluster, name)
            if value != type(cluster).model_fields[name].default:
                raise ConfigError(f"cluster.{name}", str(value), "a trainer with GPUs of its own never sleeps",
                               "remove it, or set cluster.placement: colocated")  # fmt: skip
        return
    if cluster.asleep_directory is not None and cluster.asleep_in == "memory":
        raise ConfigError("cluster.asleep_directory", str(cluster.asleep_directory),
                       "nothing is put on a disk with cluster.asleep_in: memory", "remove one of the two")  # fmt: skip
    _check_task(config)
    _check_engines(config)
    _check_settings(config)


def _check_task(config: RunConfig) -> None:
    if config.train.task == "sft":
        raise _placement("supervised training has no engines that could share GPUs", "remove it")
    if config.lora.on:
        raise _placement("a trainer of adapters (lora.rank) was never put to sleep", "set separate, or remove lora")
    _check_turns(config)
    weights = config.weights
    if weights.carrier in BY_COLLECTIVE and config.transport != "shm":
        raise ConfigError(
            "weights.delta_over" if weights.transport == "delta" else "weights.transport", weights.carrier,
            "trainer rank and engine would be two members of one process group on one GPU, which NCCL refuses",
            f"set handles or shm on one machine, checkpoint_engine, or {SHARED_DIRECTORY}",
        )  # fmt: skip
    if weights.transport == "mooncake":
        raise ConfigError(
            "weights.transport", weights.transport,
            "a sender keeps a bucket registered on its GPU between syncs, where engines need all of it",
            f"set handles or shm on one machine, checkpoint_engine, or {SHARED_DIRECTORY}",
        )  # fmt: skip


def _check_handed(config: RunConfig) -> None:
    """`checkpoint_engine`: every rank of the trainer gives weights to the engine's rank on its own GPU."""
    engine, ranks = config.sglang, config.layout.world_size
    if config.weights.transport != "checkpoint_engine" or config.train.task == "sft":
        return

    def refused(rule: str, way_out: str) -> ConfigError:
        return ConfigError("weights.transport", "checkpoint_engine", rule, way_out)

    if not config.colocated:
        raise refused(
            "a trainer rank hands weights to the engine on its own GPU, and engines have others here "
            "(cluster.placement: separate)", "set auto, broadcast or relay, or cluster.placement: colocated",
        )  # fmt: skip
    if config.cluster.device == "cpu":
        raise refused("it hands out handles of a GPU's memory (cluster.device: cpu)", "set shm or disk")
    if engine.urls:
        raise refused(f"engines are attached to ({engine.urls[0]}), and not on the trainer's GPUs",
                      "remove sglang.urls, or set auto with cluster.placement: separate")  # fmt: skip
    if engine.drafts:
        raise refused(
            "an engine with a draft model (sglang.speculative_algorithm) asks for the handle on its GPU twice",
            f"remove the draft model, or set handles or shm on one machine, or {SHARED_DIRECTORY}",
        )
    if engine.gpus != ranks:
        raise ConfigError(
            "sglang.num_engines", engine.num_engines,
            f"with weights.transport: checkpoint_engine every trainer rank needs an engine's rank on its GPU, and "
            f"{engine.num_engines} engines of {engine.tp_size} (sglang.tp_size) are {engine.gpus} of {ranks}",
            f"let num_engines x tp_size be {ranks}, or set handles or shm on one machine, or {SHARED_DIRECTORY}",
        )  # fmt: skip


def _check_turns(config: RunConfig) -> None:
    """What is generated for later steps is interrupted at the end of each turn, and goes on in the next."""
    rollout = config.rollout
    if rollout.max_staleness > 1:
        raise ConfigError(
            "rollout.max_staleness", rollout.max_staleness,
            "with cluster.placement: colocated nothing is generated while the trainer works; one step ahead keeps the "
            "engines full to the end of their turn, and more only makes tokens older",
            "set it to 1 or 0, or give engines GPUs of their own (cluster.placement: separate)",
        )  # fmt: skip
    if rollout.max_staleness and rollout.pause_mode != "abort":
        raise ConfigError(
            "rollout.pause_mode", rollout.pause_mode,
            "engines that give their memory to the trainer can keep no request, and with rollout.max_staleness 1 some "
            "are under way at the end of each turn", "set pause_mode abort, which is the default, or max_staleness 0",
        )  # fmt: skip


def _check_engines(config: RunConfig) -> None:
    engine, cluster, ranks = config.sglang, config.cluster, config.layout.world_size
    if engine.urls:
        raise _placement(
            f"engines are attached to ({engine.urls[0]}), and are where somebody else has started them",
            "remove sglang.urls, so that mslime launches engines on the trainer's GPUs, or set separate",
        )
    if engine.tp_size > ranks:
        raise ConfigError(
            "sglang.tp_size", engine.tp_size, f"an engine does not fit on the trainer's {ranks} GPUs",
            f"set it to {ranks} or less, or raise cluster.trainer_ranks",
        )  # fmt: skip
    taught = config.taught_gpus
    if engine.gpus > ranks - taught:
        beside = f" that the teacher's {taught} leave (teacher.placement)" if taught else ""
        raise ConfigError(
            "sglang.num_engines", engine.num_engines,
            f"{engine.num_engines} engines of {engine.tp_size} GPUs (sglang.tp_size) do not fit on the trainer's "
            f"{ranks - taught}{beside}",
            f"set it to {(ranks - taught) // engine.tp_size} or less, or raise cluster.trainer_ranks",
        )  # fmt: skip
    _check_machines("sglang", engine, cluster, ranks)


def _check_machines(section: str, engine: SGLangConfig, cluster: ClusterConfig, ranks: int) -> None:
    """Servers lie on neighbouring GPUs of the trainer, whole on a machine or on whole machines."""
    each, machine = engine.gpus_a_machine, cluster.gpus_per_node
    if cluster.device == "cpu" or ranks <= machine:
        return
    if machine % each:
        raise ConfigError(
            f"{section}.tp_size", engine.tp_size,
            f"engines lie on neighbouring GPUs of the trainer, and {each} of them do not divide the {machine} of a "
            "machine (cluster.gpus_per_node)", "choose a divisor",
        )  # fmt: skip
    if engine.nnodes > 1 and each != machine:
        raise ConfigError(
            f"{section}.nnodes", engine.nnodes,
            f"an engine has {each} of the {machine} GPUs of each machine, so that two of its parts would be on one",
            f"let it have whole machines: {section}.tp_size {engine.nnodes * machine}, or fewer nnodes",
        )  # fmt: skip


def _check_teacher(config: RunConfig) -> None:
    """Its servers are the last ones on the trainer's GPUs."""
    teacher, more, ranks = config.teacher, config.teacher.extra, config.layout.world_size

    def refused(rule: str, way_out: str) -> ConfigError:
        return ConfigError("teacher.placement", "colocated", rule, way_out)

    if not config.colocated:
        raise refused("the trainer's GPUs are shared with nobody (cluster.placement: separate)",
                      "set cluster.placement: colocated, or remove it")  # fmt: skip
    if not teacher.launched:
        raise refused("mslime launches no teacher, so it cannot let one sleep", "set teacher.path, or remove it")
    if config.rollout.managers > 1:
        raise refused(f"each of {config.rollout.managers} rollout managers asks the teacher by itself, and all would "
                      "have to stop before it sleeps", "set rollout.managers: 1, or remove it")  # fmt: skip
    if teacher.gpus >= ranks or ranks % teacher.tp_size:
        raise ConfigError(
            "teacher.tp_size", teacher.tp_size,
            f"{teacher.num_engines} servers (teacher.num_engines) must leave some of the trainer's {ranks} GPUs to "
            "engines, and the size of one divide them", "lower it, or raise cluster.trainer_ranks",
        )  # fmt: skip
    if more.get("enable_memory_saver") is False or more.get("enable_weights_cpu_backup") is False:
        raise refused("it gives its memory back through SGLang's memory saver, and keeps its weights by its backup",
                      "remove teacher.enable_memory_saver and teacher.enable_weights_cpu_backup")  # fmt: skip
    _check_machines("teacher", teacher, config.cluster, ranks)


def _check_settings(config: RunConfig) -> None:
    megatron, sglang = config.megatron.extra, config.sglang.extra
    for name, why in _FIXED_ADDRESSES.items():
        if megatron.get(name):
            raise ConfigError(f"megatron.{name}", megatron[name], why, "remove it, or set cluster.placement: separate")
    if megatron.get("cuda_graph_impl", "none") != "none":
        raise ConfigError(
            "megatron.cuda_graph_impl", megatron["cuda_graph_impl"], _FIXED_ADDRESSES["enable_cuda_graph"],
            "remove it, or set cluster.placement: separate",
        )  # fmt: skip
    if sglang.get("enable_memory_saver") is False:
        raise ConfigError("sglang.enable_memory_saver", False, "an engine gives its memory back through it",
                          "remove it (mslime sets it on GPUs)")  # fmt: skip
    if (mode := sglang.get("weight_cache_mode", "off")) != "off":
        raise ConfigError("sglang.weight_cache_mode", mode, "weights that a daemon shares are not given back",
                          "remove it")  # fmt: skip


def _placement(rule: str, way_out: str) -> ConfigError:
    return ConfigError("cluster.placement", "colocated", rule, way_out)
