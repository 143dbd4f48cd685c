"""scripts/quickstart.sh --gpu: what it would install and run on one GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout whose installation does nothing and whose commands write their arguments to `calls`, a line each."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/quickstart.sh", tmp_path / "scripts")
    shutil.copytree(ROOT / "scripts/lib", tmp_path / "scripts/lib")
    fake = f'#!/usr/bin/env bash\nprintf \'%s\\n\' "$(basename "$0") $*" >>{tmp_path}/calls\n'
    for name in ("scripts/install.sh", "venv/bin/python", "venv/bin/mslime"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(fake)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(copy / "scripts/quickstart.sh"), "--venv", str(copy / "venv"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_one_gpu_is_shared_and_every_bit_is_compared(copy: Path) -> None:
    done = run(copy, "--gpu", "--out", "out", "--", "--sglang.attention-backend", "triton")
    assert done.returncode == 0, done.stderr
    calls = (copy / "calls").read_text().splitlines()
    install, task, sft, rl = calls[:4]
    assert install.startswith("install.sh --gpu ") and "--head-dim 64" in task
    assert "--cluster.device cuda" in sft and "colocated" not in sft
    assert rl.endswith("--sglang.attention-backend triton")
    # `mslime check` accepts what would be run, with the task that would be made
    subprocess.run(
        [sys.executable, *task.split()[1:4], str(copy / "out/task"), "--head-dim", "64"],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    assert json.loads((copy / "out/task/model/config.json").read_text())["head_dim"] == 64
    flags = rl.replace("mslime train", "").replace("out/", f"{copy}/out/").replace("sft/hf", "task/model")
    flags = [*flags.split(" --data.eval-sets ")[0].split(), "--data.eval-sets", "[]"]
    checked = subprocess.run(
        [sys.executable, "-m", "mslime", "check", *flags],
        cwd=ROOT, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr
    for line in ("by handles", "every bit of each sync", "max_staleness 0", "1 ranks, one rank"):
        assert line in checked.stdout, checked.stdout


def test_pipeline_stages_need_a_second_rank(copy: Path) -> None:
    done = run(copy, "--gpu", "--pp")
    assert done.returncode == 1 and "--pp needs two ranks, and --gpu has one" in done.stderr
    assert not (copy / "calls").exists()
