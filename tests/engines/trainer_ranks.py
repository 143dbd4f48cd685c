"""Real trainer ranks for tests of replay and checkpoints.

`run_trainers` builds a `MegatronTrainer` on every rank of a layout and passes it to a function of the test. Gradients
of any layout are compared with those of one process through the conversion rules, which define each rank's part of a
whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mslime.algorithms.statistics import finalise
from mslime.backends.megatron.model.chunks import named_local_params
from mslime.backends.megatron.step.pipeline import RouteHooks
from mslime.backends.megatron.step.reductions import over_all_ranks
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.resolved import policy_spec
from mslime.config.schema import RunConfig
from mslime.convert.families import get_family
from mslime.data.routes import Routes
from mslime.data.shard import TrainShard
from tests.engines.megatron_ranks import run_ranks

PARALLEL = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
FULL_RECOMPUTE = {"recompute_granularity": "full"}
MOE_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def make_config(
    checkpoint: Path,
    output: Path,
    dp: int = 1,
    train: Mapping[str, Any] | None = None,
    rollout: Mapping[str, Any] | None = None,
    algorithm: Mapping[str, Any] | None = None,
    reference: Path | None = None,
    **sizes: Any,
) -> RunConfig:
    """A run on `checkpoint`; sizes by the short names of `PARALLEL`, other keywords are fields of `megatron`.

    Args:
        reference: checkpoint of the reference policy; None: `checkpoint`.
    """
    megatron = {PARALLEL.get(key, key): value for key, value in sizes.items()}
    ranks = dp * sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    return RunConfig.model_validate(
        {
            "model": {"path": checkpoint, "reference_path": reference},
            "data": {"prompts": ["unused.jsonl"]},
            "output_dir": output,
            "cluster": {"device": "cpu", "trainer_ranks": ranks},
            "megatron": {"use_distributed_optimizer": False, **megatron},
            "rollout": dict(rollout or {}),
            "algorithm": dict(algorithm or {}),
            "train": {"lr": 1e-2, "adam_eps": 1e-5, "num_steps": 10, **(train or {})},
            "deadlines": {"trainer_start_s": 60, "train_step_s": 60, "weight_sync_s": 60},
        }
    )


def run_trainers(work: Callable[..., Any], config: RunConfig, *args: Any, deadline_s: float = 100) -> list[Any]:
    """`work(trainer, *args)` on every rank of a fresh trainer; what it returned, in rank order."""
    return run_ranks(_on_trainer, config.layout.world_size, work, config, args, deadline_s=deadline_s)


def _on_trainer(
    rank: int, world_size: int, init_method: str, work: Callable[..., Any], config: RunConfig, args: tuple[Any, ...]
) -> Any:
    trainer = MegatronTrainer(policy_spec(config), rank, world_size, init_method)
    result = work(trainer, *args)
    trainer.close()
    return result


def make_shard(
    dp: int = 1, dp_rank: int = 0, *, layers: tuple[int, ...] = (0, 1, 2, 3), top_k: int = 2, seed: int = 0,
    packed: bool = True,
) -> TrainShard:  # fmt: skip
    """One data-parallel rank's half of eight sequences with random routes (not what any router would choose).

    Args:
        top_k: experts of a token, out of 8.
    """
    random = np.random.default_rng(seed)
    lengths = random.integers(6, 25, 8)
    columns: list[dict[str, Any]] = []
    for n in lengths:
        mask = (np.arange(n) > 2) & (random.random(n) > 0.2)
        experts = np.stack([[random.permutation(8)[:top_k] for _ in layers] for _ in range(n)])
        columns.append(
            {
                "tokens": random.integers(0, 256, n).astype(np.int32),
                "mask": mask,
                "advantages": np.full(n, random.normal(), np.float32),
                "behaviour": random.normal(-6, 0.3, n).astype(np.float32),
                "experts": experts.astype(np.uint8),
                "known": np.arange(n) < n - 1,
            }
        )
    trained = sum(int(c["mask"].sum()) for c in columns)
    members = range(8)[dp_rank::dp]
    per_batch = 3 if packed else 1  # three packed micro-batches: interleaved stages need an empty fourth

    def joined(key: str) -> Any:
        return np.concatenate([columns[i][key] for i in members])

    return TrainShard(
        tokens=joined("tokens"),
        lengths=lengths[list(members)],
        sequence_ids=np.array(members, dtype=np.int64),
        loss_mask=joined("mask"),
        weights=joined("mask").astype(np.float32) / trained,
        advantages=joined("advantages"),
        behaviour_log_probs=joined("behaviour"),
        micro_batches=tuple(tuple(range(len(members)))[i : i + per_batch] for i in range(0, len(members), per_batch)),
        routes=Routes(joined("experts"), joined("known"), layers),
    )


def shard_of(trainer: MegatronTrainer, **kwargs: Any) -> TrainShard:
    """`make_shard` for this rank: its data-parallel part, its stage's layers, as many experts as it routes to."""
    layout, rank = trainer.spec.layout, trainer.parallel.rank
    kwargs = {"top_k": trainer.model.top_k or 2, "packed": trainer.spec.train.packed, **kwargs}
    shard = make_shard(layout.dp, layout.dp_rank(rank), **kwargs)
    return shard.stage_slice(trainer.moe_layer_ids)


