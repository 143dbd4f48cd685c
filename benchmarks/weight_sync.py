"""A whole weight sync by several trainer ranks, against a raw broadcast of the bytes and one broadcast per tensor.

    python benchmarks/weight_sync.py                          # TP1 EP2, TP2 EP2 and PP2 EP2 into a stand-in engine
    python benchmarks/weight_sync.py --ways auto              # only the transport that runs use, not two
    python benchmarks/weight_sync.py --layouts tp2ep2 --engine URL --model DIR   # into a running SGLang server of DIR
    python benchmarks/weight_sync.py --loaders --dtype float32   # into SGLang servers that load in either way, on a CPU
    python benchmarks/weight_sync.py --transports --dtype float32 --layouts tp1ep2   # all transports, one server

Ours, per tensor and raw take turns in one run, and medians are compared. "Ours" is `WeightSender.send` over
`weights.transport`: packing, gathering, converting, HTTP and broadcasts. "Per tensor" gathers like ours with one sender
per stage, and broadcasts tensor by tensor. "Raw", the floor, is one rank's broadcast of buffers of the buckets' sizes.
The stand-in engine receives into a reused buffer and does not load. Parameters have the order of megatron-core's
buffers: dense and expert parameters apart, from the last to the first. The model is a synthetic Qwen3-MoE, or that of
--model. The C library keeps freed memory, so fewer pages are new; a new page costs 2 us here, and raw has none
(--plain-memory turns this off).

The last line is JSON. An entry for each layout has the first of --ways (by default `auto`, of runs: `relay` for an
engine of one rank); an entry `LAYOUT WAY` has each other way. `raw_s`, `ours_s`, `per_tensor_s`; `ratio_raw`,
`ratio_per_tensor` (medians of the rounds' own ratios); `cpu_s` (all ranks, for ours); `ratio_cpu` (CPU time of all
processes, with the engine's, for ours over raw: the lower limit of the wall ratio if raw keeps all cores busy); with a
server also `server_s`, the whole update with its begin and end. With --loaders each layout has two entries and
`ratio_loaders` of their updates. With --transports each transport has one: `server_s`, `ratio_broadcast` (over the
broadcast of the same round), `send_s` and `fill_s` of the slowest sender, and `cpu_s` of all ranks. All parameters are
compared first.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from mslime.backends.sglang.port import SGLangPort
from mslime.config.keys import Endpoint, EngineKeys
from mslime.config.layout import ParallelLayout
from mslime.config.schema import DeadlineConfig
from mslime.config.transports import AUTO, transports
from mslime.config.weights import WeightsConfig
from mslime.convert.families import get_family, read_hf_config
from mslime.convert.safetensors_files import torch_dtype
from mslime.convert.table import RuleTable
from mslime.threads import in_thread
from mslime.weights.broadcast import connect_group
from mslime.weights.buckets import named_tensors
from mslime.weights.groups import make_groups
from mslime.weights.sync import SendReport, SyncOptions, WeightSender
from mslime.weights.transport import Link
from mslime.weights.weight_plan import Senders

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.engines.conftest import serve
from tests.fixtures.engine_calls import with_pool
from tests.fixtures.stand_in_engine import StandInEngine
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

DEADLINE_S = 300.0
KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""Environment of all processes in which glibc returns no memory to the operating system. Torch's large tensors reuse
only part of it: they are aligned to 64 bytes, for which glibc needs more than was freed.
"""


@dataclass(frozen=True)
class Job:
    """Parameters of a measurement, for every rank."""

    config: dict[str, Any]
    layout: ParallelLayout
    dtype: str
    bucket_bytes: int
    senders: int
    rounds: int
    engine: Endpoint
    stand_in: bool
    transport: str = "broadcast"
    delta_over: str = "disk"

    engine_pid: int | None = None

    def settings(self, transport: str) -> dict[str, str]:
        """Settings that only this transport reads."""
        return WeightsConfig.model_validate({"transport": transport, "delta_over": self.delta_over}).own_settings


