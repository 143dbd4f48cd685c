"""The transports that mslime brings along, and what others need to know of each without importing it.

A transport's name stands in this table and in its own module only: settings, planner and senders read its traits. A new
transport is a module in `weights`, a row here, and what the engine plug-in needs for it. A package adds one by an entry
point of the group `mslime.transports`: its Traits.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from mslime.config.errors import ConfigError
from mslime.config.plugins import found, load

AUTO = "auto"
"""The transport is chosen when trainer ranks connect with the engines (`choose`)."""
FALLBACK = "broadcast"
"""What works with every engine."""

DeltaOver = Literal["disk", "broadcast"]
"""By which transports changes can be sent."""
MooncakeOver = Literal["rdma", "tcp"]
"""What Mooncake's transfer engine reads memory over."""

Way = Literal["network", "adapters", "gpus", "host", "directory"]
"""What a sync's least time depends on: the network of one sender, the adapters of all engines, links between GPUs, the
memory of one machine, or a directory that all machines share."""


@dataclass(frozen=True)
class Traits:
    """What holds for one transport. The defaults are those of a user's own.

    Attributes:
        made_by: `module:function` or class that makes it for a sender.
        about: how buckets reach the engines, for the setting's description.
        settings: of the section `weights`, which no other transport reads.
        needs_plugin: of engines: mslime's plug-in.
        joins_engines: trainer rank and engine are members of one process group, which NCCL refuses on one GPU.
        one_host: trainer and engines share memory of one machine.
        on_engines_gpus: every trainer rank gives weights to the engine's rank on its own GPU.
        passes_on: an engine's ranks pass buckets on to each other.
        sends_changes: of each bucket only what changed, by another transport (`weights.delta_over`).
        uses_directory: writes files into `weights.directory`.
        gpu_bucket: a sender's GPU holds one bucket more, which engines read.
        keeps_gpu_bucket: also between syncs.
        host_buckets: largest buckets that a sender keeps in host memory.
        host_copies, pinned_copies: of all that a sender sends, in host memory.
        way: None: not known.
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


BUILT_IN: Mapping[str, Traits] = {
    "broadcast": Traits(
        "mslime.weights.broadcast:BroadcastTransport", "to all engine GPUs, bucket by bucket",
        joins_engines=True, way="network",
    ),
    "relay": Traits(
        "mslime.weights.relay:RelayTransport",
        "to one GPU of each engine, which passes buckets on",
        needs_plugin=True, joins_engines=True, passes_on=True,
    ),
    "shm": Traits(
        "mslime.weights.memory:MemoryTransport", "shared memory of a host",
        needs_plugin=True, one_host=True, host_buckets=1, way="host",
    ),
    "handles": Traits(
        "mslime.weights.memory:device_memory", "GPU memory, by CUDA's handles",
        needs_plugin=True, one_host=True, gpu_bucket=True, way="gpus",
    ),
    "disk": Traits(
        "mslime.weights.files:DiskTransport", "files in weights.directory",
        needs_plugin=True, uses_directory=True, way="directory",
    ),
    "delta": Traits(
        "mslime.weights.delta:DeltaTransport",
        "changed elements only (weights.delta_over)",
        settings=("delta_over",), needs_plugin=True, sends_changes=True, pinned_copies=1,
    ),
}  # fmt: skip
"""By the name that `weights.transport` gives them."""


def transport_names() -> tuple[str, ...]:
    """What `weights.transport` can be, besides a user's own `module:function`."""
    return (AUTO, *BUILT_IN, *found("mslime.transports"))


def transports() -> dict[str, Traits]:
    """All transports by name, but for those of packages that cannot be imported: a run that names none of them needs
    none of them."""
    known = dict(BUILT_IN)
    for name in found("mslime.transports"):
        with suppress(ConfigError):
            known[name] = traits_of(name)
    return known


def traits_of(transport: str) -> Traits:
    """Traits of a transport; those of a user's own (`module:function`) and of `auto` are the defaults.

    Raises:
        ConfigError: the package that adds it cannot be imported.
    """
    if transport in BUILT_IN:
        return BUILT_IN[transport]
    known = transport in found("mslime.transports")
    return load("mslime.transports", transport, "weights.transport") if known else Traits()


def owner_of(setting: str) -> str:
    """The transport that alone reads a setting of the section `weights`."""
    return next(name for name, traits in transports().items() if setting in traits.settings)


def choose(*, one_rank_each: bool, share_cpus: bool = False) -> str:
    """What `auto` comes to.

    Args:
        one_rank_each: each engine is one rank that has nobody to pass a bucket on to, and has the plug-in. With `relay`
            it loads a bucket while the next one arrives, and takes part in as many process groups as with `broadcast`,
            with one other bucket in memory.
        share_cpus: trainer and engines take turns on the CPUs of one machine: one process group may not hold both.
    """
    if share_cpus:
        return "shm"
    return "relay" if one_rank_each else FALLBACK


def for_shared_gpus(machines: int) -> str:
    """A transport for engines that take turns with the trainer on the same GPUs."""
    return "shm" if machines == 1 else "delta"
