"""Weight sync: flat buckets against one broadcast per tensor, and against a raw broadcast of the same bytes.

    python benchmarks/weight_sync.py                               # stand-in engine in its own process, all three ways
    python benchmarks/weight_sync.py --engine URL --model DIR      # a running SGLang server of DIR, the first two ways

All ways run over the same process group in one run, interleaved, and the medians are compared. "Flat" and "per tensor"
include packing, conversion, the HTTP calls and what the receiver does to store the tensors; "raw" is the broadcast
alone: the floor. The model is a synthetic Qwen3-MoE whose sizes are options, or a checkpoint with --model. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import torch
import torch.distributed as dist

from mslime.backends.sglang.receivers import SGLangReceivers
from mslime.config.keys import Endpoint, EngineInfo, EngineKeys
from mslime.config.layout import ParallelLayout
from mslime.config.schema import DeadlineConfig
from mslime.convert.families import get_family, read_hf_config
from mslime.convert.table import RuleTable
from mslime.threads import in_thread
from mslime.weights.broadcast import BroadcastTransport
from mslime.weights.buckets import convert, named_tensors, pack
from mslime.weights.plan import Bucket, WeightPlan, build_plan
from mslime.weights.senders import Senders
from mslime.weights.transport import Link

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.fixtures.engine_calls import with_pool
from tests.fixtures.stand_in_engine import StandInEngine

DEADLINE_S = 300.0


def synthetic_config(args: argparse.Namespace) -> dict[str, object]:
    """config.json of a Qwen3-MoE of the sizes asked for."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 4096, "vocab_size": args.vocab, "num_hidden_layers": args.layers,
        "hidden_size": args.hidden, "intermediate_size": 4 * args.hidden, "head_dim": 64,
        "num_attention_heads": args.hidden // 64, "num_key_value_heads": max(args.hidden // 256, 1),
        "moe_intermediate_size": args.ffn, "num_experts": args.experts, "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }  # fmt: skip


class Ways:
    """The three ways to bring the same weights to the engine."""

    def __init__(self, table: RuleTable, plan: WeightPlan, engine: EngineInfo, receivers: SGLangReceivers) -> None:
        self.table, self.plan, self.engine = table, plan, engine
        self.http = httpx.Client(base_url=engine.url, timeout=DEADLINE_S, headers=engine.keys.headers("/weights"))
        self.params = {
            name: torch.randn(rule.local_shape(1)).to(getattr(torch, plan.buckets[0].dtype))
            for name, rule in table.bound.items()
        }
        self.transport = BroadcastTransport(Link("benchmark", "gloo", DEADLINE_S, receivers))
        self.transport.connect([engine])
        assert self.transport._group is not None
        self.group = self.transport._group
        self.filled = [self._fill(bucket) for bucket in plan.buckets]

    def _fill(self, bucket: Bucket) -> torch.Tensor:
        return convert(bucket, [pack(bucket, self.params, 0)], self.table)

    def flat(self) -> None:
        """mslime's way: one flat broadcast per bucket, the next bucket converted meanwhile."""
        pending = None
        for bucket in self.plan.buckets:
            flat = self._fill(bucket)
            if pending is not None:
                pending.wait()
            pending = self.transport.start(bucket, flat)
        assert pending is not None
        pending.wait()

    def per_tensor(self) -> None:
        """One broadcast per tensor, requests of the same buckets, the next bucket converted meanwhile."""
        answer = None
        for bucket in self.plan.buckets:
            tensors = named_tensors(bucket, self._fill(bucket))
            if answer is not None:
                answer.result().raise_for_status()
            body = {
                "names": [name for name, _ in tensors], "dtypes": [bucket.dtype] * len(tensors),
                "shapes": [list(tensor.shape) for _, tensor in tensors], "group_name": "benchmark",
                "flush_cache": False,
            }  # fmt: skip
            answer = in_thread(self.http.post, "/update_weights_from_distributed", json=body)
            works = [dist.broadcast(tensor, group=self.group, group_src=0, async_op=True) for _, tensor in tensors]
            for work in works:
                work.wait()
        assert answer is not None
        answer.result().raise_for_status()

    def raw(self) -> None:
        """Nothing but broadcasts of buffers as large as the buckets, and one request over a connection that is open."""
        body = {"group_name": "benchmark", "sizes": [flat.nbytes for flat in self.filled]}
        answer = in_thread(self.http.post, "/raw", json=body)
        for flat in self.filled:
            dist.broadcast(flat.view(torch.uint8), group=self.group, group_src=0)
        answer.result().raise_for_status()


def measure(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each way; one round of each is thrown away, and the order turns from round to round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for round_ in range(rounds + 1):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            begin = time.perf_counter()
            ways[name]()
            if round_:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def parse_args() -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help="URL of a running SGLang server, instead of the stand-in")
    parser.add_argument("--api-key", default="", help="of that server, if it asks for one")
    parser.add_argument("--model", type=Path, help="checkpoint whose shapes are sent; needed with --engine")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--bucket-mib", type=float, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    for name, default in {"layers": 8, "hidden": 256, "ffn": 128, "experts": 64, "vocab": 8192}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"of the synthetic model (default {default})")
    args = parser.parse_args()
    if args.engine and not args.model:
        parser.error("--engine needs --model, the checkpoint that the server was started with")
    return args


def main() -> None:
    """Run and print."""
    args = parse_args()
    torch.set_num_threads(1)
    config = read_hf_config(args.model) if args.model else synthetic_config(args)
    table = get_family(config).rules(config)
    layers = sorted({rule.layer for rule in table.bound.values()} - {-1})
    plan = build_plan(table, Senders(ParallelLayout()), [layers], args.dtype, int(args.bucket_mib * (1 << 20)))
    stand_in = None if args.engine else StandInEngine()
    with TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        url = stand_in.url if stand_in else args.engine
        receivers = SGLangReceivers(DeadlineConfig.model_validate({"weight_sync_s": DEADLINE_S}))
        engine = receivers.describe(Endpoint(url, EngineKeys(args.api_key, args.api_key)))
        ways = Ways(table, plan, engine, receivers)
        chosen: dict[str, Callable[[], None]] = {"flat": ways.flat, "per tensor": ways.per_tensor}
        if stand_in:
            chosen["raw"] = ways.raw
        else:
            with_pool((engine,), lambda pool: pool.begin_update())
        medians = measure(chosen, args.rounds)
        if not stand_in:
            with_pool((engine,), lambda pool: pool.end_update())
        ways.transport.disconnect()
        receivers.close()
        dist.destroy_process_group()
    if stand_in:
        stand_in.stop()
    tensors = sum(len(bucket.entries) for bucket in plan.buckets)
    print(f"{tensors} tensors, {plan.total_bytes / 1e6:.1f} MB, {len(plan.buckets)} buckets, {args.rounds} rounds, "
          f"{'stand-in engine' if stand_in else args.engine}, gloo")  # fmt: skip
    for name, seconds in medians.items():
        print(f"  {name:<11}{seconds:8.3f} s  {plan.total_bytes / seconds / 1e9:6.2f} GB/s")
    print(f"one broadcast per tensor takes {medians['per tensor'] / medians['flat']:.2f} times as long as flat buckets")
    if stand_in:
        print(f"flat buckets take {medians['flat'] / medians['raw']:.2f} times as long as a raw broadcast of the bytes")
    figures = {"tensors": tensors, "bytes": plan.total_bytes, "buckets": len(plan.buckets), "seconds": medians,
               "over_flat": {name: seconds / medians["flat"] for name, seconds in medians.items()}}  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
