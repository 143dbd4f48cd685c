"""Whole weight syncs in which a share of the elements has changed: `delta` against `broadcast`, into an SGLang server.

    python benchmarks/delta_sync.py                       # 0.1%, 1%, 5% and 100% of the elements, TP1 EP2, on a CPU
    python benchmarks/delta_sync.py --changed 0.02 --layout tp2ep2 --over broadcast

In each round, some elements of every parameter get another lowest bit. Then delta updates the server to these weights,
and broadcast sends them again; each is a whole update with its begin and end. After the last round of each share, all
parameters are compared bit for bit. The model is that of `weight_sync.py`, in float32 for a CPU engine: an index takes
as many bytes as a value, and twice as many with bfloat16.

delta is measured in two runs, through files and by broadcasts (`weights.delta_over`), because an engine holds versions
of one connection.

The last line is JSON. For each way and share: `delta_s`, `broadcast_s`, `ratio_broadcast` (median of the rounds'
broadcast over delta), `bytes` (of a sync by delta), `ratio_bytes` (all weights over these), `fill_s` and `send_s` of
the slowest sender. `send_s` includes comparing bits, and writing and reading files, or broadcasts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.weight_sync import (
    Job,
    Update,
    layout_of,
    on_all_ranks,
    ratio,
    senders_by_transport,
    synthetic_config,
    update,
)
from tests.engines.conftest import serve
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

WAYS = ("delta", "broadcast")


@dataclass
class Found:
    """Measurements for one share: seconds per way and round, bytes that delta moved, and bytes in all."""

    updates: dict[str, list[Update]]
    moved: list[int]
    whole: int


def change(params: dict[str, torch.Tensor], share: float, seed: int) -> None:
    """Flip the lowest bit of a share of each parameter's elements, the same on every rank that holds it."""
    for name, param in params.items():
        random, flat = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed), param.view(-1).view(torch.int32)
        if share == 1:
            flat ^= 1
        else:
            count = max(1, int(share * len(flat)))
            chosen = torch.randint(len(flat), (count,), generator=random).unique()
            flat[chosen] ^= 1


def rank_main(shares: Sequence[float], rank: int, job: Job, store: str, pipe: Connection) -> None:
    """One trainer rank with a sender for each way; sends its measurements of each share."""
    version, found = 1, list[Found]()
    with senders_by_transport(WAYS, rank, job, store) as (params, senders):
        for share in shares:
            of_share = Found({way: [] for way in WAYS}, [], senders["delta"].plan.total_bytes)
            for _ in range(job.rounds):
                version += 1
                change(params, share, version)
                for way in WAYS:  # this order only: delta rejects changes that have already arrived by broadcast
                    of_share.updates[way].append(update(senders[way], version))
                of_share.moved.append(of_share.updates["delta"][-1].bytes)
            version += 1
            change(params, share, version)
            update(senders["delta"], version, verify=True)
            update(senders["broadcast"], version)
            found.append(of_share)
        pipe.send(found)


def figures(found: Found) -> dict[str, Any]:
    """Medians over the rounds."""
    delta, broadcast = found.updates["delta"], found.updates["broadcast"]
    return {
        "delta_s": statistics.median(u.seconds for u in delta),
        "broadcast_s": statistics.median(u.seconds for u in broadcast),
        "ratio_broadcast": ratio((u.seconds for u in broadcast), (u.seconds for u in delta)),
        "bytes": int(statistics.median(found.moved)),
        "ratio_bytes": found.whole / statistics.median(found.moved),
        "fill_s": statistics.median(u.fill for u in delta),
        "send_s": statistics.median(u.send for u in delta),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changed", default="0.001,0.01,0.05,1", help="shares of changed elements, comma-separated")
    parser.add_argument("--over", default="disk,broadcast", help="weights.delta_over, comma-separated")
    parser.add_argument("--layout", default="tp1ep2", help="layout of the trainer")
    parser.add_argument("--bucket-mib", type=float, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    for name, default in {"layers": 16, "hidden": 256, "ffn": 128, "experts": 64, "vocab": 32000}.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{name} of the synthetic model (default {default})"
        )
    args = parser.parse_args()
    config, shares = synthetic_config(args), [float(share) for share in args.changed.split(",")]
    with TemporaryDirectory() as directory:
        sizes = {k: v for k, v in config.items() if k not in ("architectures", "rope_theta")}
        server = serve(make_tiny_qwen3_moe(Path(directory) / "model", **sizes), Path(directory) / "logs")
        try:
            bucket = int(args.bucket_mib * (1 << 20))
            layout, engine = layout_of(args.layout), server.endpoint
            found: dict[str, dict[str, Any]] = {}
            for over in args.over.split(","):
                job = Job(config, layout, "float32", bucket, 8, args.rounds, engine, stand_in=False, delta_over=over)
                by_share = map(figures, on_all_ranks(partial(rank_main, shares), job)[0])
                found[over] = dict(zip(map(str, shares), by_share, strict=True))
                show(over, found[over], args.rounds)
        finally:
            server.process.stop()
    print(json.dumps(found))


def show(over: str, by_share: dict[str, dict[str, Any]], rounds: int) -> None:
    """Print the figures of one way as a table."""
    title = f"delta over {over}, medians of {rounds} rounds, load {os.getloadavg()[0]:.1f}"
    table = Table("changed", *next(iter(by_share.values())), title=title)
    for share, values in by_share.items():
        cells = (f"{value:.3f}" if isinstance(value, float) else f"{value:,}" for value in values.values())
        table.add_row(f"{float(share):.1%}", *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
