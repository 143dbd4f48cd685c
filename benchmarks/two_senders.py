"""Gain of an engine that receives its next bucket, another sender's, before the last one has arrived: the floor.

    python benchmarks/two_senders.py [--rounds 15]

Runs only the broadcasts of a weight sync, over gloo: two senders and one receiver, a process each, eight buckets of 32
MiB into reused memory. "One sender" is the raw broadcast of `weight_sync.py`. "In turn" receives the buckets of the two
senders one after the other, as an engine with `weights.transport: broadcast`. "Ahead" starts the next one while one
arrives, as an engine with the plan of `relay`.

The last line is JSON: seconds of each (medians), and `ratio_in_turn`, `ratio_ahead`: over one sender, medians of the
rounds' own ratios.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

BUCKETS, SIZE, RECEIVER = 8, 32 << 20, 2


class Process:
    """One of the two senders, or the receiver."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        # Every process makes both groups, in the same order.
        self.groups: list[Any] = [dist.new_group([sender, RECEIVER]) for sender in (0, 1)]
        self.buckets = [torch.randint(256, (SIZE,), dtype=torch.uint8) for _ in range(BUCKETS)]

    def one_sender(self) -> None:
        """All buckets by the first sender."""
        for index in range(BUCKETS):
            if self.rank != 1:
                self._move(0, self.buckets[0 if self.rank == RECEIVER else index]).wait()

    def in_turn(self) -> None:
        """Buckets of both senders, one after the other."""
        for index in range(BUCKETS):
            if self.rank in (index % 2, RECEIVER):
                self._move(index % 2, self.buckets[index % 2 if self.rank == RECEIVER else index]).wait()

    def ahead(self) -> None:
        """Buckets of both senders; the receiver requests the next one before it waits for the current one."""
        if self.rank != RECEIVER:
            self.in_turn()
            return
        coming = [self._move(0, self.buckets[0])]
        for index in range(1, BUCKETS):
            coming.append(self._move(index % 2, self.buckets[index % 2]))
            coming.pop(0).wait()
        coming.pop().wait()

    def _move(self, sender: int, bucket: torch.Tensor) -> dist.Work:
        work = dist.broadcast(bucket, src=sender, group=self.groups[sender], async_op=True)
        assert work is not None
        return work


def process_main(rank: int, rounds: int, store: str, pipe: Connection) -> None:
    """Run all ways in turn; sends the seconds of each round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    process = Process(rank)
    ways = {"one_sender": process.one_sender, "in_turn": process.in_turn, "ahead": process.ahead}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):  # the first round is discarded
        for name, way in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            way()
            dist.barrier()
            if number:
                seconds[name].append(time.perf_counter() - begin)
    pipe.send(seconds)
    dist.destroy_process_group()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as directory:
        pipes = [context.Pipe() for _ in range(3)]
        for rank, (_, theirs) in enumerate(pipes):
            context.Process(target=process_main, args=(rank, rounds, f"{directory}/store", theirs), daemon=True).start()
        seconds: dict[str, list[float]] = pipes[0][0].recv()
    one = seconds["one_sender"]
    ratios = {
        name: statistics.median(a / b for a, b in zip(values, one, strict=True)) for name, values in seconds.items()
    }
    table = Table("", "s", "times one sender", title=f"{rounds} rounds, gloo, load average {os.getloadavg()[0]:.1f}")
    for name, values in seconds.items():
        table.add_row(name.replace("_", " "), f"{statistics.median(values):.3f}", f"{ratios[name]:.2f}")
    Console().print(table)
    figures = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
    print(json.dumps(figures | {f"ratio_{name}": ratios[name] for name in ("in_turn", "ahead")}))


if __name__ == "__main__":
    main()
