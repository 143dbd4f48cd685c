"""The launch scripts: each passes check and plan on its model at full size, and reports a missing variable."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mslime.config.cluster import check_machines
from mslime.config.errors import ConfigError
from mslime.config.loader import load_config
from mslime.config.warnings import warnings
from tests.fixtures.launch_scripts import (
    MODELS,
    ROOT,
    Launch,
    calls,
    flatten,
    launch,
    make_fake_mslime,
    resolved,
    run_script,
    snapshot,
)
from tests.fixtures.marks import MODELS as CHOSEN
from tests.fixtures.marks import nightly_except

NAMED = [
    "deepseek-r1", "deepseek-v3", "glm4.5-355B-A32B", "glm4.5-air-106B-A12B", "glm4.7-355B-A32B", "gpt-oss-20b",
    "kimi-k2",
    "deepseek-r1-128gpus", "deepseek-v3-128gpus", "glm4.5-355B-A32B-64gpus", "qwen3-30B-A3B-8gpus",
    "llama3.1-8B", "minimax-m2", "mixtral-8x7B", "moonlight-16B-A3B", "olmoe-1B-7B", "qwen2.5-0.5B", "qwen3-235B-A22B",
    "qwen3-30B-A3B", "qwen3-4B", "qwen3-next-80B-A3B", "qwen3.5-35B-A3B",
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launch")


@pytest.fixture(scope="module")
def launched(root: Path) -> dict[str, Launch]:
    return {}


def launch_once(launched: dict[str, Launch], model: str, root: Path) -> Launch:
    if model not in launched:
        launched[model] = launch(model, root)
    return launched[model]


def test_there_is_a_script_for_every_model_that_is_promised() -> None:
    assert sorted(NAMED) == MODELS
    assert sorted(path.stem for path in (ROOT / "scripts" / "models").glob("*.sh")) == MODELS


@pytest.mark.parametrize("model", nightly_except(CHOSEN, NAMED))
@pytest.mark.slow
def test_a_launch_script_passes_check_and_fits_by_plan(model: str, root: Path, launched: dict[str, Launch]) -> None:
    plan = launch_once(launched, model, root).plan
    assert plan.fits, plan.problems
    assert max(stage.memory.peak for stage in plan.stages) < 0.9 * plan.gpu_bytes, "no room for what is not foreseen"
    assert plan.verdict == "fits" and plan.fullest < 0.9 * plan.gpu_bytes
    assert plan.host_usable is None or plan.host_share < 0.9
    assert plan.engine is not None and plan.engine.tokens >= 16 * 8192, "an engine that runs few requests at once"


@pytest.mark.parametrize("model", nightly_except(CHOSEN, NAMED))
def test_a_launch_script_takes_mslimes_own_advice(model: str, root: Path, launched: dict[str, Launch]) -> None:
    assert warnings(launch_once(launched, model, root).config) == []


@pytest.mark.parametrize("model", nightly_except(CHOSEN, NAMED))
def test_the_resolved_configuration_is_the_one_of_the_snapshot(
    model: str, root: Path, launched: dict[str, Launch]
) -> None:
    found = flatten(resolved(launch_once(launched, model, root), root))
    found = {key: value for key, value in found.items() if value is not None}
    assert found == snapshot(model), "renew: python -m tests.fixtures.launch_scripts"


@pytest.mark.parametrize("model", nightly_except(CHOSEN, NAMED))
def test_a_script_names_the_cluster_that_it_plans_for(model: str, root: Path, launched: dict[str, Launch]) -> None:
    config, plan = launch_once(launched, model, root).config, launch_once(launched, model, root).plan
    first = (ROOT / "scripts" / "models" / f"{model}.sh").read_text().splitlines()[0]
    if plan.nodes > 1:
        assert f" {plan.nodes} nodes of {config.cluster.gpus_per_node} " in first
    assert re.search(rf"H[12]00 {config.cluster.gpu_memory_gb:g} GB", first)


@pytest.mark.parametrize(("model", "gpus"), [
    ("qwen3-30B-A3B-8gpus", 8), ("deepseek-v3-128gpus", 128),
    pytest.param("glm4.5-355B-A32B-64gpus", 64, marks=pytest.mark.nightly),
    pytest.param("deepseek-r1-128gpus", 128, marks=pytest.mark.nightly),
])  # fmt: skip
def test_shared_gpus_are_as_many_as_the_script_says_and_experts_stay_on_a_machine(
    model: str, gpus: int, root: Path, launched: dict[str, Launch]
) -> None:
    config, plan = launch_once(launched, model, root).config, launch_once(launched, model, root).plan
    assert config.colocated and plan.trainer_gpus == plan.engine_gpus == gpus == 8 * plan.nodes
    assert plan.gpu_bytes < 80 * 2**30 and plan.layout.expert_size <= 8 and not plan.remarks


def test_a_run_is_checked_then_planned_then_started(tmp_path: Path) -> None:
    variables = {"MODEL": "m", "PROMPTS": "p.jsonl"}
    done = run_script("qwen3-4B", make_fake_mslime(tmp_path), "--train.lr", "2e-6", **variables)
    check, plan, train = calls(done)
    assert (check[0], plan[0], train[0]) == ("check", "plan", "train")
    assert check[1:] == plan[1:] == train[1:] and check[-2:] == ["--train.lr", "2e-6"]


@pytest.mark.parametrize(("restarts", "starts", "in_file"), [("1", 2, True), ("0", 1, False)])
def test_a_run_that_fails_after_a_step_is_started_again(
    tmp_path: Path, restarts: str, starts: int, in_file: bool
) -> None:
    """The run's directory comes from RUN.yaml, or from the later one of two flags."""
    run = tmp_path / "run.yaml"
    run.write_text(f"output_dir: {tmp_path}\n")
    flags = (str(run), "--name=a") if in_file else ("--output-dir=there", "--name", "a", "--output_dir", str(tmp_path))
    variables = {"MODEL": "m", "PROMPTS": "p.jsonl", "FAKE_METRICS": str(tmp_path / "a" / "metrics.jsonl")}
    done = run_script("qwen3-4B", make_fake_mslime(tmp_path), *flags, **variables, RESTARTS=restarts)
    assert done.returncode == 2 and [call[0] for call in calls(done)] == ["check", "plan", *["train"] * starts]


