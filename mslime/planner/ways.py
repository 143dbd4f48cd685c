"""The ways of `broadcast`, `handles`, `shm`, `disk`, `delta` and `mooncake`, by what each moves over which link.

Each follows its transport in `weights/` and what an engine does with a bucket in `backends/sglang/files.py` and
`changes.py`. Engines are taken to read the same bucket at the same time, which is the worst of the orders that they may
be in. On CPUs all were compared with syncs (`benchmarks/weight_sync.py --predict`,
`benchmarks/predict_transports.py`), and `mooncake` takes up to 1.4 times as long, over TCP; none was on GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from mslime.config.cluster import ClusterConfig
from mslime.config.weights import WeightsConfig
from mslime.planner.filling import Rates
from mslime.planner.sync import Receiving, Way, broadcast_way, near_ranks

CHANGED = 0.05
"""Of the weights' bytes, what `delta` sends: an assumption above what docs/weight_sync.md measured."""
COMPARED = 2.5
"""Copies' worth of reading that finding changes takes a sender: a bucket and the bits of the version before are
compared, and the bucket is summed up."""
SUMMED = 1.0
"""Likewise, summing up what an engine held and what it holds now."""

NOTED = 0.4e-9
"""Seconds for each byte of changes that a sender takes to note them in what it knows of its engines: 2.5 ns an element
of bfloat16, by one thread of a CPU."""


def way_of(
    transport: str, weights: WeightsConfig, cluster: ClusterConfig, rates: Rates, receiving: Receiving
) -> Way | None:
    """The way of a transport (`RunConfig.transport`); None for `relay`, whose schedule is another, and a user's."""
    per_node = cluster.gpus_per_node
    gpus = receiving.engines * receiving.ranks
    machines = -(-gpus // per_node)
    match transport:
        case "broadcast":
            return broadcast_way(rates)
        case "handles":
            return handles_way(rates, gpus - 1 if cluster.colocated else gpus)
        case "shm":
            return shm_way(rates)
        case "disk":
            return disk_way(rates, machines)
        case "delta":
            over_files = machines if weights.delta_over == "disk" else None
            return delta_way(rates, over_files, changing(rates, receiving))
        case "mooncake":
            return mooncake_way(rates, receiving, near_ranks(receiving.ranks, per_node))
        case _:
            return None


def shm_way(rates: Rates) -> Way:
    """Through the host's memory."""
    return Way(1 / rates.host, prepare=1 / rates.host)


def handles_way(rates: Rates, readers: int) -> Way:
    """Copied into memory that is shared; `readers` GPUs take it out of the sender's at the same time, over NVLink.

    The memory is new in every sync, and engines are asked to close it; what making and opening it takes is not known of
    CUDA's.
    """
    move = max(1 / rates.copy, readers / rates.nvlink)
    return Way(move, prepare=1 / rates.copy, closing=rates.request)


def disk_way(rates: Rates, machines: int) -> Way:
    """To the host, into the directory, out of it once for each engine machine, whose GPUs take it from the host."""
    return Way(machines / rates.reading + 1 / rates.host, prepare=1 / rates.host, write=1 / rates.directory)


@dataclass(frozen=True)
class Changing:
    """What `delta` does with a bucket: for each of its bytes, seconds but for `sent`.

    Attributes:
        sent: bytes that go.
        compare: its sender finds what changed.
        keep: its sender notes, in the host's memory, what engines hold now.
        restore: an engine takes back what it holds, puts the changes in and checks them, before it loads the bucket.
    """

    sent: float
    compare: float
    keep: float
    restore: float


def changing(rates: Rates, receiving: Receiving) -> Changing:
    """As GPUs do it. The version before comes from the host's memory to be compared, and is brought up to date
    there."""
    compare, keep = 1 / rates.host + COMPARED / rates.copy, CHANGED * (1 / rates.host + NOTED)
    return Changing(CHANGED, compare, keep, (receiving.share + SUMMED) / rates.copy)


def delta_way(rates: Rates, machines: int | None, changes: Changing) -> Way:
    """Changes, found by all senders at the same time.

    Args:
        machines: that read changes from files; None: they are broadcast.
    """
    over = disk_way(rates, machines) if machines is not None else broadcast_way(rates)
    return Way(
        changes.sent * over.move,
        prepare=changes.compare,
        write=changes.sent * over.write,
        unpack=changes.restore,
        keep=changes.keep,
        turns=over.turns,
    )


def mooncake_way(rates: Rates, receiving: Receiving, near: int) -> Way:
    """Every engine reads all of it over the sender's adapter, a rank its part, and they give it to each other."""
    passed_on = (near - 1) / near / rates.nvlink
    return Way(receiving.engines / rates.network + passed_on, prepare=1 / rates.copy)
