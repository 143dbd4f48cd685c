"""Tokens per second of mslime's trainer against a plain transformers training loop, same model, batch and threads.

    python benchmarks/train_step.py [--model DIR] [--short 64 48] [--long 16 768] [--steps 8] [--threads 1]

Both run supervised AdamW steps in fp32 in one process, one step of each in turn, on many short sequences and on a few
long ones. The results are `ratio_short` and `ratio_long`: the median, over the pairs of steps, of CPU seconds of the
transformers loop over those of mslime, which other load disturbs least. With several threads OpenMP spins while it
waits, so wall time and CPU time both depend on other load; therefore the default is one thread. The trainer packs
sequences without padding; the transformers loop pads them to the longest. The script also prints the floor, 6 x active
parameters x tokens operations at the rate of a large matrix product on the same threads, and with --calls the number
of torch operations of each. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

Step = Callable[[], object]
Times = list[tuple[float, float]]


def main() -> None:
    """Parse, run both on both batches, print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face checkpoint (default: a tiny random Qwen3-MoE)")
    for name, sizes in (("short", (64, 48)), ("long", (16, 768))):
        parser.add_argument(
            f"--{name}", type=int, nargs=2, default=sizes, metavar=("SEQUENCES", "LENGTH"),
            help="LENGTH of the longest; lengths are uniform in [LENGTH/4, LENGTH]",
        )  # fmt: skip
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--calls", action="store_true", help="also count torch operations per step")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    figures: dict[str, float] = {"threads": args.threads, "steps": args.steps}
    with TemporaryDirectory() as scratch:
        model = args.model or _tiny_model(Path(scratch) / "model")
        # mslime first: its CPU platform must be in place before anything imports megatron.core.
        begin, close = _mslime(model, args.threads)
        rate = _matmul_rate()
        for name in ("short", "long"):
            number, length = vars(args)[name]
            sequences = _sequences(number, length, _config(model)["vocab_size"])
            tokens = sum(map(len, sequences))
            floor = 6 * _active_parameters(_config(model)) * tokens / rate
            ours, theirs = begin(sequences), _transformers(model, sequences)
            times = _in_turn(ours, theirs, args.steps)
            found = _figures(times, tokens, floor) | (
                {"mslime_calls": _calls(ours), "transformers_calls": _calls(theirs)} if args.calls else {}
            )
            _print(name, found, args)
            figures |= {f"{key}_{name}": value for key, value in found.items()}
        close()
    print(json.dumps(figures))


