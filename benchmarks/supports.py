"""Cost of supports of truncated sampling: ids and bytes per token of a real model, CPU time of reading and training.

    python benchmarks/supports.py MODEL [--gguf FILE] [--top-p 0.9] [--top-k 4096] [--tokens 160] [--json FILE]

MODEL is a directory that transformers loads (with --gguf, one file in it). The model generates responses to a few
prompts, with top-p at temperature 1. The supports of these draws are then read as an engine's response, and trained:

    reading     `parse_generation` of one response, with the sampling masks and without
    training    log-probs and entropy of 256 rows, forward and backward, with supports and without

Times are medians of CPU seconds, as ratios.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from rich.console import Console
from rich.table import Table

from mslime.backends.megatron.log_probs.vocab_parallel import vocab_parallel_log_probs
from mslime.backends.megatron.log_probs.vocab_shard import LabelSupport
from mslime.backends.sglang.engine_reply import load_answer
from mslime.backends.sglang.generating import GenerateRequest, parse_generation
from mslime.config.model_facts import ModelFacts
from mslime.data.routes import Supports

PROMPTS = (
    "What is 17 times 23? Think step by step.",
    "Write a short story about a lighthouse keeper.",
    "Explain why the sky is blue.",
    "Write a Python function that sorts a list of tuples by the second element.",
    "If a train travels 60 miles in 1.5 hours, what is its speed?",
    "List five uses for a brick.",
    "Translate 'good morning, how are you' into French and explain each word.",
    "Prove that the sum of two even numbers is even.",
)
REPEATS = 7


@torch.no_grad()
def draws(model: Any, tokenizer: Any, args: argparse.Namespace) -> tuple[list[list[int]], list[int]]:
    """(kept ids, likeliest first; the drawn id) of every token of the responses to `PROMPTS`."""
    rows: list[list[int]] = []
    drawn: list[int] = []
    for prompt in PROMPTS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids, cache = tokenizer(text, return_tensors="pt").input_ids, None
        for _ in range(args.tokens):
            answer = model(ids, past_key_values=cache, use_cache=True)
            cache, (p, order) = answer.past_key_values, answer.logits[0, -1].softmax(-1).sort(descending=True)
            kept = int((p.cumsum(0) - p <= args.top_p).sum().clamp(max=args.top_k))
            ids = order[torch.multinomial(p[:kept], 1)][None]
            rows.append(order[:kept].tolist())
            drawn.append(int(ids))
            if drawn[-1] == tokenizer.eos_token_id:
                break
    return rows, drawn


def answer_of(rows: list[list[int]] | None, drawn: list[int]) -> bytes:
    """An engine's reply with these tokens, with or without masks."""
    n = len(drawn)
    meta: dict[str, Any] = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-1.2345678901234567, t, None] for t in drawn],
        "weight_versions": [{"version": "7", "start": 0, "end": n}],
    }
    if rows is not None:
        meta |= {"output_token_sampling_mask": rows, "output_token_sampling_logprobs": [-1.1234567890123456] * n}
    return orjson.dumps({"text": "word " * n, "output_ids": drawn, "meta_info": meta})


def cpu_seconds(work: Callable[[], object]) -> float:
    """Median CPU seconds of several runs."""
    times: list[float] = []
    for _ in range(REPEATS):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return float(np.median(times))


def reading(rows: list[list[int]] | None, drawn: list[int], vocab: int, args: argparse.Namespace) -> float:
    """CPU seconds to parse one reply."""
    content = answer_of(rows, drawn)
    model = ModelFacts(vocab_size=vocab, max_positions=1 << 20, num_layers=0, moe_layer_ids=(), num_experts=0, top_k=0)
    cut = {"top_p": args.top_p, "top_k": args.top_k} if rows is not None else {}
    request = GenerateRequest("a", [1], len(drawn), **cut)
    return cpu_seconds(lambda: parse_generation(request, load_answer(content), "engine", model))


def training(support: LabelSupport | None, labels: torch.Tensor, logits: torch.Tensor) -> float:
    """CPU seconds of log-probs and entropy, forward and backward."""

    def step() -> None:
        out = vocab_parallel_log_probs(
            logits.requires_grad_(), labels, tp_group=None, vocab_start=0, vocab_size=logits.shape[1],
            with_entropy=True, support=support,
        )  # fmt: skip
        out.log_probs.sum().backward()
        logits.grad = None

    return cpu_seconds(step)


def measure(args: argparse.Namespace) -> dict[str, float]:
    """All figures by name."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    source = {"gguf_file": args.gguf} if args.gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(args.model, **source)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, **source).eval()
    rows, drawn = draws(model, tokenizer, args)
    sizes = np.asarray([len(row) for row in rows])
    supports = Supports.of_sizes(np.asarray([i for row in rows for i in row], np.int32), sizes)
    vocab, n = model.config.vocab_size, len(rows)
    some = supports.first(min(n, 256))
    logits, labels = torch.randn(len(some), vocab), torch.as_tensor(drawn[: len(some)])
    support = LabelSupport(torch.from_numpy(some.ids), torch.from_numpy(some.offsets))
    with_masks, without = reading(rows, drawn, vocab, args), reading(None, drawn, vocab, args)
    supported, plain = training(support, labels, logits), training(None, labels, logits)
    quantiles = {f"ids_p{q}": float(np.percentile(sizes, q)) for q in (50, 90, 99)}
    return {
        "tokens": float(n),
        "vocabulary": float(vocab),
        "ids_mean": float(sizes.mean()),
        **quantiles,
        "ids_max": float(sizes.max()),
        "stored_bytes": (supports.ids.nbytes + supports.offsets.nbytes) / n,
        "answer_bytes": len(answer_of(rows, drawn)) / n,
        "answer_bytes_without": len(answer_of(None, drawn)) / n,
        "reading_us": 1e6 * with_masks / n,
        "reading_us_without": 1e6 * without / n,
        "reading_ratio": with_masks / without,
        "training_ratio": supported / plain,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gguf")
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--top-k", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = measure(args)
    table = Table("per token", f"top-p {args.top_p:g}, top-k {args.top_k}")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.2f}")
    Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
