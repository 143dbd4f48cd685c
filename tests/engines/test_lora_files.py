"""Files of a run with adapters: checkpoints that another layout resumes, and adapters that peft loads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.errors import CheckpointError
from mslime.config.schema import RunConfig
from mslime.convert.torch_dist import DistCheckpoint
from mslime.offline.jobs import run_job
from mslime.offline.lora_checkpoints import MergeLora
from tests.engines.lora_ranks import fill_factors, held_factors, whole_factors, worst
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
    saved = of_all_stages(trainer)
    trainer.train([shard_of(trainer, seed=3)])
    torch.save((saved, of_all_stages(trainer)), directory.with_suffix(".pt"))


def of_all_stages(trainer: MegatronTrainer) -> dict[str, Any]:
    """Whole factors of a run whose ranks differ in their stage alone."""
    stages: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(stages, whole_factors(trainer))
    return {name: tensor for stage in stages for name, tensor in stage.items()}


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
    [{"tp": 2, "ep": 2, "dp": 2}, {"pp": 2, "vpp": 2}, {"etp": 2, "dp": 2}],
    ids=str,
)
def test_another_layout_goes_on_from_a_checkpoint(
    sizes: dict[str, Any], saved: Path, tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    for found in run_trainers(resume, config_of(tiny_qwen3_moe, tmp_path, **sizes), saved):
        assert found[0] == 0.0 and found[1] < 1e-5


SHARED = {**LORA, "experts": "shared_outer"}


@pytest.mark.nightly
def test_factors_that_experts_share_go_on_in_another_layout(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    """Each rank of experts holds a copy: one is saved, in whatever layout, and all are alike after it is read."""
    both = {"tp": 2, "ep": 2, "dp": 2, "use_distributed_optimizer": True}
    one = {"use_distributed_optimizer": True}
    run_trainers(train_and_save, config_of(tiny_qwen3_moe, tmp_path, SHARED, **one), tmp_path / "step_2")
    for found in run_trainers(resume, config_of(tiny_qwen3_moe, tmp_path, SHARED, **both), tmp_path / "step_2"):
        assert found[0] == 0.0 and found[1] < 1e-5
    run_trainers(load_and_save, config_of(tiny_qwen3_moe, tmp_path, SHARED, **both), tmp_path)
    (tmp_path / "again.pt").write_bytes((tmp_path / "step_2.pt").read_bytes())
    (found,) = run_trainers(resume, config_of(tiny_qwen3_moe, tmp_path, SHARED, **one), tmp_path / "again")
    assert found[0] == 0.0 and found[1] < 1e-5
    with pytest.raises(RankFailed, match="was saved with"):
        run_trainers(load, config_of(tiny_qwen3_moe, tmp_path, **one), tmp_path / "step_2")


def load_and_save(trainer: MegatronTrainer, directory: Path) -> None:
    trainer.load(directory / "step_2")
    trainer.save(directory / "again", {"next_step": 2})


KINDS = {
    "experts late": ["model.layers.[01].self_attn.*_proj", "model.layers.[23].*_proj"],
    "experts early": ["model.layers.[01].*.experts.*_proj", "model.layers.[23].self_attn.*_proj"],
}
"""Four layers: with two pipeline stages the first has no adapter on experts, or none but those."""
PP2, ONE = {"pp": 2, "use_distributed_optimizer": True}, {"use_distributed_optimizer": True}


@pytest.mark.nightly
@pytest.mark.parametrize("where", KINDS)
@pytest.mark.parametrize(
    ("saving", "sizes"),
    [
        (PP2, PP2),
        (ONE, PP2),
        (PP2, ONE),
        (PP2, {**PP2, "dp": 2, "ep": 2}),
        ({"pp": 2}, {"pp": 2}),
    ],
    ids=str,
)
def test_a_stage_that_lacks_a_kind_of_adapters_takes_part_in_checkpoints(
    saving: dict[str, Any], sizes: dict[str, Any], where: str, tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    lora = {**LORA, "targets": KINDS[where]}
    run_trainers(train_and_save, config_of(tiny_qwen3_moe, tmp_path, lora, **saving), tmp_path / "step_2")
    for found in run_trainers(resume, config_of(tiny_qwen3_moe, tmp_path, lora, **sizes), tmp_path / "step_2"):
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
    with pytest.raises(RankFailed, match="set lora.rank to the adapter's value"):
        run_trainers(start_from, config_of(tiny_qwen3_moe, tmp_path, {"rank": 8, "alpha": 6, "init": str(out)}))


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "ep": 2, "pp": 2}], ids=str)
def test_an_adapter_whose_experts_share_factors_is_exported_merged_and_started_from(
    sizes: dict[str, Any], tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "adapter"
    found = run_trainers(export, config_of(tiny_qwen3_moe, tmp_path, SHARED, **sizes), out)
    factors = load_file(out / "adapter_model.safetensors")
    read, written = (
        factors[f"base_model.model.model.layers.1.mlp.experts.up_proj.lora_{each}.weight"] for each in "AB"
    )
    assert read.shape[0] == 1 and written.shape[0] == 8
    again = config_of(tiny_qwen3_moe, tmp_path, {**SHARED, "init": str(out)}, tp=2, ep=2)
    assert max((a - found[0]).abs().max() for a in run_trainers(start_from, again)) < 2e-5
    run_job(MergeLora(tiny_qwen3_moe, out), tmp_path / "merged")
    (merged,) = run_trainers(start_from, config_of(tmp_path / "merged", tmp_path, {}))
    (base,) = run_trainers(start_from, config_of(tiny_qwen3_moe, tmp_path, {}))
    assert (merged - found[0]).abs().max() < 2e-5 < 1e-2 < (base - found[0]).abs().max()


def as_made(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    """Whole factors of a rank that are not shared out over tensor-parallel ranks."""
    whole = {name: (tensor, bound) for name, tensor, bound, _ in held_factors(trainer) if bound.kind.tp_axis is None}
    return {hf: part.clone() for tensor, bound in whole.values() for hf, part in bound.to_hf([tensor.detach()])}


@pytest.mark.nightly
def test_what_experts_share_begins_alike_on_every_rank(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    (one,) = run_trainers(as_made, config_of(tiny_qwen3_moe, tmp_path, SHARED))
    shared = [name for name in one if ".experts.gate_proj.lora_A" in name]
    assert len(shared) == 4 and all(float(one[name].std()) > 0 for name in shared)
    for found in run_trainers(as_made, config_of(tiny_qwen3_moe, tmp_path, SHARED, tp=2, ep=2, dp=2)):
        assert all(torch.equal(found[name], one[name]) for name in shared)


def test_a_directory_without_an_adapter_is_refused(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    from mslime.convert.peft import AdapterFile

    with pytest.raises(CheckpointError, match="adapter_config"):
        AdapterFile.open(tiny_qwen3_moe)
