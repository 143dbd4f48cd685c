"""The section `weights` of a run's settings: how the trainer's weights get to the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from mslime.config.base import Section
from mslime.config.choices import AUTO, TRANSPORT_NAMES, MooncakeOver, Verify, check_choice


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
        description="How buckets reach the engines: auto, by relay where each engine has one GPU, no draft model, and "
        "mslime's plug-in (those that it starts have it), else by broadcast, and by shm where trainer and engines take "
        "turns on the CPUs of one machine; broadcast, one after the other to all "
        "engine GPUs; relay, to one GPU of each engine from each sender, all at once, which passes them on; shm, "
        "through memory that a sender shares with engines on its machine; handles, likewise, but through the GPUs' own "
        "memory, by CUDA's handles; disk, through files in weights.directory; delta, only what changed, through such "
        "files or by broadcasts (weights.delta_over); mooncake, out of a sender's memory by Mooncake's transfer engine "
        "(the extra mooncake); checkpoint_engine, for engines on the trainer's GPUs, from rank to rank of the trainer "
        "and then within each GPU (the extra checkpoint-engine); or your own as module:function.",
    )
    delta_over: Literal["disk", "broadcast"] = Field(
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
        """By what buckets go: the transport, or what `delta` goes over."""
        return self.delta_over if self.transport == "delta" else self.transport

    @model_validator(mode="after")
    def _check_names(self) -> WeightsConfig:
        check_choice("weights.transport", self.transport, TRANSPORT_NAMES)
        return self
