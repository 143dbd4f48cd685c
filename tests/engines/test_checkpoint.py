"""Trainer checkpoints on real ranks: a resumed run, in any layout, equals the uninterrupted run."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mslime.backends.megatron import checkpoint
from mslime.backends.megatron.step.offload import optimizer_tensors
from mslime.backends.megatron.step.optimizer import parts_of
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.errors import CheckpointError
from mslime.convert.families import read_hf_config
from mslime.convert.torch_dist import METADATA, load_metadata
from mslime.data.checkpoints import newest, read_manifest, step_directory, sum_file, write_manifest
from mslime_plugins.planner.plan import make_plan
from tests.engines.trainer_ranks import largest_difference, make_config, run_trainers, shard_of, to_hf
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

pytestmark = pytest.mark.timeout(180)

STEPS, SAVED = 4, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "one_distopt": {"use_distributed_optimizer": True},
    "one_bf16": {"use_distributed_optimizer": True, "params_dtype": "bfloat16"},
    "tp2_ep2": {"tp": 2, "ep": 2},
    "tp2_ep2_distopt": {"tp": 2, "ep": 2, "use_distributed_optimizer": True},
    "dp2_ep2_distopt": {"dp": 2, "ep": 2, "use_distributed_optimizer": True},
    "pp2_vpp2_distopt": {"pp": 2, "vpp": 2, "use_distributed_optimizer": True},
}
SCHEDULE = {"lr_warmup_steps": 2, "lr_decay_style": "cosine", "num_steps": 8, "min_lr": 1e-4}
EXTRA = {"step": SAVED, "weight_version": 7, "cursor": {"epoch": 1, "index": 33}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("checkpoint") / "model")


def config_of(layout: str, model: Path, output: Path) -> Any:
    return make_config(model, output, train=SCHEDULE, **LAYOUTS[layout])


def train_steps(trainer: MegatronTrainer, first: int, last: int) -> list[dict[str, float]]:
    """Optimizer steps `first`..`last - 1`, each on its own data."""
    return [trainer.train([shard_of(trainer, seed=step)])[0] for step in range(first, last)]


def curve(rows: list[dict[str, float]]) -> list[tuple[float, float, float]]:
    return [(row["loss/total"], row["grad_norm"], row["lr"]) for row in rows]


def draws(trainer: MegatronTrainer) -> list[float]:
    """The next numbers of every generator of this rank."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        inside = float(torch.rand(()))
    return [random.random(), float(np.random.random()), float(torch.rand(())), inside]


def _uninterrupted(trainer: MegatronTrainer) -> tuple[Any, dict[str, torch.Tensor]]:
    rows = train_steps(trainer, 0, STEPS)
    return curve(rows), {k: v.clone() for k, v in to_hf(trainer, dict(trainer.named_local_params())).items()}


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Loss curve and final weights of one process that was never interrupted."""
    path = tmp_path_factory.mktemp("uninterrupted") / "run.pt"
    torch.save(run_trainers(_uninterrupted, config_of("one", model, path.parent))[0], path)
    return path


def _train_and_save(trainer: MegatronTrainer, directory: Path) -> Any:
    rows = train_steps(trainer, 0, SAVED)
    random.random(), np.random.random(), torch.rand(5)
    trainer.save(directory, EXTRA)
    return curve(rows), draws(trainer)


def _load_and_train(trainer: MegatronTrainer, directory: Path, uninterrupted: Path) -> dict[str, Any]:
    extra = trainer.load(directory)
    drawn = draws(trainer)
    step = trainer.step
    rows = train_steps(trainer, SAVED, STEPS)
    weights = torch.load(uninterrupted)[1]
    return {
        "extra": extra,
        "draws": drawn,
        "step": step,
        "curve": curve(rows),
        "weights": largest_difference(trainer, dict(trainer.named_local_params()), weights),
    }


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Any]]]:
    """A checkpoint saved after two steps under a layout, and its ranks' observations; made once a layout."""
    made: dict[str, tuple[Path, list[Any]]] = {}

    def make(layout: str) -> tuple[Path, list[Any]]:
        if layout not in made:
            root = tmp_path_factory.mktemp(f"saved-{layout}")
            directory = step_directory(root, SAVED)
            made[layout] = directory, run_trainers(_train_and_save, config_of(layout, model, root), directory)
        return made[layout]

    return make


