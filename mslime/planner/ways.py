"""The ways of `broadcast`, `handles`, `shm`, `disk`, `delta` and `mooncake`, by what each moves over which link.

Each follows its transport in `weights/` and what an engine does with a bucket in `backends/sglang/files.py` and
`changes.py`. Engines are taken to read the same bucket at the same time, which is the worst of the orders that they may
be in. Only that of `broadcast` was compared with syncs, over gloo (`benchmarks/weight_sync.py --predict`).
"""

from __future__ import annotations

from mslime.config.schema import RunConfig
from mslime.planner.filling import Rates
from mslime.planner.sync import Receiving, Way, broadcast_way, near_ranks

CHANGED = 0.05
"""Of the weights' bytes, what `delta` sends: an assumption above what docs/weight_sync.md measured."""
COMPARED = 2.5
"""Copies' worth of reading that finding changes takes a sender: a bucket and the bits of the version before are
compared, and the bucket is summed up."""
SUMMED = 1.0
"""Likewise, summing up what an engine held and what it holds now."""


def way_of(config: RunConfig, rates: Rates, receiving: Receiving) -> Way | None:
    """The way of the transport that a run chose; None for `relay`, whose schedule is another, and for a user's."""
    weights, per_node = config.weights, config.cluster.gpus_per_node
    gpus = receiving.engines * receiving.ranks
    machines = -(-gpus // per_node)
    match weights.transport:
        case "broadcast":
            return broadcast_way(rates)
        case "handles":
            return _handles(rates, gpus - 1 if config.colocated else gpus)
        case "shm":
            return Way(1 / rates.host, prepare=1 / rates.host)
        case "disk":
            return _disk(rates, machines)
        case "delta":
            return _delta(rates, receiving, machines if weights.delta_over == "disk" else None)
        case "mooncake":
            return _mooncake(rates, receiving, near_ranks(receiving.ranks, per_node))
        case _:
            return None


def _handles(rates: Rates, readers: int) -> Way:
    """Copied into memory that is shared; `readers` GPUs take it out of the sender's at the same time, over NVLink."""
    return Way(max(1 / rates.copy, readers / rates.nvlink), prepare=1 / rates.copy)


def _disk(rates: Rates, machines: int) -> Way:
    """To the host, into the directory, out of it once for each engine machine, whose GPUs take it from the host."""
    return Way(machines / rates.directory + 1 / rates.host, prepare=1 / rates.host, write=1 / rates.directory)


def _delta(rates: Rates, receiving: Receiving, machines: int | None) -> Way:
    """The version before comes from the host's memory to be compared; an engine takes its own back to put the changes
    in.

    Args:
        machines: that read changes from files; None: they are broadcast.
    """
    over = _disk(rates, machines) if machines is not None else broadcast_way(rates)
    return Way(
        CHANGED * over.move,
        prepare=1 / rates.host + COMPARED / rates.copy,
        write=CHANGED * over.write,
        unpack=(receiving.share + SUMMED) / rates.copy,
        turns=over.turns,
    )


def _mooncake(rates: Rates, receiving: Receiving, near: int) -> Way:
    """Every engine reads all of it over the sender's adapter, a rank its part, and they give it to each other."""
    passed_on = (near - 1) / near / rates.nvlink
    return Way(receiving.engines / rates.network + passed_on, prepare=1 / rates.copy)
