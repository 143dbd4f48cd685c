"""Log-probs and entropy of the logits, forward and backward: time and peak memory of every way, in one run.

    python benchmarks/log_probs.py [--rows 2048] [--vocab 32768] [--dtype bf16 fp32] [--entropy report] [--json FILE]

    materialised        float32 log_softmax of all logits, the entropy from it
    chunked             mslime, a chunk of tokens at a time (every device)
    fused               mslime, Triton (CUDA)
    fused, reused       the same, the gradient written over the logits
    megatron-core       its fused cross entropy (every device; no entropy)
    liger-kernel        its cross entropy (CUDA; no entropy, temperature 1, the gradient written over the logits in the
                        forward pass). Install it with: pip install --no-deps liger-kernel==0.8.5

On CUDA, which is used when present: --rows 8192 --vocab 151936 are the sizes of a real step. Times are there against
the floor of memory traffic (logits read once forward, read and written once backward) at the copy bandwidth measured in
this run. The ways take turns, and medians are reported. Peak memory is memory allocated beyond the logits, counted
from the allocator's events (torch.profiler) on a CPU, and by torch.cuda.max_memory_allocated on CUDA.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mslime.backends.megatron.log_probs.vocab_parallel import Way, vocab_parallel_log_probs

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Outputs = tuple[Tensor, Tensor | None]
Function = Callable[[Tensor, Tensor], Outputs]


@dataclass(frozen=True)
class Figures:
    """One way at one dtype. Seconds are medians; bytes are beyond the logits; floors only on CUDA.

    Attributes:
        kept: bytes alive between the passes.
        peak: most bytes alive in either pass, the gradient of the logits included.
        error: largest error of a log-prob against float64.
    """

    way: str
    dtype: str
    forward: float
    backward: float
    kept: int
    peak: int
    error: float
    forward_floor: float | None = None
    backward_floor: float | None = None


def main() -> None:
    """Parse, measure each dtype, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--chunk", type=int, default=1024, help="train.log_prob_chunk_tokens")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument(
        "--entropy",
        choices=["none", "report", "gradient"],
        default="report",
        help="compute the entropy, and its gradient",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = [figures for name in args.dtype for figures in measure(name, device, args)]
    title = f"{args.rows} rows, vocabulary {args.vocab}, entropy: {args.entropy}, {device_name(device)}"
    show(found, title, args.rows * args.vocab)
    if args.json:
        args.json.write_text(json.dumps({"setting": title, "figures": [asdict(f) for f in found]}, indent=1) + "\n")


def device_name(device: torch.device) -> str:
    """Name of the device for the title."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def ways(device: torch.device, args: argparse.Namespace) -> dict[str, Function]:
    """Ways that run on this device."""

    def ours(way: Way, *, reuse: bool = False) -> Function:
        def run(logits: Tensor, labels: Tensor) -> Outputs:
            found = vocab_parallel_log_probs(
                logits, labels, tp_group=None, vocab_start=0, vocab_size=args.vocab, temperature=args.temperature,
                with_entropy=args.entropy != "none", chunk=args.chunk, way=way, reuse_logits=reuse,
            )  # fmt: skip
            return found.log_probs, found.entropy

        return run

    def materialised(logits: Tensor, labels: Tensor) -> Outputs:
        log_p = torch.log_softmax(logits.float() / args.temperature, dim=-1)
        label = log_p.gather(1, labels[:, None])[:, 0]
        if args.entropy == "none":
            return label, None
        with torch.set_grad_enabled(args.entropy == "gradient"):
            return label, -(log_p.exp() * log_p).sum(dim=-1)

    found: dict[str, Function] = {
        "materialised": materialised,
        "chunked": ours("chunked"),
        "megatron-core": _megatron(args.temperature),
    }
    if device.type == "cuda" and importlib.util.find_spec("triton"):
        found |= {"fused": ours("fused"), "fused, reused": ours("fused", reuse=True)}
        if importlib.util.find_spec("liger_kernel"):
            found["liger-kernel"] = _liger()
    return found


def _megatron(temperature: float) -> Function:
    """megatron-core's fused cross entropy on float32 logits, divided by the temperature, as its users must do."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    from mslime.network import free_port

    if not torch.distributed.is_initialized():
        backend, address = "nccl" if torch.cuda.is_available() else "gloo", f"tcp://127.0.0.1:{free_port()}"
        torch.distributed.init_process_group(backend, init_method=address, rank=0, world_size=1)
    group = torch.distributed.group.WORLD

    def run(logits: Tensor, labels: Tensor) -> Outputs:
        whole = logits[:, None].float() / temperature
        return -fused_vocab_parallel_cross_entropy(whole, labels[:, None], group)[:, 0], None

    return run


def _liger() -> Function:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction  # pyright: ignore[reportMissingImports]  # an extra

    def run(logits: Tensor, labels: Tensor) -> Outputs:
        return -LigerCrossEntropyFunction.apply(logits, labels, None, -100, 0.0, 0.0, "none")[0], None

    return run


