"""Every script under benchmarks/ runs, at sizes too small for meaningful figures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = {
    "adapters_together": "--adapters 2 --micro-batches 1 --tokens 32 --rounds 1",
    "convert": "--layers 1 --experts 4 --hidden 128 --ffn 64 --rounds 1",
    "delta_sync": "--changed 0.01 --rounds 1 --hidden 64 --layers 1 --experts 4",
    "expert_balance": "--ep 2 --sequences 8 --longest 32 --budget 64 --rounds 1",
    "hidden_log_probs": "--rows 16 --hidden 16 --vocab 64 --rounds 1",
    "log_probs": "--rows 16 --vocab 64 --chunk 8 --rounds 1",
    "lora_sync": "--hidden 64 --layers 1 --experts 4 --rounds 1 --targets attention",
    "manager": "--engines 2 --requests 20 --tokens 2000 --in-flight 8 --repeats 1 --cases short",
    "on_gpu": "--small --device cpu --layers 1 --tokens 256 --steps 1 --fp8",
    "on_gpu_run": "--small --device cpu --layers 1 --steps 3 --requests 8 --tokens 16",
    "sessions": "--sessions 2 --rate 10 --seconds 1 --turns 2",
    "train_step": "--short 4 16 --long 2 32 --steps 1",
    "two_senders": "--rounds 1",
    "weight_sync": "--layouts tp1ep2 --rounds 1 --bucket-mib 4",
}
NOT_HERE = {
    "algorithms": "whole runs; tests/unit/test_benchmark_algorithms.py has its parts",
    "chaos_engines": "a run with accidents; tests/e2e/test_engine_gone.py has some of them",
    "colocated_memory": "an engine and a trainer; tests/engines/test_colocated_engine.py",
    "engine_lost": "a run of minutes; tests/e2e/test_engine_gone.py",
    "engine_start": "three starts of an engine",
    "probe": "a whole run",
    "quantised_engines": "whole runs; tests/unit/test_benchmark_quantised.py has its parts",
    "relay_lanes": "needs root and network namespaces",
    "step_overlap": "runs of a RUN.yaml that is given",
    "supports": "a MODEL that is given",
}


def test_every_script_has_small_sizes_or_a_reason() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert scripts == SMALL.keys() | NOT_HERE.keys() and not SMALL.keys() & NOT_HERE.keys()


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", SMALL)
def test_a_benchmark_runs_at_small_sizes(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), *SMALL[script].split()],
        capture_output=True, text=True, timeout=580, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip(), "it prints figures"
