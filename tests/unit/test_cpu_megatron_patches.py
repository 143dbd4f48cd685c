"""The CPU patches of megatron-core: each is needed, all together suffice, and other versions are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mslime.backends.cpu import megatron_patches
from mslime.config.errors import TrainerError
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

HOW_IT_BREAKS = {
    "no_compile": "jit_fuser compiles", "current_device": "CUDA", "factories": "CUDA", "synchronize": "CUDA",
    "streams": "CUDA", "rng_device": "CUDA", "tensor_cuda": "CUDA", "tensor_type": "cuda", "uneven_all_gather": "Error",
    "rng_state": "CUDA", "te_general_gemm": "te_general_gemm", "splits_on_cpu": "Error",
    "norm_sequence_parallel": "sequence parallel not supported",
    "zero_centred_norm": "zero_centered_gamma not supported", "no_flash_mla": "libcuda",
    "gated_delta_rule": "FLA is not installed", "mla_linear": "Error", "expert_bias_in_place": "modified inplace",
    "adam_state_before_load": "Error", "adam_own_step": "share one step",
}  # fmt: skip


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How every scenario ended, from one subprocess."""
    work = tmp_path_factory.mktemp("patches")
    make_tiny_qwen3_moe(work / "model")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.cpu_patch_scenarios", str(work)],
        capture_output=True, text=True, timeout=300, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
def test_every_scenario_works_with_every_patch(verdicts: dict[str, str]) -> None:
    assert verdicts["all"] == "ok", verdicts["all"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", [patch.name for patch in megatron_patches.PATCHES])
def test_without_the_patch_megatron_core_breaks(name: str, verdicts: dict[str, str]) -> None:
    assert verdicts[name] != "ok", f"{name} is not needed"
    assert HOW_IT_BREAKS[name] in verdicts[name], verdicts[name]


def test_every_patch_says_why() -> None:
    assert all(len(patch.reason) > 20 for patch in megatron_patches.PATCHES)


def test_another_version_of_megatron_core_is_refused() -> None:
    with pytest.raises(TrainerError, match=r"0\.17\.0.*\n.*pip install megatron-core==0\.16\.1"):
        megatron_patches._refuse_other_versions("0.17.0")
