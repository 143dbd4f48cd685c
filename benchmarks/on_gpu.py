"""A step of one wide MoE on one GPU, its memory, packing for a sync, and offloading, against the card's limits.

    python benchmarks/on_gpu.py [--layers 4] [--tokens 16384] [--steps 5] [--fp8 blockwise tensorwise] [--trace FILE]

The model has random weights and the widths of Qwen3-30B-A3B (128 experts, 8 per token, a vocabulary of 151,936), in
bfloat16, through the real `MegatronTrainer` on Transformer Engine's layers; one rank, no recompute. Both parts of each
ratio are measured in the same run:

    step        seconds over the floor: 6 x active parameters x tokens operations at the rate of a large matrix product
                (the floor excludes attention's own products); model_tflops is the same as a rate
    fp8         seconds of the bfloat16 step over those of the same step with `train.fp8`
    memory      peak of torch's allocator, and bytes of weights, gradients and optimizer, over `mslime plan`'s
    packing     filling all buckets of a weight sync, over copying the same bytes within the GPU's memory
    sleep       offloading all of the trainer's state to pinned host memory and back, over copies of as many bytes

Prints medians of --steps, after two uncounted steps. --trace writes the operations of one more step, for a browser
(chrome://tracing), and prints those that take longest. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from mslime.config.keys import Endpoint
from mslime.weights.transport import EngineInfo, Link, Transport
from mslime.weights.weight_plan import Bucket

GIB = 1 << 30
LONGEST = 2048
BEGIN = time.perf_counter()


def main() -> None:
    """Measure, print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per step, in micro-batches of 8192")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--fp8", nargs="*", default=["blockwise"], choices=["blockwise", "tensorwise"])
    parser.add_argument("--trace", type=Path, help="file for a profile of one step in bfloat16, such as step.json.gz")
    parser.add_argument("--small", action="store_true", help="small model, to test this script")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to test this script")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU found; --device cpu --small tests this script")
    found: dict[str, float | str] = {"device": device_name(args.device), "torch": torch.__version__}
    with TemporaryDirectory(dir="/dev/shm") as directory:
        report_progress("writing a checkpoint with random weights")
        model = write_wide_model(Path(directory), args.layers, args.small, args.device)
        report_progress("measuring the rates of the card")
        rates = card_rates(args.device, 1 << 20 if args.small else GIB)
        found |= rates
        for recipe in (None, *args.fp8):
            found |= _measure(model, Path(directory), args, recipe, rates)
            release(args.device)
    for recipe in args.fp8:
        found[f"ratio_fp8_{recipe}"] = float(found["step_s"]) / float(found[f"step_s_{recipe}"])
    show(found)
    print(json.dumps(found))


def report_progress(text: str) -> None:
    """Print the progress: the first steps of a process compile kernels and take long."""
    print(f"{time.perf_counter() - BEGIN:6.0f} s  {text}", file=sys.stderr, flush=True)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def gpu_memory_gb(device: str) -> float:
    """The setting cluster.gpu_memory_gb with which `mslime plan` counts on the memory that this GPU has."""
    from mslime_plugins.planner.plan import USABLE

    return torch.cuda.get_device_properties(0).total_memory / USABLE / GIB if device == "cuda" else 80.0


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def median(work: Callable[[], object], times: int, device: str, warm: int = 2) -> float:
    """Median seconds of a call."""
    found: list[float] = []
    for _ in range(times + warm):
        finish(device)
        begin = time.perf_counter()
        work()
        finish(device)
        found.append(time.perf_counter() - begin)
    return statistics.median(found[warm:])


def card_rates(device: str, size: int) -> dict[str, float]:
    """Measured rates of the card: operations/s, and copied bytes/s within the card and to and from the host."""
    n = 8192 if device == "cuda" else 512
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    here, there = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
    return {
        "matmul_per_s": 2 * n**3 / median(lambda: a @ b, 20, device),
        "copy_bytes_per_s": size / median(lambda: there.copy_(here), 20, device),
        "to_host_bytes_per_s": size / median(lambda: host.copy_(here, non_blocking=True), 5, device),
        "from_host_bytes_per_s": size / median(lambda: there.copy_(host, non_blocking=True), 5, device),
    }


