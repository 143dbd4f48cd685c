"""Runs with two rollout managers: two processes with an engine each, one ledger, one state."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mslime.data.checkpoints import OUTLINE, ROLLOUTS, newest
from mslime.data.ledger import Ledger
from mslime.data.sample import Group
from mslime.observe.names import by_step
from mslime.observe.samples import file_of, read_samples, recorded_steps
from mslime.observe.timeline import read_spans
from mslime.rollout.group_tracker import begun_anew
from mslime.rollout.state import open_state, unpack_groups
from tests.e2e.harness import Run, assert_balanced, start_run
from tests.e2e.test_run import START_S, STEP_S, prompts, saved_step, settings

__all__ = ["prompts"]
STEPS, GROUPS = 2, 2


def run_of(managers: int, model: Path, rows: Path, directory: Path, **sections: Any) -> Run:
    """A run with so many managers, and an engine for each."""
    rollout = {"max_staleness": 1, "max_response_tokens": 96, "groups_per_step": GROUPS, "managers": managers}
    sglang = {"num_engines": managers, "max_total_tokens": 4096}
    sections = {"train": {"num_steps": STEPS}, "rollout": rollout, "sglang": sglang, **sections}
    return start_run(settings(model, rows, **sections), directory)


def saved(run: Run, file: str = ROLLOUTS) -> tuple[dict[str, Any], Sequence[Group], Ledger]:
    """The rollouts' state in the newest checkpoint, the groups that it holds with their tokens, and its ledger."""
    checkpoint = newest(run.directory / "checkpoints")
    assert checkpoint is not None
    with open_state(checkpoint / file) as (state, stored):
        held = unpack_groups(state["groups"], stored) + begun_anew(state.get("begun", []), stored)
        return state, held, Ledger.from_state(state["ledger"])


def assert_books_hold(run: Run, groups: int = GROUPS) -> None:
    """Every generated token is accounted for in each step, and in the state that the run has saved."""
    rows = by_step(run.rows())
    assert_balanced(rows)
    state, held, ledger = saved(run)
    assert ledger.trained == sum(row["ledger/trained_tokens"] for row in rows)
    assert sum(s.trainable_tokens for g in held for s in g.samples) == ledger.pending
    gone = len(rows) * groups + state["counters"].get("stale_groups", 0)
    assert state["next_group_id"] == gone + len(held), "no prompt is lost or doubled"


