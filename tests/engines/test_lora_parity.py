"""Adapters train equally in every parallel layout: log-probs, loss, gradients, metrics and factors after three
steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.lora_ranks import compare, lora_config, record, trainer_of
from tests.engines.megatron_parity import Case, log_probs, make_shards
from tests.engines.megatron_ranks import run_ranks
from tests.engines.test_megatron_parity import CP, DIST, EP, ETP, FULL, LAYOUTS, PP, TP
from tests.fixtures.families import CASES
from tests.fixtures.tiny_models import make_tiny_qwen3_dense


def check(checkpoint: Path, path: Path, case: Case, lora: dict[str, Any]) -> None:
    for rank, found in enumerate(run_ranks(compare, case.world, checkpoint, case, lora, path)):
        where = f"rank {rank}: {found}"
        assert found["begin"] == 0.0 and found["moved"] > 1e-3, where
        assert found["log_probs"] < 2e-5, where
        assert found["loss"] < 1e-5, where
        assert (found["gradients"] is None) == bool(case.megatron.get("use_distributed_optimizer")), where
        assert found["gradients"] is None or found["gradients"] < 1e-5, where
        assert found["after"] < 1e-5, where
        assert not found["not_frozen"], where
        assert found["factors"] <= found["buffers"] <= found["factors"] * 1.5 + 512, where
        for step, (mine, recorded) in enumerate(zip(found["metrics"], found["recorded"], strict=True)):
            assert mine.keys() == recorded.keys(), where
            for name in (name for name in recorded if not name.startswith("perf/")):
                assert mine[name] == pytest.approx(recorded[name], rel=2e-4, abs=2e-5), f"{name}, step {step}, {where}"


@pytest.fixture(scope="module")
def moe(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoint and the single process's record on it."""
    path = tmp_path_factory.mktemp("lora") / "moe.pt"
    run_ranks(record, 1, tiny_qwen3_moe, Case(), {}, path)
    return tiny_qwen3_moe, path


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_train_like_one_process(name: str, moe: tuple[Path, Path]) -> None:
    check(*moe, LAYOUTS[name], {})


SHARED = {"experts": "shared_outer"}
OVERLAPPED = {**DIST, "overlap_grad_reduce": True, "overlap_param_gather": True}
FURTHER = {
    "etp2": (Case(2, {ETP: 2}), {}),  # experts shared out over ranks that are data-parallel elsewhere
    "queries_and_values_alone": (Case(2, {TP: 2}), {"targets": ["q_proj", "v_proj"], "rank": 3}),
    "one_half_of_gated_layers": (Case(2, {TP: 2, EP: 2}), {"targets": ["up_proj", "model.layers.[12].*.o_proj"]}),
    "experts_alone_recomputed": (Case(2, {PP: 2, **FULL}), {"targets": ["experts"], "rs_lora": True}),
    "experts_alone_sharded": (Case(2, {**DIST}), {"targets": ["experts"]}),  # no dense parameter has an optimizer
    "shared_by_experts": (Case(4, {TP: 2, EP: 2}), SHARED),
    "shared_by_experts_in_stages": (Case(2, {PP: 2, **FULL}), SHARED),
    "shared_by_experts_sharded": (Case(4, {TP: 2, EP: 2, ETP: 2, **DIST}), SHARED),
    "shared_by_experts_etp2": (Case(2, {ETP: 2}), SHARED),
    "shared_by_experts_alone": (Case(2, {EP: 2, **OVERLAPPED}), {**SHARED, "targets": ["experts"]}),
    "shared_by_experts_cp2": (Case(4, {CP: 2, TP: 2, EP: 2}), SHARED),
    "attention_alone": (Case(4, {TP: 2, EP: 2, **DIST}), {"targets": ["attention"]}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", FURTHER)
def test_adapters_on_some_layers_train_like_one_process(name: str, tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    case, lora = FURTHER[name]
    run_ranks(record, 1, tiny_qwen3_moe, Case(), lora, tmp_path / "record.pt")
    check(tiny_qwen3_moe, tmp_path / "record.pt", case, lora)


FAMILIES = {
    "deepseek-v3": Case(4, {TP: 2, EP: 2}),  # latent attention, shared experts, a dense layer
    "glm-4.5": Case(2, {PP: 2, **FULL}),
    "qwen3-next": Case(2, {EP: 2}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_of_other_layers_train_like_one_process(name: str, tmp_path: Path) -> None:
    checkpoint = CASES[name].make(tmp_path / "model")
    run_ranks(record, 1, checkpoint, Case(), {}, tmp_path / "record.pt")
    check(checkpoint, tmp_path / "record.pt", FAMILIES[name], {})


@pytest.mark.nightly
def test_adapters_beside_a_tied_embedding_train_like_one_process(tmp_path: Path) -> None:
    checkpoint = make_tiny_qwen3_dense(tmp_path / "model", tie_word_embeddings=True, vocab_size=321)
    run_ranks(record, 1, checkpoint, Case(), {}, tmp_path / "record.pt")
    check(checkpoint, tmp_path / "record.pt", Case(4, {TP: 2, PP: 2}), {})


def policies(rank: int, world: int, init: str, checkpoint: Path, other: Path) -> dict[str, Any]:
    """Log-probs of a shard by the adapted model, its reference, and a reference that is a separate model."""
    config = lora_config(checkpoint, Case(world, {TP: world} if world > 1 else {}), {})
    trainer = trainer_of(config, rank, world, init)
    shard = make_shards(Case(), 1, 0, None)[0]
    own, held = trainer.log_probs(shard), trainer.base.reference
    found = {"own": own, "reference": trainer.log_probs(shard, "reference"), "again": trainer.log_probs(shard)}
    trainer.close()
    apart = config.model_copy(update={"model": config.model.model_copy(update={"reference_path": other})})
    return found | {
        "held": held is not None,
        "other": trainer_of(apart, rank, world, init + "2").log_probs(shard, "reference"),
    }


def test_the_reference_is_the_model_without_its_adapters(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    other = CASES["qwen3-moe"].make(tmp_path / "other")
    (found,) = run_ranks(policies, 1, tiny_qwen3_moe, other)
    base, apart = run_ranks(log_probs, 1, tiny_qwen3_moe, Case()), run_ranks(log_probs, 1, other, Case())
    assert found["reference"].equal(base[0]) and found["other"].equal(apart[0])
    assert not found["held"] and found["again"].equal(found["own"])
    assert (found["own"] - base[0]).abs().max() > 1e-2
