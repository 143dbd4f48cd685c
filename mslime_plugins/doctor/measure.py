"""Measurements that need torch, each in a separate process.

`python -m mslime_plugins.doctor.measure WHAT ...` prints one line of JSON. Without a GPU the same code measures the
CPU, in float32 and on smaller sizes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

GPU_SIZE, CPU_SIZE = 8192, 1024
"""Rows and columns of the matrices."""
GPU_BYTES, CPU_BYTES = 2**31, 2**27
"""Bytes of the copied tensor."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
VOCABULARY, ROWS = 32_000, 256


def main() -> None:
    """The command line of a worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("speed", "kernels", "collectives"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rendezvous", default="", help="tcp://HOST:PORT")
    parser.add_argument("--mib", type=int, default=16, help="size of a rank's buffer")
    args = parser.parse_args()
    if args.what == "speed":
        found: Any = {"tflops": matmul(args.device, args.seconds), "gb_per_s": copying(args.device, args.seconds)}
    elif args.what == "kernels":
        found = kernels(args.device)
    else:
        found = collectives(args.device, args.rank, args.ranks, args.rendezvous, args.mib * 2**20, args.seconds)
    print(json.dumps(found))


def timed(work: Callable[[], object], seconds: float, device: str) -> float:
    """Seconds of one call: the median of five blocks that take `seconds` in total, after two warm-up calls."""
    import torch

    def finish() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    def block(calls: int) -> float:
        finish()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        finish()
        return (time.perf_counter() - began) / calls

    block(1)
    calls = max(1, int(seconds / 5 / max(block(1), 1e-6)))
    return sorted(block(calls) for _ in range(5))[2]


def matmul(device: str, seconds: float) -> float:
    """10^12 operations a second of a square product: bfloat16 on a GPU, float32 on a CPU."""
    import torch

    size, dtype = (CPU_SIZE, torch.float32) if device == "cpu" else (GPU_SIZE, torch.bfloat16)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / timed(lambda: a @ b, seconds, device) / 1e12


def copying(device: str, seconds: float) -> float:
    """GB/s of memory, reads and writes together, of a copy."""
    import torch

    size = CPU_BYTES if device == "cpu" else GPU_BYTES
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timed(lambda: target.copy_(source), seconds, device) / 1e9


def kernels(device: str) -> dict[str, float | str]:
    """By kernel: its largest relative difference from plain torch in float32, or its error."""
    tried: dict[str, Callable[[str], float]] = {"log-probs and entropy of mslime": log_probs}
    if device != "cpu":
        tried |= {
            "linear layer of Transformer Engine": te_linear,
            "grouped experts of Transformer Engine": te_experts,
            "attention of Transformer Engine": te_attention,
        }
    found: dict[str, float | str] = {}
    for name, kernel in tried.items():
        try:
            found[name] = kernel(device)
        except Exception as error:  # any error of a kernel is a result
            found[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return found


def log_probs(device: str) -> float:
    """mslime's log-probs, entropy and gradient against torch's: Triton's kernels on a GPU, blocks on a CPU."""
    import torch

    from mslime.backends.megatron.log_probs.vocab_parallel import vocab_parallel_log_probs

    torch.manual_seed(0)
    logits = torch.randn(ROWS, VOCABULARY, device=device, requires_grad=True)
    labels = torch.randint(VOCABULARY, (ROWS,), device=device)
    got = vocab_parallel_log_probs(
        logits, labels, tp_group=None, vocab_start=0, vocab_size=VOCABULARY, with_entropy=True,
        way="chunked" if device == "cpu" else "fused",
    )  # fmt: skip
    assert got.entropy is not None
    [gradient] = torch.autograd.grad(got.log_probs.sum() + got.entropy.sum(), logits)
    all_log_probs = torch.log_softmax(logits, -1)
    wanted = all_log_probs.gather(1, labels[:, None])[:, 0]
    entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    [expected] = torch.autograd.grad(wanted.sum() + entropy.sum(), logits)
    pairs = ((got.log_probs, wanted), (got.entropy, entropy), (gradient, expected))
    return max(difference(one, other) for one, other in pairs)


def difference(got: Any, wanted: Any) -> float:
    """The largest difference, in units of the largest wanted value."""
    return float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())


def _transformer_engine() -> Any:
    """Import Transformer Engine after torch, whose libraries it needs; CPU hosts have no build of it."""
    return importlib.import_module("transformer_engine.pytorch")


