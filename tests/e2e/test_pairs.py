"""A run with a real engine pair: one SGLang server prefills, another decodes, and the cache is sent over TCP.

Additional requirements: `pip install --no-deps mooncake-transfer-engine-non-cuda prometheus_client`, and the operating
system's library libibverbs1, which is loaded but not used.
"""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import pytest

from mslime.observe.names import by_step
from tests.e2e.harness import Run, start_run
from tests.e2e.test_engine_gone import check_books, engines_of, more_steps
from tests.e2e.test_managers import GROUPS
from tests.e2e.test_run import START_S, STEP_S, prompts, settings
from tests.fixtures.killing_transport import kill_family

__all__ = ["prompts"]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="the package that moves the cache is missing")
def test_a_pair_generates_what_is_replayed_takes_weights_and_comes_back_when_one_half_dies(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    """Routes of the prompt come from one half and those of the response from the other: all are replayed, and the
    trainer's log-probs equal the engine's. At each sync the bits of both halves are compared, and both give the same
    results for a text."""
    rollout = {"max_staleness": 1, "on_stale": "mask", "max_response_tokens": 96, "groups_per_step": GROUPS}
    sections = {
        "rollout": rollout, "train": {"num_steps": 500}, "checkpoint": {"save_every": 0},
        "sglang": {"num_engines": 1, "max_total_tokens": 8192, "pairs": "mooncake_tcp"},
        "weights": {"verify": "always"},
    }  # fmt: skip
    run = start_run(settings(tiny_qwen3_moe, prompts, **sections), tmp_path)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 3, START_S + 5 * STEP_S)
    assert all(f"version {v}: " in run.text() for v in range(3)) and "the trainer's, bit for bit" in run.text()
    for row in by_step(run.rows())[:3]:
        assert row["weights/probe_log_probs"] < 1e-4 and row["weights/probe_routes"] == 1.0
        assert row["replay/coverage"] + row.get("replay/too_old", 0.0) == pytest.approx(1.0)
    kill_family(run.find("--disaggregation-mode prefill"))
    run.wait_for(lambda: "engine0 is back at http" in run.text(), START_S)
    more_steps(run)
    assert "engine0 is gone" in run.text() and engines_of(run)[-1] == 1
    run.process.terminate()
    assert run.finish(120) == 128 + signal.SIGTERM, run.text()
    check_books(run)
