"""Compares docs/walk.md with the functions that a run really enters, and measures the page's coverage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT, Run, start_run
from tests.e2e.probe import RELAYS, VARIABLE, Entered, mentions, probed_copy, read, ways
from tests.unit.test_walk import Stop, all_stops


@pytest.fixture(scope="module")
def rows(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Entered]]:
    """Two steps of one rank and one engine, with routes replayed."""
    directory = tmp_path_factory.mktemp("walk")
    probed_copy(ROOT / "mslime", directory / "copy")
    (directory / "entered").mkdir()
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(24)))
    values = {
        "model": {"path": str(tiny_qwen3_moe)}, "data": {"prompts": [str(prompts)]}, "cluster": {"device": "cpu"},
        "rollout": {"groups_per_step": 4, "group_size": 4, "max_response_tokens": 24},
        "reward": {"kind": "custom", "function": "tests.e2e.rewards:even_tokens"},
        "train": {"num_steps": 2, "lr": 1e-3}, "weights": {"verify": "always"},
        "checkpoint": {"save_every": 1, "save_hf": False}, "algorithm": {"old_log_probs": "always"},
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(directory / "entered"))
        run: Run = start_run(values, directory, package=directory / "copy")
    try:
        assert run.finish(600) == 0, run.text()
    finally:
        run.stop()
    yield read(directory / "entered")


@pytest.mark.timeout(900)
def test_what_a_step_enters_is_counted(rows: list[Entered]) -> None:
    take, loss, weight = ways(rows, mentions(ROOT / "mslime"))
    print(f"\n{take}\n{loss}\n{weight}")
    assert {row.name for row in rows} >= set(RELAYS), "a relay has another name now"
    assert take.functions < loss.functions
    assert "rollout/group_tracker.py:GroupTracker.take" in take.functions
    assert "algorithms/losses.py:policy_loss" in loss.functions - take.functions
    assert "backends/sglang/client.py:EngineClient.weight_checksums" in weight.functions
    outside = {str(stop) for stop in all_stops()} - loss.functions - weight.functions
    assert outside == {"run/loop.py:train_rl"}, "the walk has a stop that no verb reaches"


def test_the_walk_leaves_nothing_out(rows: list[Entered]) -> None:
    """A stop is entered from the one that it stands under; or by another process, a thread or the event loop."""
    calls, entered = {(row.caller, row.name) for row in rows}, {row.name for row in rows}

    def wrong(stop: Stop) -> bool:
        if stop.caller is None:
            return str(stop) not in entered
        return (str(stop.caller), str(stop)) not in calls and ("", str(stop)) not in calls

    assert not [f"{stop} under {stop.caller}" for stop in all_stops() if wrong(stop)]
