"""Code of the adapter tests on every rank: a trainer whose factors are all nonzero, compared with one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mslime.backends.megatron.model.chunks import named_factors, named_local_params
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.resolved import policy_spec
from mslime.config.schema import RunConfig
from tests.engines.megatron_parity import Case, make_shards, run_config
from tests.engines.megatron_parity import _rows as rows_of_sequence

LORA = {"rank": 4, "alpha": 6}


def factor(name: str, shape: tuple[int, ...]) -> Tensor:
    """A whole factor by its name in an adapter's file: no zeros, the same everywhere."""
    seed = sum(ord(char) * (at + 1) for at, char in enumerate(name))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.15


def fill_factors(trainer: MegatronTrainer) -> None:
    """Give every factor of this rank its part of `factor`."""
    adapters = trainer.adapters
    assert adapters is not None
    shapes = adapters.table.hf_shapes()
    for _, tensor, bound, place in held_factors(trainer):
        with torch.no_grad():
            tensor.copy_(bound.to_megatron(lambda name: factor(name, shapes[name]), *place))


def held_factors(trainer: MegatronTrainer) -> Iterator[tuple[str, Tensor, Any, tuple[int, int]]]:
    """(name, tensor, rule, place among the ranks that share it) of this rank's factors."""
    from mslime.backends.megatron.parallel import tensor_shard

    assert trainer.adapters is not None
    trainer.sync_params()
    for name, tensor in named_factors(trainer.chunks):
        bound = trainer.adapters.table.bind(name)
        yield name, tensor, bound, tensor_shard(bound.is_expert)


def whole_factors(trainer: MegatronTrainer, grads: bool = False) -> dict[str, Tensor]:
    """One process's factors, or their gradients, by their names in an adapter's file."""
    found: dict[str, Tensor] = {}
    for _, tensor, bound, _ in held_factors(trainer):
        value = tensor.main_grad if grads else tensor.detach()  # type: ignore[attr-defined]
        found |= {hf: part.clone() for hf, part in bound.to_hf([value])}
    return found


def worst(trainer: MegatronTrainer, whole: dict[str, Tensor], grads: bool = False) -> float:
    """Largest difference of this rank's factors, or gradients, from its part of the whole ones."""
    differences = [0.0]
    for _, tensor, bound, place in held_factors(trainer):
        value = tensor.main_grad if grads else tensor.detach()  # type: ignore[attr-defined]
        differences.append(float((value - bound.to_megatron(whole.__getitem__, *place)).abs().max()))
    return max(differences)


def lora_config(checkpoint: Path, case: Case, lora: dict[str, Any], device: str = "cpu") -> RunConfig:
    """`run_config` with adapters; Adam does not divide gradients that are noise by themselves."""
    plain = run_config(checkpoint, replace(case, train={"adam_eps": 1e-4, **case.train})).model_dump()
    plain["cluster"]["device"] = device
    return RunConfig.model_validate(plain | {"lora": {**LORA, **lora}})


def trainer_of(config: RunConfig, rank: int, world_size: int, init_method: str) -> MegatronTrainer:
    """With filled factors."""
    trainer = MegatronTrainer(policy_spec(config), rank, world_size, init_method)
    fill_factors(trainer)
    return trainer


def gradients(trainer: MegatronTrainer, shard: Any) -> float:
    """Leave the reduced gradients of a shard in the buffers; the loss over all ranks."""
    from mslime.algorithms.statistics import finalise
    from mslime.backends.megatron.step.reductions import over_all_ranks

    for chunk in trainer.wrapped:
        chunk.zero_grad_buffer()
    with trainer.routing.gradient_pass(shard, 0) as routes:
        own = trainer.runner.add_gradients(shard, trainer.runner.loss, routes)
    return finalise(over_all_ranks(own))["loss/total"]


def record(rank: int, world: int, init: str, checkpoint: Path, case: Case, lora: dict[str, Any], path: Path) -> None:
    """Run `case` in one process and write its results to `path`."""
    trainer = trainer_of(lora_config(checkpoint, case, lora), rank, world, init)
    log_probs = [trainer.log_probs(shard) for shard in make_shards(case, 1, 0, None)]
    noise = np.random.default_rng(99)
    behaviour = [(column.numpy() + noise.normal(size=len(column)) * 0.05).astype(np.float32) for column in log_probs]
    loss = gradients(trainer, make_shards(case, 1, 0, behaviour)[0])
    kept = {"gradients": whole_factors(trainer, grads=True), "begin": whole_factors(trainer)}
    base = {name: tensor.clone() for name, tensor in named_local_params(trainer.chunks)}
    metrics = trainer.train(make_shards(case, 1, 0, behaviour))
    assert all(torch.equal(tensor, base[name]) for name, tensor in named_local_params(trainer.chunks))
    kept |= {"log_probs": log_probs, "behaviour": behaviour, "loss": loss, "metrics": metrics}
    torch.save({**kept, "after": whole_factors(trainer)}, path)


def compare(
    rank: int, world: int, init: str, checkpoint: Path, case: Case, lora: dict[str, Any], path: Path,
    device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """Run `case` on this rank; its differences from the record."""
    kept = torch.load(path, weights_only=False)
    config = lora_config(checkpoint, case, lora, device)
    trainer = trainer_of(config, rank, world, init)
    shards = make_shards(case, config.layout.dp, config.layout.dp_rank(rank), kept["behaviour"])
    rows = np.concatenate([rows_of_sequence(case.lengths, i) for i in shards[0].sequence_ids])
    found = [trainer.log_probs(shard) for shard in shards]
    loss = gradients(trainer, shards[0])
    sharded = config.megatron.use_distributed_optimizer
    grads = None if sharded else worst(trainer, kept["gradients"], grads=True)
    begin = worst(trainer, kept["begin"])
    metrics = trainer.train(shards)
    frozen = [name for name, tensor in named_local_params(trainer.chunks) if tensor.requires_grad]
    return {
        "log_probs": max(float((a - b[rows]).abs().max()) for a, b in zip(found, kept["log_probs"], strict=True)),
        "loss": abs(loss - kept["loss"]),
        "gradients": grads,
        "begin": begin,
        "after": worst(trainer, kept["after"]),
        "moved": max(float((kept["after"][n] - kept["begin"][n]).abs().max()) for n in kept["after"]),
        "metrics": metrics,
        "recorded": kept["metrics"],
        "not_frozen": frozen,
        "buffers": sum(buffer.numel for chunk in trainer.wrapped for buffer in every_buffer(chunk)),
        "factors": sum(tensor.numel() for _, tensor, _, _ in held_factors(trainer)),
    }


def every_buffer(chunk: Any) -> list[Any]:
    """Gradient buffers of a data-parallel wrapper, dense and of experts."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]
