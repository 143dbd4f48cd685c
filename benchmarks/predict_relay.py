"""What `mslime plan` predicts of a sync by `relay` into an engine of one rank, beside syncs into the stand-in, on CPUs.

    python benchmarks/predict_relay.py [--layouts tp1ep2,tp2ep2,pp2ep2] [--rounds 15]

Model, layouts, engine and raw connections are those of `weight_sync.py`. A round is a sync and what `predict_relay`
needs: all senders' raw broadcasts of their buckets at the same time (what the engine's one adapter carries), which go
before the sync in every second round, and one of each before, which is thrown away; a request, copies, gathers, an
exchange. What a bucket takes beside its bytes is measured once, before, by syncs of buckets of next to nothing. Ranks
and engine share the cores. No constant is fitted.

The last line is JSON: for each layout `measured_s`, `predicted_s` (medians), `ratio_predicted` (median of the rounds'
own ratios) and the medians of the rates.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from mslime.config.keys import Endpoint
from mslime.planner.filling import Rates
from mslime.planner.sync import Receiving, predict_relay
from mslime.threads import in_thread
from mslime.weights.courier import Courier, Seconds
from mslime.weights.relay import RelayTransport

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.weight_sync import (
    DEADLINE_S,
    KEPT_MEMORY,
    REPEATS,
    Job,
    Ways,
    cell,
    gather_rate,
    layout_of,
    mean_of,
    on_all_ranks,
    ratio,
    synthetic_config,
    timed,
)
from tests.fixtures.stand_in_engine import StandInEngine

SIZES = {"layers": 16, "hidden": 256, "ffn": 128, "experts": 64, "vocab": 32000}
STARTS = 8


class Alone(Ways):
    """One rank, and what it measures for itself; all ranks call the same at the same time."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        mine = [bucket.hf_bytes for bucket in self.sender.plan.buckets if bucket.sender == dist.get_rank()]
        self._ranks = self.groups.senders.everyone()
        self.own = [torch.randint(256, (size,), dtype=torch.uint8) for size in mine]

    def together(self) -> None:
        """Every sender broadcasts its buckets, one after the other, at the same time as the others."""
        if self.own:
            self._send(self.own)

    def _send(self, buffers: list[torch.Tensor]) -> None:
        body = {"group_name": self.connection, "sizes": [len(buffer) for buffer in buffers]}
        answer = in_thread(self.url.post, "/raw", json=body)
        for buffer in buffers:
            dist.broadcast(buffer, group=self.group, group_src=0)
        answer.result().raise_for_status()

    def _request_alone_s(self) -> float:
        """Seconds of a request for a broadcast of a byte, on the first rank while the others rest."""
        dist.barrier()
        tiny = [torch.zeros(1, dtype=torch.uint8)]
        took = mean_of(lambda: self._send(tiny)) if dist.get_rank() == 0 else 0.0
        dist.barrier()
        return took

    def start_s(self) -> float:
        """Seconds that a bucket takes beside its bytes: what more buckets of next to nothing add to a sync."""
        took = [[timed(partial(self._tiny_sync, each))[0] for _ in range(REPEATS)] for each in (STARTS, 2 * STARTS)]
        few, more = map(statistics.median, took)
        return max(more - few, 0.0) / STARTS / len(self._ranks)

    def _tiny_sync(self, each: int) -> None:
        """Every sender's courier sends so many buckets of one element, which engines take by the plan's order."""
        senders = [rank for _ in range(each) for rank in self._ranks]
        like, flat = self.tiny[0]
        buckets = [replace(like, index=index, sender=rank) for index, rank in enumerate(senders)]
        transport = self.transport
        assert isinstance(transport, RelayTransport), "all ranks send"
        transport.begin(0, buckets)
        courier = Courier(transport, None, time.monotonic() + DEADLINE_S, DEADLINE_S, Seconds(), None)
        for bucket in buckets:
            if bucket.sender == dist.get_rank():
                courier.wait_for_room()
                courier.put(bucket, flat)
        failure = courier.close()
        assert failure is None, failure
        transport.complete()

    def measured_rates(self, together: float, start: float) -> Rates:
        """For this round, of which the senders' broadcasts took so many seconds.

        Args:
            start: see `start_s`.
        """
        one = self._request_alone_s()
        largest = self.sender.plan.buckets[0].hf_bytes
        return Rates(
            network=self.sender.plan.total_bytes / max(together - one, 1e-9),
            nvlink=gather_rate(self.sender.plan, self.groups, largest // 2),
            copy=self._copy_rate(largest),
            request=one,
            tensor=0.0,
            exchange=mean_of(lambda: self.sender._exchange(None)),
            collective=start,
            cores=os.cpu_count() or 1,
        )


def rank_main(rank: int, job: Job, store: str, pipe: Connection) -> None:
    """One trainer rank; the first sends (seconds, predicted seconds, rates) of each round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job.layout.world_size)
    alone, rounds = Alone(job), list[tuple[float, float, dict[str, float]]]()
    start = alone.start_s()
    receiving = Receiving(engines=1, share=0.0, recorded=True)
    ways = [alone.ours, alone.together]
    for number in range(job.rounds + 2):  # the first two are thrown away: engines record, and learn the plan
        for way in ways:  # thrown away: syncs take longer after what else a round measures
            way()
        first = number % 2
        took = {first: timed(ways[first])[0], 1 - first: timed(ways[1 - first])[0]}
        seconds, rates = took[0], alone.measured_rates(took[1], start)
        found = predict_relay(alone.sender.plan, rates, receiving, job.layout.world_size)
        rounds.append((seconds, found.seconds, asdict(rates)))
    pipe.send(rounds[2:])
    alone.sender.disconnect()
    dist.destroy_process_group()


def figures_of(words: str, rounds: int) -> dict[str, Any]:
    """One layout."""
    engine = StandInEngine()
    engine.set_mode("discard")
    config = synthetic_config(argparse.Namespace(**SIZES))
    job = Job(
        config, layout_of(words), "bfloat16", 32 << 20, 8, rounds, Endpoint(engine.url), stand_in=True,
        transport="relay", engine_pid=engine.pid,
    )  # fmt: skip
    try:
        measured, predicted, rates = zip(*on_all_ranks(rank_main, job)[0], strict=True)
    finally:
        engine.stop()
    medians = {f"rate_{name}": statistics.median(each[name] for each in rates) for name in rates[0]}
    return {
        "measured_s": statistics.median(measured), "predicted_s": statistics.median(predicted),
        "ratio_predicted": ratio(predicted, measured),
        "ratio_predicted_of_minima": min(predicted) / min(measured),
        # JSON has no infinity: nobody gathers there.
        **{name: value for name, value in medians.items() if math.isfinite(value)},
    }  # fmt: skip


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="tp1ep2,tp2ep2,pp2ep2", help="of the trainer, by comma")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    os.environ.update(KEPT_MEMORY)
    begin = time.monotonic()
    found = {words: figures_of(words, args.rounds) for words in args.layouts.split(",")}
    table = Table(title=f"medians of {args.rounds} rounds, gloo, load average {os.getloadavg()[0]:.1f}")
    for column in ("", *found):
        table.add_column(column, justify="right")
    for name in dict.fromkeys(name for figures in found.values() for name in figures):
        table.add_row(name, *(cell(figures.get(name, "")) for figures in found.values()))
    Console().print(table)
    print(f"{REPEATS} calls for each rate; {time.monotonic() - begin:.0f} s")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
