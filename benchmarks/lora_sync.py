"""A sync of adapters alone against a sync of merged weights: bytes, time, and interruptions of the engine.

    python benchmarks/lora_sync.py                    # adapters on attention; on all linear layers; the same, shared
    python benchmarks/lora_sync.py --hidden 1024 --rounds 9 --rank 16
    python benchmarks/lora_sync.py --hidden 2048 --moe-width 768 --layers 2 --targets all    # Qwen3-30B-A3B's widths

Runs one real trainer rank and two real SGLang servers on CPUs, one per way, with the same synthetic Qwen3-MoE in
float32. During a sync each server generates long responses. Both ways are timed in turn, from the trainer's adapters
to the moment from which new requests use them: merged with `weights.transport: broadcast` (pause, buckets, end, stamp,
resume), adapters by `lora.sync: adapter` (write, load, switch). Neither way compares or probes weights. Then, without
requests, the CPU time of all processes for a sync is measured, which other load changes least.

The last line is JSON. For each choice of layers: `merged_bytes`, `adapter_bytes` and their ratio `ratio_bytes`;
`merged_s`, `adapter_s` (medians) and `ratio_seconds`, the median of the rounds' own ratios; `merged_pause_s` and
`adapter_pause_s`: how long the engine is paused; `kept`: responses that continued through all adapter syncs without an
interruption, of all; `tensors` of a file; `write_s`, `load_s`: parts of `adapter_s`; `merged_cpu_s`, `adapter_cpu_s`,
`ratio_cpu`: CPU time of trainer and server without responses; `rank_of_50`: the largest rank whose adapters have 50
times fewer bytes than the merged weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.backends.sglang.client import EngineClient
from mslime.backends.sglang.engine_pool import EnginePool
from mslime.backends.sglang.generating import GenerateRequest
from mslime.backends.sglang.port import SGLangPort
from mslime.backends.sglang.server_process import EngineAddress, ServerProcess
from mslime.backends.sglang.serving_adapters import AdapterVersion
from mslime.config.loader import build
from mslime.config.resolved import engine_spec, policy_spec
from mslime.config.schema import RunConfig
from mslime.convert.families import get_family, read_hf_config
from mslime.convert.lora_rules import make_adapters, served_modules
from mslime.convert.peft import WEIGHTS
from mslime.convert.safetensors_files import read_header
from mslime.network import free_port

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

TARGETS: dict[str, dict[str, Any]] = {
    "attention": {"targets": ["attention"]},
    "all": {"targets": ["attention", "experts"]},
    "shared": {"targets": ["attention", "experts"], "experts": "shared_outer"},
}
RESPONSES, TOKENS = 4, 1900


def configured(model: Path, root: Path, targets: dict[str, Any], rank: int, sync: str) -> RunConfig:
    """Configuration of a run of one trainer rank; `targets` are the layers of the section `lora`."""
    return build(
        {
            "model": {"path": str(model)},
            "data": {"prompts": ["unused.jsonl"]},
            "output_dir": str(root),
            "cluster": {"device": "cpu"},
            "megatron": {"use_distributed_optimizer": False},
            "lora": {"rank": rank, "alpha": 2 * rank, "sync": sync, **targets},
            "rollout": {"max_staleness": 1, "pause_mode": "in_place"},
            "sglang": {"max_total_tokens": 32768},
            "deadlines": {"weight_sync_s": 120, "engine_start_s": 300},
        }
    )


class Engine:
    """A server with one client and its pool on the caller's event loop."""

    def __init__(self, config: RunConfig, root: Path, adapted: tuple[str, ...]) -> None:
        self.process = ServerProcess(engine_spec(config, adapted), 0, root)
        self.address: EngineAddress = self.process.start()
        self.pool = EnginePool([self.client()], 64)
        self._processes: dict[int, psutil.Process] = {}

    def cpu_s(self) -> float:
        """CPU seconds of its processes so far."""
        if not self._processes:
            port = self.address.url.rsplit(":", 1)[1]
            tree = psutil.Process().children(recursive=True)
            launched = [p for p in tree if port in p.cmdline() and "mslime.backends.sglang.launch" in p.cmdline()]
            self._processes = {p.pid: p for one in launched for p in (one, *one.children(recursive=True))}
            assert len(self._processes) >= 3, "a server, its scheduler and its detokenizer"
        return sum(sum(p.cpu_times()[:2]) for p in self._processes.values())

    def client(self) -> EngineClient:
        a = self.address
        return EngineClient(a.url, a.name, None, None, a.log_path, a.keys)

    def begin_responses(self, number: int) -> list[asyncio.Task[Any]]:
        requests = (
            GenerateRequest(f"{number}-{i}", list(range(3, 30)), TOKENS, ignore_eos=True) for i in range(RESPONSES)
        )
        return [asyncio.create_task(self.pool.generate(request)) for request in requests]


