"""What the CUDA path is compared with, made once for a family, in the CPU environment:

    python -m tests.rehearsal.reference OUT [--stamp STAMP]

For each: the tiny checkpoint, transformers' logits in float32, and what the trainer of the CPU path says of one
process: log-probs, gradients under the rollout's routes, the norm and the weights after a step. Of some families also
what it says of a trainer with adapters (`adapters.pt`).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.base import Fp8Recipe
from mslime.config.schema import RunConfig
from mslime.convert.families import get_family, read_hf_config
from tests.engines import lora_ranks, megatron_parity
from tests.engines.megatron_ranks import run_ranks
from tests.engines.trainer_ranks import PARALLEL, make_shard, metrics_and_gradients, run_trainers, shard_of, to_hf
from tests.fixtures.families import CASES
from tests.rehearsal.outcomes import directory_name

ADAPTED = ("qwen3-moe", "deepseek-v3")
"""Families whose adapters are rehearsed: grouped and latent attention, dense, shared and routed experts."""


def make_run(
    checkpoint: Path, out: Path, device: str, sizes: dict[str, int], megatron: dict[str, Any], ranks: int = 1,
    fp8: Fp8Recipe | None = None,
) -> RunConfig:  # fmt: skip
    """A run of a family's tiny model; sizes by the names of `trainer_ranks.PARALLEL`."""
    hf = read_hf_config(checkpoint)
    routed = get_family(hf).model_fields(hf).num_experts
    return RunConfig.model_validate(
        {
            "model": {"path": checkpoint},
            "data": {"prompts": ["unused.jsonl"]},
            "output_dir": out,
            "cluster": {"device": device, "trainer_ranks": ranks},
            "megatron": {PARALLEL[key]: size for key, size in sizes.items()} | megatron,
            "weights": {"bucket_mib": 0.05},
            "train": {"lr": 1e-2, "adam_eps": 1e-5, "num_steps": 10, "fp8": fp8, "replay": "r3" if routed else "off"},
            "deadlines": {"trainer_start_s": 100, "train_step_s": 300, "weight_sync_s": 100},
        }
    )


def one_step(trainer: MegatronTrainer) -> dict[str, Any]:
    """Log-probs, gradients, the norm of the step and the weights after it, of one process."""
    shard = shard_of(trainer)
    log_probs = trainer.log_probs(shard)
    with trainer.routing.gradient_pass(shard, 0) as routes:
        metrics, gradients = metrics_and_gradients(trainer, shard, routes)
    step = trainer.train([shard])[0]
    weights = {name: tensor.detach().float().cpu() for name, tensor in trainer.named_local_params()}
    return {
        "log_probs": log_probs,
        "loss": metrics["loss/total"],
        "gradients": to_hf(trainer, {name: tensor.float().cpu() for name, tensor in gradients.items()}),
        "grad_norm": step["grad_norm"],
        "weights": to_hf(trainer, weights),
    }


def make(root: Path, name: str, stamp: str) -> None:
    """The reference of one family, in `root`: `checkpoint` and `reference.pt`, which is written last."""
    shutil.rmtree(root, ignore_errors=True)
    checkpoint = CASES[name].make(root / "checkpoint")
    shard, model = make_shard(), CASES[name].transformers_model(checkpoint)
    sequences = torch.from_numpy(shard.tokens).long().split(shard.lengths.tolist())
    with torch.no_grad():
        logits = torch.cat([model(tokens[None]).logits[0] for tokens in sequences])
    config = make_run(checkpoint, root / "run", "cpu", {}, {"use_distributed_optimizer": False})
    (found,) = run_trainers(one_step, config)
    if name in ADAPTED:
        run_ranks(lora_ranks.record, 1, checkpoint, megatron_parity.Case(), {}, root / "adapters.pt")
    torch.save({"stamp": stamp, "logits": logits, **found}, root / "reference.new")
    (root / "reference.new").rename(root / "reference.pt")


def main() -> None:
    """Make those that are not there, or are of something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of the references")
    parser.add_argument("--stamp", default="", help="what is rehearsed")
    given = parser.parse_args()
    for name in CASES:
        root = given.out / directory_name(name)
        found = root / "reference.pt"
        if not found.exists() or torch.load(found)["stamp"] != given.stamp:
            make(root, name, given.stamp)
            print(f"{name}: made", flush=True)


if __name__ == "__main__":
    main()
