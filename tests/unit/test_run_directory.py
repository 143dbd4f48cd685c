"""What surrounds a run: its lock, its signals, its metrics across a resume, its configuration."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mslime.config.errors import ConfigError, UserError
from mslime.config.loader import build, load_config
from mslime.config.output import CheckpointConfig, ObserveConfig
from mslime.config.schema import RunConfig
from mslime.observe.metrics import MetricsLogger, read_metrics
from mslime.run.run import changed_settings, owned, write_resolved
from mslime.run.stop import Stopped, StopSignals


def config(tmp_path: Path, **sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "model": {"path": str(tmp_path)}, "data": {"prompts": ["p.jsonl"]}, "output_dir": str(tmp_path),
        "train": {"num_steps": 10}, "cluster": {"device": "cpu"},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return build(values)


# --------------------------------------------------------------------------------------------------------------- lock


def test_a_directory_has_one_owner_who_is_named_and_is_free_afterwards(tmp_path: Path) -> None:
    run = tmp_path / "run"
    program = (
        "import sys; from pathlib import Path; from mslime.run.run import owned\n"
        "with owned(Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdout.readline() == "mine\n"
    with pytest.raises(ConfigError, match=f"process {other.pid} on "), owned(run):
        pass
    other.kill()
    other.wait()
    with owned(run):
        assert json.loads((run / ".lock").read_text())["pid"] == os.getpid()
    with owned(run):
        pass


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"), owned(tmp_path / "file" / "run"):
        pass


def test_where_the_file_system_has_no_locks_processes_of_this_machine_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("mslime.run.run.fcntl.flock", no_locks)
    with owned(tmp_path):
        content = json.loads((tmp_path / ".lock").read_text())
    import psutil

    parent = psutil.Process(os.getppid())
    content |= {"pid": parent.pid, "process_started": parent.create_time()}
    (tmp_path / ".lock").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"process {parent.pid}"), owned(tmp_path):
        pass
    (tmp_path / ".lock").write_text(json.dumps(content | {"process_started": 1.0}))  # the number was used again
    with owned(tmp_path):
        pass


# ------------------------------------------------------------------------------------------------------------ signals


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_waits_for_a_point_of_rest_and_a_second_one_does_not(
    signum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mslime.run.stop.TOGETHER_S", 0.0)
    handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    with pytest.raises(Stopped) as error, StopSignals() as stop:
        stop.patient = True
        signal.raise_signal(signum)
        with pytest.raises(Stopped) as first:
            stop.check()
        assert first.value.save and first.value.exit_status == 128 + signum
        signal.raise_signal(signum)
    assert not error.value.save and error.value.describe() == f"stopped by {signal.Signals(signum).name}"
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)] == handlers


def test_a_signal_before_anything_is_learnt_stops_at_once_and_later_ones_do_not_disturb_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mslime.run.stop.TOGETHER_S", 0.0)
    ended = False
    with pytest.raises(Stopped), StopSignals():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            with pytest.raises(Stopped):
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            ended = True
    assert ended


def test_the_signal_is_known_behind_the_interrupt_that_ray_makes_of_it() -> None:
    with pytest.raises(Stopped) as error, StopSignals():
        try:
            signal.raise_signal(signal.SIGHUP)
        except Stopped:
            raise KeyboardInterrupt from None
    assert error.value.exit_status == 129


def test_ignored_signals_stay_ignored_and_other_threads_set_none() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopSignals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    handler, seen = signal.getsignal(signal.SIGTERM), []

    def elsewhere() -> None:
        with StopSignals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [handler]


def test_a_closed_terminal_does_not_stop_the_saving() -> None:
    """The program prints to a terminal that is gone when the signal comes."""
    program = (
        "import os, signal, sys, time; from mslime.run.stop import StopSignals\n"
        "with StopSignals() as stop:\n"
        "    stop.patient = True; print('ready', flush=True); os.write(3, b'r')\n"
        "    while stop._pending is None: time.sleep(0.01)\n"
        "    print('to nobody', file=sys.stderr, flush=True); os.write(3, b's')\n"
    )
    leader, follower = os.openpty()
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.dup2({write}, 3)\n" + program], stdin=follower, stdout=follower,
        stderr=follower, pass_fds=(write,), start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    os.close(write)
    assert os.read(read, 1) == b"r"
    os.close(leader)
    process.send_signal(signal.SIGHUP)
    assert os.read(read, 1) == b"s" and process.wait(30) == 0


# ------------------------------------------------------------------------------------------------- metrics and config


def test_the_row_of_the_checkpoint_fills_a_hole_before_a_resume(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, ObserveConfig()) as metrics:
        rows = [metrics.log(step, {"lr": float(step)}) for step in (1, 2, 3)]
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])  # the last row is torn
    with MetricsLogger(tmp_path, ObserveConfig(), first_step=4, last_row=rows[2]) as metrics:
        metrics.log(4, {"lr": 4.0})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4] and read_metrics(path)[2] == rows[2]
    with MetricsLogger(tmp_path, ObserveConfig(), first_step=4, last_row=rows[2]):
        pass
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


@pytest.mark.parametrize("row", ["not json", '{"lr": 1}', '{"step": "2"}', '{"step": 1.5}', '{"step": null}'])
def test_a_row_without_a_step_is_refused_by_its_line(row: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n\n' + row + '\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:3"):
        MetricsLogger(tmp_path, ObserveConfig(), first_step=4)


def test_a_full_disk_tears_no_row_and_its_error_is_not_hidden_by_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="metrics cannot be written"):  # noqa: SIM117
        with MetricsLogger(tmp_path, ObserveConfig()) as metrics:
            metrics.log(1, {"lr": 1.0})
            monkeypatch.setattr(metrics, "close", lambda: full(0))
            monkeypatch.setattr("mslime.observe.metrics.os.fsync", full)
            metrics.log(2, {"lr": 2.0})
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def test_the_configuration_is_written_whole_and_an_earlier_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_resolved(config(tmp_path), path)
    first = path.read_text()
    write_resolved(config(tmp_path), path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]
    write_resolved(config(tmp_path, train={"lr": 1e-3}), path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.1.yaml", "config.yaml"]
    assert (tmp_path / "config.1.yaml").read_text() == first != path.read_text()


def test_a_resume_says_which_settings_changed(tmp_path: Path) -> None:
    before, now = config(tmp_path).as_dict(), config(tmp_path, train={"lr": 1e-3, "num_steps": 20}).as_dict()
    del before["checkpoint"]["keep"]  # a setting of a later version
    assert changed_settings(before, now) == [
        "train.num_steps: 10 -> 20", "train.lr: 1e-06 -> 0.001", "checkpoint.keep: unknown -> 2",
    ]  # fmt: skip
    assert changed_settings({}, now) == [] == changed_settings(now, now)


@pytest.mark.parametrize(
    ("metric", "every"), [("eval/other/accuracy", 4), ("eval/accuracy", 4), ("eval/a/accuracy", 0)]
)
def test_a_best_checkpoint_by_a_metric_that_never_comes_is_refused(metric: str, every: int, tmp_path: Path) -> None:
    data = {"eval_sets": [{"name": "a", "path": "e.jsonl"}]}
    config(tmp_path, data=data, checkpoint={"keep_best": "eval/a/accuracy"})
    with pytest.raises(ConfigError, match="keep_best"):
        config(tmp_path, data=data, checkpoint={"keep_best": metric}, observe={"eval_every": every})


@pytest.mark.parametrize(
    ("task", "metric", "best", "field"),
    [
        ("sft", "eval/a/nll", "max", "keep_best_is"),
        ("sft", "eval/a/accuracy", "max", "keep_best "),
        ("rl", "eval/a/perplexity", "min", "keep_best "),
    ],
)
def test_a_best_checkpoint_follows_what_the_task_measures(
    task: str, metric: str, best: str, field: str, tmp_path: Path
) -> None:
    data = {"eval_sets": [{"name": "a", "path": "e.jsonl"}]}
    config(tmp_path, data=data, train={"task": "sft"}, checkpoint={"keep_best": "eval/a/nll", "keep_best_is": "min"})
    with pytest.raises(ConfigError, match=rf"checkpoint\.{field}"):
        config(tmp_path, data=data, train={"task": task}, checkpoint={"keep_best": metric, "keep_best_is": best})


def test_a_checkpoint_always_follows_the_last_step_and_an_evaluation_never_when_off() -> None:
    def steps(due: Callable[[int, int], bool]) -> list[int]:
        return [step + 1 for step in range(10) if due(step, 10)]

    assert steps(CheckpointConfig(save_every=4).save_due) == [4, 8, 10]
    assert steps(CheckpointConfig(save_every=0).save_due) == [10]
    assert steps(ObserveConfig(eval_every=4).evaluation_due) == [4, 8, 10]
    assert steps(ObserveConfig(eval_every=0).evaluation_due) == []
    assert [step for step in range(10) if CheckpointConfig(hf_every=4).export_due(step)] == [3, 7]


def test_the_written_configuration_reads_the_same_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths of every kind are absolute; nothing else is changed, and no path appears where none was given."""
    monkeypatch.chdir(tmp_path)
    held_out = [{"name": "held_out", "path": "task/heldout.jsonl@[:4]"}]
    given = build({
        "model": {"path": "sft/hf"}, "data": {"prompts": ["task/train.jsonl@[4:]", "/data/more.parquet"],
                                              "eval_sets": held_out},
        "output_dir": "outputs", "cluster": {"device": "cpu"}, "checkpoint": {"load": "other/checkpoints/step_4"},
    })  # fmt: skip
    write_resolved(given, tmp_path / "config.yaml")
    monkeypatch.chdir("/")
    read = load_config(tmp_path / "config.yaml")
    assert read.model.path == tmp_path / "sft/hf" and read.run_dir == tmp_path / "outputs" / given.name
    assert read.checkpoint.load == tmp_path / "other/checkpoints/step_4"
    assert read.data.prompts == [f"{tmp_path}/task/train.jsonl@[4:]", "/data/more.parquet"]
    assert read.data.eval_sets[0].path == f"{tmp_path}/task/heldout.jsonl@[:4]"
    changed = {line.partition(":")[0] for line in changed_settings(given.as_dict(), read.as_dict())}
    assert changed == {"model.path", "output_dir", "checkpoint.load", "data.prompts", "data.eval_sets"}
