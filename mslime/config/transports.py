"""Table of the built-in transports, with their traits, which is read without importing them.

A transport's name is only in this table and in its own module: settings, planner and senders read its traits. A new
transport is a module in `weights`, a row here, and its part of the engine plug-in. A package adds one by an entry point
of the group `mslime.transports`: its Traits.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from mslime.config.errors import ConfigError
from mslime.config.plugins import found, load

AUTO = "auto"
"""The transport is chosen when trainer ranks connect to the engines (`choose`)."""
FALLBACK = "broadcast"
"""Transport that works with every engine."""

DeltaOver = Literal["disk", "broadcast"]
"""Transports that can carry changes."""
MooncakeOver = Literal["rdma", "tcp"]
"""Protocols over which Mooncake's transfer engine reads memory."""

Way = Literal["network", "adapters", "gpus", "host", "directory"]
"""Bottleneck of a sync: the network of one sender, the adapters of all engines, links between GPUs, the memory of one
machine, or a directory that all machines share.
"""


@dataclass(frozen=True)
class TransportTraits:
    """Properties of one transport. The defaults are those of a user's own.

    Attributes:
        made_by: `module:function` or class that makes it for a sender.
        about: how buckets reach the engines, for the setting's description.
        settings: of the section `weights`, which no other transport reads.
        needs_plugin: engines need mslime's plug-in.
        joins_engines: trainer rank and engine are members of one process group, which NCCL does not allow on one GPU.
        one_host: trainer and engines share memory of one machine.
        on_engines_gpus: every trainer rank sends weights to the engine's rank on its own GPU.
        passes_on: an engine's ranks pass buckets on to each other.
        sends_changes: only changed elements of each bucket, by another transport (`weights.delta_over`).
        uses_directory: writes files into `weights.directory`.
        gpu_bucket: a sender's GPU holds one bucket more, which engines read.
        keeps_gpu_bucket: also between syncs.
        host_buckets: largest buckets that a sender keeps in host memory.
        host_copies, pinned_copies: copies in host memory of everything that a sender sends.
        way: bottleneck of a sync; None: unknown.
    """

    made_by: str = ""
    about: str = ""
    settings: tuple[str, ...] = ()
    needs_plugin: bool = False
    joins_engines: bool = False
    one_host: bool = False
    on_engines_gpus: bool = False
    passes_on: bool = False
    sends_changes: bool = False
    uses_directory: bool = False
    gpu_bucket: bool = False
    keeps_gpu_bucket: bool = False
    host_buckets: int = 0
    host_copies: int = 0
    pinned_copies: int = 0
    way: Way | None = None


BUILT_IN: Mapping[str, TransportTraits] = {
    "broadcast": TransportTraits(
        "mslime.weights.broadcast:BroadcastTransport", "to all engine GPUs, bucket by bucket",
        joins_engines=True, way="network",
    ),
    "relay": TransportTraits(
        "mslime.weights.relay:RelayTransport",
        "to one GPU of each engine, which passes buckets on",
        needs_plugin=True, joins_engines=True, passes_on=True,
    ),
    "shm": TransportTraits(
        "mslime.weights.memory:MemoryTransport", "shared memory of a host",
        needs_plugin=True, one_host=True, host_buckets=1, way="host",
    ),
    "handles": TransportTraits(
        "mslime.weights.memory:device_memory", "GPU memory, through CUDA IPC handles",
        needs_plugin=True, one_host=True, gpu_bucket=True, way="gpus",
    ),
    "disk": TransportTraits(
        "mslime.weights.files:DiskTransport", "files in weights.directory",
        needs_plugin=True, uses_directory=True, way="directory",
    ),
    "delta": TransportTraits(
        "mslime.weights.delta:DeltaTransport",
        "changed elements only (weights.delta_over)",
        settings=("delta_over",), needs_plugin=True, sends_changes=True, pinned_copies=1,
    ),
}  # fmt: skip
"""Transports by their names in `weights.transport`."""


def transport_names() -> tuple[str, ...]:
    """Values of `weights.transport`, besides a user's own `module:function`."""
    return (AUTO, *BUILT_IN, *found("mslime.transports"))


def transports() -> dict[str, TransportTraits]:
    """All transports by name, except those of packages that cannot be imported, which matter only to runs that use
    them.
    """
    known = dict(BUILT_IN)
    for name in found("mslime.transports"):
        with suppress(ConfigError):
            known[name] = traits_of(name)
    return known


def traits_of(transport: str) -> TransportTraits:
    """Traits of a transport; defaults for a user's own (`module:function`) and for `auto`.

    Raises:
        ConfigError: the package that adds it cannot be imported.
    """
    if transport in BUILT_IN:
        return BUILT_IN[transport]
    known = transport in found("mslime.transports")
    return load("mslime.transports", transport, "weights.transport") if known else TransportTraits()


def owner_of(setting: str) -> str:
    """The only transport that reads a setting of the section `weights`."""
    return next(name for name, traits in transports().items() if setting in traits.settings)


def choose(*, one_rank_each: bool, share_cpus: bool = False) -> str:
    """Transport that `auto` resolves to.

    Args:
        one_rank_each: each engine is one rank, with the plug-in and without other ranks to pass buckets to. With
            `relay` it loads a bucket while the next one arrives. It joins as many process groups as with `broadcast`,
            and holds one bucket more in memory.
        share_cpus: trainer and engines take turns on the CPUs of one machine: one process group may not hold both.
    """
    if share_cpus:
        return "shm"
    return "relay" if one_rank_each else FALLBACK


def for_shared_gpus(machines: int) -> str:
    """Transport for engines that take turns with the trainer on the same GPUs."""
    return "shm" if machines == 1 else "delta"
