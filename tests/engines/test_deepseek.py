"""DeepSeek-V2 and V3 trained on real megatron-core: gradients of every layout, replayed routes, the correction bias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.convert.families import get_family, read_hf_config
from mslime.convert.hf import HFCheckpoint
from mslime.data.checkpoints import step_directory
from tests.engines.trainer_ranks import (
    largest_difference,
    loss_and_gradients,
    make_config,
    run_trainers,
    shard_of,
    to_hf,
)
from tests.fixtures.families.deepseek import SMALL_INIT, YARN, with_mtp_layer
from tests.fixtures.tiny_models import make_tiny_deepseek_v2

pytestmark = pytest.mark.timeout(180)

ROUTED = (1, 2, 3)
ALL = {"tp": 2, "pp": 2, "ep": 2}
CHECKPOINTS = {
    "v3": lambda path: with_mtp_layer(path, rope_parameters=YARN, routed_scaling_factor=2.5, **SMALL_INIT),
    "v2": lambda path: make_tiny_deepseek_v2(
        path, topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0, **SMALL_INIT
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("deepseek")
    return {name: make(root / name) for name, make in CHECKPOINTS.items()}


def replayed_and_natural(trainer: MegatronTrainer) -> dict[str, Any]:
    """Loss and gradients with the shard's random routes, and with the routers' own."""
    shard = shard_of(trainer, layers=ROUTED)
    with trainer.routing.gradient_pass(shard, 0) as routes:
        loss, gradients = loss_and_gradients(trainer, shard, routes)
    report = trainer.routing.report(shard)
    natural, natural_gradients = loss_and_gradients(trainer, shard, None)
    assert report is not None and report.coverage == 1.0
    return {"loss": loss, "gradients": gradients, "natural": natural, "natural_gradients": natural_gradients}


def in_one_process(trainer: MegatronTrainer) -> dict[str, Any]:
    found = replayed_and_natural(trainer)
    return {key: to_hf(trainer, value) if isinstance(value, dict) else value for key, value in found.items()}


def compared(trainer: MegatronTrainer, reference: Path) -> dict[str, float]:
    found, alone = replayed_and_natural(trainer), torch.load(reference)
    return {
        key: largest_difference(trainer, value, alone[key]) if isinstance(value, dict) else abs(value - alone[key])
        for key, value in found.items()
    }


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_routes_and_routers_give_one_process_loss_and_gradients_in_a_parallel_layout(
    checkpoints: dict[str, Path], tmp_path: Path, name: str
) -> None:
    (alone,) = run_trainers(in_one_process, make_config(checkpoints[name], tmp_path))
    assert abs(alone["loss"] - alone["natural"]) > 1e-3, "the routes are the routers' own"
    torch.save(alone, tmp_path / "alone.pt")
    for differences in run_trainers(compared, make_config(checkpoints[name], tmp_path, **ALL), tmp_path / "alone.pt"):
        assert max(differences.values()) < 2e-5, differences


def step(trainer: MegatronTrainer) -> dict[str, dict[str, torch.Tensor]]:
    """This rank's tensors before and after an optimizer step."""
    before = {name: tensor.detach().clone() for name, tensor in trainer.named_local_params()}
    trainer.train([shard_of(trainer, layers=ROUTED)])
    return {"before": before, "after": {name: tensor.detach() for name, tensor in trainer.named_local_params()}}


@pytest.mark.nightly
def test_training_in_bfloat16_changes_every_weight_but_no_digit_of_the_correction_bias(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    config = make_config(checkpoints["v3"], tmp_path, params_dtype="bfloat16", tp=2, ep=2, dp=2)
    rules = get_family(hf_config := read_hf_config(checkpoints["v3"])).rules(hf_config)
    source = HFCheckpoint(checkpoints["v3"])
    for tensors in run_trainers(step, config):
        biases = [name for name in tensors["before"] if name.endswith("expert_bias")]
        assert len(biases) == len(ROUTED)
        for name in biases:
            assert torch.equal(tensors["after"][name], source.tensor(rules.bind(name).hf_names[0])), name
        same = [name for name, tensor in tensors["before"].items() if torch.equal(tensor, tensors["after"][name])]
        assert set(same) == set(biases)


def save_and_export(trainer: MegatronTrainer, directory: Path, exported: Path) -> None:
    trainer.train([shard_of(trainer, layers=ROUTED)])
    trainer.save(directory, {})
    trainer.weight_sender().export(exported, trainer.spec.checkpoint)


def load_and_export(trainer: MegatronTrainer, directory: Path, exported: Path) -> None:
    trainer.load(directory)
    trainer.weight_sender().export(exported, trainer.spec.checkpoint)


@pytest.mark.nightly
def test_a_checkpoint_of_one_layout_is_the_same_model_in_another(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    saved, common = step_directory(tmp_path, 1), {"params_dtype": "bfloat16", "use_distributed_optimizer": True}
    before, after = tmp_path / "before", tmp_path / "after"
    run_trainers(save_and_export, make_config(checkpoints["v3"], tmp_path, tp=2, ep=2, **common), saved, before)
    run_trainers(load_and_export, make_config(checkpoints["v3"], tmp_path, pp=2, **common), saved, after)
    ours, theirs = HFCheckpoint(after), HFCheckpoint(before)
    assert ours.info.keys() == theirs.info.keys()
    assert [name for name in ours.info if not torch.equal(ours.tensor(name), theirs.tensor(name))] == []