async def merged(engine: Engine, sender: Any, version: int) -> tuple[float, float, int]:
    """Sync merged weights; returns (seconds, seconds of the engine's pause, bytes)."""
    begin = time.perf_counter()
    await engine.pool.pause("in_place")
    paused = time.perf_counter()
    await engine.pool.begin_update()
    report = await asyncio.to_thread(sender.send, version)
    await engine.pool.end_update()
    await engine.pool.stamp(version)
    await engine.pool.resume()
    end = time.perf_counter()
    return end - begin, end - paused, report.bytes


async def alone(engine: Engine, trainer: MegatronTrainer, root: Path, version: int) -> tuple[float, float, Path]:
    """Sync adapters alone; returns (seconds, seconds of the write, path of the written file)."""
    begin, directory = time.perf_counter(), root / f"adapter{version}"
    await asyncio.to_thread(trainer.write_adapter, directory, False)
    written = time.perf_counter()
    await engine.pool.load_adapter(AdapterVersion(f"v{version}", version, directory), 3)
    await engine.pool.switch(version, interrupt=False)
    return time.perf_counter() - begin, written - begin, directory / WEIGHTS


async def cpu_of(engine: Engine, sync: Callable[[], Awaitable[Any]]) -> float:
    """CPU seconds of trainer, client and server for a sync."""
    begin = time.process_time() + engine.cpu_s()
    await sync()
    return time.process_time() + engine.cpu_s() - begin


async def cpu_of_both(
    engines: tuple[Engine, Engine], trainer: MegatronTrainer, sender: Any, root: Path, first: int, rounds: int
) -> dict[str, float]:
    """CPU seconds of a sync of each way, in turn, without generation."""
    whole, beside = engines
    found: list[tuple[float, float]] = []
    for version in range(first, first + rounds):
        by_weights = await cpu_of(whole, partial(merged, whole, sender, version))
        found.append((by_weights, await cpu_of(beside, partial(alone, beside, trainer, root, version))))
    by_weights, by_adapters = (statistics.median(each[way] for each in found) for way in (0, 1))
    return {
        "merged_cpu_s": by_weights,
        "adapter_cpu_s": by_adapters,
        "ratio_cpu": statistics.median(adapter / weights for weights, adapter in found),
    }


