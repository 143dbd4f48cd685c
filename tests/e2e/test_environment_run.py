"""Two steps of the walk on a grid (examples/navigation), on real engines, from a random model."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.navigation import make_task
from examples.tiny_model import write_model, write_rows
from mslime.config.loader import read_yaml
from tests.e2e.harness import Run, start_run

pytestmark = [pytest.mark.e2e, pytest.mark.engine]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)
def test_two_steps_in_an_environment(tmp_path: Path, runs: list[Run]) -> None:
    write_model(tmp_path / "model", 7)
    write_rows(tmp_path / "train.jsonl", make_task.make_rows(7)["train"])
    values = read_yaml(ROOT / "examples/navigation/run.yaml")
    del values["name"], values["output_dir"]
    values["model"]["path"] = str(tmp_path / "model")
    values["data"] = {"prompts": [str(tmp_path / "train.jsonl")], "metadata_key": "metadata"}
    values["rollout"] |= {"groups_per_step": 4, "group_size": 4}
    values["train"] |= {"num_steps": 2, "lr_warmup_steps": 0}
    values["observe"] = {}
    run = start_run(values, tmp_path / "out")
    runs.append(run)
    assert run.finish(800) == 0, run.text()
    rows = [row for row in run.rows() if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 1 <= row["user/environment_turns"] <= 8 and row["rollout/responses"] == 16
        assert 0 < row["ledger/trained_tokens"] < row["rollout/response_len_mean"] * 16, (
            "what it is told is not trained"
        )
        assert row["replay/coverage"] == 1.0
        assert row["ledger/generated_tokens"] >= row["ledger/trained_tokens"]
    assert not run.left_over(), "environments' processes end with the run"