def synthetic_config(args: argparse.Namespace) -> dict[str, Any]:
    """config.json of a Qwen3-MoE with the requested sizes."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 4096, "vocab_size": args.vocab, "num_hidden_layers": args.layers,
        "hidden_size": args.hidden, "intermediate_size": 4 * args.hidden, "head_dim": 32,
        "num_attention_heads": args.hidden // 32, "num_key_value_heads": args.hidden // 64,
        "moe_intermediate_size": args.ffn, "num_experts": args.experts, "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }  # fmt: skip


def parameters_of(table: RuleTable, job: Job, rank: int) -> dict[str, torch.Tensor]:
    """Random parameters of one rank, in buffers laid out as megatron-core's."""
    place, layout = job.layout.place(rank), job.layout
    layers = sorted({rule.layer for rule in table.bound.values()} - {-1})
    per_stage = len(layers) // layout.pp
    experts = max((rule.expert for rule in table.bound.values()), default=-1) + 1
    mine: dict[bool, list[tuple[str, tuple[int, ...]]]] = {False: [], True: []}
    for name, rule in table.bound.items():
        first = 0 if name.startswith("embedding.") else layout.pp - 1
        stage = layers.index(rule.layer) // per_stage if rule.layer >= 0 else first
        elsewhere = rule.is_expert and rule.expert // (experts // layout.ep) != place.ep
        if stage == place.pp and not elsewhere:
            mine[rule.is_expert].append((name, rule.kind.local_shape(layout.etp if rule.is_expert else layout.tp)))
    held: dict[str, torch.Tensor] = {}
    for named in mine.values():
        buffer = torch.randn(sum(math.prod(shape) for _, shape in named)).to(torch_dtype(job.dtype))
        at = len(buffer)
        for name, shape in named:
            at -= math.prod(shape)
            held[name] = buffer[at : at + math.prod(shape)].view(shape)
    return held


class Ways:
    """The three ways on one rank; all ranks call the same one at the same time."""

    def __init__(self, job: Job) -> None:
        family = get_family(job.config)
        table, rank = family.rules(job.config), dist.get_rank()
        self.job, self.params = job, parameters_of(table, job, rank)
        engine_port = SGLangPort(DeadlineConfig.model_validate({"weight_sync_s": DEADLINE_S}))
        groups = make_groups(Senders.at_most(job.layout, job.senders), "gloo", DEADLINE_S)
        options = SyncOptions(
            job.dtype,
            job.bucket_bytes,
            "gloo",
            DEADLINE_S,
            transport=job.transport,
            settings=job.settings(job.transport),
        )
        self.sender = WeightSender(table, groups, self.params.items, options, engine_port)
        self.sender.connect([job.engine])
        self.connection = ""
        if groups.sends:  # needed by the other two ways
            self.connection = f"measured-{job.transport}-{uuid.uuid4().hex[:8]}-{rank}"
            link = Link(self.connection, "gloo", DEADLINE_S, engine_port)
            self.group, self._store = connect_group(link, self.sender.engines, [1])
        self.gathered = self.sender._gathered_plan(job.dtype)
        self.groups, self.transport = groups, self.sender._transport
        self.url = httpx.Client(base_url=job.engine.url, timeout=DEADLINE_S,
                                headers=job.engine.keys.headers("/update_weights_from_distributed"))  # fmt: skip
        sizes = [bucket.hf_bytes for bucket in self.gathered.buckets] if rank == 0 else []
        self.buffers = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]

    def ours(self) -> None:
        """The sync of a run."""
        self.sender.send(1)

    def per_tensor(self) -> None:
        """One broadcast per tensor, stage by stage."""
        for stage in range(self.job.layout.pp):
            if stage == self.groups.stage:
                self._stage_per_tensor(stage)
            dist.barrier()

    def _stage_per_tensor(self, stage: int) -> None:
        answer = None
        for bucket in self.gathered.stage_buckets(stage):
            if dist.get_rank() not in bucket.members:
                continue
            flat = self.sender._fill(bucket, self.params)
            if flat is None:
                continue
            tensors = named_tensors(bucket, flat)
            if answer is not None:
                answer.result().raise_for_status()
            body = {
                "names": [name for name, _ in tensors], "dtypes": [bucket.dtype] * len(tensors),
                "shapes": [list(tensor.shape) for _, tensor in tensors], "group_name": self.connection,
                "flush_cache": False,
            }  # fmt: skip
            answer = in_thread(self.url.post, "/update_weights_from_distributed", json=body)
            works = [
                dist.broadcast(t.reshape(-1).view(torch.uint8), group=self.group, group_src=0, async_op=True)
                for _, t in tensors
            ]
            for work in works:
                assert work is not None
                work.wait()
        if answer is not None:
            answer.result().raise_for_status()

    def raw(self) -> None:
        """Only broadcasts by the first rank, and one request over an open connection."""
        if dist.get_rank() == 0:
            body = {"group_name": self.connection, "sizes": [len(buffer) for buffer in self.buffers]}
            answer = in_thread(self.url.post, "/raw", json=body)
            for buffer in self.buffers:
                dist.broadcast(buffer, group=self.group, group_src=0)
            answer.result().raise_for_status()

    def whole_update(self) -> None:
        """The sync of a run, between the requests that begin and end an update."""
        engines, first = self.sender.engines, dist.get_rank() == 0
        if first:
            with_pool(engines, lambda pool: pool.begin_update())
        dist.barrier()
        self.ours()
        if first:
            with_pool(engines, lambda pool: pool.end_update())


