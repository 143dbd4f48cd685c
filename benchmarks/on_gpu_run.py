"""An engine and a whole run on one GPU, which engine and trainer share, against the card's limits.

    python benchmarks/on_gpu_run.py [--parts engine r3 off] [--layers 4] [--steps 4] [--sglang attention_backend=triton]

The model is that of benchmarks/on_gpu.py: random weights, the widths of Qwen3-30B-A3B, bfloat16. Parts:

    engine   tokens/s of a server that returns log-probs and routes, over one that returns neither, with the same
             requests; the memory of its weights and its cache, over `mslime plan`'s
    r3       `mslime train` with weights by CUDA handles, every sampled token's experts replayed by the trainer: the
             mismatch between engine and trainer, the share of replayed (token, layer) pairs, and the seconds of a sync
             over copying its bytes twice within the GPU's memory
    off      the same without routes: the mismatch that replay removes

Each part prints one line of JSON when it ends, and the last line holds all. A run is ended after its steps without
saving.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.on_gpu import (
    GIB,
    card_rates,
    device_name,
    gpu_memory_gb,
    release,
    report_progress,
    show,
    write_wide_model,
)
from examples.tiny_model import write_rows
from mslime.backends.sglang.generating import GenerateRequest
from mslime.backends.sglang.server_process import EngineAddress, ServerProcess
from mslime.config.loader import build
from mslime.config.resolved import engine_spec
from mslime.observe.metrics import FILE_NAME, read_metrics
from mslime.observe.names import by_step

PROMPT = 128
Figures = dict[str, float]


def main() -> int:
    """Measure part after part; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="of each run; at least 3: the first two syncs are slower")
    parser.add_argument("--requests", type=int, default=128, help="at once, and responses of a step")
    parser.add_argument("--tokens", type=int, default=1024, help="of each response")
    parser.add_argument("--sglang", nargs="*", default=[], metavar="NAME=VALUE", help="fields of SGLang's servers")
    parser.add_argument("--small", action="store_true", help="small model, to test this script")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to test this script")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU found; --device cpu --small tests this script")
    if args.steps < 3:
        parser.error(f"--steps is {args.steps}, and the first two syncs are not counted; use at least 3")
    found: dict[str, float | str] = {"device": device_name(args.device), "torch": torch.__version__}
    failed = False
    with TemporaryDirectory(dir="/dev/shm") as directory:
        root = Path(directory)
        report_progress("writing a checkpoint with random weights")
        model = write_wide_model(root, args.layers, args.small, args.device)
        write_tokenizer(model)
        write_rows(root / "prompts.jsonl", prompt_rows(model, 64))
        found |= (rates := card_rates(args.device, 1 << 20 if args.small else GIB))
        release(args.device)
        for part in args.parts:
            report_progress(f"part {part}")
            try:
                figures = PARTS[part](root, args, rates)
            except Exception as error:  # the other parts are independent
                failed = True
                print(f"part {part} failed: {error}", file=sys.stderr, flush=True)
            else:
                print(json.dumps(figures), flush=True)
                found |= figures
    show(found)
    print(json.dumps(found))
    return int(failed)


def write_tokenizer(model: Path) -> None:
    """One word for each id of the model's vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "<bos>", "<eos>")
    words = (*special, *(f"w{i}" for i in range(len(special), vocabulary(model))))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<pad>", pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(model)


def vocabulary(model: Path) -> int:
    """Number of ids."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def prompt_rows(model: Path, number: int) -> list[dict[str, str]]:
    """Random prompts."""
    size, rng = vocabulary(model), np.random.default_rng(0)
    return [
        {"prompt": " ".join(f"w{i}" for i in rng.integers(3, size, PROMPT)), "label": "none"} for _ in range(number)
    ]


