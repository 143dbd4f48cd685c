"""A trainer step with and without `train.balance_experts`, for several kinds of prompts with experts of their own.

    python benchmarks/expert_balance.py [--ep 2 4] [--kinds 4] [--sequences 96] [--budget 512] [--rounds 7]

The synthetic Qwen3-MoE is like a model after balanced training: over all kinds of prompts, experts are used equally,
and each kind has favourite experts at random places. Routes are computed with transformers for every token and
replayed (r3), as those of a rollout.

First the script prints the load of the busiest expert-parallel ranks over the mean: packed by lengths alone, balanced,
and the lowest that any packing can reach. Then real ranks over gloo train the same samples both ways in turn, one step
each per round. The results are `ratio`, the median over the rounds of the step by lengths alone over the balanced step
in wall seconds, and `loss_difference` between the two. Ranks have one thread each. With more ranks than cores, waiting
ranks leave their core to busy ones, and the gain is smaller. `ratio_own_cores` is the gain with one core per rank: it
adds up, over the intervals between collectives, the CPU seconds of the slowest rank. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.layout import ParallelLayout
from mslime.data.expert_balance import loads_of
from mslime.data.packing import build_shards, expert_metrics, packing_metrics
from mslime.data.routes import Routes
from mslime.data.sample import Sample
from mslime.data.shard import TrainShard
from tests.engines.trainer_ranks import make_config, run_trainers

LAYERS, EXPERTS, TOP_K, VOCAB = 4, 16, 2, 512


def main() -> None:
    """Make the model and its samples, print the balance, time the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep", type=int, nargs="+", default=[2, 4], help="expert-parallel ranks, all data-parallel")
    parser.add_argument("--kinds", type=int, default=4, help="number of kinds of prompts")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument(
        "--longest", type=int, default=240, help="longest sequence; lengths are uniform in [LONGEST/4, LONGEST]"
    )
    parser.add_argument("--budget", type=int, default=512, help="tokens per micro-batch")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    figures: dict[str, object] = {"sequences": args.sequences, "budget": args.budget, "kinds": args.kinds}
    with TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model", args.kinds)
        samples = make_samples(model, args)
        for ep in args.ep:
            figures[f"ep{ep}"] = measure(model, samples, ep, args, Path(scratch))
    print(json.dumps(figures))