RESUMES = [
    ("one", "one"),
    ("tp2_ep2", "one"),
    ("one", "tp2_ep2"),
    ("tp2_ep2_distopt", "tp2_ep2_distopt"),
    ("tp2_ep2_distopt", "one_distopt"),
    ("one_distopt", "dp2_ep2_distopt"),
    ("dp2_ep2_distopt", "pp2_vpp2_distopt"),
    ("pp2_vpp2_distopt", "tp2_ep2_distopt"),
]


@pytest.mark.parametrize(("before", "after"), RESUMES, ids=lambda name: name)
def test_a_resumed_run_continues_the_uninterrupted_loss_curve(
    before: str, after: str, model: Path, saved: Any, uninterrupted: Path, tmp_path: Path
) -> None:
    directory, ranks_before = saved(before)
    expected = torch.load(uninterrupted)[0]
    results = run_trainers(_load_and_train, config_of(after, model, tmp_path), directory, uninterrupted)
    for result in results:
        assert result["extra"] == EXTRA
        assert result["step"] == SAVED
        np.testing.assert_allclose(ranks_before[0][0], expected[:SAVED], atol=2e-4, rtol=2e-4)
        np.testing.assert_allclose(result["curve"], expected[SAVED:], atol=2e-4, rtol=2e-4)
        assert result["weights"] < 1e-4
    if before == after:
        assert [r["draws"] for r in results] == [r[1] for r in ranks_before], (
            "each rank goes on with its own generators"
        )


def _save_as_megatron_core(trainer: MegatronTrainer, directory: Path) -> None:
    """With every rank's whole buffers, as mslime saved before it let each rank store its own part."""
    for part in parts_of(trainer.optimizer):
        del part.sharded_param_state_fully_reshardable  # type: ignore[attr-defined]  # what hides the class's own
    train_steps(trainer, 0, SAVED)
    trainer.save(directory, EXTRA)


