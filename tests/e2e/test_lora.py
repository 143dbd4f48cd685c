"""A whole run with adapters on the real engines: trained, served, saved, exported and resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mslime.config.base import adapter_directory
from mslime.config.errors import CheckpointError
from mslime.config.lora import LoraConfig
from mslime.convert.peft import AdapterFile
from mslime.run.run_checkpoints import export, export_job, newest_of
from tests.e2e.harness import Run, assert_balanced, start_run
from tests.e2e.test_run import START_S, STEP_S, settings

pytestmark = pytest.mark.timeout(600)
LORA: dict[str, Any] = {
    "lora": {"rank": 4, "alpha": 8},
    "train": {"num_steps": 2, "lr": 1e-2},
    "algorithm": {"kl_coef": 0.01},
}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(24)))
    return path


def finish(run: Run, steps: int) -> list[dict[str, Any]]:
    try:
        assert run.finish(START_S + steps * STEP_S) == 0, run.text()
        assert run.left_over() == []
    finally:
        run.stop()
    return run.rows()


@pytest.fixture(scope="module")
def trained(tiny_qwen3_moe: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Any, Any]:
    """A run of two steps, its rows and its settings."""
    values = settings(tiny_qwen3_moe, prompts, **LORA)
    run = start_run(values, tmp_path_factory.mktemp("run"))
    return run, finish(run, 2), values


@pytest.mark.nightly
def test_adapters_are_trained_and_served(trained: tuple[Run, Any, Any]) -> None:
    run, rows, _ = trained
    assert [row["step"] for row in rows] == [1, 2]
    assert_balanced(rows)
    assert "tensors in the engines equal the trainer's, bit for bit" in run.text()
    # The reference is the model without adapters, which B of 0 begin as.
    assert rows[0]["loss/kl"] == 0.0 and rows[1]["loss/kl"] > 0
    assert all(row["mismatch/kl"] < 1e-4 and row["weights/probe_log_probs"] < 1e-4 for row in rows)


@pytest.mark.nightly
def test_what_is_exported_and_saved_is_the_same_adapter(trained: tuple[Run, Any, Any], tmp_path: Path) -> None:
    run, _, values = trained
    exported = AdapterFile.open(run.directory / "hf")
    assert exported.lora == LoraConfig(rank=4, alpha=8)
    assert any(float(exported.reader()(name).abs().max()) > 0 for name in exported.info if ".lora_B." in name)
    export(newest_of(run.directory), Path(values["model"]["path"]), tmp_path / "again", quiet=True)
    again = AdapterFile.open(tmp_path / "again")
    assert again.info.keys() == exported.info.keys()
    assert all(again.reader()(name).equal(exported.reader()(name)) for name in exported.info)
    with pytest.raises(CheckpointError, match="merge-lora"):
        export_job(run.directory / "checkpoints" / "step_2", Path(values["model"]["path"]))


@pytest.mark.nightly
def test_a_run_with_adapters_goes_on_from_its_checkpoint(trained: tuple[Run, Any, Any]) -> None:
    run, _, values = trained
    again = start_run({**values, "train": {**values["train"], "num_steps": 3}}, run.directory.parent)
    rows = finish(again, 1)
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[2]["mismatch/kl"] < 1e-4 and rows[2]["loss/kl"] > 0


# --------------------------------------------------------------------------------------------------- adapters alone

ALONE: dict[str, Any] = {
    "lora": {"rank": 4, "alpha": 8, "sync": "adapter"},
    "train": {"num_steps": 4, "lr": 1e-2, "replay_max_age": 0},
    "rollout": {"max_staleness": 1, "max_response_tokens": 300, "groups_per_step": 2},
    "algorithm": {"correction": {"preset": "tis"}},
    "checkpoint": {"save_every": 1},
}


def newest_agree(row: dict[str, Any]) -> bool:
    """Whether engine and trainer agree on all tokens of the newest version; a step may have none of them."""
    return row.get("mismatch/kl_age_0", 0.0) < 1e-6


def exported_to(directory: Path) -> dict[str, torch.Tensor]:
    """Tensors of an exported adapter, the experts of a layer in one tensor as in the files for engines."""
    file = AdapterFile.open(directory)
    parts: dict[str, list[torch.Tensor]] = {}
    for name in sorted(file.info, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
        parts.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(file.reader()(name))
    return {name: torch.stack(each) if ".experts." in name else each[0] for name, each in parts.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_engines_that_are_given_adapters_alone_go_on_while_they_load(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, mode: str
) -> None:
    """Responses over several versions, with TIS; then the run is killed and resumed: ledger and bits are exact."""
    values = settings(tiny_qwen3_moe, prompts, **ALONE)
    values["rollout"]["pause_mode"] = mode
    run = start_run({**values, "train": {**values["train"], "num_steps": 100}}, tmp_path)
    try:
        run.wait_for(lambda: len(run.rows()) >= 4, START_S + 4 * STEP_S)
        run.process.kill()
        run.process.wait()
        assert run.left_over(60) == []
    finally:
        run.stop()
    before = run.rows()
    assert_balanced(before)
    assert "tensors in the engines equal the trainer's, bit for bit" in run.text()
    assert all(row["weights/pause_seconds"] == 0 and newest_agree(row) for row in before)
    assert sum(row["staleness/mean"] for row in before) > 0, "nothing was sampled by an older version"
    assert any("mismatch/kl_age_0" in row for row in before)
    saved = max(int(path.name.split("_")[1]) for path in (run.directory / "checkpoints").glob("step_*"))
    export(newest_of(tmp_path / "run"), Path(values["model"]["path"]), tmp_path / "saved", quiet=True)
    again = start_run({**values, "train": {**values["train"], "num_steps": saved + 2}}, tmp_path)
    rows = [row for row in finish(again, 2) if row["step"] > saved]
    assert [row["step"] for row in rows] == [saved + 1, saved + 2]
    assert all(newest_agree(row) and row["weights/probe_log_probs"] < 1e-4 for row in rows)
    assert f"version {saved}: 56 tensors in the engines equal the trainer's, bit for bit" in again.text()
    served = load_file(again.directory / "weights" / adapter_directory(saved + 2) / "adapter_model.safetensors")
    exported = exported_to(again.directory / "hf")
    assert served.keys() == exported.keys() and all(served[name].equal(exported[name]) for name in served)
    first = exported_to(tmp_path / "saved")
    assert any(not first[name].equal(served[name]) for name in served), "it learnt nothing more"


@pytest.mark.nightly
def test_an_engine_that_is_killed_comes_back_with_the_newest_adapters(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path
) -> None:
    values = settings(tiny_qwen3_moe, prompts, **ALONE)
    values |= {"sglang": {"num_engines": 2, "max_total_tokens": 16384}, "train": {**values["train"], "num_steps": 60}}
    run = start_run(values, tmp_path)
    try:
        run.wait_for(lambda: len(run.rows()) >= 2, START_S + 2 * STEP_S)
        engines = [p for p in run.look() if "mslime.backends.sglang.launch" in " ".join(p.cmdline())]
        engines[0].kill()
        run.wait_for(lambda: any(row["weights/engines"] == 1 for row in run.rows()), 2 * STEP_S)
        back = len(run.rows())
        run.wait_for(lambda: any(row["weights/engines"] == 2 for row in run.rows()[back:]), START_S)
    finally:
        run.stop()
    rows = run.rows()
    assert_balanced(rows)
    assert all(newest_agree(row) and row["weights/probe_log_probs"] < 1e-4 for row in rows)
