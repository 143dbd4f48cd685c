"""Code of the parity tests on every rank: a trainer under some layout, compared with the single process's record.

The record has Hugging Face names and whole tensors. Each rank cuts its own part out of it with the conversion rules,
and compares that with its parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mslime.config.resolved import policy_spec
from mslime.config.schema import RunConfig
from mslime.data.routes import Routes
from mslime.data.shard import TrainShard

STEPS = 3
LENGTHS = (13, 5, 29, 2, 18, 40, 7, 22)
VOCAB = 320


@dataclass(frozen=True)
class Case:
    """One layout.

    Attributes:
        world: trainer ranks.
        megatron: fields of the megatron section; gradients are compared unless the optimizer is distributed.
        packed: pack sequences.
        plan: micro-batches of every data-parallel rank, as indices into LENGTHS; default: packed_plan/unpacked_plan.
        train, algorithm: further fields of those sections.
        routes: give the shards random routes of this (layers, experts, top-k).
        lengths: of the sequences. Ragged ones make a mixed-up micro-batch crash; equal ones let it pass in silence.
    """

    world: int = 1
    megatron: dict[str, Any] = field(default_factory=dict)
    packed: bool = True
    plan: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    train: dict[str, Any] = field(default_factory=dict)
    algorithm: dict[str, Any] = field(default_factory=dict)
    routes: tuple[int, int, int] | None = None
    lengths: tuple[int, ...] = LENGTHS


PACKED_PLANS = {
    1: (((0, 1, 2), (3, 4), (5, 6, 7)),),
    # Ranks with unequal work: the second has fewer sequences, and a micro-batch without any.
    2: (((0, 5, 2), (3,), (7, 1)), ((4,), (), (6,))),
}
UNPACKED_PLANS = {
    1: (tuple((i,) for i in range(8)),),
    2: (((0,), (5,), (2,), (3,), (7,), (1,)), ((4,), (), (6,), (), (), ())),
}


def run_config(checkpoint: Path, case: Case) -> RunConfig:
    """A run with every term of the loss switched on, so that a layout can get each of them wrong."""
    algorithm = {"kl_coef": 0.1, "entropy_coef": 0.01, "correction": {"preset": "seq_tis"}, **case.algorithm}
    train = {
        "lr": 1e-3,
        "min_lr": 1e-4,
        "lr_decay_style": "cosine",
        "lr_warmup_steps": 1,
        "num_steps": 4,
        "weight_decay": 0.01,
        "adam_eps": 1e-5,
        "replay": "off",
        "packed": case.packed,
        "log_prob_chunk_tokens": 16,
        "optimizer_steps_per_rollout": STEPS,
        **case.train,
    }
    return RunConfig.model_validate(
        {
            "model": {"path": checkpoint},
            "data": {"prompts": ["none.jsonl"]},
            "cluster": {"device": "cpu", "trainer_ranks": case.world},
            "megatron": {"use_distributed_optimizer": False, **case.megatron},
            "rollout": {"groups_per_step": STEPS, "temperature": 0.8},
            "algorithm": algorithm,
            "train": train,
            "deadlines": {"trainer_start_s": 60, "train_step_s": 60, "weight_sync_s": 60},
        }
    )


def make_shards(case: Case, dp: int, dp_rank: int, behaviour: list[np.ndarray] | None) -> list[TrainShard]:
    """One shard per step for a data-parallel rank; `behaviour` holds [N] log-probs of all sequences for each step."""
    plans = PACKED_PLANS if case.packed else UNPACKED_PLANS
    plan = (case.plan or plans[dp])[dp_rank]
    members = sorted(i for batch in plan for i in batch)
    local = {sequence: place for place, sequence in enumerate(members)}
    return [
        _cut(whole, members, tuple(tuple(local[i] for i in batch) for batch in plan))
        for whole in (_whole_step(step, case, behaviour[step] if behaviour else None) for step in range(STEPS))
    ]


def _whole_step(step: int, case: Case, behaviour: np.ndarray | None) -> TrainShard:
    rng = np.random.default_rng(step)
    lengths = case.lengths
    n = sum(lengths)
    mask = rng.random(n) > 0.3
    mask[np.cumsum((0, *lengths[:-1]))] = False
    routes = None
    if case.routes is not None:
        layers, experts, top_k = case.routes
        chosen = rng.random((n, layers, experts)).argsort(-1)[..., :top_k].astype(np.uint8)
        routes = Routes(chosen, np.ones(n, np.bool_), tuple(range(layers)))
    return TrainShard(
        tokens=rng.integers(0, VOCAB, n).astype(np.int32),
        lengths=np.array(lengths, np.int64),
        sequence_ids=np.arange(len(lengths), dtype=np.int64),
        loss_mask=mask,
        weights=(mask / mask.sum()).astype(np.float32),
        advantages=np.repeat(rng.normal(size=len(lengths)), lengths).astype(np.float32),
        behaviour_log_probs=np.zeros(n, np.float32) if behaviour is None else behaviour,
        micro_batches=(tuple(range(len(lengths))),),
        routes=routes,
    )


def _cut(whole: TrainShard, members: list[int], micro_batches: tuple[tuple[int, ...], ...]) -> TrainShard:
    spans = whole.spans()
    rows = np.concatenate([np.arange(*spans[i]) for i in members])
    routes = whole.routes
    return replace(
        whole,
        tokens=whole.tokens[rows],
        lengths=whole.lengths[members],
        sequence_ids=whole.sequence_ids[members],
        loss_mask=whole.loss_mask[rows],
        weights=whole.weights[rows],
        advantages=whole.advantages[rows],
        behaviour_log_probs=whole.behaviour_log_probs[rows],
        micro_batches=micro_batches,
        routes=None if routes is None else Routes(routes.experts[rows], routes.mask[rows], routes.layer_ids),
    )


def record(rank: int, world_size: int, init_method: str, checkpoint: Path, case: Case, path: Path) -> dict[str, float]:
    """Run `case` in one process and keep log-probs, loss, gradients, metrics and final weights in `path`."""
    from mslime.backends.megatron.step.trainer import MegatronTrainer

    trainer = MegatronTrainer(policy_spec(run_config(checkpoint, case)), rank, world_size, init_method)
    log_probs = [trainer.log_probs(s, replay=case.routes is not None) for s in make_shards(case, 1, 0, None)]
    noise = np.random.default_rng(99)
    behaviour = [(column.numpy() + noise.normal(size=len(column)) * 0.05).astype(np.float32) for column in log_probs]
    loss, gradients = _gradients(trainer, make_shards(case, 1, 0, behaviour)[0])
    metrics = trainer.train(make_shards(case, 1, 0, behaviour))
    torch.save(
        {
            "log_probs": log_probs,
            "behaviour": behaviour,
            "loss": loss,
            "gradients": _whole(trainer, gradients),
            "metrics": metrics,
            "weights": _whole(trainer, dict(trainer.named_local_params())),
        },
        path,
    )
    return metrics[-1]


def compare(rank: int, world_size: int, init_method: str, checkpoint: Path, case: Case, path: Path) -> dict[str, Any]:
    """Run `case` on this rank; largest differences from the record, and this rank's own metrics."""
    from mslime.backends.megatron.step.trainer import MegatronTrainer

    kept = torch.load(path, weights_only=False)
    config = run_config(checkpoint, case)
    trainer = MegatronTrainer(policy_spec(config), rank, world_size, init_method)
    layout = config.layout
    shards = make_shards(case, layout.dp, layout.dp_rank(rank), kept["behaviour"])
    rows = np.concatenate([_rows(case.lengths, i) for i in shards[0].sequence_ids])
    found = [trainer.log_probs(shard, replay=case.routes is not None) for shard in shards]
    loss, gradients = _gradients(trainer, shards[0])
    # A distributed optimizer leaves each rank with pieces of gradients only: their norm and the weights speak for them.
    whole_gradients = not config.megatron.use_distributed_optimizer
    metrics = trainer.train(shards)
    return {
        "log_probs": max(float((a - b[rows]).abs().max()) for a, b in zip(found, kept["log_probs"], strict=True)),
        "loss": abs(loss - kept["loss"]),
        "gradients": _largest_difference(gradients, kept["gradients"], trainer) if whole_gradients else None,
        "compared": len(gradients),
        "weights": _largest_difference(dict(trainer.named_local_params()), kept["weights"], trainer),
        "metrics": metrics,
        "recorded": kept["metrics"],
        "moe_layer_ids": trainer.moe_layer_ids,
    }


