"""scripts/on_gpu.sh: it goes on where it was cut off, and its table holds what it has so far."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE = f"""#!/usr/bin/env bash
case "$*" in *on_gpu_table.py*) exec {sys.executable} "$@" ;; esac
echo "$*" >>"$CALLS"
echo '{{"model_tflops": 250.0}}'
case "$*" in *"$FAILS"*) exit 3 ;; esac
"""


@pytest.fixture
def fake_venv(tmp_path: Path) -> Path:
    """An environment whose commands do nothing, and fail if their arguments contain $FAILS."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    for name in ("python", "mslime"):
        file = tmp_path / "venv" / "bin" / name
        file.write_text(FAKE)
        file.chmod(0o755)
    return tmp_path / "venv"


def run(
    venv: Path, out: Path, *arguments: str, fails: str = "nothing"
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The finished command, and the commands that it began."""
    calls = out.parent / "calls"
    calls.write_text("")
    command = [
        "bash",
        str(ROOT / "scripts/on_gpu.sh"),
        "--device",
        "cpu",
        "--venv",
        str(venv),
        "--out",
        str(out),
        *arguments,
    ]
    done = subprocess.run(
        command, env=os.environ | {"CALLS": str(calls), "FAILS": fails}, capture_output=True, text=True, check=False
    )
    return done, calls.read_text().splitlines()


def test_only_steps_that_did_not_succeed_are_run_again(fake_venv: Path, tmp_path: Path) -> None:
    out, three = tmp_path / "out", ("--only", "doctor", "--only", "step", "--only", "kernels")
    done, calls = run(fake_venv, out, *three, fails="log_probs")
    assert done.returncode == 1 and [c.split()[0] for c in calls] == [
        "doctor",
        "benchmarks/on_gpu.py",
        "benchmarks/log_probs.py",
    ]
    table = (out / "table.md").read_text()
    assert (
        "| step | succeeded | " in table
        and "| kernels | failed with status 3 |" in table
        and "| run | not run |" in table
    )
    assert "of model operations in bf16 | 250 | >= 200 | yes |" in table
    assert [json.loads(line)["step"] for line in (out / "figures.jsonl").read_text().splitlines()] == [
        "doctor",
        "step",
        "kernels",
    ]
    done, calls = run(fake_venv, out, *three)
    assert done.returncode == 0 and [c.split()[0] for c in calls] == ["benchmarks/log_probs.py"]
    done, calls = run(fake_venv, out, *three, "--fresh")
    assert done.returncode == 0 and len(calls) == 3


def test_a_step_for_which_no_time_is_left_is_not_begun(fake_venv: Path, tmp_path: Path) -> None:
    done, calls = run(fake_venv, tmp_path / "out", "--seconds", "19", "--only", "doctor")
    assert done.returncode == 1 and calls == [] and "doctor: not begun, no time is left" in done.stdout


def test_results_of_other_options_are_not_continued(fake_venv: Path, tmp_path: Path) -> None:
    run(fake_venv, tmp_path / "out", "--only", "doctor")
    done, calls = run(fake_venv, tmp_path / "out", "--only", "kernels", "--sglang", "attention_backend=triton")
    assert done.returncode == 1 and calls == [] and "has results of other code, or of other options" in done.stderr


def test_gpu_tests_that_passed_are_left_out(fake_venv: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(fake_venv, out, "--only", "tests", fails="pytest")
    (out / "tests.log").write_text("[gw1] [ 10%] PASSED tests/gpu/test_a.py::test_b[qwen3, tied] \n")
    done, calls = run(fake_venv, out, "--only", "tests")
    assert done.returncode == 0 and len(calls) == 1
    assert (out / "passed").read_text().strip() == "--deselect=tests/gpu/test_a.py::test_b[qwen3, tied]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "docter"], "--only docter: no such step"),
        (["--seconds", "ten"], "--seconds is ten"),
        (["--sglang", "triton"], "--sglang triton: not NAME=VALUE"),
        (["--device", "tpu"], "--device is tpu"),
        (["--venv"], "--venv needs a value"),
        (["--venv", "/no/such"], "no environment in /no/such"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, fake_venv: Path, tmp_path: Path) -> None:
    done, calls = run(fake_venv, tmp_path / "out", *arguments)
    assert done.returncode == 1 and message in done.stderr and calls == []


def test_the_table_holds_every_figure(tmp_path: Path) -> None:
    """Made-up results of all steps; two of them miss their goals, one was cut off in the middle of a line."""
    for step in ("doctor", "tests", "quickstart", "quickstart_off", "run", "kernels"):
        (tmp_path / f"{step}.status").write_text("0 50\n")
    (tmp_path / "step.status").write_text("124 180\n")
    (tmp_path / "tests.log").write_text(
        "[gw0] [ 50%] FAILED tests/gpu/test_a.py::test_b[x, y] \n[gw1] [ 60%] PASSED tests/gpu/test_a.py::test_c \n"
        "[gw0] [ 90%] PASSED tests/gpu/test_a.py::test_b[x, y] \nSKIPPED tests/gpu/test_a.py::test_d\n"
    )
    row = {"mismatch/kl": 2e-5, "weights/bytes": 1e6, "perf/step_seconds": 2.0}
    for run_name in ("rl", "rl_off"):
        (tmp_path / "quickstart" / run_name).mkdir(parents=True)
        (tmp_path / "quickstart" / run_name / "metrics.jsonl").write_text(
            json.dumps({"step": 0, "eval/held_out/accuracy": 0.15}) + "\n" + json.dumps({"step": 1} | row) + "\n"
            + json.dumps({"step": 2, "eval/held_out/accuracy": 0.95} | row) + "\n" + '{"step": 3, "mis'
        )  # fmt: skip
    (tmp_path / "run.log").write_text(
        '     1 s  part r3\n{"mismatch_kl_r3": 4e-4, "replay_coverage": 1.0, "ratio_handles": 1.7}\n'
        '{"mismatch_kl_off": 1.2e-3}\n{"device": "NVIDIA H200", "ratio_engine": 0.95}\n'
    )
    (tmp_path / "step.log").write_text('{"model_tflops": 180.0, "ratio_memory": 1.02}\n{"ratio_fp8_bl')
    seconds = {"forward": 2.0, "backward": 4.0, "forward_floor": 1.6, "backward_floor": 3.2}
    figures = [{"dtype": "bf16", "way": way} | seconds for way in ("materialised", "fused, reused")]
    (tmp_path / "kernels.json").write_text(json.dumps({"figures": figures}))
    subprocess.run([sys.executable, str(ROOT / "scripts/lib/on_gpu_table.py"), str(tmp_path)], check=True)
    table = (tmp_path / "table.md").read_text().splitlines()
    for line in (
        "NVIDIA H200, commit unknown",
        "| step | cut off by its time limit | 180 |",
        "| GPU tests | 2 passed, 0 failed, 1 skipped | all pass | yes |",
        "| quickstart, held-out accuracy | 15.0% -> 95.0% | >= 90% | yes |",
        "| quickstart, syncs with every bit equal | 2 | all of its steps | yes |",
        "| quickstart, mismatch KL with / without R3 | 2.0e-05 / 2.0e-05 |  |  |",
        "| mismatch KL with R3, widths of Qwen3-30B-A3B | 4.0e-04 | <= 5e-4 | yes |",
        "| mismatch KL without R3 / with | 3.0 | >= 2 | yes |",
        "| replayed (token, layer) pairs | 100.00% | >= 100.00% | yes |",
        "| training step, TFLOP/s of model operations in bf16 | 180 | >= 200 | **no** |",
        "| FP8 step, bf16 over it (best recipe) | not measured | >= 1.20 |  |",
        "| log-probs and entropy, forward, bf16: floor / time | 0.80 | >= 0.75 | yes |",
        "| sync by handles / copying its bytes twice | 1.70 | <= 1.50 | **no** |",
        "| engine, tokens/s with log-probs and routes / without | 0.95 | >= 0.90 | yes |",
        "| memory of a step / plan | 1.020 | 0.95 to 1.05 | yes |",
    ):
        assert line in table, line
