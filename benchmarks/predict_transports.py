"""What `mslime plan` predicts of a sync by each transport, beside syncs into stand-in engines, on CPUs.

    python benchmarks/predict_transports.py    # all transports, layouts, and numbers of engines
    python benchmarks/predict_transports.py --ways shm,delta-disk-0.01 --layouts tp2ep2 --engines 2 --rounds 15
    python benchmarks/predict_transports.py --ways mooncake    # over TCP; needs mooncake-transfer-engine-non-cuda

Every rank sends. A round is two syncs (`WeightSender.send`; their mean) and, between them, what the planner's functions
need to know, each by calls of one thing alone: copies of a bucket, gathers, files that are written, read and removed,
memory that is shared and opened, comparing a bucket of which so much has changed (`find_changes`), putting the changes
in, noting them, requests for one tiny tensor and for many, broadcasts of a bucket's changes, reads by Mooncake of as
many as there are engines at once, an exchange. No constant is fitted; all ranks measure at the same time.
`delta-disk-0.01` is `weights.transport: delta` with `weights.delta_over: disk`, of which 1% of the elements change
between syncs, always the same ones. All bits are compared before the rounds and after them.

The planner gives every GPU a processor of its own, and here are two for up to six processes and whatever else runs. So
each piece of work on a bucket, in a sync as where it is measured alone, takes --pace times its CPU seconds (`paced`): a
thread sleeps after it, by as much less as it had to wait for a processor. That is a slow processor of its own for
everyone, as long as a thread gets a processor for more than 1 / pace of the time that it wants one. Requests, gathers
and broadcasts are as fast as they are. Files lie in memory (--directory). The C library keeps what is freed, as in
`weight_sync.py`.

The last line is JSON: for each layout, number of engines and transport `ratio` (predicted over measured, median of the
rounds' own), and medians of `measured`, `predicted`, of the slowest sender's phases, of what the prediction was made
with, and of its parts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from mslime.backends.sglang.receivers import SGLangReceivers
from mslime.config.keys import Endpoint
from mslime.config.schema import DeadlineConfig
from mslime.convert.families import get_family
from mslime.planner.filling import Rates
from mslime.planner.sync import Receiving, Way, predict
from mslime.planner.ways import delta_way, disk_way, handles_way, mooncake_way, shm_way
from mslime.threads import in_thread
from mslime.weights.delta import DeltaTransport
from mslime.weights.delta_broadcast import BroadcastCarrier
from mslime.weights.groups import make_groups
from mslime.weights.plan import Bucket
from mslime.weights.senders import Senders
from mslime.weights.shm import ShmTransport
from mslime.weights.sync import SyncOptions, WeightSender
from mslime.weights.transport import takes_turns

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.transport_rates import REPEATS, Changer, Primitives, in_pace, mean_of
from benchmarks.weight_sync import (
    KEPT_MEMORY,
    Job,
    gather_rate,
    layout_of,
    on_all_ranks,
    parameters_of,
    ratio,
    synthetic_config,
    tiny_bucket,
)
from tests.fixtures.engine_calls import with_pool
from tests.fixtures.stand_in_engine import StandInEngine

WAYS = "shm,handles,disk,delta-disk-0.01,delta-disk-0.05,delta-disk-1"
WAYS += ",delta-broadcast-0.01,delta-broadcast-0.05,delta-broadcast-1"
DEADLINE_S = 300.0
MANY = 300
"""Tensors of the larger of the two requests."""


@dataclass(frozen=True)
class Kind:
    """A transport as the command names it.

    Attributes:
        transport: `weights.transport`.
        over: `weights.delta_over`; empty for others.
        changed: of the elements, between syncs.
    """

    transport: str
    over: str = ""
    changed: float = 1.0

    @classmethod
    def parse(cls, words: str) -> Kind:
        """`shm`, or `delta-disk-0.01`."""
        name, *rest = words.split("-")
        return cls(name, rest[0], float(rest[1])) if rest else cls(name)

    @property
    def by_files(self) -> bool:
        """Whether buckets lie in files of a directory."""
        return self.transport == "disk" or self.over == "disk"


@dataclass(frozen=True)
class Case:
    """Transports that share engines, and where these are."""

    kinds: dict[str, Kind]
    engines: tuple[Endpoint, ...]
    directory: Path
    pace: float


def pace_sender(sender: WeightSender, pace: float) -> None:
    """Let what a sender does with a bucket take as long as on a slow processor of its own; gloo's threads do not."""
    transport: Any = sender._transport
    paced_calls: list[tuple[Any, tuple[str, ...]]] = [(sender, ("_fill",))]
    if isinstance(transport, DeltaTransport):
        paced_calls += [(transport, ("prepare_bucket", "note_whole", "complete"))]
        paced_calls += [(transport._carrier, ("write", "start_changes"))]
    elif transport is not None:
        paced_calls += [(transport, ("write",) if isinstance(transport, ShmTransport) else ("write", "complete"))]
    for owner, names in paced_calls:
        for name in filter(partial(hasattr, owner), names):
            setattr(owner, name, in_pace(getattr(owner, name), pace))


