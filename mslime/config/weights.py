"""Section `weights` of a run's settings: transfer of the trainer's weights to the engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from mslime.config.base import Rule, Section, Task, Verify, check_choice, refuse_first
from mslime.config.cluster import ClusterConfig, PlacementClaim, count_gpus, describe_gpus
from mslime.config.engines import SGLangConfig
from mslime.config.transports import AUTO, BUILT_IN, DeltaOver, MooncakeOver, traits_of, transport_names


class WeightsConfig(Section):
    """Weight sync from the trainer to the engines: transport, buckets, checks."""

    bucket_mib: float = Field(
        default=512, gt=0, description="Size of a bucket of the weight sync, in MiB; two are held at once."
    )
    senders: int = Field(
        default=8,
        ge=1,
        le=65536,
        description="Maximum trainer ranks that send. A stage has one for every expert-parallel rank or block of "
        "them. Every engine GPU holds a connection to each.",
    )
    verify: Verify = Field(
        default="probe",
        description="Checks after a sync. first: all bits, in the first two syncs. probe: the same, and log-probs "
        "(with r3 also routes) of a fixed text after each sync. always: both after each. never: none "
        "(docs/weight_sync.md#what-is-checked).",
    )
    probe_tolerance: float | None = Field(
        default=None,
        gt=0,
        description="Maximum median difference of the probe's log-probs, in nats. Default: 0.0005 if trainer and "
        "engines hold float32, 0.5 for quantised engines, else 0.25.",
    )
    loader: Literal["recorded", "model"] = Field(
        default="recorded",
        description="How launched engines load a bucket. recorded: repeat the copies that the model's loader made the "
        "first time. model: run that loader each time.",
    )
    transport: str = Field(
        default=AUTO,
        description=f"How buckets reach the engines (docs/weight_sync.md#which-transport). {AUTO}: relay if all "
        "engines have one GPU, mslime's plug-in and no draft model, else broadcast; on shared CPUs shm. "
        + " ".join(f"{name}: {traits.about}." for name, traits in BUILT_IN.items())
        + " mooncake: by RDMA. checkpoint_engine: for shared GPUs over several hosts. Or your own `module:function`.",
    )
    delta_over: DeltaOver = Field(
        default="disk",
        description="delta: how changes reach the engines. disk: files in weights.directory. broadcast: the network, "
        "without a shared file system.",
    )
    mooncake_over: MooncakeOver = Field(
        default="rdma",
        description="mooncake: rdma: the adapters that Mooncake finds, else TCP. tcp: always TCP, without any checks "
        "of the peer: only in a private network.",
    )
    directory: Path | None = Field(
        default=None,
        description="disk and delta: weights go to DIRECTORY/NAME of the run, on a file system that trainer and "
        "engines share, with room for all weights twice. null: RUN/weights.",
    )

    @property
    def carrier(self) -> str:
        """Transport that carries buckets: `transport`, or the one that sends changes."""
        return self.carrier_of(self.transport)

    def carrier_of(self, transport: str) -> str:
        """The same for another transport, to which `auto` was resolved."""
        return self.delta_over if traits_of(transport).sends_changes else transport

    @property
    def own_settings(self) -> dict[str, str]:
        """Settings that only the transport reads, by name."""
        return {name: str(getattr(self, name)) for name in traits_of(self.transport).settings}

    @model_validator(mode="after")
    def _check_names(self) -> WeightsConfig:
        check_choice("weights.transport", self.transport, transport_names())
        return self


SHARED_DIRECTORY = "disk or delta with a weights.directory that all machines share"


def check_weights(
    weights: WeightsConfig,
    engine: SGLangConfig,
    cluster: ClusterConfig,
    wanted: Sequence[PlacementClaim],
    *,
    task: Task,
    ranks: int,
    transport: str,
    compares: bool,
) -> None:
    """Reject transfers to the engines that the placement, the machines or the engines do not support.

    Args:
        wanted: GPUs of the run.
        ranks: of the trainer.
        transport: `weights.transport`, with `auto` resolved.
        compares: engines may return checksums of their weights.

    Raises:
        ConfigError: the first broken rule.
    """
    traits, rl = traits_of(transport), task == "rl"
    if traits.on_engines_gpus and rl:
        refuse_first("", _on_engines_gpus(transport, engine, cluster, ranks))
    if cluster.colocated:
        own = f"set handles or shm on one machine, checkpoint_engine, or {SHARED_DIRECTORY}"
        refuse_first("weights", [
            (traits_of(weights.carrier_of(transport)).joins_engines,
             "delta_over" if traits.sends_changes else "transport", weights.carrier,
             "needs a process group of trainer and engine, and NCCL does not allow two of its ranks on one GPU", own),
            (traits.keeps_gpu_bucket, "transport", weights.transport,
             "a sender keeps a bucket registered on its GPU between syncs, but engines need all GPU memory then", own),
        ])  # fmt: skip
    one_machine = cluster.device == "cpu" or count_gpus(wanted) <= cluster.gpus_per_node
    others = "disk or delta" if cluster.colocated else "broadcast, or disk or delta"
    refuse_first("weights", [
        (traits_of(weights.transport).one_host and not one_machine, "transport", weights.transport,
         f"the run needs {describe_gpus(wanted)}, one machine has {cluster.gpus_per_node} (cluster.gpus_per_node), and "
         "machines share no memory", f"set {others} with a weights.directory that all machines share"),
        (weights.verify in ("first", "always") and rl and not compares, "verify", weights.verify,
         "engines compute checksums from recorded copies, and weights.loader is model",
         "set weights.verify: probe, or leave weights.loader alone"),
    ])  # fmt: skip


def _on_engines_gpus(transport: str, engine: SGLangConfig, cluster: ClusterConfig, ranks: int) -> Iterator[Rule]:
    """Settings with which trainer ranks cannot send weights to the engine's rank on the same GPU."""
    here = ("weights.transport", transport)
    yield (
        not cluster.colocated, *here, "trainer ranks pass weights to the engine on the same GPU, but engines have "
        "their own GPUs (cluster.placement: separate)", "set auto, broadcast or relay, or cluster.placement: colocated",
    )  # fmt: skip
    yield (
        cluster.device == "cpu", *here, "it needs GPU memory, and cluster.device is cpu",
        "set shm or disk",
    )  # fmt: skip
    yield (
        engine.urls, *here, f"attached engines ({next(iter(engine.urls), '')}) are not on the trainer's GPUs",
        "remove sglang.urls, or set auto with cluster.placement: separate",
    )  # fmt: skip
    yield (
        engine.drafts, *here,
        "an engine with a draft model (sglang.speculative_algorithm) would open the handle on its GPU twice",
        f"remove the draft model, or set handles or shm on one machine, or {SHARED_DIRECTORY}",
    )  # fmt: skip
    yield (
        engine.gpus != ranks, "sglang.num_engines", engine.num_engines,
        f"with weights.transport: {transport} every trainer rank needs an engine's rank on its GPU, and "
        f"{engine.num_engines} engines of {engine.tp_size} GPUs (sglang.tp_size) cover {engine.gpus} of {ranks}",
        f"set num_engines x tp_size to {ranks}, or set handles or shm on one machine, or {SHARED_DIRECTORY}",
    )  # fmt: skip