@pytest.mark.nightly
@pytest.mark.parametrize("after", ["dp2_ep2_distopt", "tp2_ep2_distopt"])
def test_a_checkpoint_with_whole_buffers_resumes_in_every_layout(
    after: str, model: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    directory = step_directory(tmp_path, SAVED)
    run_trainers(_save_as_megatron_core, config_of("dp2_ep2_distopt", model, tmp_path), directory)
    for result in run_trainers(_load_and_train, config_of(after, model, tmp_path), directory, uninterrupted):
        np.testing.assert_allclose(result["curve"], torch.load(uninterrupted)[0][SAVED:], atol=2e-4, rtol=2e-4)
        assert result["weights"] < 1e-4


def _stored_and_held(trainer: MegatronTrainer, is_loading: bool) -> tuple[int, int, int]:
    """Elements of optimizer state that this rank stores, those of them that lie in its optimizer's own memory, and all
    that it has."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    state = checkpoint._state(trainer.chunks, trainer.optimizer, trainer.schedule, is_loading=is_loading)
    stored = [each for each in nested_values(state["optimizer"]) if isinstance(each, ShardedTensor)]
    own = {tensor.untyped_storage().data_ptr() for tensor in optimizer_tensors(trainer.optimizer)}
    held = {t.data_ptr(): t.numel() for t in optimizer_tensors(trainer.optimizer) if t.ndim}
    sizes = [(part.data.numel(), part.data.untyped_storage().data_ptr() in own) for part in stored]
    return sum(size for size, _ in sizes), sum(size for size, mine in sizes if mine), sum(held.values())


@pytest.mark.parametrize("is_loading", [False, True], ids=["saving", "loading"])
def test_a_rank_stores_its_own_part_of_the_optimizers_state_and_copies_none_of_it(
    is_loading: bool, model: Path, tmp_path: Path
) -> None:
    for stored, in_place, held in run_trainers(
        _stored_and_held, config_of("dp2_ep2_distopt", model, tmp_path), is_loading
    ):
        assert stored == in_place == held > 0


def test_a_resume_in_one_process_is_bit_exact(model: Path, saved: Any, uninterrupted: Path, tmp_path: Path) -> None:
    directory, _ = saved("one")
    result = run_trainers(_load_and_train, config_of("one", model, tmp_path), directory, uninterrupted)[0]
    assert result["curve"] == torch.load(uninterrupted)[0][SAVED:]
    assert result["weights"] == 0.0


def _save_twice(trainer: MegatronTrainer, directory: Path) -> list[bool]:
    compared: list[bool] = []
    preprocess = checkpoint.save_preprocess

    def noted(state: Any, validate_access_integrity: bool) -> Any:
        compared.append(validate_access_integrity)
        return preprocess(state, validate_access_integrity)

    with mock.patch.object(checkpoint, "save_preprocess", noted):
        for name in ("first", "second"):
            trainer.save(directory / name, EXTRA)
    return compared


def test_ranks_compare_what_they_store_at_the_first_save_alone(model: Path, tmp_path: Path) -> None:
    assert run_trainers(_save_twice, config_of("one", model, tmp_path), tmp_path) == [[True, False]]


@pytest.mark.nightly
def test_another_layout_starts_its_generators_from_the_seed(
    model: Path, saved: Any, uninterrupted: Path, tmp_path: Path
) -> None:
    directory, _ = saved("tp2_ep2")
    resumed = run_trainers(_load_and_train, config_of("one", model, tmp_path), directory, uninterrupted)[0]
    assert resumed["draws"] == run_trainers(draws, config_of("one", model, tmp_path))[0]


def test_the_driver_reads_extra_without_a_trainer(saved: Any) -> None:
    directory, _ = saved("tp2_ep2")
    assert read_manifest(directory).extra == EXTRA
    assert read_manifest(directory).layout == "TP2 EP2"
    assert newest(directory.parent) == directory


def test_each_rank_writes_one_file(saved: Any) -> None:
    """With a second writer thread torch loses that thread's errors, and with them a part of the checkpoint."""
    assert len(list(saved("tp2_ep2")[0].glob("*.distcp"))) == 2


@pytest.mark.parametrize("layout", ["one", "one_bf16", "tp2_ep2_distopt"])
def test_a_checkpoint_is_as_large_as_planned(layout: str, model: Path, saved: Any) -> None:
    directory, _ = saved(layout)
    stored = load_metadata(directory / METADATA).state_dict_metadata.values()
    tensors = [each for each in stored if isinstance(each, TensorStorageMetadata)]
    size = sum(math.prod(each.size) * each.properties.dtype.itemsize for each in tensors)
    assert size == make_plan(config_of(layout, model, directory), read_hf_config(model)).saved.checkpoint


def _load_only(trainer: MegatronTrainer, directory: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        trainer.load(directory)
    return str(error.value)


@pytest.mark.parametrize("damage", ["missing", "truncated", "no manifest"])
def test_a_damaged_checkpoint_is_refused_on_every_rank_by_file(
    damage: str, model: Path, saved: Any, tmp_path: Path
) -> None:
    directory = step_directory(tmp_path, SAVED)
    shutil.copytree(saved("tp2_ep2")[0], directory)
    victim = max(directory.glob("*.distcp"), key=lambda path: path.stat().st_size)
    if damage == "missing":
        victim.unlink()
    elif damage == "truncated":
        os.truncate(victim, victim.stat().st_size // 2)
    else:
        victim = directory / "manifest.json"
        victim.unlink()
    messages = run_trainers(_load_only, config_of("tp2_ep2", model, tmp_path), directory)
    assert all(victim.name in message and "hint" in message for message in messages)
    with pytest.raises(CheckpointError, match="resume: older"):
        newest(tmp_path)


@pytest.mark.nightly
def test_rubbish_of_the_right_size_is_refused_on_every_rank(model: Path, saved: Any, tmp_path: Path) -> None:
    directory = step_directory(tmp_path, SAVED)
    shutil.copytree(saved("tp2_ep2")[0], directory)
    for victim in directory.glob("__1_*.distcp"):
        victim.write_bytes(b"\x13" * victim.stat().st_size)
    messages = run_trainers(_load_only, config_of("tp2_ep2", model, tmp_path), directory)
    assert all("__1_0.distcp" in message and "the file is damaged" in message for message in messages)


class _Hostile:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def _as_a_stored_object(directory: Path, mark: Path) -> None:
    """The hostile pickle takes the place of an object that megatron-core stores with every linear layer."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    buffer = io.BytesIO()
    torch.save(_Hostile(mark), buffer)
    (directory / "hostile.distcp").write_bytes(buffer.getvalue())
    for index, info in metadata.storage_data.items():
        if "_extra_state" in index.fqn:
            info.relative_path, info.offset, info.length = "hostile.distcp", 0, len(buffer.getvalue())
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


HOSTILE: dict[str, Callable[[Path, Path], None]] = {
    "generators of format 1": lambda directory, mark: (
        [  # type: ignore[dict-item]
            path.unlink() for path in directory.glob("rng/*.npz")
        ]
        and torch.save({"python": _Hostile(mark)}, directory / "rng" / "rank_00000.pt")
    ),
    "generators": lambda directory, mark: np.savez(directory / "rng" / "rank_00000.npz", python=_Hostile(mark)),  # type: ignore[arg-type]
    "metadata": lambda directory, mark: (directory / ".metadata").write_bytes(pickle.dumps(_Hostile(mark))),  # type: ignore[dict-item]
    "common": lambda directory, mark: torch.save({"schedule": _Hostile(mark)}, directory / "common.pt"),
    "stored object": _as_a_stored_object,
}


@pytest.mark.parametrize("where", HOSTILE)
def test_a_checkpoint_of_somebody_else_runs_no_code(where: str, model: Path, saved: Any, tmp_path: Path) -> None:
    directory, mark = step_directory(tmp_path, SAVED), tmp_path / "ran"
    shutil.copytree(saved("one")[0], directory)
    HOSTILE[where](directory, mark)
    manifest = read_manifest(directory, check_files=False)
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != "manifest.json"]
    sums = {str(path.relative_to(directory)): sum_file(path) for path in files}
    write_manifest(directory, replace(manifest, files=sums))  # nothing is wrong with its checksums
    (message,) = run_trainers(_load_only, config_of("one", model, tmp_path), directory)
    assert "must be a readable checkpoint" in message or ".metadata" in message
    assert not mark.exists()


@pytest.mark.nightly
def test_generators_of_format_1_are_restored(model: Path, saved: Any, uninterrupted: Path, tmp_path: Path) -> None:
    """Written as the first format did: a pickle of the generators' own states, a manifest of sizes."""
    directory = step_directory(tmp_path, SAVED)
    shutil.copytree(saved("one")[0], directory)
    run_trainers(_save_old_generators, config_of("one", model, tmp_path), directory)
    (directory / "rng" / "rank_00000.npz").unlink()
    content = json.loads((directory / "manifest.json").read_text())
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != "manifest.json"]
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in files}
    old = {key: content[key] for key in ("layout", "world_size", "extra")} | {"format": 1, "complete": True}
    (directory / "manifest.json").write_text(json.dumps(old | {"files": sizes}))
    (result,) = run_trainers(_load_and_train, config_of("one", model, tmp_path), directory, uninterrupted)
    assert result["draws"] == saved("one")[1][0][1] and result["extra"] == EXTRA


def _save_old_generators(trainer: MegatronTrainer, directory: Path) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    trainer.load(directory)
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": None,
        "megatron": get_cuda_rng_tracker().get_states(),
    }
    torch.save(state, directory / "rng" / "rank_00000.pt")


