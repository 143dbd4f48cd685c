"""The section `weights` of a run's settings: how the trainer's weights get to the engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from mslime.config.base import Section
from mslime.config.choices import Task, Verify, check_choice
from mslime.config.cluster import Claim, ClusterConfig, count_gpus, describe_gpus
from mslime.config.engines import SGLangConfig
from mslime.config.errors import ConfigError
from mslime.config.transports import AUTO, TRAITS, TRANSPORT_NAMES, DeltaOver, MooncakeOver, traits_of


class WeightsConfig(Section):
    """Trainer to engine."""

    bucket_mib: float = Field(
        default=512, gt=0, description="Size of a bucket of the weight sync; two are held at once."
    )
    senders: int = Field(
        default=8,
        ge=1,
        le=65536,
        description="Trainer ranks that send, at most. A stage has one for every expert-parallel rank, or block, "
        "and at least one. Every engine GPU holds a connection to each.",
    )
    verify: Verify = Field(
        default="probe",
        description="What is checked after a sync. first: every bit of what engines hold in the first sync, and in "
        "the second, which is the first to use what weights.loader recorded. probe: the same, where an engine can say "
        "what it holds, and after each sync what engines and trainer say of a fixed text: log-probs, and routes with "
        "train.replay r3. always: bits and text in each.",
    )
    probe_tolerance: float | None = Field(
        default=None,
        gt=0,
        description="Nats by which the log-probs of half of the fixed text's tokens may be off. Default: 0.0005 where "
        "trainer and engines hold float32, 0.5 where engines hold quantised weights, else 0.25.",
    )
    loader: Literal["recorded", "model"] = Field(
        default="recorded",
        description="How engines that mslime starts load a bucket. recorded: by the copies that the model's own loader "
        "made of it the first time, wherever it made copies only. model: by that loader each time.",
    )
    transport: str = Field(
        default=AUTO,
        description=f"How buckets reach the engines: {AUTO}, by relay where each engine has one GPU, no draft model, "
        "and mslime's plug-in (those that it starts have it), else by broadcast, and by shm where trainer and engines "
        "take turns on the CPUs of one machine; "
        + "; ".join(f"{name}, {traits.about}" for name, traits in TRAITS.items())
        + "; or your own as module:function.",
    )
    delta_over: DeltaOver = Field(
        default="disk",
        description="delta: how changes reach the engines. disk: through files in weights.directory. broadcast: over "
        "the network, to engines that share no file system with the trainer.",
    )
    mooncake_over: MooncakeOver = Field(
        default="rdma",
        description="mooncake: what memory is read over. rdma: adapters that Mooncake finds, or TCP where it finds "
        "none. tcp: TCP in any case, between whose ends nothing is checked: for a network that nobody else is on.",
    )
    directory: Path | None = Field(
        default=None,
        description="disk and delta: senders write weights to DIRECTORY/NAME of the run, on a file system that trainer "
        "and engines share, and that holds all weights twice. None: to RUN/weights.",
    )

    @property
    def carrier(self) -> str:
        """By what buckets go: the transport, or what changes are sent over."""
        return self.delta_over if traits_of(self.transport).sends_changes else self.transport

    @property
    def own_settings(self) -> dict[str, str]:
        """Those that the transport alone reads, by name."""
        return {name: str(getattr(self, name)) for name in traits_of(self.transport).settings}

    @model_validator(mode="after")
    def _check_names(self) -> WeightsConfig:
        check_choice("weights.transport", self.transport, TRANSPORT_NAMES)
        return self


SHARED_DIRECTORY = "disk or delta with a weights.directory that all machines share"


def check_weights(
    weights: WeightsConfig,
    engine: SGLangConfig,
    cluster: ClusterConfig,
    wanted: Sequence[Claim],
    *,
    task: Task,
    ranks: int,
    transport: str,
    compares: bool,
) -> None:
    """Refuse ways to the engines that the placement, the machines or the engines rule out.

    Args:
        wanted: GPUs of the run.
        ranks: of the trainer.
        transport: `weights.transport`, `auto` decided.
        compares: engines may be able to say what they hold.

    Raises:
        ConfigError: the first broken rule.
    """
    if traits_of(transport).on_engines_gpus and task == "rl":
        _check_on_engines_gpus(transport, engine, cluster, ranks)
    if cluster.colocated:
        _check_colocated(weights, transport)
    _check_shared_memory(weights, cluster, wanted)
    if weights.verify in ("first", "always") and task == "rl" and not compares:
        raise ConfigError(
            "weights.verify", weights.verify,
            "engines say what they hold by what they recorded, and weights.loader is model",
            "set weights.verify: probe, or leave weights.loader alone",
        )  # fmt: skip


def _check_on_engines_gpus(transport: str, engine: SGLangConfig, cluster: ClusterConfig, ranks: int) -> None:
    """Every rank of the trainer gives weights to the engine's rank on its own GPU."""

    def refused(rule: str, way_out: str) -> ConfigError:
        return ConfigError("weights.transport", transport, rule, way_out)

    if not cluster.colocated:
        raise refused(
            "a trainer rank hands weights to the engine on its own GPU, and engines have others here "
            "(cluster.placement: separate)", "set auto, broadcast or relay, or cluster.placement: colocated",
        )  # fmt: skip
    if cluster.device == "cpu":
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
            f"with weights.transport: {transport} every trainer rank needs an engine's rank on its GPU, and "
            f"{engine.num_engines} engines of {engine.tp_size} (sglang.tp_size) are {engine.gpus} of {ranks}",
            f"let num_engines x tp_size be {ranks}, or set handles or shm on one machine, or {SHARED_DIRECTORY}",
        )  # fmt: skip


def _check_colocated(weights: WeightsConfig, transport: str) -> None:
    """Trainer and engines take turns on the same GPUs."""
    carrier = weights.delta_over if traits_of(transport).sends_changes else transport
    if traits_of(carrier).joins_engines:
        raise ConfigError(
            "weights.delta_over" if traits_of(transport).sends_changes else "weights.transport", weights.carrier,
            "trainer rank and engine would be two members of one process group on one GPU, which NCCL refuses",
            f"set handles or shm on one machine, checkpoint_engine, or {SHARED_DIRECTORY}",
        )  # fmt: skip
    if traits_of(transport).keeps_gpu_bucket:
        raise ConfigError(
            "weights.transport", weights.transport,
            "a sender keeps a bucket registered on its GPU between syncs, where engines need all of it",
            f"set handles or shm on one machine, checkpoint_engine, or {SHARED_DIRECTORY}",
        )  # fmt: skip


def _check_shared_memory(weights: WeightsConfig, cluster: ClusterConfig, wanted: Sequence[Claim]) -> None:
    if (
        not traits_of(weights.transport).one_host
        or cluster.device == "cpu"
        or count_gpus(wanted) <= cluster.gpus_per_node
    ):
        return
    others = "disk or delta" if cluster.colocated else "broadcast, or disk or delta"
    raise ConfigError(
        "weights.transport",
        weights.transport,
        f"the run needs {describe_gpus(wanted)}, one machine has {cluster.gpus_per_node} (cluster.gpus_per_node), and "
        "machines share no memory",
        f"set {others} with a weights.directory that all machines share",
    )
