"""A run whose engines die one after the other: it goes on with those that are left, as long as there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mslime.observe.rows import by_step
from tests.e2e.harness import Run, start_run
from tests.e2e.test_managers import GROUPS, assert_books_hold
from tests.e2e.test_run import START_S, STEP_S, prompts, saved_step, settings

__all__ = ["prompts"]


@pytest.mark.timeout(900)
def test_a_run_goes_on_without_an_engine_that_died_and_ends_with_the_last_one(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    rollout = {"max_staleness": 1, "max_response_tokens": 96, "groups_per_step": GROUPS}
    sections = {"train": {"num_steps": 500}, "checkpoint": {"save_every": 0}, "weights": {"verify": "always"}}
    sglang = {"num_engines": 2, "max_total_tokens": 4096}
    run = start_run(settings(tiny_qwen3_moe, prompts, rollout=rollout, sglang=sglang, **sections), tmp_path)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 1, START_S + STEP_S)
    kill_engine(run, 1)
    before = len(run.rows())
    run.wait_for(lambda: len(run.rows()) >= before + 4, 5 * STEP_S)
    kill_engine(run, 0)
    assert run.finish(120) == 2, run.text()

    rows = by_step(run.rows())
    counts = [int(row["weights/engines"]) for row in rows]
    assert counts[0] == 2 and counts[-1] == 1 and counts == sorted(counts, reverse=True)
    assert "engine1 is gone" in run.text() and "1 of 2 engines go on" in run.text()
    assert "engine0" in run.text() and "engine0.log" in run.text()
    assert all(row["staleness/max"] <= 1 for row in rows)
    assert saved_step(run) == len(rows)
    assert_books_hold(run)
    assert run.left_over() == []


def kill_engine(run: Run, index: int) -> None:
    """A server with its children, as the kernel does when memory is short."""
    server = run.find(f"--served-model-name engine{index}-")
    for process in (*server.children(recursive=True), server):
        process.kill()
