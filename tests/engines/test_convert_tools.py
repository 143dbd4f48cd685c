"""The conversion tools against real megatron-core, in both directions: each loads the other's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.errors import CheckpointError
from mslime.convert.families import get_family, read_hf_config
from mslime.convert.hf import HFCheckpoint
from mslime.convert.torch_dist import ModelPlacement
from mslime.offline.inspect import HFSide, MegatronSide, compare
from mslime.offline.jobs import run_job
from mslime.offline.requantise import ToFp8, ToPlain
from mslime.offline.to_hf import ToHf
from mslime.offline.to_megatron import HF_FILES, ToMegatron
from tests.engines.megatron_ranks import run_ranks
from tests.engines.trainer_ranks import largest_difference, make_config, run_trainers, shard_of
from tests.fixtures.convert_tools import fake_placement
from tests.fixtures.families import CASES
from tests.fixtures.tiny_models import make_tiny_deepseek_v3, make_tiny_qwen3_dense, make_tiny_qwen3_moe

pytestmark = pytest.mark.timeout(180)

ALL = {"tp": 2, "pp": 2, "ep": 2}


def _place(rank: int, world_size: int, init_method: str, model: Path) -> ModelPlacement:
    from mslime.backends.megatron.checkpoint_files import model_placement

    return model_placement(read_hf_config(model), model)


def place(model: Path) -> ModelPlacement:
    """The placement, computed in a separate process."""
    return run_ranks(_place, 1, model)[0]


def to_megatron(model: Path, out: Path, **options: Any) -> ModelPlacement:
    """Convert in several files."""
    placement = place(model)
    run_job(ToMegatron(model, read_hf_config(model), placement, max_file_bytes=200_000, **options), out)
    return placement


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "moe": make_tiny_qwen3_moe(root / "moe", mlp_only_layers=[1], vocab_size=321),
        "dense tied": make_tiny_qwen3_dense(root / "tied", tie_word_embeddings=True),
        "mla": make_tiny_deepseek_v3(root / "mla"),
        "delta net": CASES["qwen3-next"].make(root / "delta"),
        "stacked": CASES["gpt-oss"].make(root / "stacked"),
    }


def different_after_loading(trainer: MegatronTrainer, directory: Path) -> list[str]:
    """Wipe the weights, load them with megatron-core's own loader, and name tensors that differ from HF's before."""
    from megatron.core import dist_checkpointing, parallel_state

    from mslime.backends.megatron.checkpoint_files import SHARDING
    from mslime.backends.megatron.model.chunks import named_local_params

    before = {name: tensor.detach().clone() for name, tensor in named_local_params(trainer.chunks)}
    metadata = SHARDING | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    with torch.no_grad():
        for _, tensor in named_local_params(trainer.chunks):
            tensor.fill_(77)
    state = {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(trainer.chunks)}
    loaded = dist_checkpointing.load(state, str(directory))
    for i, chunk in enumerate(trainer.chunks):
        chunk.load_state_dict(loaded[f"model{i}"])
    after = dict(named_local_params(trainer.chunks))
    assert before.keys() == after.keys() and before
    return [name for name in before if not torch.equal(before[name], after[name])]


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("moe", ALL),
        ("moe", {"pp": 2, "vpp": 2}),
        ("dense tied", {"tp": 2, "pp": 2}),
        ("mla", {"tp": 2, "ep": 2}),
        ("delta net", {"tp": 2, "ep": 2}),
        ("stacked", {"tp": 2, "ep": 2}),
    ],
    ids=str,
)
def test_megatron_core_loads_a_converted_checkpoint_as_the_weights_that_hugging_face_gives(
    models: dict[str, Path], tmp_path: Path, model: str, sizes: dict[str, Any]
) -> None:
    to_megatron(models[model], tmp_path / "megatron")
    config = make_config(models[model], tmp_path, **sizes)
    for rank, different in enumerate(run_trainers(different_after_loading, config, tmp_path / "megatron")):
        assert not different, f"rank {rank}: {different[:3]}"


def train_save_export(trainer: MegatronTrainer, root: Path) -> None:
    trainer.train([shard_of(trainer)])
    trainer.save(root / "step_1", {"step": 1})
    trainer.weight_sender().export(root / "exported", trainer.spec.checkpoint)


@pytest.mark.parametrize("sizes", [ALL, {"tp": 2, "ep": 2, "dp": 2, "use_distributed_optimizer": True}], ids=str)
def test_a_training_checkpoint_becomes_the_trainers_own_export_without_a_trainer(
    models: dict[str, Path], tmp_path: Path, sizes: dict[str, Any]
) -> None:
    model = models["moe"]
    run_trainers(train_save_export, make_config(model, tmp_path, **sizes), tmp_path)
    config, placement = read_hf_config(model), place(model)
    run_job(ToHf(tmp_path / "step_1", model, config, placement), tmp_path / "converted")
    ours, trainers = HFCheckpoint(tmp_path / "converted"), HFCheckpoint(tmp_path / "exported")
    assert ours.info.keys() == trainers.info.keys()
    for name in ours.info:
        assert torch.equal(ours.tensor(name), trainers.tensor(name)), name
        assert ours.tensor(name).dtype == trainers.tensor(name).dtype
    side = MegatronSide(tmp_path / "step_1", config, placement)
    assert compare(side, HFSide(tmp_path / "exported")) == []
    trained = compare(side, HFSide(model))
    assert len(trained) > len(ours.info) / 2 and all(0 < difference.largest < 0.1 for difference in trained)


def round_trips(rank: int, world_size: int, init_method: str, root: Path) -> dict[str, list[str]]:
    """Every family's tiny model to Megatron and back; returns the differences by case."""
    from mslime.backends.megatron.checkpoint_files import model_placement

    different: dict[str, list[str]] = {}
    for number, case in enumerate(CASES.values()):
        model, megatron, back = case.make(root / f"{number}"), root / f"{number}-megatron", root / f"{number}-back"
        config = read_hf_config(model)
        placement = model_placement(config, model)
        run_job(ToMegatron(model, config, placement, max_file_bytes=300_000), megatron)
        run_job(ToHf(megatron, megatron / HF_FILES, config, placement, max_shard_bytes=300_000), back)
        ignored = get_family(config).rules(config).ignored
        found = compare(HFSide(model), HFSide(back))
        different[case.name] = [f"{d.name}: {d.what}" for d in found if d.name not in ignored]
    return different


