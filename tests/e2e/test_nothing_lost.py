"""Whole supervised runs that are ended by signals, damaged, started twice and resumed: no step and no token is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mslime.convert.hf import HFCheckpoint
from mslime.data.checkpoints import read_manifest, steps
from mslime.run.stop import TOGETHER_S
from tests.e2e.harness import Run, start_run

START_S = 240.0


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(24)))
    return path


def settings(model: Path, prompts: Path, num_steps: int, **checkpoint: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(model)},
        "data": {"prompts": [str(prompts)]},
        "cluster": {"device": "cpu"},
        "train": {"task": "sft", "num_steps": num_steps, "lr": 1e-3, "sft_batch_size": 8},
        "checkpoint": {"save_every": 2, "save_hf": False, **checkpoint},
    }


def newest_step(run: Run) -> int:
    found = steps(run.directory / "checkpoints")
    return read_manifest(found[-1]).extra["next_step"] if found else 0


def flip_one_bit(checkpoint: Path) -> Path:
    victim = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 4
    victim.write_bytes(bytes(data))
    return victim


def ended_by(run: Run, signum: int) -> None:
    """Send a signal once steps beyond the last checkpoint are done; check how the run ends.

    SIGTERM goes to the driver's whole process group, as `timeout`, `docker stop` of a shell, and batch systems send it.
    """
    before = len(run.rows())
    run.wait_for(lambda: len(run.rows()) >= before + 3, START_S)
    if signum == signal.SIGTERM:
        os.killpg(run.process.pid, signum)
    else:
        run.process.send_signal(signum)
    assert run.finish(60) == 128 + signum, run.text()
    rows, text = run.rows(), run.text()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "a hole in the metrics"
    assert all("loss/nll" in row for row in rows)
    assert newest_step(run) == len(rows), text
    assert "Stopping" in text and f"stopped by {signal.Signals(signum).name}: " in text
    assert "Traceback" not in text and "*** SIG" not in text
    assert run.left_over() == []


@pytest.mark.timeout(900)
def test_signals_save_what_was_learnt_and_damage_is_refused_by_name(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    def start(num_steps: int = 100_000, **checkpoint: Any) -> Run:
        run = start_run(settings(tiny_qwen3_moe, prompts, num_steps, **checkpoint), tmp_path)
        runs.append(run)
        return run

    run = start()
    run.wait_for(lambda: len(run.rows()) >= 1, START_S)
    second = start()
    assert second.finish(START_S) == 2, second.text()
    assert f"process {run.process.pid} on " in second.text() and "runs in this directory" in second.text()
    assert len(run.find("raylet").environ()["RAY_AUTH_TOKEN"]) == 64, "Ray's token is the run's own"
    ended_by(run, signal.SIGTERM)
    config = (run.directory / "config.yaml").read_text()

    again = start(keep=3)
    ended_by(again, signal.SIGHUP)
    assert "changed since " in again.text() and "checkpoint.keep: 2 -> 3" in again.text()
    assert (run.directory / "config.1.yaml").read_text() == config

    # A flipped bit is found by the ranks, a cut file before anything starts; neither is passed over in silence.
    root = run.directory / "checkpoints"
    good, bad = steps(root)[-2:]
    victim = flip_one_bit(bad)
    flipped = start(keep=3)
    assert flipped.finish(START_S) == 2, flipped.text()
    assert victim.name in flipped.text() and "the file is damaged" in flipped.text()
    assert "resume: older" in flipped.text() and steps(root)[-1] == bad
    victim.write_bytes(victim.read_bytes()[:-1])
    cut = start(keep=3)
    assert cut.finish(START_S) == 2 and victim.name in cut.text() and "resume: older" in cut.text(), cut.text()

    older = start(keep=3, resume="older")
    older.wait_for(lambda: f"continuing from {good}" in older.text(), START_S)
    assert "skipped a damaged checkpoint, renamed to " in older.text() and victim.name in older.text()
    ended_by(older, signal.SIGINT)

    for checkpoint in steps(root):
        flip_one_bit(checkpoint)
    kept = sorted(path.name for path in root.iterdir())
    for resume in ("older", "never"):
        refused = start(keep=3, resume=resume)
        assert refused.finish(START_S) == 2, refused.text()
    assert "all checkpoints are damaged" in runs[-2].text() and "would overwrite it" in runs[-1].text()
    assert sorted(path.name for path in root.iterdir()) == kept and "damaged-" + bad.name in kept


@pytest.mark.timeout(600)
def test_a_second_signal_stops_at_once(tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]) -> None:
    run = start_run(settings(tiny_qwen3_moe, prompts, 100_000, save_every=0), tmp_path)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 2, START_S)
    rank = run.find("ray::TrainerActor")
    rank.suspend()  # the rescue would wait for it
    run.process.send_signal(signal.SIGTERM)
    run.wait_for(lambda: "Press Ctrl-C again to stop without saving" in run.text(), 30)
    time.sleep(2 * TOGETHER_S)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish(30) == 143, run.text()
    assert "not saved: a second signal arrived" in run.text() and newest_step(run) == 0
    assert run.left_over() == []


@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_milestones_and_exports_are_kept(tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]) -> None:
    kept = {"save_every": 1, "keep": 1, "keep_every": 2, "keep_best": "loss/nll", "keep_best_is": "max", "hf_every": 3}
    run = start_run(settings(tiny_qwen3_moe, prompts, 5, **kept), tmp_path)
    runs.append(run)
    assert run.finish(START_S) == 0, run.text()
    losses = {row["step"]: row["loss/nll"] for row in run.rows()}
    best = max(losses, key=lambda step: losses[step])
    assert {int(path.name.removeprefix("step_")) for path in steps(run.directory / "checkpoints")} == {2, 4, 5, best}
    assert [path.name for path in sorted(run.directory.glob("hf_step_*"))] == ["hf_step_3"]
    weights = run.directory / "hf_step_3" / "model-00001-of-00001.safetensors"
    assert weights.stat().st_mode & 0o777 == (run.directory / "hf_step_3" / "config.json").stat().st_mode & 0o777
    assert HFCheckpoint(run.directory / "hf_step_3").info.keys() == HFCheckpoint(tiny_qwen3_moe).info.keys()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_rescue_never_waits_behind_a_rank_that_hangs(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    values = settings(tiny_qwen3_moe, prompts, 100_000, save_every=0) | {"deadlines": {"rescue_s": 5}}
    run = start_run(values, tmp_path)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 2, START_S)
    run.find("ray::TrainerActor").suspend()
    run.process.send_signal(signal.SIGTERM)
    run.wait_for(lambda: "Press Ctrl-C again" in run.text(), 30)
    assert run.finish(90) == 143, run.text()
    assert "not saved: " in run.text() and run.left_over() == []


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_run_survives_the_death_of_rays_control_process_until_it_is_saved(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    run = start_run(settings(tiny_qwen3_moe, prompts, 100_000, save_every=0), tmp_path)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 2, START_S)
    run.look()
    run.find("gcs_server").kill()
    assert run.finish(120) == 2, run.text()
    assert "Ray's control process is gone" in run.text()
    assert newest_step(run) == len(run.rows()) and run.left_over() == []


@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_a_data_error_in_mid_run_loses_no_step(tiny_qwen3_moe: Path, tmp_path: Path, runs: list[Run]) -> None:
    """The bad row appears when it is drawn: the file changes under the run."""
    rows = [json.dumps({"prompt": f"{i}+1=", "label": str(i + 1)}) for i in range(8)]
    bad = tmp_path / "rows.jsonl"
    width = max(map(len, rows))
    bad.write_text("".join(row.ljust(width) + "\n" for row in rows))
    values = settings(tiny_qwen3_moe, bad, 100_000, save_every=0)
    run = start_run(values, tmp_path)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 2, START_S)
    bad.write_text(("{" + "x" * (width - 1) + "\n") * 8)
    assert run.finish(120) == 2, run.text()
    assert "rows.jsonl" in run.text() and "Traceback" not in run.text()
    assert newest_step(run) == len(run.rows()) > 0
