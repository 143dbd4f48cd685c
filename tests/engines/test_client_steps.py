"""Steps composed by clients of `mslime serve`: losses by name and Adam's numbers, against peft on transformers.

Targets are not the following tokens, and each step has its own loss, learning rate, betas, decay and clipping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mslime.backends.megatron.step import client_steps
from mslime.backends.megatron.step.adapters import AdapterTrainers
from mslime.backends.megatron.step.base_model import Base
from mslime.backends.megatron.step.client_steps import RankPassResult
from mslime.config.errors import TrainerError
from mslime.config.lora import LoraConfig
from mslime.config.resolved import policy_spec
from mslime.config.serve import AdamParams, LossChoice
from mslime.convert.families import get_family, read_hf_config
from mslime.convert.lora_rules import make_adapters
from mslime.data.client_batch import ClientShard, Datum, by_datum, client_shards
from tests.engines.lora_ranks import LORA, factor, fill_factors, held_factors, lora_config, worst
from tests.engines.megatron_parity import VOCAB, Case
from tests.engines.megatron_ranks import run_ranks
from tests.engines.test_megatron_parity import DIST, EP, FULL, LAYOUTS, PP, TP, VPP
from tests.fixtures.peft_models import factors_of, peft_model

CP = "context_parallel_size"
STEPS: list[tuple[LossChoice, AdamParams]] = [
    (LossChoice("cross_entropy"), AdamParams(1e-3, 0.9, 0.95, 1e-4, 0.0, 0.0)),
    (LossChoice("importance_sampling"), AdamParams(3e-3, 0.8, 0.9, 1e-3, 0.1, 0.0)),
    (LossChoice("ppo", 0.9, 1.1), AdamParams(2e-3, 0.9, 0.98, 1e-4, 0.0, 0.5)),
    (LossChoice("cispo", 0.8, 1.3), AdamParams(1e-3, 0.7, 0.95, 1e-4, 0.2, 1.0)),
    (LossChoice("dro", beta=0.3), AdamParams(5e-3, 0.9, 0.95, 1e-4, 0.0, 0.1)),
]


def data_of(step: int) -> list[Datum]:
    rng = np.random.default_rng(step)
    found = []
    for length in (12, 1, 30, 7, 19, 40):
        weights = rng.normal(size=length).astype(np.float32) * (rng.random(length) > 0.3)
        found.append(
            Datum(
                rng.integers(0, VOCAB, length).astype(np.int32),
                rng.integers(0, VOCAB, length).astype(np.int32),
                weights,
                rng.normal(size=length).astype(np.float32) * (rng.random(length) > 0.3),
                rng.normal(-5.8, 0.2, length).astype(np.float32),
            )
        )
    return found


def run_steps(rank: int, world: int, init: str, checkpoint: Path, case: Case, path: Path) -> dict[str, Any]:
    """All steps, the data of each in two passes; returns their results, and the distance of factors from those in
    `path`."""
    config = lora_config(checkpoint, case, {})
    spec, layout = policy_spec(config), config.layout
    trainers = AdapterTrainers(Base(spec, rank, world, init))
    trainers.create("a", spec)
    with trainers.placed("a") as trainer:
        fill_factors(trainer)
    losses, columns, norms = [], [], []
    for step, (loss, params) in enumerate(STEPS):
        parts, total = [], 0.0
        for data in (data_of(step)[:2], data_of(step)[2:]):
            shards = client_shards(data, loss, layout, 64, packed=case.packed, multiple_of=2)
            own = shards[layout.dp_rank(rank)]
            with trainers.placed("a") as trainer:
                before = client_steps.forward(trainer, own)
                found = client_steps.forward_backward(trainer, own)
            assert abs(before.loss - found.loss) < 1e-5 and np.abs(before.log_probs - found.log_probs).max() < 1e-5
            total += found.loss
            parts.append((own, found.log_probs))
        losses.append(total)
        columns.append(parts)
        with trainers.placed("a") as trainer:
            norms.append(client_steps.adam_step(trainer, params)["grad_norm"])
    with trainers.placed("a") as trainer:
        with pytest.raises(TrainerError, match="no gradients"):
            client_steps.adam_step(trainer, STEPS[0][1])
        kept: dict[str, Tensor] = torch.load(path, weights_only=False)
        far = worst(trainer, kept)
        moved = [float((t - b.to_megatron(kept.__getitem__, *p)).abs().max()) for _, t, b, p in held_factors(trainer)]
    return {"losses": losses, "columns": columns, "norms": norms, "far": far, "many": len(moved)}


def reference(checkpoint: Path, path: Path) -> dict[str, Any]:
    """The same steps by peft, torch's AdamW and the formulas written out."""
    config = read_hf_config(checkpoint)
    adapters = make_adapters(get_family(config).rules(config), LoraConfig(**LORA))
    factors = {name: factor(name, shape) for name, shape in adapters.table.hf_shapes().items()}
    model = peft_model(checkpoint, adapters.target_modules, LORA, factors)
    trained = factors_of(model)
    optimizer = torch.optim.AdamW(trained.values(), lr=1.0)
    losses, columns, norms = [], [], []
    for step, (choice, params) in enumerate(STEPS):
        optimizer.zero_grad()
        total, kept = torch.zeros(()), []
        for datum in data_of(step):
            logits = model(torch.from_numpy(datum.tokens).long()[None]).logits[0]
            log_p = logits.log_softmax(-1).gather(1, torch.from_numpy(datum.targets).long()[:, None])[:, 0]
            total = total + written_out(choice, log_p, datum)
            kept.append(log_p.detach().numpy())
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), params.clip or float("inf"))
        for group in optimizer.param_groups:
            group |= {"lr": params.lr, "betas": (params.beta1, params.beta2), "eps": params.eps}
            group["weight_decay"] = params.weight_decay
        optimizer.step()
        losses.append(float(total))
        columns.append(kept)
        norms.append(float(norm))
    torch.save({name: tensor.detach().clone() for name, tensor in trained.items()}, path)
    return {"losses": losses, "columns": columns, "norms": norms}


