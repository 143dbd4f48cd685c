"""Adapters against peft on transformers, in float32: log-probs, loss, gradients, and the factors after two steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mslime.config.lora import LoraConfig
from mslime.convert.families import get_family, read_hf_config
from mslime.convert.lora_rules import make_adapters
from tests.engines.lora_ranks import LORA, factor, record
from tests.engines.megatron_parity import Case, make_shards, run_config
from tests.engines.megatron_ranks import run_ranks
from tests.fixtures.families import CASES
from tests.fixtures.peft_models import factors_of, peft_model, share_outer

SFT = Case(train={"task": "sft", "lr_decay_style": "constant", "lr_warmup_steps": 0, "clip_grad": 0})
MODELS = {
    "qwen3-moe": {"rs_lora": True},
    "deepseek-v3": {},
    "glm-4": {},
    "qwen2-moe": {},
    "mixtral": {"targets": ["attention"]},
    "qwen3-moe, shared": {"experts": "shared_outer"},
    "deepseek-v3, shared": {"experts": "shared_outer", "rs_lora": True},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many tiny products: threads that wait for each other would cost more than they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def negative_log_likelihood(model: Any, shard: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(the shard's loss, [N] log-probs with 0 for first tokens)."""
    columns: list[torch.Tensor] = []
    for start, stop in shard.spans():
        tokens = torch.from_numpy(shard.tokens[start:stop]).long()[None]
        log_probs = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        columns += [log_probs.new_zeros(1), log_probs]
    found = torch.cat(columns)
    return -(found * torch.from_numpy(shard.weights)).sum(), found.detach()


def of_each(factors: dict[str, torch.Tensor], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Every expert's factors by peft's names, if some are shared by all experts of a layer."""
    return {name: factors[name] if name in factors else factors[of_all(name)][0] for name in names}


def of_all(name: str) -> str:
    return re.sub(r"\.experts\.\d+\.", ".experts.", name)


def trained_by(model: Any, kept: dict[str, torch.Tensor]) -> dict[str, tuple[torch.nn.Parameter, torch.Tensor]]:
    """The model's factors, each with what is kept of it, by the name that it is kept under."""
    found: dict[str, tuple[torch.nn.Parameter, torch.Tensor]] = {}
    for name, parameter in factors_of(model).items():
        own = name in kept
        found[name if own else of_all(name)] = (parameter, kept[name] if own else kept[of_all(name)][0])
    assert found.keys() == kept.keys()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_adapters_learn_what_peft_learns(name: str, tmp_path: Path) -> None:
    lora = {**LORA, **MODELS[name]}
    checkpoint = CASES[name.split(",")[0]].make(tmp_path / "model")
    run_ranks(record, 1, checkpoint, SFT, lora, tmp_path / "record.pt")
    kept = torch.load(tmp_path / "record.pt", weights_only=False)
    config = read_hf_config(checkpoint)
    table = get_family(config).rules(config)
    adapters = make_adapters(table, LoraConfig(**lora))
    factors = {name: factor(name, shape) for name, shape in adapters.table.hf_shapes().items()}
    each = make_adapters(table, LoraConfig(**lora | {"experts": "per_expert"})).table.hf_shapes()
    model = peft_model(checkpoint, adapters.target_modules, lora, of_each(factors, each))
    if adapters.lora.shares_outer:
        share_outer(model)
    trained, train = factors_of(model), run_config(checkpoint, SFT).train
    optimizer = torch.optim.AdamW(
        trained.values(), lr=train.lr, betas=(train.adam_beta1, train.adam_beta2), eps=1e-4,
        weight_decay=train.weight_decay,
    )  # fmt: skip
    for step, shard in enumerate(make_shards(SFT, 1, 0, None)):
        optimizer.zero_grad()
        loss, log_probs = negative_log_likelihood(model, shard)
        loss.backward()
        assert float(loss) == pytest.approx(kept["metrics"][step]["loss/total"], abs=1e-5)
        if step == 0:
            assert (log_probs - kept["log_probs"][0]).abs().max() < 2e-5
            pairs = trained_by(model, kept["gradients"]).items()
            worst = {n: float((p.grad - gradient).abs().max()) for n, (p, gradient) in pairs}
            assert max(worst.values()) < 1e-5, sorted(worst.items(), key=lambda item: -item[1])[:4]
            assert max(float(p.grad.abs().max()) for p in trained.values()) > 1e-3
        optimizer.step()
    assert max(float((p - after).abs().max()) for p, after in trained_by(model, kept["after"]).values()) < 1e-5


def test_new_factors_are_drawn_as_peft_draws_them_and_by_their_names_alone() -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    from mslime.backends.megatron.model.lora_layers import new_factor

    linear = torch.nn.Sequential(torch.nn.Linear(256, 64, bias=False))
    theirs = get_peft_model(linear, PeftConfig(r=128, target_modules=["0"]))  # type: ignore[arg-type]
    for name, drawn in theirs.named_parameters():
        if "lora_" in name:
            own = new_factor(name.replace(".default", ""), tuple(drawn.shape), seed=3)
            assert torch.allclose(own.abs().max(), drawn.abs().max(), rtol=1e-3)
            assert torch.allclose(own.std(), drawn.std(), rtol=0.03)
    a = new_factor("x.lora_A.weight", (4, 8), seed=3)
    assert torch.equal(a, new_factor("x.lora_A.weight", (4, 8), seed=3))
    assert not torch.equal(a, new_factor("y.lora_A.weight", (4, 8), seed=3))
    assert not torch.equal(a, new_factor("x.lora_A.weight", (4, 8), seed=4))
