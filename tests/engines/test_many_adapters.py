"""Eight adapters take turns on one base, and each computes the same as in a separate run, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mslime.backends.megatron.model.chunks import named_factors, named_local_params
from mslime.backends.megatron.model.lora_layers import adapters_of
from mslime.backends.megatron.step.adapters import AdapterTrainers
from mslime.backends.megatron.step.base_model import Base
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.errors import ConfigError, TrainerError
from mslime.config.resolved import PolicySpec, policy_spec
from mslime.config.schema import RunConfig
from mslime.data.shard import TrainShard
from tests.engines.lora_ranks import every_buffer, lora_config
from tests.engines.megatron_parity import LENGTHS, STEPS, VOCAB, Case, make_shards
from tests.engines.megatron_ranks import run_ranks
from tests.engines.test_megatron_parity import DIST, EP, FULL, LAYOUTS, PP, TP, VPP

EIGHT: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # lora, train, algorithm
    "plain": ({}, {}, {}),
    "other_rank": ({"rank": 3, "alpha": 9, "rs_lora": True}, {"lr": 2e-3}, {}),
    "attention": ({"targets": ["attention"]}, {"lr_decay_style": "constant"}, {"kl_coef": 0.0}),
    "experts": ({"targets": ["experts"]}, {"lr_warmup_steps": 2}, {"entropy_coef": 0.0}),
    "queries": ({"targets": ["q_proj"], "rank": 8}, {"weight_decay": 0.2}, {"correction": {"preset": "tis"}}),
    "other_loss": ({}, {"clip_grad": 0.05}, {"clip_low": 0.1, "clip_high": 0.5}),
    "quick": ({"alpha": 32, "experts": "shared_outer"}, {"lr": 1e-2, "min_lr": 1e-2}, {}),
    "middle_layers": ({"targets": ["model.layers.[12].*_proj"]}, {"adam_beta2": 0.9}, {"kl_coef": 0.3}),
}
"""Rank, scale, layers, the factors shared by experts, learning rate, schedule, clipping and loss differ."""


def configs(checkpoint: Path, case: Case) -> dict[str, RunConfig]:
    """Of a run of each adapter alone."""
    found: dict[str, RunConfig] = {}
    for seed, (name, (lora, train, algorithm)) in enumerate(EIGHT.items()):
        own = replace(case, train={**case.train, **train}, algorithm={**case.algorithm, **algorithm})
        found[name] = lora_config(checkpoint, own, lora).model_copy(update={"seed": seed})
    return found


def specs(checkpoint: Path, case: Case) -> dict[str, PolicySpec]:
    return {name: policy_spec(config) for name, config in configs(checkpoint, case).items()}


def shards_of(name: str, case: Case, spec: PolicySpec, rank: int) -> list[TrainShard]:
    """An adapter's own data: one shard for each of its steps."""
    number = list(EIGHT).index(name)
    rng = np.random.default_rng(100 + number)
    behaviour = [rng.normal(-6, 0.3, sum(LENGTHS)).astype(np.float32) for _ in range(STEPS)]
    shards = make_shards(case, spec.layout.dp, spec.layout.dp_rank(rank), behaviour)
    return [
        replace(s, tokens=(s.tokens + 13 * number) % VOCAB, advantages=s.advantages * (1 + number) * (-1) ** number)
        for s in shards
    ]


def factors(trainer: MegatronTrainer) -> dict[str, Tensor]:
    trainer.sync_params()
    return {name: tensor.detach().clone() for name, tensor in named_factors(trainer.chunks)}


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


Alone = dict[str, tuple[list[dict[str, float]], dict[str, Tensor]]]


def alone(rank: int, world: int, init: str, checkpoint: Path, case: Case, names: Sequence[str] = tuple(EIGHT)) -> Alone:
    """Metrics and factors of the adapters' own runs."""
    found: Alone = {}
    for name, spec in ((name, specs(checkpoint, case)[name]) for name in names):
        trainer = MegatronTrainer(spec, rank, world, f"{init}_{name}")
        metrics = [trainer.train([shard])[0] for shard in shards_of(name, case, spec, rank)]
        found[name] = ([numbers(m) for m in metrics], factors(trainer))
        trainer.close()
    return found


def differing(found: tuple[list[dict[str, float]], dict[str, Tensor]], own: Any) -> list[str]:
    """Names of metrics and factors that are not those of the own run, bit for bit."""
    metrics, held = own
    assert held.keys() == found[1].keys() and held
    wrong = [f"step {at} {name}" for at, (a, b) in enumerate(zip(found[0], metrics, strict=True)) for name in a | b
             if a.get(name) != b.get(name)]  # fmt: skip
    return wrong + [name for name, tensor in held.items() if not torch.equal(tensor, found[1][name])]


