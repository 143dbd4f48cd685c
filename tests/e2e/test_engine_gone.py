"""A run whose engines die one after the other: it goes on with those that are left, as long as there is one."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Any

import pytest

from mslime.observe.rows import by_step
from mslime.observe.timeline import read_spans
from tests.e2e.harness import Run, start_run
from tests.e2e.test_managers import GROUPS, assert_books_hold
from tests.e2e.test_run import START_S, STEP_S, prompts, saved_step, settings
from tests.fixtures.killing_transport import VARIABLE, kill_family

__all__ = ["prompts"]


def start(model: Path, rows: Path, directory: Path, restarts: int = 3, **weights: Any) -> Run:
    """A run of two engines that compares every sync and never ends by itself."""
    rollout = {"max_staleness": 1, "on_stale": "mask", "max_response_tokens": 96, "groups_per_step": GROUPS}
    sglang = {"num_engines": 2, "max_total_tokens": 4096, "restarts": restarts}
    sections = {"train": {"num_steps": 500}, "checkpoint": {"save_every": 0}}
    weights = {"verify": "always", **weights}
    return start_run(settings(model, rows, rollout=rollout, sglang=sglang, weights=weights, **sections), directory)


def kill_engine(run: Run, index: int) -> None:
    """One that is of this run."""
    kill_family(run.find(f"--served-model-name engine{index}-"))


def check_end(run: Run) -> None:
    """The run ended without engines, and lost nothing. What an engine's death made too old was masked, not trained."""
    assert run.finish(120) == 2, run.text()
    assert "engine0.log" in run.text() or "engine1.log" in run.text()
    rows = by_step(run.rows())
    assert all(row["staleness/max"] <= 1 for row in rows)
    assert saved_step(run) == len(rows)
    assert_books_hold(run)
    assert run.left_over() == []


def engines_of(run: Run) -> list[int]:
    """How many engines took the weights of each step."""
    return [int(row["weights/engines"]) for row in by_step(run.rows()) if "weights/engines" in row]


@pytest.mark.timeout(900)
def test_an_engine_that_dies_between_two_buckets_leaves_the_others_on_whole_weights(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken sync is of version 2. That the engine that is left has whole weights is compared bit for bit."""
    monkeypatch.setenv(VARIABLE, f"1/3/1/{uuid.uuid4()}")
    transport = "tests.fixtures.killing_transport:FakeAccident"
    run = start(tiny_qwen3_moe, prompts, tmp_path, transport=transport, bucket_mib=0.25)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 3, START_S + 5 * STEP_S)
    assert "version 2: " in run.text() and "equal the trainer's, bit for bit" in run.text()
    assert run.rows()[0]["weights/buckets"] > 2 and engines_of(run)[:3] == [2, 1, 1]
    assert re.search(r"engine1 is gone \(.*\): it is started again", run.text())
    run.wait_for(lambda: engines_of(run)[-1] == 2, START_S)
    back = len(run.rows())
    run.wait_for(lambda: len(run.rows()) >= back + 2, 3 * STEP_S)
    assert "engine1 is back at http" in run.text() and "2 of 2 engines take the weights" in run.text()
    asked = {span.step for span in read_spans(run.directory) if (span.lane, span.name) == ("engine1", "generate")}
    assert max(asked) > back, "it generates again"
    kill_engine(run, 0)
    kill_engine(run, 1)
    check_end(run)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_an_engine_that_dies_while_it_generates_is_left_out_of_the_next_sync(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    run = start(tiny_qwen3_moe, prompts, tmp_path, restarts=0)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 1, START_S + STEP_S)
    kill_engine(run, 1)
    before = len(run.rows())
    run.wait_for(lambda: len(run.rows()) >= before + 4, 5 * STEP_S)
    assert engines_of(run)[-1] == 1 and "engine1 is gone" in run.text() and "it is not started again" in run.text()
    kill_engine(run, 0)
    check_end(run)
