"""The walk on a grid: its tasks can be solved, its demonstrations are walks, and its environment keeps its contract."""

from __future__ import annotations

from pathlib import Path

from examples.navigation import make_task
from examples.navigation.grid import MOVES, SIZE, Grid, distance, moved, text_of
from mslime.checks.user_functions import check_environment, check_functions, run_functions
from mslime.config.loader import build, read_yaml
from mslime.data.source import Prompt
from mslime.rollout.environments import EnvironmentTask, Step

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/navigation"
WALK = {"start": [1, 1], "goal": [2, 0]}


def test_a_walk_that_gets_there_is_worth_1_and_words_that_are_no_move_end_it() -> None:
    grid, task = Grid(), EnvironmentTask("", None, WALK, 0, 0, False, 0)
    assert grid.reset(task) == "[11]"
    assert grid.step(">") == Step("[21]", 0.0)
    assert grid.step("-") == Step("", 1.0, True, metrics={"detour": 0})
    grid.reset(task)
    assert grid.step("7") == Step("", 0.0, True)


def test_walls_hold() -> None:
    corner = (0, SIZE - 1)
    assert [moved(corner, move) for move in MOVES] == [corner, (1, SIZE - 1), (0, SIZE - 2), corner]


def test_tasks_can_be_solved_in_the_moves_of_the_run_and_held_out_ones_are_nowhere_else() -> None:
    rows = make_task.make_rows(7)
    turns = build(read_yaml(EXAMPLE / "run.yaml")).rollout.environment_limits.turns
    pairs = {name: {(*r["metadata"]["start"], *r["metadata"]["goal"]) for r in found} for name, found in rows.items()}
    assert all(1 <= distance(p[:2], p[2:]) <= make_task.LONGEST < turns for found in pairs.values() for p in found)
    assert len(pairs["heldout"]) == make_task.HELD_OUT
    assert not pairs["heldout"] & (pairs["train"] | pairs["sft"])
    assert turns == make_task.MOST_MOVES and make_task.make_rows(7) == rows


def test_a_demonstration_is_what_the_environment_would_say() -> None:
    for row in make_task.make_rows(7)["sft"][:200]:
        place, label = tuple(row["metadata"]["start"]), row["label"]
        for at in range(0, len(label), 5):
            assert label[at : at + 4] == text_of(place)
            place = moved(place, label[at + 4])


def test_the_runs_environment_can_be_used_and_survives_whatever_is_said() -> None:
    check_functions(run_functions(build(read_yaml(EXAMPLE / "run.yaml"))))
    said = check_environment("examples.navigation.grid:Grid", {}, Prompt([1], "2", WALK, "made_up:1", "(20)"))
    assert said[1] == "step(''): '', reward 0, done"