def make_model(path: Path, kinds: int) -> Path:
    """Save a random model. Tokens of one kind share a part of their embedding, which some experts' routers select."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, moe_intermediate_size=512, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    network: Any = Qwen3MoeForCausalLM(config)  # its layers are untyped
    with torch.no_grad():
        rows = network.model.embed_tokens.weight
        common = torch.randn(kinds, rows.shape[1])
        rows += 0.03 * common[torch.arange(VOCAB) % kinds]
        for layer in network.model.layers:
            layer.mlp.gate.weight += 0.02 * common[torch.randperm(EXPERTS) % kinds]
    _balance(network, kinds)
    network.save_pretrained(path)
    return path


def _balance(network: PreTrainedModel, kinds: int) -> None:
    """Balance expert use over tokens of all kinds by shifting routers, as load-balancing biases do in training
    (DeepSeek-V3, section 2.1.2). The shift is along a direction that all tokens share.
    """
    rng = np.random.default_rng(1)
    shared = torch.randn(network.config.hidden_size)
    with torch.no_grad():
        network.model.embed_tokens.weight += 0.03 * shared
        for step in range(150):
            tokens = torch.stack([torch.from_numpy(tokens_of(rng, i, kinds, 256)) for i in range(16)])
            for layer, logits in zip(
                network.model.layers, network(input_ids=tokens, output_router_logits=True).router_logits, strict=True
            ):
                used = torch.bincount(logits.topk(TOP_K).indices.flatten(), minlength=EXPERTS).float()
                wrong = (used.mean() - used) / used.mean()
                layer.mlp.gate.weight += 0.01 * 0.98**step * wrong[:, None] * shared / shared.norm()


def tokens_of(rng: np.random.Generator, index: int, kinds: int, length: int) -> NDArray[np.int64]:
    """Random tokens of sequence `index`, of its kind."""
    return rng.integers(0, VOCAB // kinds, length) * kinds + index % kinds


def make_samples(model: Path, args: argparse.Namespace) -> list[Sample]:
    """Sequences of one kind of tokens each, with the routes that transformers chooses."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rng = np.random.default_rng(0)
    samples = list[Sample]()
    for index, length in enumerate(rng.integers(args.longest // 4, args.longest + 1, args.sequences)):
        tokens = tokens_of(rng, index, args.kinds, int(length))
        with torch.no_grad():
            found = network(input_ids=torch.from_numpy(tokens)[None], output_router_logits=True).router_logits
        experts = torch.stack([logits.topk(TOP_K).indices for logits in found], dim=1).numpy()[:-1]
        sample = Sample.from_prompt(index, 0, tokens[:4].tolist())
        sample.routes = Routes.empty(range(LAYERS), TOP_K, EXPERTS)
        rest = int(length) - 4
        sample.extend(
            tokens[4:].tolist(), log_probs=np.full(rest, -6.0, np.float32), versions=[(0, 0, rest)], engine="none",
            routes=experts.astype(np.uint8),
        )  # fmt: skip
        sample.reward = float(rng.random())
        samples.append(sample)
    return samples


def measure(model: Path, samples: list[Sample], ep: int, args: argparse.Namespace, scratch: Path) -> dict[str, float]:
    """Balance, loss and time of both ways on `ep` ranks."""
    layout = ParallelLayout(dp=ep, ep=ep)
    loads = loads_of([s.routes for s in samples], [len(s) for s in samples], EXPERTS, ep)
    begin = time.perf_counter()
    ways = [shards_of(samples, layout, args.budget, chosen) for chosen in (None, loads)]
    took = time.perf_counter() - begin
    plain, balanced = (expert_metrics([shards], loads, layout) for shards in ways)
    config = make_config(
        model, scratch / f"run{ep}", dp=ep, ep=ep,
        train={"lr": 1e-12, "max_tokens_per_micro_batch": args.budget, "quadratic_tokens": None},
    )  # fmt: skip
    ranks = run_trainers(in_turn, config, ways, args.rounds, deadline_s=1800)
    seconds, losses = np.asarray([r[0] for r in ranks]).max(axis=0), ranks[0][2]
    own = np.asarray([[np.asarray([r[1][i][way] for r in ranks]).max(axis=0).sum() for way in (0, 1)]
                      for i in range(args.rounds)])  # fmt: skip
    figures = {
        "imbalance": plain["packing/expert_imbalance"] + 1,
        "imbalance_balanced": balanced["packing/expert_imbalance"] + 1,
        "imbalance_least": balanced["packing/expert_imbalance_least"] + 1,
        "dense_imbalance": packing_metrics([ways[0]], layout, args.budget, None)["packing/imbalance"] + 1,
        "dense_imbalance_balanced": packing_metrics([ways[1]], layout, args.budget, None)["packing/imbalance"] + 1,
        "pack_both_s": took,
        "step_s": float(np.median(seconds[:, 0])), "step_balanced_s": float(np.median(seconds[:, 1])),
        "ratio": statistics.median(seconds[:, 0] / seconds[:, 1]),
        "own_cores_s": float(np.median(own[:, 0])), "own_cores_balanced_s": float(np.median(own[:, 1])),
        "ratio_own_cores": statistics.median(own[:, 0] / own[:, 1]),
        "loss_difference": abs(losses[0] - losses[1]),
    }  # fmt: skip
    show(ep, figures, len(ways[0][0].micro_batches))
    return figures


def shards_of(
    samples: list[Sample], layout: ParallelLayout, budget: int, loads: NDArray[np.float32] | None
) -> list[TrainShard]:
    """Shards of one optimizer step, packed by lengths alone or balanced."""
    advantages = [float(s.reward or 0) - 0.5 for s in samples]
    (shards,) = build_shards(samples, advantages, layout, budget, version=0, loads=loads)
    return shards


class Stretches:
    """CPU seconds of this thread between the collectives of a step. On a CPU this thread runs the backward pass too."""

    WAITS = ("all_to_all_single", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier")

    def __init__(self) -> None:
        self.seconds = list[float]()
        self._since = 0.0
        for name in self.WAITS:
            setattr(dist, name, self._counted(getattr(dist, name)))

    def begin(self) -> None:
        """Clear the measurements."""
        self.seconds, self._since = [], time.thread_time()

    def _counted(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(collective)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.seconds.append(time.thread_time() - self._since)
            try:
                return collective(*args, **kwargs)
            finally:
                self._since = time.thread_time()

        return counted


def in_turn(
    trainer: MegatronTrainer, ways: list[list[TrainShard]], rounds: int
) -> tuple[list[list[float]], list[list[list[float]]], list[float]]:
    """Time the steps of both ways in turn after a warm-up round.

    Returns ([rounds][ways] wall seconds, [rounds][ways] stretches of work, loss of each way) of this rank.
    """
    mine = [shards[trainer.spec.layout.dp_rank(trainer.parallel.rank)] for shards in ways]
    times, stretches, losses = list[list[float]](), list[list[list[float]]](), [0.0, 0.0]
    counter = Stretches()
    for number in range(rounds + 1):
        times.append([])
        stretches.append([])
        for index, shard in enumerate(mine):
            dist.barrier()
            counter.begin()
            begin = time.perf_counter()
            (metrics,) = trainer.train([shard])
            times[-1].append(time.perf_counter() - begin)
            dist.barrier()
            stretches[-1].append(counter.seconds)
            if number == 0:
                losses[index] = metrics["loss/total"]
    return times[1:], stretches[1:], losses


def show(ep: int, figures: dict[str, float], micro_batches: int) -> None:
    """Print the figures as a table."""
    table = Table(title=f"EP{ep} DP{ep}, {micro_batches} micro-batches a rank")
    for head in ("", "by lengths alone", "balanced", "least"):
        table.add_column(head, justify="right")
    table.add_row(
        "tokens of the busiest expert ranks / mean",
        *(f"{figures[k]:.3f}" for k in ("imbalance", "imbalance_balanced", "imbalance_least")),
    )
    table.add_row(
        "the same of dense work", *(f"{figures[k]:.3f}" for k in ("dense_imbalance", "dense_imbalance_balanced"))
    )
    table.add_row("seconds of a step", f"{figures['step_s']:.2f}", f"{figures['step_balanced_s']:.2f}")
    table.add_row(
        "with a core for each rank", f"{figures['own_cores_s']:.2f}", f"{figures['own_cores_balanced_s']:.2f}"
    )
    console = Console(width=110)
    console.print(table)
    console.print(
        f"{figures['ratio']:.2f} times as fast, {figures['ratio_own_cores']:.2f} with a core each; "
        f"losses differ by {figures['loss_difference']:.1e}; packing both took {figures['pack_both_s']:.2f} s"
    )


if __name__ == "__main__":
    main()