def written_out(choice: LossChoice, log_p: Tensor, datum: Datum) -> Tensor:
    total = torch.zeros(())
    for t in range(len(datum)):
        p, a, w = log_p[t], float(datum.advantages[t]), float(datum.weights[t])
        ratio = torch.exp(p - float(datum.log_probs[t]))
        if choice.name == "cross_entropy":
            total = total - w * p
        elif choice.name == "importance_sampling":
            total = total - ratio * a
        elif choice.name == "ppo":
            total = total - min(ratio * a, ratio.clip(choice.low, choice.high) * a, key=float)
        elif choice.name == "cispo":
            total = total - float(min(max(float(ratio.detach()), choice.low), choice.high)) * p * a
        else:
            total = total - (p * a - choice.beta / 2 * (p - float(datum.log_probs[t])) ** 2)
    return total


MIXED = {
    "one_process": Case(),
    "dp2_distributed_optimizer_overlapped": LAYOUTS["dp2_distributed_optimizer_overlapped"],
    "tp2_ep2": Case(2, {TP: 2, EP: 2}),
    "pp2_vpp2_recompute": Case(2, {PP: 2, VPP: 2, **FULL}),
    "cp2": Case(2, {CP: 2}),
    "tp2_dp2_ep2_distributed_optimizer": Case(4, {TP: 2, EP: 2, **DIST}),
    "unpacked_dp2": Case(2, packed=False),
}


