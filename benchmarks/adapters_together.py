"""Steps of several adapters in one pass through the pipeline, against the same steps in turns.

    python benchmarks/adapters_together.py [--adapters 8] [--micro-batches 2] [--stages 2] [--tokens 512] [--rounds 7]

Runs one process per pipeline stage on CPUs, with one thread each. In each round, the same trainers take one step per
adapter, first in turns and then in one pass. `ratio` is the median over rounds of the seconds of all turns over those
of the pass. `ideal` follows from the slots of the schedule: N (m + p - 1) over N m + p - 1. The benchmark needs as many
free cores as stages; other load makes both slower and the ratio smaller. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import multiprocessing
from torch.multiprocessing.spawn import spawn

Seconds = list[tuple[float, float]]


def main() -> None:
    """Parse flags, start the ranks, print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("adapters", 8), ("micro-batches", 2), ("stages", 2), ("tokens", 512), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with TemporaryDirectory() as scratch:
        model = _tiny_model(Path(scratch) / "model", args.stages)
        results = multiprocessing.get_context("spawn").SimpleQueue()
        spawn(_rank, (model, f"file://{scratch}/store", args, results), args.stages)
        times: Seconds = results.get()
    n, m, p = args.adapters, args.micro_batches, args.stages
    figures = {
        **vars(args),
        "turns_s": statistics.median(turns for turns, _ in times),
        "one_pass_s": statistics.median(together for _, together in times),
        "ratio": statistics.median(turns / together for turns, together in times),
        "ideal": n * (m + p - 1) / (n * m + p - 1),
        "load": os.getloadavg()[0],
    }
    print(json.dumps(figures))


def _rank(rank: int, model: Path, store: str, args: argparse.Namespace, results: Any) -> None:
    """Worker of one pipeline stage; rank 0 sends the seconds of each round."""
    torch.set_num_threads(1)
    from mslime.backends.megatron.step.adapters import AdapterTrainers, joint_update
    from mslime.backends.megatron.step.base_model import Base
    from mslime.config.loader import build
    from mslime.config.resolved import policy_spec

    config = build({
        "model": {"path": str(model)}, "data": {"prompts": ["unused.jsonl"]}, "lora": {"rank": 8},
        "cluster": {"device": "cpu", "trainer_ranks": args.stages, "trainer_threads": 1},
        "megatron": {"pipeline_model_parallel_size": args.stages},
        "train": {"task": "sft", "lr": 1e-4, "max_tokens_per_micro_batch": args.tokens},
    })  # fmt: skip
    spec = policy_spec(config)
    trainers = AdapterTrainers(Base(spec, rank, args.stages, store))
    torch.set_num_threads(1)
    names = [f"adapter{number}" for number in range(args.adapters)]
    for name in names:
        trainers.create(name, spec)
    shards = [_shard(config, args, number) for number in range(args.adapters)]
    times: Seconds = []
    for _ in range(args.rounds + 1):
        begin = time.perf_counter()
        for name, shard in zip(names, shards, strict=True):
            with trainers.placed(name) as trainer:
                trainer.train([shard])
        middle = time.perf_counter()
        prepared = {name: [shard] for name, shard in zip(names, shards, strict=True)}
        joint_update(trainers.of(names), prepared)
        times.append((middle - begin, time.perf_counter() - middle))
    if rank == 0:
        results.put(times[1:])  # the first round warms up
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _shard(config: Any, args: argparse.Namespace, number: int) -> Any:
    """An optimizer step of `--micro-batches` micro-batches of one sequence each."""
    from mslime.data.packing import build_shards
    from mslime.data.sample import Sample

    rng, samples = np.random.default_rng(number), []
    for place in range(args.micro_batches):
        tokens = rng.integers(3, 512, args.tokens).astype(np.int32)
        sample, rest = Sample.from_prompt(place, 0, tokens[:1]), args.tokens - 1
        sample.extend(tokens[1:], log_probs=np.zeros(rest, np.float32), versions=[(0, 0, rest)], engine="none")
        samples.append(sample)
    ((shard,),) = [step[:1] for step in build_shards(samples, [0.0] * len(samples), config.layout, args.tokens)]
    assert len(shard.micro_batches) == args.micro_batches
    return shard


def _tiny_model(path: Path, stages: int) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=2 * stages,
        num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


if __name__ == "__main__":
    main()
