"""Log-probs from hidden states against log-probs of whole logits: time and peak memory over the vocabulary, in one run.

    python benchmarks/hidden_log_probs.py [--rows 1024] [--hidden 512] [--vocab 8192 32768 131072] [--mib 64]

Both compute the last layer of a training step: the product with the output weights, log-probs, the reported entropy,
and the gradients of hidden states and weights. `whole` materialises all logits, as `train.logits_mib` does below its
limit; `blocks` has a limit of --mib. They take turns. The ratio is the median of the rounds' own ratios, on a CPU in
CPU seconds, which other load disturbs least. Peak memory excludes the inputs and the weights' gradient, which both
return. `--pass forward` measures a pass for old, reference or teacher log-probs. CUDA is used if present; there:
--rows 8192 --hidden 2048 --vocab 151936 --mib 1024. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mslime.backends.megatron.log_probs.blocks import block_columns, hidden_log_probs
from mslime.backends.megatron.log_probs.vocab_parallel import LogProbs, vocab_parallel_log_probs

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Function = Callable[[Tensor, Tensor, Tensor], LogProbs]


def main() -> None:
    """Parse, measure every vocabulary, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--mib", type=float, default=64, help="train.logits_mib of the blocks")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--pass", dest="which", choices=["training", "forward"], default="training")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = [measure(vocab, args) for vocab in args.vocab]
    show(found, args)
    print(json.dumps({**vars(args), "figures": found}))


def measure(vocab: int, args: argparse.Namespace) -> dict[str, float]:
    """Both ways in turns at one size of the vocabulary."""
    torch.manual_seed(0)
    device, dtype = torch.device("cuda" if torch.cuda.is_available() else "cpu"), DTYPES[args.dtype]
    training = args.which == "training"
    hidden = torch.randn(args.rows, args.hidden, device=device).to(dtype).requires_grad_(training)
    weight = torch.randn(vocab, args.hidden, device=device).mul_(args.hidden**-0.5).to(dtype).requires_grad_(training)
    labels = torch.randint(0, vocab, (args.rows,), device=device)
    limit = int(args.mib * 2**20)
    ways = {"whole": whole, "blocks": lambda h, w, t: blocks(h, w, t, limit)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds + 1):
        for name, way in ways.items():
            begin = now(device)
            step(way, hidden, weight, labels)
            seconds[name].append(now(device) - begin)
    ratios = [b / a for a, b in zip(seconds["whole"][1:], seconds["blocks"][1:], strict=True)]  # the first warms up
    returned = weight.numel() * weight.element_size() if training else 0
    column_bytes = args.rows * weight.element_size()
    return {
        "vocab": vocab,
        "blocks": -(-vocab // block_columns(vocab, column_bytes, limit)),
        "whole_s": statistics.median(seconds["whole"][1:]),
        "blocks_s": statistics.median(seconds["blocks"][1:]),
        "ratio": statistics.median(ratios),
        "whole_mb": (peak(ways["whole"], hidden, weight, labels) - returned) / 1e6,
        "blocks_mb": (peak(ways["blocks"], hidden, weight, labels) - returned) / 1e6,
    }


def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> LogProbs:
    """Log-probs from whole logits, as in a step within the limit."""
    return vocab_parallel_log_probs(
        hidden @ weight.t(), labels, tp_group=None, vocab_start=0, vocab_size=len(weight), with_entropy=True,
        reuse_logits=True,
    )  # fmt: skip


def blocks(hidden: Tensor, weight: Tensor, labels: Tensor, limit: int) -> LogProbs:
    """Log-probs in blocks, as in a step above the limit."""
    return hidden_log_probs(
        hidden, weight, labels, tp_group=None, vocab_start=0, vocab_size=len(weight), with_entropy=True,
        most_bytes=limit,
    )  # fmt: skip


def step(way: Function, hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    """Forward pass, then backward if the inputs require gradients."""
    hidden.grad = weight.grad = None
    out = way(hidden, weight, labels)
    if hidden.requires_grad:
        out.log_probs.sum().backward()


def now(device: torch.device) -> float:
    """Current seconds: process time on a CPU, synchronised wall clock on a device."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def peak(way: Function, hidden: Tensor, weight: Tensor, labels: Tensor) -> int:
    """Most bytes allocated at once beyond the inputs."""
    hidden.grad = weight.grad = None
    if hidden.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(way, hidden, weight, labels)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step(way, hidden, weight, labels)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    alive = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]  # not in torch's stub
        most = max(most, alive)
    return most


def show(found: list[dict[str, float]], args: argparse.Namespace) -> None:
    """Print the figures as a table."""
    sizes = f"{args.rows} tokens, hidden size {args.hidden}, {args.dtype}, blocks of {args.mib:g} MiB"
    table = Table(title=f"{sizes}, {args.which} pass")
    for head in ("vocabulary", "blocks", "whole ms", "blocks ms", "time ratio", "whole MB", "blocks MB"):
        table.add_column(head, justify="right")
    for f in found:
        table.add_row(
            f"{f['vocab']:,}", str(f["blocks"]), f"{f['whole_s'] * 1e3:.0f}", f"{f['blocks_s'] * 1e3:.0f}",
            f"{f['ratio']:.2f}", f"{f['whole_mb']:.1f}", f"{f['blocks_mb']:.1f}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
