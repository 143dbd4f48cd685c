"""`convert.engine` against the layers of SGLang themselves, on up to 16 ranks: more than there are key heads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_cpu_sglang_patches import ENV


@pytest.fixture(scope="module")
def differing() -> dict[str, dict[str, list[int]]]:
    """In a process of its own, since SGLang changes the one that imports it."""
    command = [sys.executable, str(Path(__file__).with_name("engine_layers.py"))]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("layer", ["qkv", "gate and up", "rows", "vocabulary"])
def test_every_rank_holds_what_the_layer_of_the_engine_holds(
    layer: str, differing: dict[str, dict[str, list[int]]]
) -> None:
    assert differing[layer] == {"1": [], "2": [], "4": [], "8": [], "16": []}
