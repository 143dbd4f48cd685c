"""What a run with adapters writes: checkpoints that another layout resumes, and adapters that peft loads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.errors import CheckpointError
from mslime.config.schema import RunConfig
from mslime.convert.torch_dist import DistCheckpoint
from tests.engines.lora_ranks import fill_factors, whole_factors, worst
from tests.engines.megatron_ranks import RankFailed
from tests.engines.trainer_ranks import make_config, run_trainers, shard_of
from tests.fixtures.peft_models import peft_model

LORA = {"rank": 4, "alpha": 6}


def config_of(checkpoint: Path, output: Path, lora: dict[str, Any] = LORA, dp: int = 1, **sizes: Any) -> RunConfig:
    plain = make_config(checkpoint, output, dp=dp, train={"replay": "off", "adam_eps": 1e-4}, **sizes).model_dump()
    return RunConfig.model_validate(plain | {"lora": lora})


def train_and_save(trainer: MegatronTrainer, directory: Path) -> None:
    """Two steps, a checkpoint, one more step; factors before it and after it are kept beside the checkpoint."""
    fill_factors(trainer)
    for seed in (1, 2):
        trainer.train([shard_of(trainer, seed=seed)])
    trainer.save(directory, {"next_step": 2})
    saved = whole_factors(trainer)
    trainer.train([shard_of(trainer, seed=3)])
    torch.save((saved, whole_factors(trainer)), directory.with_suffix(".pt"))


def resume(trainer: MegatronTrainer, directory: Path) -> list[float]:
    """Load it, take the same step; differences before and after it."""
    saved, after = torch.load(directory.with_suffix(".pt"))
    extra = trainer.load(directory)
    assert extra["next_step"] == 2 and trainer.step == 2
    before = worst(trainer, saved)
    trainer.train([shard_of(trainer, seed=3)])
    return [before, worst(trainer, after)]


def save(trainer: MegatronTrainer, directory: Path, seed: int = 3) -> None:
    trainer.save(directory, {})


def load(trainer: MegatronTrainer, directory: Path) -> None:
    trainer.load(directory)


@pytest.fixture(scope="module")
def saved(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one process."""
    root = tmp_path_factory.mktemp("saved")
    run_trainers(train_and_save, config_of(tiny_qwen3_moe, root), root / "step_2")
    return root / "step_2"


@pytest.mark.parametrize(
    "sizes",
    [{"tp": 2, "ep": 2, "dp": 2}, pytest.param({"pp": 2, "vpp": 2}, marks=pytest.mark.nightly), {"etp": 2, "dp": 2}],
    ids=str,
)
def test_another_layout_goes_on_from_a_checkpoint(
    sizes: dict[str, Any], saved: Path, tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    for found in run_trainers(resume, config_of(tiny_qwen3_moe, tmp_path, **sizes), saved):
        assert found[0] == 0.0 and found[1] < 1e-5


def test_a_checkpoint_holds_adapters_and_their_optimizer_alone(saved: Path, tiny_qwen3_moe: Path) -> None:
    checkpoint = DistCheckpoint(saved)
    assert all(".adapter.lora_" in name for name in checkpoint.tensors)
    factors, _ = torch.load(saved.with_suffix(".pt"))
    elements = sum(tensor.numel() for tensor in factors.values())
    assert sum(math.prod(checkpoint.view(name).shape) for name in checkpoint.tensors) == 3 * elements


@pytest.mark.parametrize(
    "lora", [{"rank": 4, "alpha": 8}, {"rank": 8, "alpha": 6}, {**LORA, "targets": ["attention"]}, {}], ids=str
)
def test_a_checkpoint_of_other_adapters_is_refused(
    lora: dict[str, Any], saved: Path, tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    with pytest.raises(RankFailed, match="was saved with"):
        run_trainers(load, config_of(tiny_qwen3_moe, tmp_path, lora), saved)


def test_a_checkpoint_without_adapters_is_refused(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    run_trainers(save, config_of(tiny_qwen3_moe, tmp_path, {}), tmp_path / "full")
    with pytest.raises(RankFailed, match="was saved with"):
        run_trainers(load, config_of(tiny_qwen3_moe, tmp_path), tmp_path / "full")


def export(trainer: MegatronTrainer, directory: Path) -> torch.Tensor:
    """Export filled factors; log-probs of a shard."""
    fill_factors(trainer)
    trainer.weight_sender()
    trainer.export(directory)
    return trainer.log_probs(shard_of(trainer))


def start_from(trainer: MegatronTrainer) -> torch.Tensor:
    return trainer.log_probs(shard_of(trainer))


@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "ep": 2, "pp": 2}], ids=str)
def test_an_exported_adapter_is_read_by_peft_and_started_from(
    sizes: dict[str, Any], tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    from peft import PeftConfig

    out = tmp_path / "adapter"
    found = run_trainers(export, config_of(tiny_qwen3_moe, tmp_path, **sizes), out)
    assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    settings = PeftConfig.from_pretrained(str(out))
    targets = sorted(settings.target_modules)
    assert targets == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (settings.r, settings.lora_alpha, settings.use_rslora) == (4, 6, False)
    factors = load_file(out / "adapter_model.safetensors")
    peft_model(tiny_qwen3_moe, targets, LORA, factors)  # every name is one of peft's, in its shape
    again = config_of(tiny_qwen3_moe, tmp_path, {**LORA, "init": str(out)}, pp=2)
    assert max((a - found[0]).abs().max() for a in run_trainers(start_from, again)) < 2e-5
    with pytest.raises(RankFailed, match="set lora.rank to what the adapter has"):
        run_trainers(start_from, config_of(tiny_qwen3_moe, tmp_path, {"rank": 8, "alpha": 6, "init": str(out)}))


def test_a_directory_without_an_adapter_is_refused(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    from mslime.convert.peft import AdapterFile

    with pytest.raises(CheckpointError, match="adapter_config"):
        AdapterFile.open(tiny_qwen3_moe)