def settings(root: Path, args: argparse.Namespace, replay: str) -> dict[str, Any]:
    """Settings of a run."""
    cuda = args.device == "cuda"
    groups = max(1, args.requests // 8)
    return {
        "name": f"replay_{replay}", "output_dir": str(root), "model": {"path": str(root / "model")},
        "data": {"prompts": [str(root / "prompts.jsonl")]},
        "cluster": {
            "device": args.device, "placement": "colocated", "trainer_ranks": 1, "ray_address": "local",
            "gpu_memory_gb": gpu_memory_gb(args.device),
        },
        "megatron": {"params_dtype": "bfloat16", "moe_grouped_gemm": True, "moe_permute_fusion": True} if cuda else {},
        "sglang": {"max_total_tokens": 1 << (18 if cuda else 14)} | dict(_field(text) for text in args.sglang),
        "rollout": {
            "groups_per_step": groups, "group_size": args.requests // groups, "max_staleness": 0,
            "max_response_tokens": args.tokens, "concurrency": args.requests,
        },
        "reward": {"kind": "custom", "function": "mslime_plugins.doctor.step:even_tokens"},
        "train": {
            "num_steps": 1000, "lr": 1e-6, "replay": replay,
            "max_tokens_per_micro_batch": max(8192 if cuda else 256, PROMPT + args.tokens),
        },
        "weights": {"transport": "handles", "verify": "first", "bucket_mib": 1024},
        "checkpoint": {"save_every": 0, "save_hf": False},
        "observe": {"progress": "off", "save_rollouts": "none"},
    }  # fmt: skip


def _field(text: str) -> tuple[str, Any]:
    """A field of a server; the value is JSON, or a text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def measure_engine(root: Path, args: argparse.Namespace, rates: Figures) -> Figures:
    """A server with log-probs and routes beside one without."""
    found = Figures()
    for replay in ("r3", "off"):
        returns = replay == "r3"
        config = build(settings(root, args, replay))
        server = ServerProcess(engine_spec(config), 0, root / f"server_{replay}")
        try:
            report_progress(f"a server {'with' if returns else 'without'} log-probs and routes")
            address = server.start()
            if returns:
                found |= _memory(address, config, root)
            rates_seen = [_tokens_per_s(address, root, args, returns, turn) for turn in range(3)]
        finally:
            server.stop()
        found[f"engine_tokens_per_s_{'returning' if returns else 'plain'}"] = statistics.median(rates_seen[1:])
    found["ratio_engine"] = found["engine_tokens_per_s_returning"] / found["engine_tokens_per_s_plain"]
    return found


def _tokens_per_s(address: EngineAddress, root: Path, args: argparse.Namespace, returns: bool, turn: int) -> float:
    """Generated tokens/s of all requests at once."""
    size, rng = vocabulary(root / "model"), np.random.default_rng(turn)
    bodies: list[dict[str, Any]] = []
    for number in range(args.requests):
        request = GenerateRequest(
            f"{turn}-{number}", rng.integers(3, size, PROMPT).astype(np.int32), args.tokens, ignore_eos=True,
            want_routes=returns, routes_start=0,
        )  # fmt: skip
        body = request.payload()
        bodies.append(body if returns else {k: v for k, v in body.items() if not k.startswith("return_")})
    headers = address.keys.headers("/generate")
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(headers=headers, timeout=600, limits=limits) as client, ThreadPoolExecutor(len(bodies)) as pool:

        def ask(body: dict[str, Any]) -> int:
            reply = client.post(f"{address.url}/generate", json=body)
            reply.raise_for_status()
            return int(reply.json()["meta_info"]["completion_tokens"])

        begin = time.perf_counter()
        tokens = sum(pool.map(ask, bodies))
        return tokens / (time.perf_counter() - begin)


def _memory(address: EngineAddress, config: Any, root: Path) -> Figures:
    """What the server reports of its memory, and the plan's."""
    from mslime_plugins.planner.plan import make_plan

    headers = address.keys.headers("/server_info")
    reply = httpx.get(f"{address.url}/server_info", headers=headers, timeout=60).raise_for_status().json()
    used = reply["internal_states"][0]["memory_usage"]
    planned = make_plan(config, json.loads((root / "model/config.json").read_text())).engine
    assert planned is not None
    weights, cache = used["weight"] * GIB, used["kvcache"] * GIB
    return {
        "engine_weights_bytes": weights, "ratio_engine_weights": weights / planned.weights,
        "engine_cache_bytes": cache, "ratio_engine_cache": cache / planned.cache,
    }  # fmt: skip


def measure_run(replay: str) -> Callable[[Path, argparse.Namespace, Figures], Figures]:
    """A function that trains with `replay`, and returns its figures."""

    def measure(root: Path, args: argparse.Namespace, rates: Figures) -> Figures:
        rows = _train(root, settings(root, args, replay), args.steps)
        later = [row for row in rows if row["step"] > 2]  # the engine's copies are recorded, and verified, before
        found: Figures = {
            f"mismatch_kl_{replay}": statistics.fmean(row["mismatch/kl"] for row in rows),
            f"mismatch_abs_max_{replay}": max(row["mismatch/abs_max"] for row in rows),
            f"rollout_tokens_per_s_{replay}": statistics.median(row["rollout/tokens_per_s"] for row in later),
            f"train_tokens_per_s_{replay}": statistics.median(row["perf/train_tokens_per_s"] for row in later),
        }
        if replay == "off":
            return found
        size = later[-1]["weights/bytes"]
        seconds = statistics.median(row["weights/bytes"] / row["weights/gb_per_s"] / 1e9 for row in later)
        return found | {
            "replay_coverage": min(row["replay/coverage"] for row in rows),
            "router_agreement": statistics.fmean(row["replay/agreement"] for row in rows),
            "handles_bytes": size, "handles_s": seconds, "handles_gb_per_s": size / seconds / 1e9,
            "ratio_handles": seconds * rates["copy_bytes_per_s"] / (2 * size),
            **{
                f"{name}_s": statistics.median(row[f"perf/{name}_seconds"] for row in later)
                for name in ("sleep", "wake", "release", "resume")
            },
        }  # fmt: skip

    return measure


def _train(root: Path, values: dict[str, Any], steps: int) -> Sequence[dict[str, Any]]:
    """Rows of the first `steps` steps of a run, which is then killed: its checkpoint would be larger than many disks.

    Raises:
        RuntimeError: it ended before (message with the end of its output).
    """
    config, output = root / f"{values['name']}.json", root / f"{values['name']}.log"
    config.write_text(json.dumps(values))
    metrics = root / values["name"] / FILE_NAME
    with output.open("w") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "mslime", "train", str(config)], stdout=log, stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        )  # fmt: skip
    try:
        while True:
            rows = by_step(read_metrics(metrics)) if metrics.exists() else []
            done = [dict(row) for row in rows if row["step"] > 0 and "weights/bytes" in row]
            if len(done) >= steps:
                return done[:steps]
            if run.poll() is not None:
                words = "\n".join(output.read_text().strip().splitlines()[-30:])
                raise RuntimeError(f"the run ended with status {run.returncode} after {len(done)} steps:\n{words}")
            time.sleep(0.2)
    finally:
        _kill(run)


def _kill(run: subprocess.Popen[bytes]) -> None:
    """End a run and everything that it started."""
    try:
        below = psutil.Process(run.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    run.kill()
    run.wait()
    for process in below:
        if process.is_running():
            process.kill()
    psutil.wait_procs(below, timeout=30)


PARTS: dict[str, Callable[[Path, argparse.Namespace, Figures], Figures]] = {
    "engine": measure_engine, "r3": measure_run("r3"), "off": measure_run("off"),
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
