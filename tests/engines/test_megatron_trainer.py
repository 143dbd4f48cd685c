"""Other duties of a trainer: it stops on non-finite numbers, swaps policies back, and warms up."""

from __future__ import annotations

import math
import os
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.errors import CheckpointError, TrainerError
from mslime.config.resolved import policy_spec
from tests.engines.megatron_parity import Case, compare, make_shards, record, run_config
from tests.engines.megatron_ranks import RankFailed, run_ranks


def train_on_nan(rank: int, world_size: int, init_method: str, checkpoint: Path) -> TrainerError:
    """Rank 1's second step holds a weight that is not a number."""
    case = Case(2)
    trainer = MegatronTrainer(policy_spec(run_config(checkpoint, case)), rank, world_size, init_method)
    shards = make_shards(case, 2, rank, None)
    if rank == 1:
        weights = shards[1].weights.copy()
        weights[np.flatnonzero(shards[1].loss_mask)[0]] = np.nan
        shards[1] = replace(shards[1], weights=weights)
    with pytest.raises(TrainerError) as caught:
        trainer.train(shards)
    return caught.value


def test_a_loss_that_is_not_finite_stops_every_rank_with_the_step_and_the_rank(tiny_qwen3_moe: Path) -> None:
    for error in run_ranks(train_on_nan, 2, tiny_qwen3_moe):
        assert error.field == "loss"
        assert "optimizer step 2" in error.rule and "on rank 1" in error.rule


def train_on_overflow(rank: int, world_size: int, init_method: str, checkpoint: Path) -> TrainerError:
    trainer = MegatronTrainer(policy_spec(run_config(checkpoint, Case())), rank, world_size, init_method)
    shard = make_shards(Case(), 1, 0, None)[0]
    with pytest.raises(TrainerError) as caught:
        trainer.train([replace(shard, weights=shard.weights * np.float32(1e30))])
    return caught.value


def test_a_gradient_that_is_not_finite_stops_the_step(tiny_qwen3_moe: Path) -> None:
    (error,) = run_ranks(train_on_overflow, 1, tiny_qwen3_moe)
    assert error.field == "grad_norm" and "optimizer step 1" in error.rule


def policies(rank: int, world_size: int, init_method: str, checkpoint: Path) -> dict[str, Any]:
    """Log-probs of both policies before and after a step, whether the actor's weights survived the swaps, and how many
    swaps prepared two more shards."""
    case = Case(1, {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True})
    trainer = MegatronTrainer(policy_spec(run_config(checkpoint, case)), rank, world_size, init_method)
    seen: list[tuple[int, int]] = []
    trainer.on_micro_batch = lambda done, total: seen.append((done, total))
    shard = make_shards(case, 1, 0, None)[0]
    before = trainer.log_probs(shard), trainer.log_probs(shard, "reference")
    trainer.train([shard])
    weights = {name: tensor.clone() for name, tensor in trainer.named_local_params()}
    after = trainer.log_probs(shard), trainer.log_probs(shard, "reference")
    same = all(torch.equal(weights[name], tensor) for name, tensor in trainer.named_local_params())
    shards, swaps = make_shards(case, 1, 0, None), []
    apart = [(trainer.log_probs(shard).numpy(), trainer.log_probs(shard, "reference").numpy()) for shard in shards]
    other = trainer.base.reference
    assert other is not None
    swapped_in = other.swapped_in
    other.swapped_in = lambda: swaps.append(1) or swapped_in()  # type: ignore[method-assign]
    prepared = [(shard.old_log_probs, shard.reference_log_probs) for shard in trainer.prepare(shards)[0]]
    return {"before": before, "after": after, "same": same, "progress": seen, "swaps": len(swaps),
            "apart": apart, "prepared": prepared}  # fmt: skip


def test_the_reference_policy_stays_what_it_was_and_the_actor_comes_back_bit_for_bit(tiny_qwen3_moe: Path) -> None:
    (found,) = run_ranks(policies, 1, tiny_qwen3_moe)
    actor, reference = found["before"]
    assert torch.equal(actor, reference)
    assert torch.equal(found["after"][1], reference)
    assert float((found["after"][0] - actor).abs().max()) > 1e-3
    assert found["same"]
    assert found["progress"] == [(1, 3), (2, 3), (3, 3)]
    assert found["swaps"] == 1, "once for both shards"
    for ours, alone in zip(found["prepared"], found["apart"], strict=True):
        np.testing.assert_array_equal(ours, alone)


def fine_tune(rank: int, world_size: int, init_method: str, checkpoint: Path) -> list[dict[str, float]]:
    case = Case(1, train={"task": "sft", "lr": 1e-2, "replay": "r3"})
    trainer = MegatronTrainer(policy_spec(run_config(checkpoint, case)), rank, world_size, init_method)
    return trainer.train([make_shards(case, 1, 0, None)[0]] * 3)


def test_supervised_loss_is_the_mean_cross_entropy_of_transformers_and_falls(tiny_qwen3_moe: Path) -> None:
    from transformers import AutoModelForCausalLM

    (metrics,) = run_ranks(fine_tune, 1, tiny_qwen3_moe)
    shard = make_shards(Case(), 1, 0, None)[0]
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe, dtype=torch.float32, attn_implementation="eager")
    expected = 0.0
    for start, stop in shard.spans():
        tokens = torch.from_numpy(shard.tokens[start:stop]).long()[None]
        with torch.no_grad():
            log_probs = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        expected -= float((log_probs * torch.from_numpy(shard.weights[start + 1 : stop])).sum())
    assert metrics[0]["loss/nll"] == pytest.approx(expected, abs=1e-5)
    assert metrics[2]["loss/nll"] < metrics[1]["loss/nll"] < metrics[0]["loss/nll"]


