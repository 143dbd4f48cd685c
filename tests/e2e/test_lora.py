"""A whole run with adapters on the real engines: trained, served, saved, exported and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mslime.config.errors import CheckpointError
from mslime.config.lora import LoraConfig
from mslime.config.schema import RunConfig
from mslime.control.export import export, export_job
from mslime.convert.peft import AdapterFile
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


def test_adapters_are_trained_and_served(trained: tuple[Run, Any, Any]) -> None:
    run, rows, _ = trained
    assert [row["step"] for row in rows] == [1, 2]
    assert_balanced(rows)
    assert "tensors in the engines equal the trainer's, bit for bit" in run.text()
    # The reference is the model without adapters, which B of 0 begin as.
    assert rows[0]["loss/kl"] == 0.0 and rows[1]["loss/kl"] > 0
    assert all(row["mismatch/kl"] < 1e-4 and row["weights/probe_log_probs"] < 1e-4 for row in rows)


def test_what_is_exported_and_saved_is_the_same_adapter(trained: tuple[Run, Any, Any], tmp_path: Path) -> None:
    run, _, values = trained
    exported = AdapterFile.open(run.directory / "hf")
    assert exported.lora == LoraConfig(rank=4, alpha=8)
    assert any(float(exported.reader()(name).abs().max()) > 0 for name in exported.info if ".lora_B." in name)
    config = RunConfig.model_validate({**values, "output_dir": str(run.directory.parent)})
    export(config, None, tmp_path / "again")
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


@pytest.mark.nightly
def test_engines_that_are_given_adapters_alone_are_never_paused(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path
) -> None:
    run = start_run(settings(tiny_qwen3_moe, prompts, **LORA | {"lora": LORA["lora"] | {"sync": "adapter"}}), tmp_path)
    rows = finish(run, 2)
    assert_balanced(rows)
    assert "version 0: 224 tensors in the engines equal the trainer's, bit for bit" in run.text()
    assert all(row["mismatch/kl"] < 1e-4 and row["weights/probe_log_probs"] < 1e-4 for row in rows)
    assert all(row["weights/pause_seconds"] == 0 and row["weights/buckets"] == 0 for row in rows)