def test_a_checkpoint_of_another_model_is_refused(saved: Any, tmp_path: Path) -> None:
    other = make_tiny_qwen3_moe(tmp_path / "other", moe_intermediate_size=48)
    message = run_trainers(_load_only, config_of("one", other, tmp_path), saved("one")[0])[0]
    assert "must be a readable checkpoint of the trained model" in message


def _save_on_small_disk(trainer: MegatronTrainer, directory: Path, limited_rank: int) -> str:
    """One rank may write no more than 100 kB a file, as on a file system that fills up under it."""
    train_steps(trainer, 0, 1)
    if trainer.parallel.rank == limited_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    with pytest.raises(CheckpointError) as error:
        trainer.save(directory, EXTRA)
    return str(error.value)


@pytest.mark.nightly
@pytest.mark.parametrize("limited_rank", [0, 1])
def test_a_disk_that_fills_up_while_saving_leaves_the_previous_checkpoint(
    limited_rank: int, model: Path, saved: Any, tmp_path: Path
) -> None:
    previous = step_directory(tmp_path, SAVED)
    shutil.copytree(saved("tp2_ep2")[0], previous)
    directory = step_directory(tmp_path, SAVED + 1)
    messages = run_trainers(_save_on_small_disk, config_of("tp2_ep2", model, tmp_path), directory, limited_rank)
    for message in messages:
        assert str(directory) in message and "bytes free" in message and "File too large" in message
    assert newest(tmp_path) == previous
    assert sorted(path.name for path in tmp_path.glob("*step*")) == [previous.name], "nothing is left behind"