async def measure(
    engines: tuple[Engine, Engine], trainer: MegatronTrainer, sender: Any, root: Path, rounds: int
) -> dict[str, Any]:
    """Measure both ways in turn while responses run; the first round of each is not counted."""
    whole, beside = engines
    found: list[tuple[float, float, float, float]] = []
    bytes_of, file = (0, 0), root
    await alone(beside, trainer, root, 1)
    running = whole.begin_responses(0) + beside.begin_responses(0)
    await asyncio.sleep(0.5)
    for version in range(2, rounds + 3):
        merged_s, pause_s, merged_bytes = await merged(whole, sender, version)
        adapter_s, write_s, file = await alone(beside, trainer, root, version)
        found.append((merged_s, adapter_s, pause_s, write_s))
        bytes_of = (merged_bytes, file.stat().st_size)
    under_way = [not task.done() for task in running[RESPONSES:]]
    for engine in engines:
        await engine.pool.abort()
    results = await asyncio.gather(*running)
    kept = sum(
        went and {version for version, _, _ in result.versions} == {1} and not result.retractions
        for went, result in zip(under_way, results[RESPONSES:], strict=True)
    )
    counted, ratio_bytes = found[1:], bytes_of[0] / bytes_of[1]
    return await cpu_of_both(engines, trainer, sender, root, rounds + 3, rounds) | {
        "merged_bytes": bytes_of[0],
        "adapter_bytes": bytes_of[1],
        "ratio_bytes": ratio_bytes,
        "rank_of_50": int(ratio_bytes * trainer.spec.lora.rank / 50),
        "tensors": len(read_header(file)),
        "merged_s": statistics.median(each[0] for each in counted),
        "adapter_s": statistics.median(each[1] for each in counted),
        "ratio_seconds": statistics.median(each[1] / each[0] for each in counted),
        "merged_pause_s": statistics.median(each[2] for each in counted),
        "adapter_pause_s": 0.0,
        "write_s": statistics.median(each[3] for each in counted),
        "load_s": statistics.median(each[1] - each[3] for each in counted),
        "kept": [kept, RESPONSES],
    }


async def case(name: str, model: Path, root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one choice of layers, with one trainer and a server for each way."""
    config = configured(model, root, TARGETS[name], arguments.rank, "adapter")
    hf_config = read_hf_config(model)
    adapted = served_modules(make_adapters(get_family(hf_config).rules(hf_config), config.lora))
    engines: list[Engine] = []
    trainer = MegatronTrainer(policy_spec(config), 0, 1, f"tcp://127.0.0.1:{free_port('127.0.0.1')}")
    try:
        starts = (asyncio.to_thread(Engine, config, root / f"logs{i}", m) for i, m in enumerate(((), adapted)))
        engines += await asyncio.gather(*starts)
        sender = trainer.weight_sender(SGLangPort(config.deadlines))
        await asyncio.to_thread(sender.connect, [engines[0].address.endpoint])
        return await measure((engines[0], engines[1]), trainer, sender, root, arguments.rounds)
    finally:
        for engine in engines:
            await engine.pool.close()
            engine.process.stop()
        trainer.close()


def run(coroutine: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Run a coroutine on a new event loop; returns its result."""
    return asyncio.run(coroutine)


def main() -> None:
    """Measure, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the model")
    parser.add_argument("--moe-width", type=int, help="width of an expert; default: half of the hidden size")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    with TemporaryDirectory() as directory:
        root = Path(directory)
        model = make_tiny_qwen3_moe(
            root / "model", hidden_size=arguments.hidden,
            moe_intermediate_size=arguments.moe_width or arguments.hidden // 2,
            num_hidden_layers=arguments.layers, num_experts=arguments.experts,
        )  # fmt: skip
        for name in arguments.targets:
            found[name] = run(case(name, model, root / name, arguments))
    table = Table(title="Adapters alone against merged weights", title_justify="left")
    headings = ("layers", "MB merged", "MB adapters", "ratio", "50 at rank", "s merged", "s adapters", "ratio",
                "CPU s merged", "CPU s adapters", "ratio", "kept")  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, each in found.items():
        table.add_row(
            name, f"{each['merged_bytes'] / 1e6:.1f}", f"{each['adapter_bytes'] / 1e6:.2f}",
            f"{each['ratio_bytes']:.0f}", str(each["rank_of_50"]), f"{each['merged_s']:.3f}",
            f"{each['adapter_s']:.3f}", f"{each['ratio_seconds']:.2f}", f"{each['merged_cpu_s']:.2f}",
            f"{each['adapter_cpu_s']:.2f}", f"{each['ratio_cpu']:.2f}", f"{each['kept'][0]} of {each['kept'][1]}",
        )  # fmt: skip
    Console().print(table)
    print(json.dumps({**vars(arguments), **found}))


if __name__ == "__main__":
    main()