@pytest.mark.parametrize(("plan", "status", "after"), [("1", 1, []), ("3", 0, ["train"])], ids=["no", "tightly"])
def test_a_run_that_does_not_fit_is_not_started(tmp_path: Path, plan: str, status: int, after: list[str]) -> None:
    variables = {"MODEL": "m", "PROMPTS": "p.jsonl", "FAKE_PLAN_STATUS": plan}
    done = run_script("qwen3-4B", make_fake_mslime(tmp_path), **variables)
    assert done.returncode == status and [call[0] for call in calls(done)] == ["check", "plan", *after]


def test_a_run_on_several_machines_takes_the_ray_cluster_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_script("qwen3-30B-A3B", make_fake_mslime(tmp_path), MODEL="m", PROMPTS="p", CHECK_ONLY="1")
    flags = calls(done)[0][1:]
    config = load_config(None, flags)
    with pytest.raises(ConfigError, match=r"24 GPUs \(16 trainer, 8 engines\)") as caught:
        check_machines(config.cluster, config.claims())
    assert "ray start" in caught.value.hint
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    config = load_config(None, flags)
    check_machines(config.cluster, config.claims())
    assert config.cluster.ray_address == "10.0.0.1:6379"


@pytest.mark.parametrize(("model", "given", "named"), [
    ("qwen3-4B", {"PROMPTS": "p"}, "MODEL is not set"), ("qwen3-4B", {"MODEL": "m"}, "PROMPTS is not set"),
])  # fmt: skip
def test_what_is_missing_is_named_with_a_way_out(tmp_path: Path, model: str, given: dict[str, str], named: str) -> None:
    done = run_script(model, make_fake_mslime(tmp_path), **given)
    assert done.returncode == 1 and named in done.stderr and "hint" in done.stderr and not done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The launch scripts alone, away from the real checkout and its environment."""
    shutil.copytree(ROOT / "scripts", tmp_path / "checkout/scripts")
    return tmp_path / "checkout"


def launch_without_a_path(checkout: Path) -> subprocess.CompletedProcess[str]:
    command = ["/bin/bash", str(checkout / "scripts/run-qwen3-4B.sh")]
    given = {"PATH": "/usr/bin:/bin", "MODEL": "m", "PROMPTS": "p", "CHECK_ONLY": "1"}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=30, check=False)


def test_without_an_active_environment_the_one_of_the_checkout_is_used(checkout: Path) -> None:
    make_fake_mslime(checkout / ".venv/bin")
    done = launch_without_a_path(checkout)
    assert done.returncode == 0, done.stderr
    assert [call[0] for call in calls(done)] == ["check"]


def test_without_any_environment_the_installation_is_named_as_the_way_out(checkout: Path) -> None:
    done = launch_without_a_path(checkout)
    assert done.returncode == 1 and "command not found" not in done.stderr and not done.stdout
    assert "mslime was not found" in done.stderr and "hint: bash scripts/install.sh" in done.stderr
