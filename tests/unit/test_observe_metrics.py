"""The metrics log, its sinks and the list of names."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mslime.config.errors import UserError
from mslime.config.loader import build, load_config
from mslime.config.output import ObserveConfig
from mslime.observe.metrics import MetricsLogger, read_rows
from mslime.observe.names import METRICS, is_known, markdown
from mslime.observe.sinks import TensorBoardSink

QUIET = ObserveConfig()


def logged(run_dir: Path) -> list[dict[str, float]]:
    return read_rows(run_dir / "metrics.jsonl")


def test_rows_survive_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from mslime.observe.metrics import MetricsLogger\n"
        "from mslime.config.output import ObserveConfig\n"
        "log = MetricsLogger(pathlib.Path(sys.argv[1]), ObserveConfig())\n"
        "log.log(1, {'lr': 0.5}); log.log(2, {'lr': 0.25}); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [(row["step"], row["lr"]) for row in logged(tmp_path)] == [(1, 0.5), (2, 0.25)]
    assert all(row["time"] > 1e9 for row in logged(tmp_path))


def test_a_misspelt_metric_is_an_assertion_that_names_the_nearest(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, QUIET) as log, pytest.raises(AssertionError, match="reward/mean"):
        log.log(1, {"reward/maen": 0.5})
    assert logged(tmp_path) == []


def test_open_parts_of_names_are_filled_and_closed_parts_are_not() -> None:
    assert is_known("eval/held_out/pass@4") and is_known("replay/agreement_layer_47")
    assert is_known("ledger/dropped/zero_variance_tokens") and is_known("grad_norm")
    assert not is_known("eval/a/b/accuracy") and not is_known("eval/accuracy") and not is_known("reward/mean/x")


def test_steps_never_go_backwards(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, QUIET) as log:
        log.log(3, {})
        with pytest.raises(AssertionError, match="step 2 after step 3"):
            log.log(2, {})


def test_values_that_are_not_finite_become_null_and_the_file_stays_json(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, QUIET) as log:
        log.log(1, {"grad_norm": float("inf"), "loss/total": float("nan")})
    (row,) = logged(tmp_path)
    assert row["grad_norm"] is None and row["loss/total"] is None
    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)


def test_resuming_cuts_steps_that_are_done_again_and_repairs_a_torn_line(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, QUIET) as log:
        for step in range(1, 6):
            log.log(step, {"lr": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lr": 6')
    with MetricsLogger(tmp_path, QUIET, first_step=4) as log:
        log.log(4, {"lr": 40})
    assert [(row["step"], row["lr"]) for row in logged(tmp_path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_a_fresh_start_keeps_the_earlier_file_under_another_name(tmp_path: Path) -> None:
    for attempt in range(3):
        with MetricsLogger(tmp_path, QUIET) as log:
            log.log(1, {"lr": attempt})
    assert [row["lr"] for row in logged(tmp_path)] == [2]
    assert [read_rows(tmp_path / f"metrics.{n}.jsonl")[0]["lr"] for n in (1, 2)] == [0, 1]


def test_a_full_disk_is_a_users_error_and_earlier_rows_stay(tmp_path: Path) -> None:
    """A file size limit stands in for the full disk: the kernel refuses the write in the same place."""
    log = MetricsLogger(tmp_path, QUIET)
    log.log(1, {"lr": 1.0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(tmp_path / "metrics.jsonl") + 10, limits[1]))
        with pytest.raises(UserError, match="metrics cannot be written"):
            log.log(2, {"lr": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    with MetricsLogger(tmp_path, QUIET, first_step=2) as again:
        again.log(2, {"lr": 3.0})
    assert [row["lr"] for row in logged(tmp_path)] == [1.0, 3.0]


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLogger(tmp_path, ObserveConfig(tensorboard=True)) as log:
        log.log(1, {"reward/mean": 0.25, "grad_norm": float("nan")})
        log.log(2, {"reward/mean": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert "grad_norm" not in events.Tags()["scalars"]
    read = [(e.step, e.value) for e in events.Scalars("reward/mean")]
    assert read == [(1, 0.25), (2, 0.5)]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed here")
def test_asking_for_wandb_without_its_package_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)observe.wandb_project.*pip install wandb"):
        MetricsLogger(tmp_path, ObserveConfig(wandb_project="mslime"))


def test_observe_imports_neither_torch_nor_a_sink_that_nobody_asked_for() -> None:
    code = (
        "import sys, mslime.observe.metrics, mslime.observe.progress\n"
        "sys.exit(bool({'torch', 'tensorboard', 'wandb', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_documented_metrics_are_the_list() -> None:
    """Write the file anew with `python -m mslime.observe.names > docs/metrics.md`."""
    assert (Path(__file__).parents[2] / "docs" / "metrics.md").read_text() == markdown()
    assert all(metric.meaning for metric in METRICS.values())


def test_tensorboard_shows_the_last_attempt_of_steps_that_were_done_twice(tmp_path: Path) -> None:
    """As scalars, which scripts read; a trainer that is lost at step 4 goes on from step 2."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = tmp_path / "tensorboard"
    for attempt, steps in enumerate([(1, 2, 3, 4), (3, 4, 5)]):
        sink = TensorBoardSink(tmp_path)
        for step in steps:
            sink.log(step, {"loss/total": 10.0 * attempt + step})
        sink.close()
        for number, path in enumerate(sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns)):
            path.rename(directory / f"events.out.tfevents.{number}")  # they are named by the second
    events = EventAccumulator(str(directory))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss/total"]
    assert [(e.step, e.value) for e in events.Scalars("loss/total")] == [(1, 1), (2, 2), (3, 13), (4, 14), (5, 15)]


# ----------------------------------------------------------------------------------------------------- Weights & Biases


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
    for wrong, field, hint in (
        ({"wandb": {"entty": "team"}, "wandb_project": "p"}, "observe.wandb.entty", "entity"),
        ({"wandb": {"id": "x"}, "wandb_project": "p"}, "observe.wandb.id", "remove it"),
        ({"wandb": {"entity": "team"}}, "observe.wandb", "observe.wandb_project"),
    ):
        with pytest.raises(UserError) as caught:
            told = build({"model": {"path": "m"}, "data": {"prompts": ["p"]}, "observe": wrong})
            MetricsLogger(tmp_path / "other", told.observe)
        assert caught.value.field == field and hint in caught.value.hint


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