def te_linear(device: str) -> float:
    """Compare the forward pass of a linear layer with torch's, on the same bfloat16 weights."""
    import torch

    te = _transformer_engine()

    layer = te.Linear(512, 1024, bias=False, params_dtype=torch.bfloat16, device=device)
    rows = torch.randn(256, 512, device=device, dtype=torch.bfloat16)
    output = layer(rows)
    output.sum().backward()
    return difference(output, rows.float() @ layer.weight.float().T)


def te_experts(device: str) -> float:
    """Compare four experts with different numbers of tokens, one of them with none."""
    import torch

    te = _transformer_engine()

    layer = te.GroupedLinear(4, 512, 1024, bias=False, params_dtype=torch.bfloat16, device=device)
    splits = [96, 0, 32, 128]
    rows = torch.randn(sum(splits), 512, device=device, dtype=torch.bfloat16)
    output = layer(rows, splits)
    output.sum().backward()
    parts = [
        part.float() @ weight.float().T
        for part, weight in zip(rows.split(splits), (layer.weight0, layer.weight1, layer.weight2, layer.weight3),
                                strict=True)
    ]  # fmt: skip
    return difference(output, torch.cat(parts))


def te_attention(device: str) -> float:
    """Compare packed sequences of 128 and 384 tokens, causal, 8 heads on 2 of keys, with torch's in float32."""
    import torch

    te = _transformer_engine()

    heads, groups, width, lengths = 8, 2, 128, (128, 384)
    shapes = ((heads, width), (groups, width), (groups, width))
    q, k, v = (torch.randn(sum(lengths), *shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    attention = te.DotProductAttention(heads, width, num_gqa_groups=groups, attention_dropout=0.0,
                                       qkv_format="thd", attn_mask_type="padding_causal")  # fmt: skip
    got = attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(lengths),
                    max_seqlen_kv=max(lengths))  # fmt: skip
    expected = []
    for query, key, value in zip(*(each.float().split(list(lengths)) for each in (q, k, v)), strict=True):
        key, value = (each.repeat_interleave(heads // groups, 1) for each in (key, value))
        by_head = (each.transpose(0, 1) for each in (query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(*by_head, is_causal=True)
        expected.append(output.transpose(0, 1).flatten(1))
    return difference(got.view(sum(lengths), -1), torch.cat(expected))


def collectives(device: str, rank: int, ranks: int, rendezvous: str, size: int, seconds: float) -> dict[str, float]:
    """Bus bandwidth of all-reduce and all-to-all in GB/s, as in nccl-tests (its PERFORMANCE.md): the bytes of a rank's
    buffer over the time, times 2 (n - 1) / n and (n - 1) / n. That is the rate of the slowest link for any n.

    `clock_ms`: difference between the hosts' clocks, measured as all ranks leave a barrier.
    """
    import torch
    import torch.distributed as dist

    cuda = device != "cpu"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=rendezvous, rank=rank, world_size=ranks,
                            timeout=timedelta(seconds=120))  # fmt: skip
    ours = torch.ones(size // 4 // ranks * ranks, device=device)
    theirs = torch.empty_like(ours)
    times = {"all_reduce": _together(lambda: dist.all_reduce(ours, op=dist.ReduceOp.MAX), seconds, device),
             "all_to_all": _together(lambda: dist.all_to_all_single(theirs, ours), seconds, device)}  # fmt: skip
    assert bool((ours == 1).all()) and bool((theirs == 1).all()), "a collective changed the values"
    dist.barrier()
    clocks: list[Any] = [None] * ranks
    dist.all_gather_object(clocks, time.time())
    dist.destroy_process_group()
    moved, share = ours.numel() * 4 / 1e9, (ranks - 1) / ranks
    return {
        "all_reduce": 2 * share * moved / times["all_reduce"],
        "all_to_all": share * moved / times["all_to_all"],
        "clock_ms": (max(clocks) - min(clocks)) * 1e3,
    }


def _together(work: Callable[[], object], seconds: float, device: str) -> float:
    """Seconds of one call. All ranks make equally many calls; the slowest rank's first call determines the number."""
    import torch
    import torch.distributed as dist

    def block(calls: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        if device != "cpu":
            torch.cuda.synchronize(device)
        slowest = torch.tensor([time.perf_counter() - began], device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest) / calls

    block(1)
    calls = min(200, max(1, int(seconds / 5 / max(block(1), 1e-6))))
    return sorted(block(calls) for _ in range(5))[2]


if __name__ == "__main__":
    sys.exit(main())