def assert_each_prompt_once(run: Run) -> None:
    """Every group that was begun was trained by one step, whole, or is held for a later one. A step that was handed
    over and not trained is to be done again."""
    trained = [
        (sample["group"], sample["index"])
        for step in recorded_steps(run.directory)
        if step <= saved_step(run)
        for sample in read_samples(file_of(run.directory, step))
    ]
    groups = {group for group, _ in trained}
    assert sorted(trained) == [(group, index) for group in sorted(groups) for index in range(4)]
    state, held, _ = saved(run)
    assert sorted([*groups, *(group.group_id for group in held)]) == list(range(state["next_group_id"]))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_two_managers_make_steps_as_one_does(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    held_out = {"eval_sets": [{"name": "held_out", "path": f"{prompts}@[:4]", "max_response_tokens": 16}]}
    watched = {"eval_every": STEPS, "eval_at_start": False}
    run = run_of(2, tiny_qwen3_moe, prompts, tmp_path, data=held_out, observe=watched)
    runs.append(run)
    assert run.finish(START_S + STEPS * STEP_S) == 0, run.text()
    rows = by_step(run.rows())
    assert [row["step"] for row in rows] == [1, 2] and "eval/held_out/accuracy" in rows[-1]
    assert all(row["replay/coverage"] == 1.0 and row["staleness/max"] <= 1 for row in rows)
    assert "tensors in the engines equal the trainer's, bit for bit" in run.text()
    lanes = {span.lane for span in read_spans(run.directory) if span.name == "generate"}
    assert lanes == {"engine0", "engine1"}
    assert_books_hold(run)
    for index in (0, 1):
        told = (run.directory / f"logs/manager{index}.log").read_text()
        assert "connecting to http" in told and "garbage collection excludes" in told
    assert "garbage collection excludes" in (run.directory / "logs/rollouts.log").read_text()
    assert run.left_over() == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_one_manager_goes_on_from_the_state_of_two_and_two_from_that_of_one(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    for steps, managers in ((2, 2), (3, 1), (4, 2)):
        run = run_of(managers, tiny_qwen3_moe, prompts, tmp_path, train={"num_steps": steps})
        runs.append(run)
        assert run.finish(START_S + 2 * STEP_S) == 0, run.text()
        assert [row["step"] for row in by_step(run.rows())] == [*range(1, steps + 1)]
        assert_books_hold(run)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_killed_manager_ends_the_run_by_name_and_its_groups_begin_again(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    sections = {"train": {"num_steps": 500}, "checkpoint": {"save_every": 0}, "cluster": {"restarts": 0}}
    run = run_of(2, tiny_qwen3_moe, prompts, tmp_path, **sections)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 2, START_S + 2 * STEP_S)
    run.find("ray::ManagerActor").kill()
    assert run.finish(120) == 2, run.text()
    assert "rollout manager " in run.text() and "the process died" in run.text()
    assert "unfinished groups will begin again" in run.text()
    done = saved_step(run)
    assert done == len(run.rows()) and run.left_over() == []
    _, begun, outlined = saved(run, OUTLINE)
    assert begun and not any(s.response_length for g in begun for s in g.samples), "groups begin again"
    lost = outlined.dropped["lost"]  # what earlier updates had interrupted: none of it where nothing was
    assert outlined.pending == 0 and outlined.generated == outlined.trained + lost

    again = run_of(2, tiny_qwen3_moe, prompts, tmp_path, train={"num_steps": done + 1})
    runs.append(again)
    assert again.finish(START_S + STEP_S) == 0, again.text()
    assert [row["step"] for row in by_step(again.rows())] == list(range(1, done + 2))
    state, held, ledger = saved(run)
    assert sum(s.trainable_tokens for g in held for s in g.samples) == ledger.pending and ledger.dropped["lost"] == lost
    assert state["next_group_id"] == (done + 1) * GROUPS + state["counters"].get("stale_groups", 0) + len(held)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_engines_outlive_a_manager_that_is_killed_and_its_groups_begin_again_in_the_same_job(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    sections = {"train": {"num_steps": 500}, "checkpoint": {"save_every": 0}, "observe": {"save_rollouts": "all"}}
    run = run_of(2, tiny_qwen3_moe, prompts, tmp_path, weights={"verify": "always"}, **sections)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 2, START_S + 2 * STEP_S)
    servers = [run.find(f"--served-model-name engine{index}-").pid for index in (0, 1)]
    run.find("ray::ManagerActor").kill()
    run.wait_for(lambda: "the run continues from step" in run.text(), START_S)
    done = len(run.rows())
    run.wait_for(lambda: len(run.rows()) >= done + 3, START_S + 3 * STEP_S)
    assert [run.find(f"--served-model-name engine{index}-").pid for index in (0, 1)] == servers
    run.process.terminate()
    assert run.finish(120) == 128 + signal.SIGTERM, run.text()
    told = run.text().replace("\n", " ")
    assert "rollout manager " in told and "unfinished groups will begin again" in told and "is gone" not in told
    assert f"the run continues from step {done} (1 of 3 in a row)" in told, "no step is lost"
    lanes = {span.lane for span in read_spans(run.directory) if span.name == "generate" and span.step > done}
    assert lanes == {"engine0", "engine1"}
    rows = by_step(run.rows())
    assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)] and saved_step(run) == len(rows)
    # A sync that the death or the stop broke off has no numbers.
    assert {row["weights/engines"] for row in rows[:-1] if row["step"] != done} == {2}
    assert_books_hold(run)
    assert_each_prompt_once(run)
    assert run.left_over() == []
