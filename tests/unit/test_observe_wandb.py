"""The W&B sink against a fake of the three calls it makes; the real package is no dependency of the tests."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mslime.config.errors import UserError
from mslime.config.loader import build, load_config
from mslime.config.output import ObserveConfig
from mslime.observe.metrics import MetricsLogger


class FakeWandbRun:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.axes: dict[str, str] = {}
        self.finished = False

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, row: dict[str, float]) -> None:
        """Without a `step` of its own: W&B ignores rows of one that is not above the last."""
        self.rows.append(row)

    def finish(self) -> None:
        self.finished = True


def test_further_arguments_are_passed_and_wrong_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def init(project: str, name: str, id: str, resume: str, dir: str, config: dict[str, Any],
             entity: str = "", tags: tuple[str, ...] = (), mode: str = "online") -> FakeWandbRun:  # fmt: skip
        given.update(entity=entity, tags=tags, mode=mode, project=project)
        return FakeWandbRun()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    flags = ["--observe.wandb-project", "p", "--observe.wandb.entity", "team", "--observe.wandb.tags", "[a, b]"]
    run = load_config(None, [*flags, "--observe.wandb.mode", "offline", "--model.path", "m", "--data.prompts", "p"])
    MetricsLogger(tmp_path, run.observe).close()
    assert given == {"entity": "team", "tags": ["a", "b"], "mode": "offline", "project": "p"}
    for wrong, field, way_out in (
        ({"wandb": {"entty": "team"}, "wandb_project": "p"}, "observe.wandb.entty", "entity"),
        ({"wandb": {"id": "x"}, "wandb_project": "p"}, "observe.wandb.id", "remove it"),
        ({"wandb": {"entity": "team"}}, "observe.wandb", "observe.wandb_project"),
    ):
        with pytest.raises(UserError) as caught:
            told = build({"model": {"path": "m"}, "data": {"prompts": ["p"]}, "observe": wrong})
            MetricsLogger(tmp_path / "other", told.observe)
        assert caught.value.field == field and way_out in caught.value.way_out


def test_rows_go_to_one_run_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[dict[str, Any], FakeWandbRun]] = []

    def init(**arguments: Any) -> FakeWandbRun:
        runs.append((arguments, FakeWandbRun()))
        return runs[-1][1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    observe = ObserveConfig(wandb_project="project")
    with MetricsLogger(tmp_path, observe, 0, "name", {"seed": 1}) as metrics:
        metrics.log(1, {"reward/mean": 0.5, "grad_norm": float("nan")})
    with MetricsLogger(tmp_path, observe, 2, "name", {"seed": 1}) as metrics:
        metrics.log(2, {"reward/mean": 0.6})
    (first, before), (second, after) = runs
    assert first == second and first["id"] and first["resume"] == "allow" and first["project"] == "project"
    assert before.rows == [{"step": 1, "reward/mean": 0.5}] and after.rows == [{"step": 2, "reward/mean": 0.6}]
    assert before.axes == after.axes == {"*": "step"}
    assert before.finished and after.finished
