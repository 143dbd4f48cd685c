"""`mslime doctor --full` starts a real trainer and a real engine, and leaves no process behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT


@pytest.mark.nightly
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_trainer_and_engine_agree_before_and_after_a_sync() -> None:
    with tempfile.TemporaryDirectory(prefix="d") as scratch:  # short: Ray's sockets lie below it
        done = subprocess.run(
            [sys.executable, "-m", "mslime", "doctor", "--full", "--only", "step", "--json"],
            capture_output=True, text=True, timeout=800, cwd=ROOT, check=False, env={**os.environ, "TMPDIR": scratch},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert not list(Path(scratch).glob("mslime-doctor-*"))
    [check] = json.loads(done.stdout)["checks"]
    run, sync, before, after = check["findings"]
    assert "trainer, engine and 2 steps" in run["found"] and "bit for bit" in sync["found"]
    for finding in (before, after):
        # Two programs in float32: not the same numbers, and far nearer than 24 bits of a log-prob of a few nats.
        assert 0 < finding["values"]["kl"] < 1e-9 and 0 < finding["values"]["abs_max"] < 1e-4, finding
