"""The `mslime` command as a shell starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.tiny_models import make_tiny_qwen3_moe

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_function_in_the_directory_of_the_start_is_found(tmp_path: Path) -> None:
    """A console script has its own directory on sys.path, and not the one that it was started in."""
    model = make_tiny_qwen3_moe(tmp_path / "model")
    (tmp_path / "mine.py").write_text("def tell(record):\n    return None\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    # As `mslime` is installed: nothing but its own directory, the environment's and mslime are on the path.
    script = tmp_path / "bin/mslime"
    script.parent.mkdir()
    script.write_text(f"import sys\nsys.path.append({str(ROOT)!r})\nfrom mslime.cli import main\nsys.exit(main())\n")
    said = subprocess.run(
        [sys.executable, str(script), "check", "--model.path", str(model), "--data.prompts", "prompts.jsonl",
         "--cluster.device", "cpu", "--rollout.max-response-tokens", "8", "--hooks.step", "mine:tell"],
        cwd=tmp_path, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