@pytest.mark.nightly
def test_every_familys_checkpoint_comes_back_from_megatron_the_same(tmp_path: Path) -> None:
    different = run_ranks(round_trips, 1, tmp_path, deadline_s=170)[0]
    assert different == {name: [] for name in CASES}


def test_a_copy_that_is_none_is_not_lost_silently(tmp_path: Path) -> None:
    """A prediction layer's embedding repeats the model's, so that it is not stored; one that differs is refused."""
    model = CASES["deepseek-v3"].make(tmp_path / "model")
    config = read_hf_config(model)
    alias = next(iter(get_family(config).rules(config).aliases))
    path = model / "model.safetensors"
    tensors = load_file(path)
    assert alias in tensors
    tensors[alias][3, 4] += 1
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=f"{alias}.*\n?.*must equal"):
        run_job(ToMegatron(model, config, fake_placement(config)), tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()


def worst_difference(trainer: MegatronTrainer, plain: Path) -> tuple[int, float]:
    from mslime.backends.megatron.model.chunks import named_local_params

    checkpoint = HFCheckpoint(plain)
    tensors = dict(named_local_params(trainer.chunks))
    whole = {name: checkpoint.tensor(name) for name in checkpoint.info}
    return len(tensors), largest_difference(trainer, tensors, whole)


@pytest.mark.nightly
def test_a_trainer_and_the_converter_start_from_fp8_without_a_conversion_step(tmp_path: Path) -> None:
    """Each rank dequantises its own rows and columns; sizes that are not a multiple of the block included."""
    model = make_tiny_qwen3_moe(tmp_path / "model", hidden_size=192, moe_intermediate_size=160)
    run_job(ToFp8(model, power_of_two=False), tmp_path / "fp8")
    run_job(ToPlain(tmp_path / "fp8"), tmp_path / "plain")
    config = make_config(tmp_path / "fp8", tmp_path, tp=2, ep=2)
    for tensors, worst in run_trainers(worst_difference, config, tmp_path / "plain"):
        assert tensors > 50 and worst == 0.0
    to_megatron(tmp_path / "fp8", tmp_path / "megatron")
    assert not any(run_trainers(different_after_loading, config, tmp_path / "megatron"))