class Rank:
    """One trainer rank: a sender for each transport. All ranks call the same method at the same time."""

    def __init__(self, case: Case, job: Job) -> None:
        self.case, self.job, self.rank = case, job, dist.get_rank()
        table = get_family(job.config).rules(job.config)
        torch.manual_seed(0)  # what several ranks hold is alike: it is compared
        self.params = parameters_of(table, job, self.rank)
        self.changer, self.alone = Changer(self.params), Primitives(case.pace, case.directory)
        self.groups = make_groups(Senders.at_most(job.layout, job.senders), "gloo", DEADLINE_S)
        self.senders: dict[tuple[str, str], WeightSender] = {}
        self.version = 1
        for kind in case.kinds.values():
            if (kind.transport, kind.over) not in self.senders:
                self.senders[kind.transport, kind.over] = self._connected(kind, table)
        self.http = [httpx.Client(base_url=engine.url, timeout=DEADLINE_S) for engine in case.engines]

    def _connected(self, kind: Kind, table: Any) -> WeightSender:
        receivers = SGLangReceivers(DeadlineConfig.model_validate({"weight_sync_s": DEADLINE_S}))
        directory = self.case.directory if kind.by_files else None
        options = SyncOptions(self.job.dtype, self.job.bucket_bytes, "gloo", DEADLINE_S, transport=kind.transport,
                              directory=directory, mooncake_over="tcp")  # fmt: skip
        sender = WeightSender(table, self.groups, self.params.items, options, receivers)
        sender.connect(self.case.engines)
        pace_sender(sender, self.case.pace)
        return sender

    def sync(self, kind: Kind) -> tuple[float, dict[str, float]]:
        """Wall seconds until all ranks have sent, of a version in which so much has changed; phases."""
        self.version += 1
        if kind.transport == "delta":
            self.changer.change(kind.changed)
        dist.barrier()
        begin = time.perf_counter()
        report = self._sender(kind).send(self.version)
        dist.barrier()
        took = time.perf_counter() - begin
        phases = report.phases.values()
        return took, {name: max(getattr(each, name) for each in phases) for name in ("fill", "turn", "send")}

    def compare(self, kind: Kind) -> None:
        """All bits of the engines with those of a sync."""
        self.version += 1
        report = self._sender(kind).send(self.version, verify=True)
        if self.rank == 0:
            assert with_pool(self._sender(kind).engines, lambda pool: pool.compare(report.expected))
        dist.barrier()

    def _sender(self, kind: Kind) -> WeightSender:
        return self.senders[kind.transport, kind.over]

    # Rates

    def predicted(self, kind: Kind) -> tuple[float, dict[str, float]]:
        """Seconds of a sync, and what they were predicted with."""
        plan, engines = self._sender(kind).plan, len(self.case.engines)
        size = max(bucket.hf_bytes for bucket in plan.buckets)
        requests = [self._request_s(kind, tensors) for tensors in (1, MANY)]
        rates = Rates(
            network=math.inf,
            nvlink=gather_rate(plan, self.groups, size // 2),
            copy=size / self.alone.at_once(self.alone.copying(size)),
            request=requests[0],
            tensor=max(requests[1] - requests[0], 0.0) / (MANY - 1),
            exchange=mean_of(lambda: self._sender(kind)._exchange(None)),
        )  # a CPU's memory is the host's
        receiving = Receiving(engines=engines, share=1.0, recorded=False)
        rates, way, more = self._way(kind, rates, size, receiving)
        found = predict(plan, rates, receiving, self.job.layout.world_size, way)
        return found.seconds, {**asdict(rates), **more, **{f"part {k}": v for k, v in found.parts.items()}}

    def _way(self, kind: Kind, rates: Rates, size: int, receiving: Receiving) -> tuple[Rates, Way, dict[str, float]]:
        """The rest of the rates, the way, and what else was measured for it."""
        plan = self._sender(kind).plan
        total = plan.total_bytes
        if kind.transport == "shm":
            rates = replace(rates, host=rates.copy)
            return rates, shm_way(rates), {}
        if kind.transport == "handles":
            room, opening = self.alone.sharing(size)
            return rates, replace(handles_way(rates, 0), room=room, opening=opening), {"room": room, "opening": opening}
        if kind.transport == "mooncake":
            # Loopback is no adapter that its readers would share: what all get of it together counts.
            rates = replace(rates, network=self.alone.reading_memory(size, receiving.engines))
            return rates, mooncake_way(rates, receiving, receiving.ranks), {}
        if kind.transport == "disk":
            files, index = (
                self.alone.files(size, lasting=True),
                self.alone.index_s(e.name for bucket in plan.buckets for e in bucket.entries),
            )
            rates = replace(rates, reading=files.reading)
            way = replace(disk_way(rates, 1), prepare=files.write, closing=files.remove * total + index)
            return rates, way, asdict(files) | {"index": index}
        changes = self.alone.changing(kind.changed, size)
        sent = int(size * changes.sent)
        if kind.by_files:
            files = self.alone.files(sent, lasting=False)
            rates = replace(rates, reading=files.reading)
            way = delta_way(rates, 1, changes)
            prepare, closing = way.prepare + changes.sent * files.write, files.remove * changes.sent * total
            return rates, replace(way, prepare=prepare, closing=closing), asdict(changes) | asdict(files)
        rates = replace(rates, network=self._broadcast_rate(kind, sent))
        return rates, delta_way(rates, None, changes), asdict(changes)

    def _request_s(self, kind: Kind, tensors: int) -> float:
        """Of a bucket that is next to empty: by all senders at the same time, where they take no turns."""
        sender = self._sender(kind)
        transport = sender._transport
        assert transport is not None  # all ranks send
        alone = takes_turns(transport, len(self.case.engines))
        asks = self.rank == 0 or not alone
        bucket, flat = self._tiny(sender.plan.buckets[0], tensors)

        def ask(times: int) -> float:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(times if asks else 0):
                transport.start(bucket, flat).wait()
            dist.barrier()
            return time.perf_counter() - begin

        ask(1)
        took = ask(2 * REPEATS) / 2 / REPEATS
        if isinstance(transport, ShmTransport):
            transport.complete()  # a sync makes its memory anew
        return took if alone else took / dist.get_world_size()

    def _tiny(self, like: Bucket, tensors: int) -> tuple[Bucket, torch.Tensor]:
        bucket, flat = tiny_bucket(like, -(2 * self.rank + 1 + (tensors > 1)), tensors)
        named = tuple(replace(entry, name=f"{entry.name}.{self.rank}") for entry in bucket.entries)
        return replace(bucket, entries=named), flat

    def _broadcast_rate(self, kind: Kind, size: int) -> float:
        """From the first rank to all engines."""
        dist.barrier()
        took = 0.0
        if self.rank == 0:
            delta = self._sender(kind)._transport
            assert isinstance(delta, DeltaTransport) and isinstance(delta._carrier, BroadcastCarrier)
            group, name, data = delta._carrier._group, delta._carrier.link.name, torch.zeros(size, dtype=torch.uint8)

            def broadcast(times: int) -> float:
                begin = time.perf_counter()
                body = {"group_name": name, "sizes": [size] * times}
                answers = [in_thread(client.post, "/raw", json=body) for client in self.http]
                for _ in range(times):
                    dist.broadcast(data, group=group, group_src=0)
                for answer in answers:
                    answer.result().raise_for_status()
                return time.perf_counter() - begin

            broadcast(1)
            took = max(broadcast(1 + REPEATS) - broadcast(1), 1e-9)
        dist.barrier()
        return REPEATS * size / max(self.alone.everyone(took))


def rank_main(case: Case, rank: int, job: Job, store: str, pipe: Connection) -> None:
    """One trainer rank; the first sends the rounds of each transport."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job.layout.world_size)
    with torch.no_grad():
        mine = Rank(case, job)
        for kind in case.kinds.values():
            mine.compare(kind)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in case.kinds}
        for number in range(job.rounds + 1):
            for name, kind in case.kinds.items():
                measured, phases = mine.sync(kind)
                predicted, rates = mine.predicted(kind)
                measured = (measured + mine.sync(kind)[0]) / 2
                if number:
                    rounds[name].append({"measured": measured, "predicted": predicted, **phases, **rates})
        for kind in case.kinds.values():
            mine.compare(kind)
        sizes = {name: mine._sender(kind).plan for name, kind in case.kinds.items()}
        pipe.send((rounds, {name: (plan.total_bytes, len(plan.buckets)) for name, plan in sizes.items()}))
        for sender in mine.senders.values():
            sender.disconnect()
    dist.destroy_process_group()


@contextmanager
def engines_started(number: int, pace: float) -> Iterator[tuple[Endpoint, ...]]:
    """So many stand-ins."""
    engines = [StandInEngine() for _ in range(number)]
    try:
        for engine in engines:
            engine.set_pace(pace)
        yield tuple(Endpoint(engine.url) for engine in engines)
    finally:
        for engine in engines:
            engine.stop()


def figures(rounds: list[dict[str, float]], size: tuple[int, int]) -> dict[str, float]:
    """Medians over the rounds, and the median of their ratios."""
    measured, predicted = ([each[name] for each in rounds] for name in ("measured", "predicted"))
    found = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    ratios = {
        "ratio": ratio(predicted, measured),
        "ratio_of_minima": min(predicted) / min(measured),
    }
    return {**ratios, **{k: v for k, v in found.items() if math.isfinite(v)}, "bytes": size[0], "buckets": size[1]}


def main() -> None:
    """Run and print."""
    args = parse_args()
    os.environ.update(KEPT_MEMORY)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for layout in args.layouts.split(","):
        for engines in map(int, args.engines.split(",")):
            for over in ("", "disk", "broadcast"):
                kinds = {words: Kind.parse(words) for words in args.ways.split(",")}
                kinds = {words: kind for words, kind in kinds.items() if kind.over == over}
                if kinds:
                    column = found.setdefault(f"{layout} x{engines}", {})
                    column |= measure(args, layout, engines, kinds)
    show(found, args)
    print(json.dumps(found))


def measure(args: argparse.Namespace, layout: str, number: int, kinds: dict[str, Kind]) -> dict[str, dict[str, float]]:
    """One layout and number of engines: the figures of each transport."""
    from tempfile import TemporaryDirectory

    with engines_started(number, args.pace) as engines, TemporaryDirectory(dir=args.directory) as directory:
        job = Job(
            synthetic_config(args), layout_of(layout), "bfloat16", int(args.bucket_mib * 2**20), args.senders,
            args.rounds, engines[0], stand_in=True,
        )  # fmt: skip
        ranks = on_all_ranks(partial(rank_main, Case(kinds, engines, Path(directory), args.pace)), job)
        rounds, sizes = ranks[0]
        found = {name: figures(rounds[name], sizes[name]) for name in kinds}
        for name, each in found.items():
            print(layout, number, name, {k: float(f"{v:.3g}") for k, v in each.items()}, file=sys.stderr, flush=True)
        return found


def show(found: dict[str, dict[str, dict[str, float]]], args: argparse.Namespace) -> None:
    """Predicted over measured."""
    title = f"predicted / measured, medians of {args.rounds} rounds, load {os.getloadavg()[0]:.1f}"
    table = Table("", *found, title=title)
    for name in args.ways.split(","):
        table.add_row(name, *(f"{column[name]['ratio']:.2f}" if name in column else "" for column in found.values()))
    Console(width=120).print(table)


def parse_args() -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=WAYS, help="transports, by comma")
    parser.add_argument("--layouts", default="tp1ep2,tp2ep2,pp2ep2", help="of the trainer, by comma")
    parser.add_argument("--engines", default="1,2", help="how many, by comma")
    parser.add_argument("--senders", type=int, default=8, help="weights.senders")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="in which files are written")
    parser.add_argument("--pace", type=float, default=8, help="1: as fast as processors allow")
    parser.add_argument("--bucket-mib", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    for name, default in {"layers": 8, "hidden": 256, "ffn": 256, "experts": 32, "vocab": 16000}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"of the synthetic model (default {default})")
    return parser.parse_args()


if __name__ == "__main__":
    main()