def log_probs(rank: int, world_size: int, init_method: str, checkpoint: Path, case: Case) -> torch.Tensor:
    """Natural log-probs of the first step's shard."""
    from mslime.backends.megatron.step.trainer import MegatronTrainer

    trainer = MegatronTrainer(policy_spec(run_config(checkpoint, case)), rank, world_size, init_method)
    return trainer.log_probs(make_shards(case, 1, 0, None)[0])


def _rows(lengths: tuple[int, ...], sequence: int) -> np.ndarray:
    stop = int(np.cumsum(lengths)[sequence])
    return np.arange(stop - lengths[sequence], stop)


def _gradients(trainer: Any, shard: TrainShard) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss over all ranks and this rank's reduced gradients by canonical name, without an optimizer step."""
    from mslime.algorithms.statistics import finalise
    from mslime.backends.megatron.model.chunks import named_local_params
    from mslime.backends.megatron.step.reductions import over_all_ranks

    for chunk in trainer.wrapped:
        chunk.zero_grad_buffer()
    if trainer.routing.mode == "r2":
        with trainer.routing.old_log_prob_pass(shard, 0) as routes:
            trainer.runner.log_probs(shard, routes)
    with trainer.routing.gradient_pass(shard, 0) as routes:
        own = trainer.runner.add_gradients(shard, trainer.runner.loss, routes)
    loss = finalise(over_all_ranks(own))["loss/total"]
    named = named_local_params(trainer.chunks, tied_copies=False)
    return loss, {name: tensor.main_grad.clone() for name, tensor in named}  # type: ignore[attr-defined]


def _whole(trainer: Any, local: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A single process's tensors in Hugging Face names."""
    from mslime.convert.families import get_family

    rules = get_family(trainer.hf_config).rules(trainer.hf_config)
    return {hf: t.clone() for name, tensor in local.items() for hf, t in rules.bind(name).to_hf([tensor.detach()])}


def _largest_difference(local: dict[str, torch.Tensor], whole: dict[str, torch.Tensor], trainer: Any) -> float:
    from megatron.core import parallel_state as ps

    from mslime.convert.families import get_family

    rules = get_family(trainer.hf_config).rules(trainer.hf_config)
    assert local, "nothing to compare"
    largest = 0.0
    for name, tensor in local.items():
        rule = rules.bind(name)
        if rule.is_expert:
            place = ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()
        else:
            place = ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
        expected = rule.to_megatron(whole.__getitem__, *place)
        largest = max(largest, float((expected - tensor.detach()).abs().max()))
    return largest
