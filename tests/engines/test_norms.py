"""Norms that megatron-core does not build: trained under tensor parallelism as in one process, and saved whole.

`test_families` compares logits with transformers'; this file compares gradients, the gradient norm, the optimizer's
step and checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mslime.backends.megatron.step.trainer import MegatronTrainer
from tests.engines.trainer_ranks import largest_difference, make_config, run_trainers, shard_of, to_hf
from tests.fixtures.families import CASES

pytestmark = pytest.mark.timeout(180)

SIZES: dict[str, dict[str, Any]] = {"minimax-m2": {"tp": 2, "ep": 2}, "glm-4": {"tp": 2}}
Curve = list[tuple[float, float]]


def train_step(trainer: MegatronTrainer, seed: int) -> tuple[float, float]:
    """(loss, gradient norm) of one optimizer step."""
    row = trainer.train([shard_of(trainer, seed=seed)])[0]
    return row["loss/total"], row["grad_norm"]


def two_steps(trainer: MegatronTrainer) -> tuple[Curve, dict[str, torch.Tensor]]:
    curve = [train_step(trainer, seed) for seed in (0, 1)]
    return curve, {k: v.clone() for k, v in to_hf(trainer, dict(trainer.named_local_params())).items()}


def one_step_saved_and_another(trainer: MegatronTrainer, directory: Path, whole: Path) -> tuple[Curve, float]:
    curve = [train_step(trainer, 0)]
    trainer.save(directory, {})
    curve.append(train_step(trainer, 1))
    return curve, largest_difference(trainer, dict(trainer.named_local_params()), torch.load(whole))


def resumed_second_step(trainer: MegatronTrainer, directory: Path, whole: Path) -> tuple[Curve, float]:
    trainer.load(directory)
    return [train_step(trainer, 1)], largest_difference(trainer, dict(trainer.named_local_params()), torch.load(whole))


@pytest.mark.parametrize("name", SIZES)
def test_training_and_checkpoints_under_tensor_parallelism_equal_one_process(name: str, tmp_path: Path) -> None:
    model = CASES[name].make(tmp_path / "model")
    one, two = make_config(model, tmp_path / "one"), make_config(model, tmp_path / "two", **SIZES[name])
    curve, weights = run_trainers(two_steps, one)[0]
    norms = [tensor for hf, tensor in weights.items() if "norm" in hf]
    assert all(float(norm.std()) > 1e-2 for norm in norms)
    torch.save(weights, tmp_path / "weights.pt")
    saved = tmp_path / "saved"
    for found, difference in run_trainers(one_step_saved_and_another, two, saved, tmp_path / "weights.pt"):
        torch.testing.assert_close(found, curve, rtol=1e-5, atol=1e-6)
        assert difference <= 1e-4
    # What two ranks saved, one process continues.
    found, difference = run_trainers(resumed_second_step, one, saved, tmp_path / "weights.pt")[0]
    torch.testing.assert_close(found, curve[1:], rtol=1e-5, atol=1e-6)
    assert difference <= 1e-4
