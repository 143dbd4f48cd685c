"""Adapters whose micro-batches share a pass compute the same as in a separate run, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mslime.backends.megatron.model.chunks import named_local_params
from mslime.backends.megatron.model.lora_layers import adapters_of
from mslime.backends.megatron.step.adapters import AdapterTrainers, joint_update
from mslime.backends.megatron.step.base_model import Base
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.errors import TrainerError
from mslime.config.resolved import PolicySpec
from mslime.data.shard import TrainShard
from tests.engines.megatron_parity import STEPS, Case
from tests.engines.megatron_ranks import run_ranks
from tests.engines.test_many_adapters import EIGHT, Alone, differing, factors, numbers, shards_of, specs
from tests.engines.test_megatron_parity import DIST, EP, FULL, LAYOUTS, PP, TP, VPP

FEW = ("plain", "other_rank", "attention", "middle_layers")
TWO_AT_ONCE = {"attention", "queries"}
"""These take two optimizer steps on their first batch, with the log-probs from before it."""


def batches(name: str, case: Case, spec: PolicySpec, rank: int) -> list[list[TrainShard]]:
    """An adapter's batches of one shard or two. Half of the adapters have fewer, and larger, micro-batches."""
    shards = shards_of(name, case, spec, rank)
    if list(EIGHT).index(name) % 2:
        shards = [replace(s, micro_batches=(sum(s.micro_batches[:2], ()), *s.micro_batches[2:])) for s in shards]
    assert STEPS == 3
    return [shards[:2], shards[2:]] if name in TWO_AT_ONCE else [[shard] for shard in shards]


def alone(rank: int, world: int, init: str, checkpoint: Path, case: Case, names: Sequence[str]) -> Alone:
    """Metrics and factors of the adapters' own runs."""
    found: Alone = {}
    for name, spec in ((name, specs(checkpoint, case)[name]) for name in names):
        trainer = MegatronTrainer(spec, rank, world, f"{init}_{name}")
        metrics = [m for batch in batches(name, case, spec, rank) for m in trainer.train(batch)]
        found[name] = ([numbers(m) for m in metrics], factors(trainer))
        trainer.close()
    return found


def in_one_pass(rank: int, world: int, init: str, checkpoint: Path, case: Case, names: Sequence[str]) -> dict[str, Any]:
    """The same adapters on one base: first batches in one pass, then one adapter's turn, then passes of the others."""
    own, every = alone(rank, world, init, checkpoint, case, names), specs(checkpoint, case)
    base = Base(every["plain"], rank, world, init)
    before = {name: tensor.clone() for name, tensor in named_local_params(base.chunks)}
    trainers = AdapterTrainers(base)
    for name in names:
        trainers.create(name, every[name])
    left = {name: batches(name, case, every[name], rank) for name in names}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    together: list[float] = []
    while any(left.values()):
        ready = [name for name in reversed(names) if left[name]]
        if len(ready) == len(names) and found[names[0]]:
            name = ready.pop()
            with trainers.placed(name) as trainer:
                found[name] += trainer.train(left[name].pop(0))
        prepared: dict[str, list[TrainShard]] = {}
        known: dict[str, dict[str, float]] = {}
        for name in ready:
            with trainers.placed(name) as trainer:
                prepared[name], known[name] = trainer.prepare(left[name].pop(0))
        for name, metrics in joint_update(trainers.of(prepared), prepared).items():
            assert not isinstance(metrics, TrainerError), metrics
            found[name] += [known[name] | m for m in metrics]
            together += [m["perf/adapters_together"] for m in metrics]
    wrong: dict[str, list[str]] = {}
    for name in names:
        with trainers.placed(name) as trainer:
            wrong[name] = differing(([numbers(m) for m in found[name]], factors(trainer)), own[name])
    moved = [n for n, tensor in named_local_params(base.chunks) if not torch.equal(tensor, before[n])]
    return {"wrong": wrong, "base": moved, "left": len(list(adapters_of(base.chunks))), "together": together}


# ------------------------------------------------------------------------------------------------- when one fails

BROKEN: dict[str, dict[str, float]] = {"other_rank": {"advantages": np.nan}, "attention": {"advantages": 1e30}}
"""Defects of the second batch: a loss that is not finite, and a gradient whose norm is not."""


def broken_batches(name: str, case: Case, spec: PolicySpec, rank: int) -> list[list[TrainShard]]:
    """`batches`, one shard each, of which the second is broken for some adapters."""
    every = [shard for batch in batches(name, case, spec, rank) for shard in batch]
    wrong = {column: getattr(every[1], column) * factor for column, factor in BROKEN.get(name, {}).items()}
    return [[every[0]], [replace(every[1], **wrong)], [every[2]]]