def _sequences(count: int, longest: int, vocab: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, vocab, n).astype(np.int32) for n in rng.integers(longest // 4, longest + 1, count)]


def _figures(times: tuple[Times, Times], tokens: int, floor: float) -> dict[str, float]:
    ours, theirs = (np.array(rows) for rows in times)
    (cpu, wall), (other_cpu, other_wall) = np.median(ours, axis=0), np.median(theirs, axis=0)
    ratio, ratio_wall = np.median(theirs / ours, axis=0)
    return {
        "tokens": tokens, "mslime_cpu_s": cpu, "transformers_cpu_s": other_cpu, "mslime_wall_s": wall,
        "transformers_wall_s": other_wall, "floor_s": floor, "ratio": ratio, "ratio_wall": ratio_wall,
    }  # fmt: skip


def _calls(step: Step) -> int:
    """Calls of torch's operations in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return sum(row.count for row in profile.key_averages() if row.key.startswith("aten::"))


def _tiny_model(path: Path) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, num_experts=16, num_experts_per_tok=2,
        norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def _config(model: Path) -> dict[str, int]:
    return json.loads((model / "config.json").read_text())


def _active_parameters(config: dict[str, int]) -> int:
    h, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or h // heads
    attention = h * dim * (2 * heads + 2 * groups)
    experts = config["num_experts_per_tok"] * 3 * h * config["moe_intermediate_size"]
    return layers * (attention + experts) + h * config["vocab_size"]


def _matmul_rate(n: int = 1024) -> float:
    """Operations per second of a large fp32 matrix product with the current threads."""
    a, b = torch.randn(n, n), torch.randn(n, n)
    a @ b
    begin = time.perf_counter()
    for _ in range(5):
        a @ b
    return 5 * 2 * n**3 / (time.perf_counter() - begin)


def _in_turn(ours: Step, theirs: Step, steps: int) -> tuple[Times, Times]:
    """(CPU, wall) seconds of each step of both after a warm-up step."""
    found: tuple[Times, Times] = ([], [])
    for _ in range(steps + 1):
        for step, times in zip((ours, theirs), found, strict=True):
            cpu, wall = time.process_time(), time.perf_counter()
            step()
            times.append((time.process_time() - cpu, time.perf_counter() - wall))
    return found[0][1:], found[1][1:]


def _mslime(model: Path, threads: int) -> tuple[Callable[[list[np.ndarray]], Step], Step]:
    """A function that makes a training step for given sequences, and a function that closes the trainer."""
    from mslime.backends.megatron.step.trainer import MegatronTrainer
    from mslime.config.loader import build
    from mslime.config.resolved import policy_spec
    from mslime.data.packing import build_shards
    from mslime.data.sample import Sample
    from mslime.network import free_port

    config = build({
        "model": {"path": str(model)}, "data": {"prompts": ["unused.jsonl"]},
        "cluster": {"device": "cpu", "trainer_threads": threads},
        "train": {"task": "sft", "lr": 1e-4, "max_tokens_per_micro_batch": 4096},
    })  # fmt: skip
    trainer = MegatronTrainer(policy_spec(config), 0, 1, f"tcp://127.0.0.1:{free_port()}")
    torch.set_num_threads(threads)

    def begin(sequences: list[np.ndarray]) -> Step:
        samples = []
        for i, tokens in enumerate(sequences):
            sample = Sample.from_prompt(i, 0, tokens[:1])
            rest = len(tokens) - 1
            sample.extend(tokens[1:], log_probs=np.zeros(rest, np.float32), versions=[(0, 0, rest)], engine="none")
            samples.append(sample)
        shards = [step[0] for step in build_shards(samples, [0.0] * len(samples), config.layout, 4096)]
        return lambda: trainer.train(shards)

    return begin, trainer.close


def _transformers(model: Path, sequences: list[np.ndarray]) -> Step:
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

    def step() -> None:
        optimizer.zero_grad()
        network(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()

    return step


def _print(name: str, found: dict[str, float], args: argparse.Namespace) -> None:
    count, longest = vars(args)[name]
    tokens, floor = found["tokens"], found["floor_s"]
    title = f"{name}: {tokens} tokens in {count} sequences of at most {longest}, {args.threads} threads"
    table = Table(title=f"{title}, median of {args.steps} steps")
    for head in ("", "CPU ms a step", "wall ms a step", "tokens per CPU second"):
        table.add_column(head, justify="right")
    rows = (
        ("mslime trainer", found["mslime_cpu_s"], found["mslime_wall_s"]),
        ("transformers loop", found["transformers_cpu_s"], found["transformers_wall_s"]),
        ("operations floor", floor, floor),
    )
    for name, cpu, wall in rows:
        table.add_row(name, f"{cpu * 1e3:.0f}", f"{wall * 1e3:.0f}", f"{tokens / cpu:,.0f}")
    console = Console(width=120)
    console.print(table)
    console.print(
        f"mslime / transformers = {found['ratio']:.2f} x tokens per CPU second; "
        f"mslime takes {found['mslime_cpu_s'] / floor:.1f} x the floor"
    )
    if "mslime_calls" in found:
        console.print(f"calls: mslime {found['mslime_calls']:,}, transformers {found['transformers_calls']:,}")


if __name__ == "__main__":
    main()