def _save_without_space(trainer: MegatronTrainer, directory: Path) -> str:
    def fake_nearly_full_disk(path: Any) -> Any:
        return shutil._ntuple_diskusage(10**9, 10**9 - 4096, 4096)  # type: ignore[attr-defined]

    shutil.disk_usage = fake_nearly_full_disk
    with pytest.raises(CheckpointError) as error:
        trainer.save(directory, EXTRA)
    return str(error.value)


def test_a_disk_without_enough_space_is_noticed_before_writing(model: Path, tmp_path: Path) -> None:
    directory = step_directory(tmp_path, 1)
    message = run_trainers(_save_without_space, config_of("one", model, tmp_path), directory)[0]
    assert "4096 bytes free" in message and str(directory) in message
    assert not list(tmp_path.glob("*step*"))


def _save_for_ever(trainer: MegatronTrainer, root: Path) -> None:
    train_steps(trainer, 0, 1)
    (root / "pid").write_text(str(os.getpid()))
    for step in range(10_000):
        trainer.save(step_directory(root, step), {"step": step})


def _kill_while_saving(root: Path, after_s: float) -> None:
    """SIGKILL to the process that `_save_for_ever` named, some time after its first checkpoint."""
    deadline = time.monotonic() + 60
    while newest(root) is None:
        assert time.monotonic() < deadline, "no first checkpoint"
        time.sleep(0.01)
    time.sleep(after_s)
    os.kill(int((root / "pid").read_text()), signal.SIGKILL)


def _load_newest(trainer: MegatronTrainer, root: Path) -> int:
    found = newest(root)
    assert found is not None
    return trainer.load(found)["step"]


@pytest.mark.nightly
def test_a_kill_in_mid_save_leaves_only_complete_checkpoints(model: Path, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    config = config_of("one", model, tmp_path)
    with ThreadPoolExecutor(1) as pool:
        for attempt in range(3):
            root = tmp_path / f"attempt{attempt}"
            root.mkdir()
            killer = pool.submit(_kill_while_saving, root, 0.013 * (attempt + 1))
            with pytest.raises(AssertionError, match="died"):
                run_trainers(_save_for_ever, config, root)
            killer.result()
            named = [path for path in root.iterdir() if path.name.startswith("step_")]
            for directory in named:
                read_manifest(directory)
            steps = {json.loads((path / "manifest.json").read_text())["extra"]["step"] for path in named}
            assert steps == set(range(len(named))), "every save before the kill is there, none is half there"
            assert run_trainers(_load_newest, config, root) == [max(steps)]


def _save_at_once(trainer: MegatronTrainer, directory: Path) -> Any:
    trainer.save(directory, {})
    return curve(train_steps(trainer, 0, 2))


def _load_and_begin(trainer: MegatronTrainer, directory: Path) -> Any:
    trainer.load(directory)
    assert trainer.step == 0
    return curve(train_steps(trainer, 0, 2))


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["one", "dp2_ep2_distopt"])
def test_a_model_that_was_never_updated_is_saved_and_resumed(layout: str, model: Path, tmp_path: Path) -> None:
    """Like a policy whose critic is still warmed up."""
    config = config_of(layout, model, tmp_path)
    saved = run_trainers(_save_at_once, config, tmp_path / "step_0")
    assert run_trainers(_load_and_begin, config, tmp_path / "step_0") == saved


def _refused(trainer: MegatronTrainer, directory: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        trainer.load(directory)
    return caught.value


@pytest.mark.nightly
def test_state_of_the_other_kind_of_optimizer_is_refused_with_a_way_out(
    saved: Callable[[str], tuple[Path, list[Any]]], model: Path, tmp_path: Path
) -> None:
    directory, _ = saved("one_distopt")
    (error,) = run_trainers(_refused, config_of("one", model, tmp_path), directory)
    assert "use_distributed_optimizer" in error.hint