@pytest.fixture(scope="module")
def expected(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    path = tmp_path_factory.mktemp("reference") / "factors.pt"
    return reference(tiny_qwen3_moe, path), path


@pytest.mark.parametrize("name", MIXED)
def test_clients_steps_are_those_of_peft_in_every_layout(
    name: str, tiny_qwen3_moe: Path, expected: tuple[dict[str, Any], Path]
) -> None:
    case, (wanted, path) = MIXED[name], expected
    config = lora_config(tiny_qwen3_moe, case, {})
    found = run_ranks(run_steps, case.world, tiny_qwen3_moe, case, path)
    assert all(each["far"] < 2e-5 for each in found), [each["far"] for each in found]
    for each in found:
        assert each["losses"] == pytest.approx(wanted["losses"], abs=2e-4)
        assert each["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
    ranks = {config.layout.dp_rank(rank): each for rank, each in enumerate(found)}
    for step, columns in enumerate(wanted["columns"]):
        halves = [by_datum([each["columns"][step][half] for each in ranks.values()], n) for half, n in ((0, 2), (1, 4))]
        for got, right in zip([*halves[0], *halves[1]], columns, strict=True):
            assert got.shape == right.shape and np.abs(got - right).max() < 5e-5


# ------------------------------------------------------------------------------------------- clients in one pass

CLIENTS: dict[str, tuple[tuple[LossChoice, AdamParams], dict[str, Any]]] = {
    "a": (STEPS[0], {}),
    "b": (STEPS[2], {"rank": 3}),
    "c": (STEPS[4], {"targets": ["attention"]}),
}
"""Loss and step of three clients, and the differences of their adapters."""


def told(work: Callable[[], Any]) -> Any:
    """Result of a call, in values that are compared bit for bit; or its error."""
    try:
        found = work()
    except TrainerError as error:
        found = error
    if isinstance(found, TrainerError):
        return str(found)
    return (found.loss, found.log_probs.tobytes()) if isinstance(found, RankPassResult) else found


def placed(trainers: AdapterTrainers, name: str, work: Callable[[Any, Any], Any], given: Any) -> Any:
    """Result of a call with the adapter in the model."""
    with trainers.placed(name) as trainer:
        return work(trainer, given)


def in_turns_and_in_one_pass(rank: int, world: int, init: str, checkpoint: Path, case: Case) -> dict[str, Any]:
    """The same requests of three clients, one after the other and in shared passes: results of both ways."""
    spec, layout = policy_spec(lora_config(checkpoint, case, {})), lora_config(checkpoint, case, {}).layout
    trainers = AdapterTrainers(Base(spec, rank, world, init))
    for name, (_, lora) in CLIENTS.items():
        for way in ("turn", "pass"):
            trainers.create(f"{name} {way}", replace(spec, lora=spec.lora.model_copy(update=lora)))
    found: dict[str, list[tuple[Any, Any]]] = {name: [] for name in CLIENTS}
    for step in range(3):
        for half in (slice(0, 2), slice(2, None)):
            parts: dict[str, ClientShard] = {}
            for number, (name, ((loss, _), _)) in enumerate(CLIENTS.items()):
                data = data_of(10 * number + step)[half]
                if (name, step, half.start) == ("b", 1, 2):  # the second of two passes, whose gradients are lost too
                    data = [replace(data[0], advantages=data[0].advantages * np.nan), *data[1:]]
                parts[name] = client_shards(data, loss, layout, 64, packed=case.packed, multiple_of=2)[
                    layout.dp_rank(rank)
                ]
            joint = {f"{name} pass": part for name, part in parts.items()}
            together = client_steps.joint_forward_backward(trainers.of(joint), joint)
            for name, part in parts.items():
                alone = told(partial(placed, trainers, f"{name} turn", client_steps.forward_backward, part))
                found[name].append((alone, told(partial(together.__getitem__, f"{name} pass"))))
        for name, ((_, params), _) in CLIENTS.items():
            both = [
                told(partial(placed, trainers, f"{name} {way}", client_steps.adam_step, params))
                for way in ("turn", "pass")
            ]
            found[name].append((both[0], both[1]))
    held: dict[str, dict[str, Tensor]] = {}
    for name in trainers.names:
        with trainers.placed(name) as trainer:
            held[name] = {n: t.detach().clone() for n, t, _, _ in held_factors(trainer)}
    differ = {
        name: [n for n, t in held[f"{name} turn"].items() if not torch.equal(t, held[f"{name} pass"][n])]
        for name in CLIENTS
    }
    return {"found": found, "differ": differ, "many": {name: len(each) for name, each in held.items()}}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MIXED)
def test_clients_that_share_a_pass_have_the_numbers_of_their_own(name: str, tiny_qwen3_moe: Path) -> None:
    """Even if one of them fails in it."""
    case = MIXED[name]
    for each in run_ranks(in_turns_and_in_one_pass, case.world, tiny_qwen3_moe, case, deadline_s=300):
        assert not any(each["differ"].values()) and min(each["many"].values()) > 0, each["differ"]
        for client, outcomes in each["found"].items():
            for at, (alone, together) in enumerate(outcomes):
                assert alone == together, (client, at)
            failed = [at for at, (alone, _) in enumerate(outcomes) if isinstance(alone, str)]
            assert failed == ([4, 5] if client == "b" else []), "the pass, and the step without gradients"