def outcome(work: Callable[[], list[dict[str, float]]]) -> dict[str, float] | str:
    """Metrics of a step, or its error."""
    try:
        return numbers(work()[0])
    except TrainerError as error:
        return str(error)


def failing_in_one_pass(
    rank: int, world: int, init: str, checkpoint: Path, case: Case, names: Sequence[str]
) -> dict[str, Any]:
    """Three passes of all adapters, some of which fail in the second; and the same steps in separate runs."""
    every = specs(checkpoint, case)
    own: dict[str, tuple[list[Any], dict[str, Tensor]]] = {}
    for name in names:
        trainer = MegatronTrainer(every[name], rank, world, f"{init}_{name}")
        steps = [outcome(partial(trainer.train, batch)) for batch in broken_batches(name, case, every[name], rank)]
        own[name] = (steps, factors(trainer))
        trainer.close()
    base = Base(every["plain"], rank, world, init)
    trainers = AdapterTrainers(base)
    for name in names:
        trainers.create(name, every[name])
    given = {name: broken_batches(name, case, every[name], rank) for name in names}
    found: dict[str, list[Any]] = {name: [] for name in names}
    for step in range(STEPS):
        prepared: dict[str, list[TrainShard]] = {}
        known: dict[str, dict[str, float]] = {}
        for name in names:
            with trainers.placed(name) as trainer:
                prepared[name], known[name] = trainer.prepare(given[name][step])
        for name, got in joint_update(trainers.of(prepared), prepared).items():
            found[name].append(str(got) if isinstance(got, TrainerError) else numbers(known[name] | got[0]))
    held: dict[str, dict[str, Tensor]] = {}
    for name in names:
        with trainers.placed(name) as trainer:
            held[name] = factors(trainer)
    return {
        "steps": {name: (found[name], own[name][0]) for name in names},
        "factors": {
            name: [
                n for n, t in held[name].items() if not torch.equal(t.nan_to_num(7.5), own[name][1][n].nan_to_num(7.5))
            ]
            for name in names
        },
        "left": len(list(adapters_of(base.chunks))),
    }


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["pp2_vpp2_recompute_r3", "one_process", "pp2", "dp2_distributed_optimizer_overlapped"]
)
def test_an_adapter_that_fails_in_a_pass_changes_nothing_for_the_others(name: str, tiny_qwen3_moe: Path) -> None:
    """The failed adapter itself equals one after the same failure in a separate run."""
    case = CASES[name]
    for found in run_ranks(failing_in_one_pass, case.world, tiny_qwen3_moe, case, FEW, deadline_s=300):
        assert found["left"] == 0 and not any(found["factors"].values()), found["factors"]
        for adapter, (together, own) in found["steps"].items():
            assert together == own, adapter
            failed = [at for at, step in enumerate(together) if isinstance(step, str)]
            assert failed[:1] == ([1] if adapter in BROKEN else []), (adapter, together)
        assert "loss" in found["steps"]["other_rank"][0][1] and "grad_norm" in found["steps"]["attention"][0][1]


LOSSES = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}
CASES = {
    "one_process": Case(),
    "tp2_ep2": Case(2, {TP: 2, EP: 2}),
    "pp2": Case(2, {PP: 2}),
    "pp2_vpp2_recompute": Case(2, {PP: 2, VPP: 2, **FULL}),
    "pp2_recompute_router_losses": Case(2, {PP: 2, **LOSSES, **FULL}),
    "dp2_ep2_distributed_optimizer": Case(2, {EP: 2, **DIST}),
    "dp2_distributed_optimizer_overlapped": LAYOUTS["dp2_distributed_optimizer_overlapped"],
    "pp2_vpp2_recompute_r3": Case(2, {PP: 2, VPP: 2, **FULL}, train={"replay": "r3"}, routes=(4, 8, 2)),
    "pp2_recompute_r2": Case(2, {PP: 2, **FULL}, train={"replay": "r2"}),
}
FEWER = {"pp2_vpp2_recompute_r3": FEW}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_each_adapter_of_a_pass_is_that_of_its_own_run(name: str, tiny_qwen3_moe: Path) -> None:
    case, names = CASES[name], FEWER.get(name, tuple(EIGHT))
    for found in run_ranks(in_one_pass, case.world, tiny_qwen3_moe, case, names, deadline_s=300):
        assert not any(found["wrong"].values()), found
        assert not found["base"] and found["left"] == 0, found
        assert max(found["together"]) == len(names) > min(found["together"]) >= 1, found