def rank_main(rank: int, job: Job, store: str, pipe: Connection) -> None:
    """One trainer rank; sends the seconds of every round and way, and its CPU seconds of the run's way."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job.layout.world_size)
    ways = Ways(job)
    chosen: dict[str, Callable[[], None]] = {"ours": ways.ours, "per_tensor": ways.per_tensor}
    chosen |= {"raw": ways.raw} if job.stand_in else {"server": ways.whole_update}
    if rank == 0 and not job.stand_in:
        with_pool(ways.sender.engines, lambda pool: pool.begin_update())
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    names = [name for name in chosen if name != "server"]
    cpu = dict.fromkeys([*names, "engine ours", "engine raw"], 0.0)
    for number in range(job.rounds + 1):  # the first round is discarded
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before = engine_seconds(job) if rank == 0 else 0.0
            elapsed, used = timed(chosen[name])
            if number:
                seconds[name].append(elapsed)
                cpu[name] += used
                if rank == 0 and f"engine {name}" in cpu:
                    cpu[f"engine {name}"] += engine_seconds(job) - before
    if not job.stand_in:
        if rank == 0:
            with_pool(ways.sender.engines, lambda pool: pool.end_update())
        dist.barrier()
        seconds["server"] = [timed(ways.whole_update)[0] for _ in range(job.rounds)]
    plan = ways.sender.plan
    size = (sum(len(b.entries) for b in plan.buckets), plan.total_bytes, len(plan.buckets))
    pipe.send((seconds, {name: used / job.rounds for name, used in cpu.items()}, size))
    ways.sender.disconnect()
    dist.destroy_process_group()


def engine_seconds(job: Job) -> float:
    """CPU time of the stand-in engine so far; 0 without one."""
    if job.engine_pid is None:
        return 0.0
    return time.clock_gettime(~job.engine_pid << 3 | 2)  # Linux's clock of another process's CPU time


def timed(way: Callable[[], None]) -> tuple[float, float]:
    """Wall seconds until all ranks are done, and CPU seconds of this one."""
    dist.barrier()
    used, begin = time.process_time(), time.perf_counter()
    way()
    dist.barrier()
    return time.perf_counter() - begin, time.process_time() - used


@dataclass
class Update:
    """Measurements of an update: wall and CPU seconds of this rank, slowest sender's phases, bytes to each engine."""

    seconds: float
    cpu: float
    send: float
    fill: float
    bytes: int