def together(rank: int, world: int, init: str, checkpoint: Path, case: Case, path: Path) -> dict[str, Any]:
    """The same adapters on one base, in a mixed order; one comes late, two are saved, freed, and resumed elsewhere."""
    own, every = alone(rank, world, init, checkpoint, case), specs(checkpoint, case)
    base = Base(every["plain"], rank, world, init)
    before = {name: tensor.clone() for name, tensor in named_local_params(base.chunks)}
    trainers, shards = AdapterTrainers(base), {n: shards_of(n, case, spec, rank) for n, spec in every.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in every}
    for name in [n for n in every if n != "quick"]:
        trainers.create(name, every[name])
    order = [name for name in every for _ in range(STEPS)]
    np.random.default_rng(7).shuffle(order)
    for name in order:
        step = len(found[name])
        if name == "quick" and step == 0:
            trainers.create(name, every[name])
        if name in ("other_rank", "experts") and step == 2:
            with trainers.placed(name) as trainer:
                trainer.save(path / name, {"next_step": 2})
            del trainer
            trainers.free(name)
            trainers.create(name, every[name])
            with trainers.placed(name) as trainer:
                assert trainer.load(path / name)["next_step"] == 2
        with trainers.placed(name) as trainer:
            found[name].append(numbers(trainer.train([shards[name][step]])[0]))
    wrong: dict[str, list[str]] = {}
    for name in every:
        with trainers.placed(name) as trainer:
            wrong[name] = differing((found[name], factors(trainer)), own[name])
    moved = [n for n, tensor in named_local_params(base.chunks) if not torch.equal(tensor, before[n])]
    return {"wrong": wrong, "base": moved, "left": len(list(adapters_of(base.chunks)))}


MIXED = {
    "one_process": Case(),
    "tp2_ep2": Case(2, {TP: 2, EP: 2}),
    "dp2": LAYOUTS["dp2"],
    "dp2_distributed_optimizer_overlapped": LAYOUTS["dp2_distributed_optimizer_overlapped"],
    "pp2_vpp2_recompute": Case(2, {PP: 2, VPP: 2, **FULL}),
    "tp2_dp2_ep2_distributed_optimizer": Case(4, {TP: 2, EP: 2, **DIST}),
    "r3": Case(train={"replay": "r3"}, routes=(4, 8, 2)),
}


@pytest.mark.parametrize("name", MIXED)
def test_each_of_eight_adapters_is_that_of_its_own_run(name: str, tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    case = MIXED[name]
    for found in run_ranks(together, case.world, tiny_qwen3_moe, case, tmp_path / "saved", deadline_s=300):
        assert not any(found["wrong"].values()), found
        assert not found["base"] and found["left"] == 0, found


def gradients(trainer: MegatronTrainer) -> list[Tensor]:
    return [buffer.grad_data.clone() for chunk in trainer.wrapped for buffer in every_buffer(chunk)]


def add_gradients(trainer: MegatronTrainer, shard: TrainShard) -> None:
    """Of a shard, to those since the last step."""
    (prepared,), _ = trainer.prepare([shard])
    trainer.accumulate(lambda: trainer.runner.add_gradients(prepared, trainer.runner.loss))


def accumulated(rank: int, world: int, init: str, checkpoint: Path, case: Case) -> dict[str, Any]:
    """Whether gradients of two passes are the sum of each one's; what is refused; whether a freed adapter is gone."""
    spec = specs(checkpoint, case)["plain"]
    trainers = AdapterTrainers(Base(spec, rank, world, init))
    trainers.create("a", spec)
    first, second, _ = shards_of("plain", case, spec, rank)
    each: list[list[Tensor]] = []
    with trainers.placed("a") as trainer:
        for shards in ([first], [second], [first, second]):
            for shard in shards:
                add_gradients(trainer, shard)
            each.append(gradients(trainer))
            trainer.forget_gradients()
    refused: list[str] = []
    other = replace(spec, checkpoint=checkpoint.parent)
    blocks = replace(spec, train=spec.train.model_copy(update={"logits_mib": spec.train.logits_mib / 2}))
    rising = replace(spec, train=spec.train.model_copy(update={"min_lr": 2 * spec.train.lr}))
    with trainers.placed("a") as trainer:
        add_gradients(trainer, first)
        with pytest.raises(TrainerError, match="would be lost"):
            trainer.hold(())
        trainer.apply_gradients()
        with pytest.raises(TrainerError) as error:
            trainer.apply_gradients()
        refused.append(str(error.value))
    with pytest.raises(AssertionError):  # megatron-core's, after the wrappers are made
        trainers.create("b", rising)
    for work in (
        lambda: trainers.create("a", spec),
        lambda: trainers.create("b", replace(spec, lora=spec.lora.model_copy(update={"rank": 0}))),
        lambda: trainers.create("b", other),
        lambda: trainers.create("b", blocks),
        lambda: trainers.of(["a", "c"]),
    ):
        with pytest.raises(ConfigError) as mistake:
            work()
        refused.append(str(mistake.value))
    gone = weakref.ref(trainer.optimizer)
    del trainer, error, mistake
    trainers.free("a")
    gc.collect()
    assert next(adapters_of(trainers.base.chunks), None) is None
    return {
        "sums": all(torch.equal(a + b, both) for a, b, both in zip(*each, strict=True)),
        "differ": any(not torch.equal(a, b) for a, b in zip(each[0], each[1], strict=True)),
        "refused": refused,
        "gone": gone() is None,
        "names": trainers.names,
    }


def test_gradients_of_several_calls_add_up_and_mistakes_are_named(tiny_qwen3_moe: Path) -> None:
    for found in run_ranks(accumulated, 2, tiny_qwen3_moe, LAYOUTS["dp2"]):
        assert found["sums"] and found["differ"], found
        assert found["gone"] and found["names"] == ()
        for message, part in zip(
            found["refused"],
            ["no gradients", "already in use", "above 0", "checkpoint", "logit_bytes", "there are a"],
            strict=True,
        ):
            assert part in message
