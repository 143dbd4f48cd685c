"""The served script with the real verifiers package, in a Python of its own, against a rollout's endpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mslime.data.sample import check_invariants
from mslime.network import free_port
from mslime.rollout import function_contract
from mslime.rollout.function_contract import check_rollout
from mslime_plugins.environments.verifiers import Verifiers

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tools/serve_verifiers.py"
ENV = {"taskset": {"id": "sums_of_two"}, "agent": {"harness": {"id": "sums_of_two"}, "runtime": {"type": "subprocess"}}}

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has verifiers: of MSLIME_VERIFIERS_PYTHON, else of a new environment."""
    if given := os.environ.get("MSLIME_VERIFIERS_PYTHON"):
        return Path(given)
    home = tmp_path_factory.mktemp("verifiers")
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    subprocess.run([home / "bin/pip", "install", "-q", "verifiers==0.4.0"], check=True)
    return home / "bin/python"


def surroundings() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "tests/fixtures/verifiers_env")}


@pytest.fixture(scope="module")
def url(python: Path) -> Iterator[str]:
    """Of a server that plays the sums."""
    port = free_port()
    process = subprocess.Popen(
        [python, SCRIPT, "serve", "--env", json.dumps(ENV), "--port", str(port)],
        env=surroundings(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert any(line.startswith("serving sums_of_two") for line in process.stdout), "the server ended"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


rollout = Verifiers("unknown")


def test_an_episode_of_the_package_is_trained_as_it_was_sampled(
    python: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_contract, "LONGEST_BLOCK_S", 60.0)
    command = [python, SCRIPT, "tasks", "--env", json.dumps(ENV), "--limit", "2"]
    made = subprocess.run(command, env=surroundings(), check=True, capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in made.splitlines()]
    assert [row["prompt"] for row in rows] == ["2 + 3?", "3 + 3?"]
    monkeypatch.setattr(rollout, "_urls", [url])
    for replies, reward in ((("4", "5"), 1.0), (("4", "7"), 0.0)):
        (sample,) = check_rollout(f"{__name__}:rollout", replies, metadata=rows[0]["metadata"])
        check_invariants(sample)
        assert "".join(chr(t) for t in sample.tokens[sample.loss_mask]) == f"{replies[0]}\0{replies[1]}\0"
        assert sample.reward == reward and sample.scores["user/turns"] == 2.0