def measure(dtype: str, device: torch.device, args: argparse.Namespace) -> Iterator[Figures]:
    """All ways at one dtype, in turns."""
    torch.manual_seed(0)
    logits = torch.randn(args.rows, args.vocab, device=device).mul_(3).to(DTYPES[dtype])
    labels = torch.randint(0, args.vocab, (args.rows,), device=device)
    upstream = torch.randn(2, args.rows, device=device)
    entered = ways(device, args)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in entered}
    for turn in range(args.rounds + 1):
        for name, function in entered.items():
            measured = _time(function, logits, labels, upstream, args.entropy)
            if turn:  # the first turn is a warm-up
                seconds[name].append(measured)
    floors = _floors(logits) if device.type == "cuda" else (None, None)
    for name, function in entered.items():
        forward, backward = (statistics.median(column) for column in zip(*seconds[name], strict=True))
        kept, peak = _memory(function, logits, labels, upstream, args.entropy)
        temperature = 1.0 if name == "liger-kernel" else args.temperature
        error = _error(function, logits[:64], labels[:64], temperature)
        yield Figures(name, dtype, forward, backward, kept, peak, error, *floors)


def _time(function: Function, logits: Tensor, labels: Tensor, upstream: Tensor, entropy: str) -> tuple[float, float]:
    """Seconds of the forward and the backward pass, on a copy of the logits because some ways overwrite them."""
    x = logits.clone().requires_grad_()
    y = x.view_as(x)
    begin = _now(logits.device)
    outputs = function(y, labels)
    middle = _now(logits.device)
    _backward(outputs, upstream, entropy)
    return middle - begin, _now(logits.device) - middle


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _backward(outputs: Outputs, upstream: Tensor, entropy: str) -> None:
    log_probs, h = outputs
    if entropy == "gradient" and h is not None:
        torch.autograd.backward([log_probs, h], [upstream[0], upstream[1]])
    else:
        log_probs.backward(upstream[0])


def _memory(function: Function, logits: Tensor, labels: Tensor, upstream: Tensor, entropy: str) -> tuple[int, int]:
    """Bytes beyond the logits: alive between the passes, and at the peak of both."""
    x = logits.clone().requires_grad_()
    y = x.view_as(x)
    if logits.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = function(y, labels)
        kept = torch.cuda.memory_allocated() - before
        _backward(outputs, upstream, entropy)
        return kept, torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as first:
        outputs = function(y, labels)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as second:
        _backward(outputs, upstream, entropy)
    kept, forward_peak = _balance(first)
    return kept, max(forward_peak, kept + _balance(second)[1])


def _balance(profile: torch.profiler.profile) -> tuple[int, int]:
    """Bytes alive at the end and at most, from the allocator's events in order of time."""
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    results = profile.profiler.kineto_results
    events = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    alive = peak = 0
    for event in events:
        alive += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]  # not in torch's stub
        peak = max(peak, alive)
    return alive, peak


def _floors(logits: Tensor) -> tuple[float, float]:
    """Seconds to read the logits, and to read and write them, at the measured copy bandwidth."""
    target = torch.empty_like(logits)
    seconds = []
    for _ in range(20):
        begin = _now(logits.device)
        target.copy_(logits)
        seconds.append(_now(logits.device) - begin)
    copy = statistics.median(seconds[3:])
    return copy / 2, copy


def _error(function: Function, logits: Tensor, labels: Tensor, temperature: float) -> float:
    exact = torch.log_softmax(logits.double() / temperature, dim=-1).gather(1, labels[:, None])[:, 0]
    with torch.no_grad():
        return float((function(logits.clone(), labels)[0].double() - exact).abs().max())


def show(found: list[Figures], title: str, elements: int) -> None:
    """Print the figures as a table; ratios are to the materialised way of the same dtype."""
    table = Table(title=title)
    floors = any(f.forward_floor for f in found)
    heads = [
        "dtype",
        "way",
        "forward ms",
        "backward ms",
        "time ratio",
        "kept MB",
        "peak MB",
        "beyond gradient MB",
        "error",
    ]
    for head in heads + ["forward / floor", "backward / floor"] * floors:
        table.add_column(head, justify="left" if head in ("dtype", "way") else "right")
    for f in found:
        base = next(b for b in found if b.dtype == f.dtype and b.way == "materialised")
        gradient = 0 if f.way in ("fused, reused", "liger-kernel") else elements * DTYPES[f.dtype].itemsize
        cells = [
            f.dtype, f.way, f"{f.forward * 1e3:.2f}", f"{f.backward * 1e3:.2f}",
            f"{(f.forward + f.backward) / (base.forward + base.backward):.3f}", f"{f.kept / 1e6:.2f}",
            f"{f.peak / 1e6:.2f}", f"{(f.peak - gradient) / 1e6:.2f}", f"{f.error:.1e}",
        ]  # fmt: skip
        if f.forward_floor and f.backward_floor:
            cells += [f"{f.forward / f.forward_floor:.2f}", f"{f.backward / f.backward_floor:.2f}"]
        table.add_row(*cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