def loss_and_gradients(
    trainer: MegatronTrainer, shard: TrainShard, routes: RouteHooks | None
) -> tuple[float, dict[str, Tensor]]:
    """The loss over all ranks, and this rank's gradients by canonical name; nothing is updated."""
    metrics, gradients = metrics_and_gradients(trainer, shard, routes)
    return metrics["loss/total"], gradients


def metrics_and_gradients(
    trainer: MegatronTrainer, shard: TrainShard, routes: RouteHooks | None
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """What `loss_and_gradients` gives, with all that the loss reports over all ranks."""
    for chunk in trainer.wrapped:
        chunk.zero_grad_buffer()
    own = trainer.runner.add_gradients(shard, trainer.runner.loss, routes)
    gradients = {name: p.main_grad.clone() for name, p in named_local_params(trainer.chunks) if p.requires_grad}
    return finalise(over_all_ranks(own)), gradients


def to_hf(trainer: MegatronTrainer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One process's tensors under Hugging Face names."""
    rules = get_family(trainer.hf_config).rules(trainer.hf_config)
    found: dict[str, Tensor] = {}
    for name, local in tensors.items():
        rule = rules.bind(name)
        for hf, tensor in rule.to_hf([local]):
            if rule.stack:
                found.setdefault(hf, tensor.new_zeros(rule.stack, *tensor.shape))[rule.expert] = tensor
            else:
                found[hf] = tensor
    return found


def largest_difference(trainer: MegatronTrainer, tensors: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> float:
    """Over this rank's tensors, against the parts of `whole` (Hugging Face names) that it should hold."""
    from megatron.core import parallel_state as groups  # only once the CPU platform is in place

    rules = get_family(trainer.hf_config).rules(trainer.hf_config)
    worst = 0.0
    for name, local in tensors.items():
        rule = rules.bind(name)
        rank, size = (
            (groups.get_expert_tensor_parallel_rank(), groups.get_expert_tensor_parallel_world_size())
            if rule.is_expert
            else (groups.get_tensor_model_parallel_rank(), groups.get_tensor_model_parallel_world_size())
        )
        expected = rule.to_megatron(whole.__getitem__, rank, size)
        worst = float(np.maximum(worst, float((local - expected).abs().max())))  # `max` would lose a NaN
    return worst


def worst_logit_difference(trainer: MegatronTrainer, expected: Tensor) -> tuple[int, float]:
    """(logit rows compared, largest |Megatron - `expected`| over them) on the last stage; (0, 0) elsewhere.

    Args:
        expected: float32 [tokens, vocabulary] of `make_shard`'s sequences, on the CPU.
    """
    from megatron.core import parallel_state as groups

    from mslime.backends.megatron.step.pipeline import Lane, run_lanes

    shard = shard_of(trainer)
    compared, worst = 0, 0.0

    def compare(batch: Any, logits: Tensor) -> tuple[Tensor, dict[str, Any]]:
        nonlocal compared, worst
        shares = [torch.empty_like(logits) for _ in range(trainer.parallel.tp_size)]
        dist.all_gather(shares, logits.contiguous(), group=groups.get_tensor_model_parallel_group())
        whole = torch.cat(shares, -1)[:, : trainer.model.vocab_size].float().cpu()
        rows = torch.from_numpy(batch.slicer.rows)
        known = rows >= 0
        compared += int(known.sum())
        if known.any():  # interleaved stages get an empty micro-batch
            found = float((whole[known] - expected[rows[known]]).abs().max())
            worst = float(np.maximum(worst, found))  # `max` would lose a NaN
        return logits.new_zeros(()), {}

    with torch.no_grad():
        run_lanes([Lane(trainer.runner, shard, compare)], None, forward_only=True)
    assert compared in (0, len(shard.tokens)) or trainer.spec.layout.cp > 1
    return compared, worst
