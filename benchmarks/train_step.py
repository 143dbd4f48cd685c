"""Tokens per second of mslime's trainer against a plain transformers training loop, same model, batch and threads.

    python benchmarks/train_step.py [--model DIR] [--sequences 64] [--length 48] [--steps 8] [--threads 2]

Both run supervised AdamW steps in fp32 on one process in turn, in this one run, and the ratio is what counts. The
trainer packs sequences without padding; the transformers loop pads them to the longest, as a plain loop does. The floor
is printed too: 6 x active parameters x tokens operations over the rate of a large matrix product on the same threads.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from rich.console import Console
from rich.table import Table


def main() -> None:
    """Parse, run both, print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face checkpoint (default: a tiny random Qwen3-MoE)")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument(
        "--length", type=int, default=48, help="longest sequence; lengths are uniform in [length/4, length]"
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with TemporaryDirectory() as scratch:
        model = args.model or _tiny_model(Path(scratch) / "model")
        rng = np.random.default_rng(0)
        lengths = rng.integers(args.length // 4, args.length + 1, args.sequences)
        vocab = _config(model)["vocab_size"]
        sequences = [rng.integers(3, vocab, n).astype(np.int32) for n in lengths]
        tokens = int(lengths.sum())
        # mslime first: its CPU platform must be in place before anything imports megatron.core.
        ours = _mslime(model, sequences, args.steps, args.threads)
        theirs = _transformers(model, sequences, args.steps)
        floor = 6 * _active_parameters(_config(model)) * tokens / _matmul_rate()
    _print(tokens, ours, theirs, floor, args)


def _tiny_model(path: Path) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=2,
        norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def _config(model: Path) -> dict[str, int]:
    import json

    return json.loads((model / "config.json").read_text())


def _active_parameters(config: dict[str, int]) -> int:
    h, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    attention = h * dim * (2 * heads + 2 * groups)
    experts = config["num_experts_per_tok"] * 3 * h * config["moe_intermediate_size"]
    return layers * (attention + experts) + h * config["vocab_size"]


def _matmul_rate(n: int = 1024) -> float:
    """Operations per second of a large fp32 matrix product on the present threads."""
    a, b = torch.randn(n, n), torch.randn(n, n)
    a @ b
    begin = time.perf_counter()
    for _ in range(5):
        a @ b
    return 5 * 2 * n**3 / (time.perf_counter() - begin)


def _mslime(model: Path, sequences: list[np.ndarray], steps: int, threads: int) -> list[float]:
    """Seconds of each step after a warm-up step."""
    from mslime.backends.megatron.trainer import MegatronTrainer
    from mslime.backends.sglang.server import free_port
    from mslime.config.loader import build
    from mslime.data.packing import build_shards
    from mslime.data.sample import Sample

    config = build({
        "model": {"path": str(model)}, "data": {"prompts": ["unused.jsonl"]},
        "cluster": {"device": "cpu", "trainer_threads": threads},
        "train": {"task": "sft", "lr": 1e-4, "max_tokens_per_micro_batch": 4096},
    })  # fmt: skip
    trainer = MegatronTrainer(config, 0, 1, f"tcp://127.0.0.1:{free_port()}")
    torch.set_num_threads(threads)
    samples = []
    for i, tokens in enumerate(sequences):
        sample = Sample.from_prompt(i, 0, tokens[:1])
        rest = len(tokens) - 1
        sample.extend(tokens[1:], log_probs=np.zeros(rest, np.float32), versions=[(0, 0, rest)], engine="none")
        samples.append(sample)
    shards = [step[0] for step in build_shards(samples, [0.0] * len(samples), config.layout, 4096)]
    seconds = []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        trainer.train(shards)
        seconds.append(time.perf_counter() - begin)
    trainer.close()
    return seconds[1:]


def _transformers(model: Path, sequences: list[np.ndarray], steps: int) -> list[float]:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(sequences):
        ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        mask[row, : len(tokens)] = 1
    labels = ids.masked_fill(mask == 0, -100)
    seconds = []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        optimizer.zero_grad()
        network(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def _print(tokens: int, ours: list[float], theirs: list[float], floor: float, args: argparse.Namespace) -> None:
    a, b = float(np.median(ours)), float(np.median(theirs))
    table = Table(
        title=f"{tokens} tokens in {args.sequences} sequences, {args.threads} threads, median of {args.steps} steps"
    )
    for name in ("", "ms a step", "tokens/s"):
        table.add_column(name, justify="right")
    for name, value in (("mslime trainer", a), ("transformers loop", b), ("operations floor", floor)):
        table.add_row(name, f"{value * 1e3:.0f}", f"{tokens / value:,.0f}")
    console = Console()
    console.print(table)
    console.print(f"mslime / transformers = {b / a:.2f} x tokens per second; mslime takes {a / floor:.1f} x the floor")


if __name__ == "__main__":
    main()