@pytest.mark.nightly
def test_a_warm_up_begins_above_zero_and_a_decay_ends_at_the_minimum(tiny_qwen3_moe: Path) -> None:
    ((rates, moves),) = run_ranks(learning_rates, 1, tiny_qwen3_moe)
    assert rates == pytest.approx([0.5e-3, 1e-3, 0.55e-3, 0.1e-3])
    # Adam's first step moves the weights with the largest gradients by the learning rate itself.
    assert moves[0] == pytest.approx(rates[0], rel=0.02)


def learning_rates(rank: int, world_size: int, init_method: str, checkpoint: Path) -> tuple[list[float], list[float]]:
    """Reported rate and largest change of a weight, for four steps."""
    schedule = {"lr_decay_style": "linear", "lr_warmup_steps": 2, "num_steps": 4, "optimizer_steps_per_rollout": 1}
    case = Case(1, train={**schedule, "weight_decay": 0.0})
    trainer = MegatronTrainer(policy_spec(run_config(checkpoint, case)), rank, world_size, init_method)
    shard = make_shards(case, 1, 0, None)[0]
    rates, moves = [], []
    for _ in range(4):
        before = {name: tensor.clone() for name, tensor in trainer.named_local_params()}
        rates.append(trainer.train([shard])[0]["lr"])
        moves.append(max(float((t - before[n]).abs().max()) for n, t in trainer.named_local_params()))
    return rates, moves


def test_a_normalised_correction_has_mean_one_over_all_ranks(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    normalised = {"correction": {"preset": "tis", "normalise": True, "high": 1.02}}
    run_ranks(record, 1, tiny_qwen3_moe, Case(algorithm=normalised), tmp_path / "record.pt")
    ranks = run_ranks(compare, 2, tiny_qwen3_moe, Case(2, algorithm=normalised), tmp_path / "record.pt")
    unscaled = Case(algorithm={"correction": {"preset": "tis", "high": 1.02}})
    run_ranks(record, 1, tiny_qwen3_moe, unscaled, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=False)["metrics"][0]
    for found in ranks:
        first = found["metrics"][0]
        assert first["correction/clipped_fraction"] > 0
        assert first["loss/policy"] == pytest.approx(plain["loss/policy"] / plain["correction/mean_weight"], rel=1e-4)
        assert first["loss/policy"] == pytest.approx(found["recorded"][0]["loss/policy"], abs=1e-5)
        assert found["weights"] < 1e-4


def refused(
    rank: int, world_size: int, init_method: str, checkpoint: Path, case: Case
) -> TrainerError | CheckpointError:
    """The error of a start."""
    with pytest.raises((TrainerError, CheckpointError)) as caught:
        MegatronTrainer(policy_spec(run_config(checkpoint, case)), rank, world_size, init_method)
    return caught.value


@pytest.mark.parametrize(
    ("name", "value"), [("layers.1.mlp.experts.5.up_proj.weight", math.nan), ("norm.weight", -math.inf)]
)
def test_weights_that_are_not_finite_are_refused_by_file_and_name(
    tiny_qwen3_moe: Path, tmp_path: Path, name: str, value: float
) -> None:
    from safetensors.torch import load_file, save_file

    spoilt = tmp_path / "spoilt"
    shutil.copytree(tiny_qwen3_moe, spoilt)
    tensors = load_file(spoilt / "model.safetensors")
    tensors[f"model.{name}"].view(-1)[7] = value
    save_file(tensors, spoilt / "model.safetensors", {"format": "pt"})
    (error,) = run_ranks(refused, 1, spoilt, Case())
    assert isinstance(error, CheckpointError)
    assert error.field == f"{spoilt}/model.safetensors: model.{name}"
    assert error.value == f"1 of {tensors[f'model.{name}'].numel():,} values" and error.hint


def test_a_number_of_ranks_that_is_not_the_layouts_is_refused(tiny_qwen3_moe: Path) -> None:
    (error,) = run_ranks(refused, 1, tiny_qwen3_moe, Case(2))
    assert isinstance(error, TrainerError) and "DP2 needs 2" in error.rule


def missing_rank(rank: int, world_size: int, init_method: str, checkpoint: Path) -> TrainerError:
    config = run_config(checkpoint, Case(2))
    config = config.model_copy(update={"deadlines": config.deadlines.model_copy(update={"trainer_start_s": 1.0})})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(TrainerError) as caught:
        MegatronTrainer(policy_spec(config), 0, 2, f"tcp://127.0.0.1:{port}")
    return caught.value


def test_a_rank_that_does_not_come_fails_the_others_at_the_deadline(tiny_qwen3_moe: Path) -> None:
    (error,) = run_ranks(missing_rank, 1, tiny_qwen3_moe)
    assert error.field == "deadlines.trainer_start_s" and "rank 0 of 2" in error.rule


def raises(rank: int, world_size: int, init_method: str) -> None:
    if rank == 1:
        raise ValueError("the reason")
    time.sleep(60)


def dies(rank: int, world_size: int, init_method: str) -> None:
    os._exit(3)


def sleeps(rank: int, world_size: int, init_method: str) -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    ("worker", "words"), [(raises, "the reason"), (dies, "without a word"), (sleeps, "did not finish")]
)
def test_the_harness_ends_with_the_reason_and_in_time(worker: Any, words: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailed, match=words):
        run_ranks(worker, 2, deadline_s=5 if worker is sleeps else 50)
    assert time.monotonic() - begin < 45
