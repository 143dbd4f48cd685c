"""Recipes of tinker-cookbook, unmodified, against `mslime serve` on the tiny model.

They name a model and a data set of the Hugging Face Hub. Here, both are directories of these names in the recipe's
working directory: `transformers` and `datasets` prefer directories.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_serve import settings, started

pytest.importorskip("tinker")
pytestmark = [pytest.mark.timeout(900), pytest.mark.nightly]
BESIDE = Path(os.environ.get("MSLIME_TEST_COOKBOOK", Path(sys.prefix) / "cookbook"))
MODEL = "Qwen/Qwen3-8B-Base"


def recipe(name: str, directory: Path, key: str, *options: str) -> str:
    """Output of a recipe, which must succeed."""
    return beside_cookbook(directory, key, "-m", f"tinker_cookbook.recipes.{name}", *options)


def beside_cookbook(directory: Path, key: str, *command: str) -> str:
    """Output of Python with the cookbook in its path; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(BESIDE), "TINKER_API_KEY": key, "HF_HUB_OFFLINE": "1",
                   "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(directory / "hub")}  # fmt: skip
    found = subprocess.run(
        [sys.executable, *command], cwd=directory, env=environment,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-4000:]
    return found.stdout


def need(package: str) -> None:
    if not (BESIDE / package).is_dir():
        pytest.skip(f"there is no {package} in {BESIDE}: bash scripts/install.sh --dev installs it")


def rows_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_the_supervised_loop_learns_and_goes_on_from_its_state(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    need("tinker_cookbook")
    (tmp_path / "Qwen").mkdir()
    (tmp_path / MODEL).symlink_to(tiny_qwen3_moe)
    data = tmp_path / "HuggingFaceH4" / "no_robots"
    data.mkdir(parents=True)
    turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two three four"}]
    (data / "train.jsonl").write_text("".join(json.dumps({"messages": turns, "id": i}) + "\n" for i in range(24)))
    server = started(settings(tiny_qwen3_moe, model_name=MODEL), tmp_path / "serve")
    try:
        options = [f"base_url={server.url}", f"model_name={MODEL}", f"log_path={tmp_path / 'log'}", "batch_size=4",
                   "lora_rank=4", "learning_rate=0.01", "max_length=256", "save_every=2"]  # fmt: skip
        recipe("sl_loop", tmp_path, server.key, *options, "max_steps=3")
        first = rows_of(tmp_path / "log")
        assert [row["step"] for row in first] == [0, 1, 2]
        nll = [row["train_mean_nll"] for row in first]
        assert nll[2] < nll[1] < nll[0], nll
        assert all(row["grad_norm:mean"] > 0 for row in first)
        saved = [json.loads(line) for line in (tmp_path / "log" / "checkpoints.jsonl").read_text().splitlines()]
        assert [each["name"] for each in saved] == ["000002", "final"]
        for path in (saved[0]["state_path"], saved[1]["state_path"], saved[1]["sampler_path"]):
            model, kind, name = path.removeprefix("tinker://").split("/")
            assert (server.run.directory / "serve" / model.replace(":", "-") / kind / name / "saved.json").is_file()
        # As if it had been interrupted after the first of them: it goes on from there, with the same numbers.
        (tmp_path / "log" / "checkpoints.jsonl").write_text(json.dumps(saved[0]) + "\n")
        recipe("sl_loop", tmp_path, server.key, *options, "max_steps=4")
        again = rows_of(tmp_path / "log")[3:]
        assert [row["step"] for row in again] == [2, 3]
        assert again[0]["train_mean_nll"] == nll[2] > again[1]["train_mean_nll"]
    finally:
        server.run.stop()


def test_the_reinforcement_loop_goes_on_from_a_warm_adapter_and_learns(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    """Half of the answers are right at first: an adapter was trained so, and the recipe resumes from its state. The
    right answer is the same for all questions, so a few steps suffice to learn it."""
    need("tinker_cookbook")
    need("pylatexenc")
    (tmp_path / "Qwen").mkdir()
    (tmp_path / MODEL).symlink_to(tiny_qwen3_moe)
    data = tmp_path / "openai" / "gsm8k"
    (data / "main").mkdir(parents=True)
    rows = [{"question": f"What is {i} + 2 - {i}?", "answer": "It is two.\n#### 2"} for i in range(64)]
    (data / "main" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "configs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n"
    (data / "README.md").write_text(f"---\n{files}---\n")
    server = started(settings(tiny_qwen3_moe, model_name=MODEL), tmp_path / "serve")
    try:
        warm = Path(__file__).with_name("warm_boxed.py")
        path = beside_cookbook(tmp_path, server.key, str(warm), server.url, MODEL, "140").split()[-1]
        log = tmp_path / "log"
        log.mkdir()
        (log / "checkpoints.jsonl").write_text(json.dumps({"name": "warm", "batch": 0, "state_path": path}) + "\n")
        options = [f"base_url={server.url}", f"model_name={MODEL}", f"log_path={log}", "batch_size=8", "group_size=16",
                   "learning_rate=0.002", "max_tokens=16", "loss_fn=importance_sampling", "save_every=4"]  # fmt: skip
        recipe("rl_loop", tmp_path, server.key, *options, "max_steps=6")
        found = rows_of(log)
        assert [row["progress/batch"] for row in found] == list(range(6))
        rewards = [row["reward/total"] for row in found]
        assert 0.1 < rewards[0] < 0.9, rewards
        assert max(rewards[2:]) > rewards[0] + 0.1, rewards
        assert found[0]["grad_norm:mean"] > 0
        saved = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
        assert [each["name"] for each in saved] == ["warm", "000004", "final"] and saved[-1]["sampler_path"]
    finally:
        server.run.stop()
