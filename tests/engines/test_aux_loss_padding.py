"""Router losses do not depend on a layout's rows of padding, on real megatron-core ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.data.shard import TrainShard
from tests.engines.trainer_ranks import (
    largest_difference,
    loss_and_gradients,
    make_config,
    make_shard,
    run_trainers,
    shard_of,
    to_hf,
)
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

pytestmark = pytest.mark.timeout(300)

LOSSES: dict[str, Any] = {
    "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.1,
}  # fmt: skip
PACKINGS = [((0, 1, 2), (3, 4, 5), (6, 7)), ((0, 1, 2, 3, 4, 5, 6, 7), ())]
"""The second one ends with a micro-batch of padding alone, as ranks with fewer sequences have."""


def of_packings(trainer: MegatronTrainer) -> list[tuple[TrainShard, float, dict[str, Tensor]]]:
    found: list[tuple[TrainShard, float, dict[str, Tensor]]] = []
    for packing in PACKINGS:
        shard = replace(shard_of(trainer), micro_batches=packing)
        found.append((shard, *loss_and_gradients(trainer, shard, None)))
    return found


def save_whole_gradients(trainer: MegatronTrainer, path: Path) -> None:
    """Of one process, in which no row is padding, by Hugging Face names, for each packing."""
    for index, (_, _, gradients) in enumerate(of_packings(trainer)):
        save_file({n: g.contiguous() for n, g in to_hf(trainer, gradients).items()}, f"{path}.{index}")


def differences(trainer: MegatronTrainer, path: Path) -> list[float]:
    return [
        largest_difference(trainer, found, load_file(f"{path}.{index}"))
        for index, (_, _, found) in enumerate(of_packings(trainer))
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model: Path) -> Path:
    """Gradients of one process with the routers' losses."""
    run_trainers(save_whole_gradients, make_config(model, model, **LOSSES), model / "with")
    run_trainers(save_whole_gradients, make_config(model, model), model / "without")
    for index in range(len(PACKINGS)):
        found, plain = (load_file(model / f"{which}.{index}") for which in ("with", "without"))
        moved = max(float((found[n] - plain[n]).abs().max()) for n in plain if n.endswith("mlp.gate.weight"))
        assert moved > 1e-3, "the losses are too small to tell"
    return model / "with"


@pytest.mark.parametrize(
    "layout",
    [{"cp": 2}, {"tp": 2, "recompute_granularity": "selective", "recompute_modules": ["moe"]},
     {"tp": 2, "pp": 2, "cp": 2}],
    ids=["cp2", "tp2_recompute", "tp2_pp2_cp2"],
)  # fmt: skip
def test_gradients_of_the_routers_losses_are_those_without_padding(
    layout: dict[str, Any], model: Path, whole: Path
) -> None:
    lengths = make_shard().lengths
    assert any(n % 4 for n in lengths) and any(n % 2 for n in lengths), "nothing would be padded"
    for found in run_trainers(differences, make_config(model, model, **layout, **LOSSES), whole):
        assert max(found) < 1e-6, found