@contextmanager
def senders_by_transport(
    names: Iterable[str], rank: int, job: Job, store: str
) -> Generator[tuple[dict[str, torch.Tensor], dict[str, WeightSender]]]:
    """Parameters of one trainer rank, and a sender per transport that has already sent and been verified."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job.layout.world_size)
    family = get_family(job.config)
    table = family.rules(job.config)
    torch.manual_seed(0)  # replicated tensors must be equal: they are compared
    params = parameters_of(table, job, rank)
    groups = make_groups(Senders.at_most(job.layout, job.senders), "gloo", DEADLINE_S)
    senders: dict[str, WeightSender] = {}
    directory = Path(store).parent / "weights"
    for name in names:
        engine_port = SGLangPort(DeadlineConfig.model_validate({"weight_sync_s": DEADLINE_S}))
        options = SyncOptions(
            job.dtype, job.bucket_bytes, "gloo", DEADLINE_S, transport=name, directory=directory,
            settings=job.settings(name),
        )  # fmt: skip
        senders[name] = WeightSender(table, groups, params.items, options, engine_port)
        senders[name].connect([job.engine])
        assert update(senders[name], verify=True)
        update(senders[name])  # the first sync records how to load; all transports share the recording
    yield params, senders
    for sender in senders.values():
        sender.disconnect()
    dist.destroy_process_group()


def transports_main(rank: int, job: Job, store: str, pipe: Connection) -> None:
    """One trainer rank that uses a sender for each transport in turn; sends the updates of each."""
    left_out = {"delta", "checkpoint_engine"}  # delta_sync.py has the changes; engines are not on the ranks' GPUs
    left_out |= {"mooncake"} if find_spec("mooncake") is None else set()
    names = [name for name in transports() if name not in left_out]
    with senders_by_transport(names, rank, job, store) as (_, senders):
        found: dict[str, list[Update]] = {name: [] for name in names}
        for number in range(job.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                found[name].append(update(senders[name]))
        plan = senders["broadcast"].plan
        pipe.send((found, (sum(len(b.entries) for b in plan.buckets), plan.total_bytes, len(plan.buckets))))


def update(sender: WeightSender, version: int = 1, verify: bool = False) -> Update:
    """Begin, send, compare if `verify`, end."""
    first, reports = dist.get_rank() == 0, list[SendReport]()

    def whole() -> None:
        if first:
            with_pool(sender.engines, lambda pool: pool.begin_update())
        dist.barrier()
        reports.append(sender.send(version, verify))
        if first and verify:
            assert with_pool(sender.engines, lambda pool: pool.compare(reports[0].expected))
        if first:
            with_pool(sender.engines, lambda pool: pool.end_update())

    seconds, cpu = timed(whole)
    phases = reports[0].phases.values()
    return Update(
        seconds, cpu, max(phase.send for phase in phases), max(phase.fill for phase in phases), reports[0].bytes
    )


def compare_transports(job: Job) -> dict[str, dict[str, Any]]:
    """Run all ranks; returns the figures of each transport."""
    ranks = on_all_ranks(transports_main, job)
    (tensors, size, buckets), by_name = ranks[0][1], ranks[0][0]
    return {
        name: {
            "server_s": statistics.median(u.seconds for u in updates),
            "ratio_broadcast": ratio((u.seconds for u in by_name["broadcast"]), (u.seconds for u in updates)),
            "send_s": statistics.median(u.send for u in updates),
            "fill_s": statistics.median(u.fill for u in updates),
            "cpu_s": sum(u.cpu for found, _ in ranks for u in found[name]) / job.rounds,
            "tensors": tensors, "bytes": size, "buckets": buckets,
        }
        for name, updates in by_name.items()
    }  # fmt: skip


def on_all_ranks(work: Callable[[int, Job, str, Connection], None], job: Job) -> list[Any]:
    """Results of `work` on every rank, in rank order."""
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as directory:
        pipes = [context.Pipe() for _ in range(job.layout.world_size)]
        ranks = [
            context.Process(target=work, args=(rank, job, f"{directory}/store", theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        while not all(ours.poll(1) for ours, _ in pipes):
            assert not any(rank.exitcode for rank in ranks), "a rank failed: see above"
        found = [ours.recv() for ours, _ in pipes]
        for rank in ranks:
            rank.join()
    return found


def measure(job: Job) -> dict[str, Any]:
    """Run all ranks; returns the figures of one layout."""
    found = on_all_ranks(rank_main, job)
    seconds: dict[str, list[float]] = found[0][0]
    tensors, size, buckets = found[0][2]
    figures: dict[str, Any] = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
    cpu = {name: sum(rank[1][name] for rank in found) for name in found[0][1]}
    figures |= {"tensors": tensors, "bytes": size, "buckets": buckets, "cpu_s": cpu["ours"]}
    if "per_tensor" in seconds:
        figures["ratio_per_tensor"] = ratio(seconds["per_tensor"], seconds["ours"])
    if "raw" in seconds:
        figures["ratio_raw"] = ratio(seconds["ours"], seconds["raw"])
        figures["ratio_raw_of_minima"] = min(seconds["ours"]) / min(seconds["raw"])
        figures["ratio_cpu"] = (cpu["ours"] + cpu["engine ours"]) / (cpu["raw"] + cpu["engine raw"])
    return figures


def ratio(above: Iterable[float], below: Iterable[float]) -> float:
    """Median of per-round ratios: a disturbance affects both sides of a round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def layout_of(text: str) -> ParallelLayout:
    """Layout from words such as `tp2ep2`; data parallelism is the minimum that expert parallelism needs."""
    sizes = {name: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", text)}
    tp = sizes.get("tp", 1)
    return ParallelLayout(**sizes, dp=max(1, sizes.get("ep", 1) * sizes.get("etp", 1) // tp))


def parse_args() -> argparse.Namespace:
    """Parse flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="tp1ep2,tp2ep2,pp2ep2", help="layouts of the trainer, comma-separated")
    parser.add_argument("--senders", type=int, default=8, help="weights.senders (default 8)")
    parser.add_argument(
        "--ways", help="weights.transport, comma-separated; default: auto, plus broadcast for a stand-in"
    )
    parser.add_argument("--plain-memory", action="store_true", help="do not keep freed memory in the process")
    parser.add_argument("--engine", help="URL of a running SGLang server, instead of the stand-in")
    parser.add_argument("--api-key", default="", help="API key of that server")
    parser.add_argument("--loaders", action="store_true", help="start servers with each weights.loader, one at a time")
    parser.add_argument("--transports", action="store_true", help="start a server and compare all weights.transport")
    parser.add_argument("--model", type=Path, help="checkpoint whose shapes are sent; required with --engine")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--bucket-mib", type=float, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    for name, default in {"layers": 16, "hidden": 256, "ffn": 128, "experts": 64, "vocab": 32000}.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{name} of the synthetic model (default {default})"
        )
    args = parser.parse_args()
    if args.engine and not args.model:
        parser.error("--engine needs --model, the checkpoint that the server was started with")
    args.ways = args.ways or ("auto" if args.engine or args.loaders else "auto,broadcast")
    return args


def figures_of(
    args: argparse.Namespace, config: dict[str, Any], layout: str, engine: Endpoint | None, transport: str = AUTO
) -> dict[str, Any]:
    """Figures of one layout and transport, into a server or the stand-in."""
    stand_in = None if engine else StandInEngine()
    if stand_in is not None:
        stand_in.set_mode("discard")
        engine = Endpoint(stand_in.url)
    assert engine is not None
    bucket = int(args.bucket_mib * (1 << 20))
    job = Job(
        config, layout_of(layout), args.dtype, bucket, args.senders, args.rounds, engine, stand_in is not None,
        transport, engine_pid=None if stand_in is None else stand_in.pid,
    )  # fmt: skip
    try:
        return measure(job)
    finally:
        if stand_in is not None:
            stand_in.stop()


def by_loader(args: argparse.Namespace, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Figures of every layout into a server of either loader, and the ratio of their updates."""
    found: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as directory:
        sizes = {k: v for k, v in config.items() if k not in ("architectures", "rope_theta")}
        checkpoint = make_tiny_qwen3_moe(Path(directory) / "model", **sizes)
        for loader in ("model", "recorded"):
            server = serve(checkpoint, Path(directory) / loader, weights={"loader": loader})
            try:
                for layout in args.layouts.split(","):
                    found[f"{layout} {loader}"] = figures_of(args, config, layout, server.endpoint)
            finally:
                server.process.stop()
    for layout in args.layouts.split(","):
        own, recorded = found[f"{layout} model"], found[f"{layout} recorded"]
        recorded["ratio_loaders"] = own["server_s"] / recorded["server_s"]
        own["ratio_loaders"] = 1.0
    return found


def by_transport(args: argparse.Namespace, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Figures of every layout and transport into one server."""
    found: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as directory:
        sizes = {k: v for k, v in config.items() if k not in ("architectures", "rope_theta")}
        checkpoint = make_tiny_qwen3_moe(Path(directory) / "model", **sizes)
        server = serve(checkpoint, Path(directory) / "logs", sglang={"dtype": args.dtype})
        try:
            for text in args.layouts.split(","):
                bucket = int(args.bucket_mib * (1 << 20))
                layout, engine = layout_of(text), server.endpoint
                job = Job(config, layout, args.dtype, bucket, args.senders, args.rounds, engine, stand_in=False)
                found |= {f"{text} {name}": figures for name, figures in compare_transports(job).items()}
        finally:
            server.process.stop()
    return found


def cell(value: float | str) -> str:
    """Format a figure for the table."""
    if isinstance(value, float):
        return f"{value:.3f}" if 0.001 < value < 1e6 else f"{value:.2e}"
    return f"{value:,}" if value != "" else ""


def main() -> None:
    """Run and print."""
    args = parse_args()
    if not args.plain_memory:
        os.environ.update(KEPT_MEMORY)
    config = dict(read_hf_config(args.model)) if args.model else synthetic_config(args)
    engine = Endpoint(args.engine, EngineKeys(args.api_key, args.api_key)) if args.engine else None
    found = (
        by_loader(args, config)
        if args.loaders
        else by_transport(args, config)
        if args.transports
        else {
            layout if way == args.ways.split(",")[0] else f"{layout} {way}": figures_of(
                args, config, layout, engine, way
            )
            for way in args.ways.split(",")
            for layout in args.layouts.split(",")
        }
    )
    table = Table(title=f"medians of {args.rounds} rounds, gloo, load average {os.getloadavg()[0]:.1f}")
    for column in ("", *found):
        table.add_column(column, justify="right")
    for name in dict.fromkeys(name for figures in found.values() for name in figures):
        table.add_row(name, *(cell(figures.get(name, "")) for figures in found.values()))
    console = Console()
    console.width = max(console.width, 24 + 16 * len(found))
    console.print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