def write_wide_model(root: Path, layers: int, small: bool, device: str) -> Path:
    """A checkpoint with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8,
    }  # fmt: skip
    if small:
        sizes |= {"vocab_size": 512, "hidden_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4,
                  "head_dim": 32, "num_experts": 16}  # fmt: skip
    config = Qwen3MoeConfig(
        **sizes, num_hidden_layers=layers, norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=40960,
        tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    with torch.device(device):
        network: Any = Qwen3MoeForCausalLM(config)
        network = network.to(torch.bfloat16)
        with torch.no_grad():
            network.lm_head.weight.mul_(4)  # random logits are nearly uniform; a trained model's are not
    network.save_pretrained(root / "model")
    del network
    release(device)
    return root / "model"


def _active(config: dict[str, Any]) -> int:
    """Active parameters per token."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    attention = hidden * dim * (2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"])
    experts = config["num_experts_per_tok"] * 3 * hidden * config["moe_intermediate_size"]
    router = hidden * config.get("num_experts", config.get("num_local_experts"))
    return config["num_hidden_layers"] * (attention + experts + router) + hidden * config["vocab_size"]


def _shards(config: Any, tokens: int, vocab: int, most: int) -> Sequence[Any]:
    """Shards of a supervised step on random tokens; lengths are between half the longest and the longest."""
    from mslime.data.packing import build_shards
    from mslime.data.sample import Sample

    rng, samples, left = np.random.default_rng(0), list[Any](), tokens
    while left > 1:
        length = min(left, int(rng.integers(LONGEST // 2, LONGEST + 1)))
        ids = rng.integers(3, vocab, length).astype(np.int32)
        sample = Sample.from_prompt(len(samples), 0, ids[:1])
        rest = length - 1
        sample.extend(ids[1:], log_probs=np.zeros(rest, np.float32), versions=[(0, 0, rest)], engine="none")
        samples.append(sample)
        left -= length
    return [step[0] for step in build_shards(samples, [0.0] * len(samples), config.layout, most)]


def _measure(
    model: Path, root: Path, args: argparse.Namespace, recipe: str | None, rates: dict[str, float]
) -> dict[str, float]:
    from mslime.backends.megatron.step.trainer import MegatronTrainer
    from mslime.config.loader import build
    from mslime.config.resolved import policy_spec
    from mslime.network import free_port

    most = min(8192, args.tokens)
    cuda = {"params_dtype": "bfloat16", "moe_grouped_gemm": True, "moe_permute_fusion": True}
    config = build({
        "model": {"path": str(model)}, "data": {"prompts": ["unused.jsonl"]}, "output_dir": str(root / "run"),
        "cluster": {"device": args.device, "gpu_memory_gb": gpu_memory_gb(args.device)},
        "megatron": {"use_distributed_optimizer": True, **(cuda if args.device == "cuda" else {})},
        "train": {"task": "sft", "lr": 1e-5, "max_tokens_per_micro_batch": most, "fp8": recipe},
        "weights": {"bucket_mib": 1024, "transport": f"{__name__}:Nowhere"},
        "deadlines": {"weight_sync_s": 300},
    })  # fmt: skip
    spec = policy_spec(config)
    precision = f"in FP8 ({recipe})" if recipe else "in bfloat16"
    report_progress(f"a trainer {precision}")
    trainer = MegatronTrainer(spec, 0, 1, f"tcp://127.0.0.1:{free_port()}")
    published = json.loads((model / "config.json").read_text())
    shards = _shards(config, args.tokens, published["vocab_size"], most)
    report_progress(f"steps {precision}")
    trainer.train(shards)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step_s = median(lambda: trainer.train(shards), args.steps, args.device, warm=1)
    floor = 6 * _active(published) * args.tokens / rates["matmul_per_s"]
    found = {"step_s": step_s, "tokens_per_s": args.tokens / step_s, "floor_s": floor, "ratio_step": step_s / floor,
             "model_tflops": floor * rates["matmul_per_s"] / step_s / 1e12}  # fmt: skip
    if args.device == "cuda":
        found |= _memory(config, published)
    if recipe is None:
        if args.trace:
            _trace(lambda: trainer.train(shards), args.trace)
        report_progress("packing for a weight sync")
        found |= _packing(trainer, args, rates)
        report_progress("sleep")
        found |= _sleep(trainer, args, rates)
    trainer.close()
    return found if recipe is None else {f"{name}_{recipe}": value for name, value in found.items()}


def _trace(work: Callable[[], object], file: Path) -> None:
    """Write a profile of a call, and print its longest operations."""
    from torch.profiler import profile

    report_progress(f"a profile of one step, to {file}")
    with profile() as profiled:
        work()
    profiled.export_chrome_trace(str(file))
    order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(profiled.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60), file=sys.stderr)


def _memory(config: Any, published: dict[str, Any]) -> dict[str, float]:
    """The allocator's peak of a step beside the planned peak."""
    from mslime_plugins.planner.plan import make_plan

    (stage,) = make_plan(config, published).stages
    step = torch.cuda.max_memory_allocated()
    planned = stage.memory.states + stage.memory.step
    return {"peak_bytes": step, "planned_bytes": planned, "ratio_memory": step / planned,
            "reserved_bytes": torch.cuda.max_memory_reserved()}  # fmt: skip


class Nowhere(Transport):
    """Transport whose buckets arrive as soon as they are filled."""

    def __init__(self, link: Link) -> None:
        """Does nothing."""

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Does nothing."""

    def disconnect(self) -> None:
        """Does nothing."""

    def start(self, bucket: Bucket, flat: torch.Tensor) -> Arrived:
        """Return an arrived bucket."""
        return Arrived()


class Arrived:
    """A bucket that is filled on its device."""

    def wait(self) -> None:
        """Wait until the device has finished its queued work."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


class OneEngine:
    """Stub of an engine that can only be described."""

    def describe(self, engine: Endpoint) -> EngineInfo:
        """Description of an engine with one rank."""
        return EngineInfo(engine.url, ranks=1)

    def close(self) -> None:
        """Does nothing."""


def _packing(trainer: Any, args: argparse.Namespace, rates: dict[str, float]) -> dict[str, float]:
    engine_port: Any = OneEngine()
    sender = trainer.weight_sender(engine_port)
    sender.connect([Endpoint("http://nowhere:1")])
    seconds = median(lambda: sender.send(1), args.steps, args.device)
    size = sum(bucket.hf_bytes for bucket in sender.plan.buckets)
    sender.disconnect()
    return {
        "sync_bytes": size, "buckets": len(sender.plan.buckets), "packing_s": seconds,
        "ratio_packing": seconds * rates["copy_bytes_per_s"] / size,
    }  # fmt: skip


def _sleep(trainer: Any, args: argparse.Namespace, rates: dict[str, float]) -> dict[str, float]:
    away, back = list[float](), list[float]()
    finish(args.device)
    awake = torch.cuda.memory_allocated() if args.device == "cuda" else 0
    asleep = 0
    for _ in range(4):
        begin = time.perf_counter()
        trainer.hold(())
        finish(args.device)
        away.append(time.perf_counter() - begin)
        asleep = torch.cuda.memory_allocated() if args.device == "cuda" else 0
        begin = time.perf_counter()
        trainer.hold(("weights", "optimizer", "gradients"))
        finish(args.device)
        back.append(time.perf_counter() - begin)
    state = trainer._state
    moved = state.size_of("weights") + state.size_of("optimizer")
    return {
        "awake_bytes": awake, "asleep_bytes": asleep, "moved_bytes": moved, "first_sleep_s": away[0],
        "sleep_s": statistics.median(away[1:]), "wake_s": statistics.median(back[1:]),
        "ratio_sleep": statistics.median(away[1:]) * rates["to_host_bytes_per_s"] / moved,
        "ratio_wake": statistics.median(back[1:]) * rates["from_host_bytes_per_s"] / moved,
    }  # fmt: skip


def show(found: dict[str, float | str]) -> None:
    table = Table(title=f"mslime on {found['device']}, torch {found['torch']}")
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in found.items():
        if isinstance(value, str):
            continue
        table.add_row(name, f"{value / GIB:,.2f} GiB" if name.endswith("_bytes") else f"{value:,.4g}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
