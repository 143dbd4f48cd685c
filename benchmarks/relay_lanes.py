"""Whether an engine's network adapters work at the same time under `weights.transport: relay`, with slow adapters.

    sudo python benchmarks/relay_lanes.py [--lanes 1 2 4] [--mbit 400] [--mib 128] [--rounds 5]

Needs Linux, root and iproute2; no GPU. Every sender and every rank of one engine gets a network namespace with an
adapter of its own, limited to `--mbit` in each direction (`tc`, token bucket), in place of a GPU's adapter. Ranks of
the engine also share an unlimited link, in place of NVLink. Senders run `RelayTransport`, and the engine's ranks run
the plug-in's `Relay.obey`. There is no model: loading compares each bucket's first element.

`seconds` are medians of whole syncs of the same bytes. `floor` is the bytes of the fullest lane over one adapter's
speed, measured in the same run. `one_adapter` is the time of one adapter for all bytes: the minimum for `broadcast`.
`ratio`, in the last line (JSON), is `seconds` over `floor`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from mslime.engine_plugin.copy_plan import ReceivedBucket, SyncBuckets
from mslime.engine_plugin.engine_ranks import EngineRankGroup, EngineRanks
from mslime.engine_plugin.relay import Relay
from mslime.engine_plugin.wire import RelaySync

BUCKETS = 16
WIRE, INSIDE = "wire", "inside"
DEADLINE = timedelta(seconds=120)


def ip(*arguments: str, space: str = "") -> None:
    """Run one command of iproute2."""
    inside = ["ip", "netns", "exec", space] if space else []
    subprocess.run([*inside, *arguments], check=True)


@contextmanager
def adapters(count: int, linked: range, mbit: float) -> Iterator[list[str]]:
    """Create network namespaces with an adapter each, 10.88.0.x; those in `linked` also get a fast link, 10.89.0.x."""
    hub = f"mslime-{os.getpid()}"
    spaces = [f"{hub}-{i}" for i in range(count)]
    made: list[str] = []
    try:
        for space in (hub, *spaces):
            ip("ip", "netns", "add", space)
            made.append(space)
            ip("ip", "link", "set", "lo", "up", space=space)
        for link in (WIRE, INSIDE):
            ip("ip", "link", "add", link, "type", "bridge", space=hub)
            ip("ip", "link", "set", link, "up", space=hub)
        for i, space in enumerate(spaces):
            for link, net in ((WIRE, 88), *([(INSIDE, 89)] if i in linked else [])):
                port = f"{link}{i}"
                ip("ip", "link", "add", port, "type", "veth", "peer", "name", link, "netns", space, space=hub)
                ip("ip", "link", "set", port, "master", link, "up", space=hub)
                ip("ip", "addr", "add", f"10.{net}.0.{i + 1}/24", "dev", link, space=space)
                ip("ip", "link", "set", link, "up", space=space)
                if link == WIRE:
                    limit = ["root", "tbf", "rate", f"{mbit:g}mbit", "burst", "256kb", "latency", "100ms"]
                    ip("tc", "qdisc", "add", "dev", link, *limit, space=space)
                    ip("tc", "qdisc", "add", "dev", port, *limit, space=hub)
        yield spaces
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "del", space], check=False)


def group(ranks: list[int], link: str) -> dist.ProcessGroup | None:
    """Process group over an adapter; None on ranks outside of it."""
    if dist.get_rank() not in ranks:
        return None
    os.environ["GLOO_SOCKET_IFNAME"] = link
    made = dist.new_group(ranks, timeout=DEADLINE, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def work(rank: int, lanes: int, mib: int, rounds: int, out: Path) -> None:
    """Worker: ranks 0 to `lanes` - 1 send, the others are engine ranks. The last rank writes the measurements."""
    os.environ["GLOO_SOCKET_IFNAME"] = WIRE
    torch.set_num_threads(1)
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  # its public name
        "10.88.0.1", 29500, 2 * lanes, is_master=rank == 0, timeout=DEADLINE
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2 * lanes, timeout=DEADLINE)
    pairs = [group([lane, lanes + lane], WIRE) for lane in range(lanes)]
    engine = list(range(lanes, 2 * lanes))
    beside = group(engine, INSIDE) if lanes > 1 else None
    numel = mib * 2**20 // 4 // BUCKETS
    flat = torch.arange(numel, dtype=torch.float32)
    mine = pairs[rank % lanes]
    raw, syncs = list[float](), list[float]()

    def load(received: ReceivedBucket) -> tuple[bool, str]:
        ((name, tensor),) = received
        return float(tensor[1]) == 1 + int(name), "loaded"

    # Without recorded copies, whole buckets are passed on.
    relay = Relay(SyncBuckets("cpu"), load, "cpu", lambda buckets: [None] * len(buckets))
    ranks = EngineRankGroup(rank - lanes, lanes, beside, beside) if lanes > 1 else EngineRankGroup()
    for number in range(rounds + 1):
        dist.barrier()
        begin = time.monotonic()
        if rank % lanes == 0:  # one adapter alone
            for _ in range(2):
                dist.broadcast(flat, group=mine, group_src=0)
        raw.append(2 * flat.nbytes / (time.monotonic() - begin))
        dist.barrier()
        begin = time.monotonic()
        if rank < lanes:
            for bucket in range(rank, BUCKETS, lanes):
                dist.broadcast(torch.arange(numel, dtype=torch.float32) + bucket, group=mine, group_src=0)
        else:
            groups = {f"lane{rank - lanes}": mine} if mine is not None else {}
            order = RelaySync(f"sync {number}", "plan", tuple(f"lane{i}" for i in range(lanes)),
                          tuple((i % lanes,) for i in range(BUCKETS)), (1,) * BUCKETS)  # fmt: skip
            names = [str(i) for i in range(BUCKETS)]
            relay.obey(order, names, ["float32"] * BUCKETS, [[numel]] * BUCKETS, groups, EngineRanks(ranks, ranks))
        dist.barrier()
        syncs.append(time.monotonic() - begin)
    if rank == lanes:
        # The first round sets up connections.
        out.write_text(json.dumps({"rate": median(raw[1:]), "seconds": median(syncs[1:])}))


def measure(lanes: int, mbit: float, mib: int, rounds: int) -> dict[str, float]:
    """Figures of an engine with `lanes` ranks and as many senders."""
    with TemporaryDirectory() as directory, adapters(2 * lanes, range(lanes, 2 * lanes), mbit) as spaces:
        out = Path(directory) / "found"
        me = [
            sys.executable,
            __file__,
            "--mib",
            str(mib),
            "--rounds",
            str(rounds),
            "--out",
            str(out),
            "--lanes",
            str(lanes),
        ]
        ranks = [
            subprocess.Popen(["ip", "netns", "exec", space, *me, "--rank", str(rank)])
            for rank, space in enumerate(spaces)
        ]
        try:
            assert not any(rank.wait(600) for rank in ranks), "a rank failed: see above"
        finally:
            for rank in ranks:
                rank.kill()
        found = json.loads(out.read_text())
    total = mib * 2**20
    floor = -(-BUCKETS // lanes) / BUCKETS * total / found["rate"]
    return {
        "seconds": found["seconds"], "floor": floor, "ratio": found["seconds"] / floor,
        "one_adapter": total / found["rate"], "ratio_one_adapter": total / found["rate"] / found["seconds"],
        "adapter_mb_per_s": found["rate"] / 1e6,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lanes", type=int, nargs="+", default=[1, 2, 4], help="numbers of senders, and of ranks of the engine"
    )
    parser.add_argument("--mbit", type=float, default=400, help="Mb/s of an adapter in each direction")
    parser.add_argument("--mib", type=int, default=128, help="MiB per sync")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        work(args.rank, args.lanes[0], args.mib, args.rounds, args.out)
        return
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        parser.exit(2, "root and iproute2 (ip, tc) are required, to make slow network adapters\n")
    found = {lanes: measure(lanes, args.mbit, args.mib, args.rounds) for lanes in args.lanes}
    columns = list(found[args.lanes[0]])
    table = Table(
        "lanes", *columns, title=f"{args.mib} MiB, {args.mbit:g} Mb/s an adapter, medians of {args.rounds} rounds"
    )
    for lanes, figures in found.items():
        table.add_row(str(lanes), *(f"{figures[column]:.3f}" for column in columns))
    Console().print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
