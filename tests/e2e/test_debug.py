"""`mslime rollout`, `mslime train --replay` and `mslime eval` on the real engines, against a whole run."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mslime.data.sample import check_invariants
from mslime.rollout.group_files import read_groups
from tests.e2e.harness import Run, start_run

START_S = 300.0


def settings(model: Path, directory: Path) -> dict[str, Any]:
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(24)))
    return {
        "model": {"path": str(model)},
        "data": {"prompts": [str(prompts)], "eval_sets": [{"name": "held_out", "path": f"{prompts}@[:4]"}]},
        "cluster": {"device": "cpu"},
        "rollout": {"groups_per_step": 4, "group_size": 4, "max_response_tokens": 24, "top_p": 0.9, "top_k": 4096},
        "reward": {"kind": "custom", "function": "tests.e2e.rewards:even_tokens"},
        "train": {"num_steps": 1, "lr": 1e-3},
        "observe": {"save_groups": True, "eval_at_start": False},
        "checkpoint": {"save_hf": False},
    }


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "time" and not name.startswith("perf/")}


def replayed(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "run-replay" / "metrics.jsonl").read_text().splitlines()
    return [timeless(json.loads(line)) for line in lines]


@pytest.mark.timeout(1200)
@pytest.mark.nightly
def test_parts_of_a_run_alone_do_what_they_do_in_it(tiny_qwen3_moe: Path, tmp_path: Path, runs: list[Run]) -> None:
    """Two at a time, since each mostly waits for its own start."""
    values, groups = settings(tiny_qwen3_moe, tmp_path), tmp_path / "groups"

    def started(command: str, *flags: str) -> Run:
        runs.append(start_run(values, tmp_path, *flags, command=command))
        return runs[-1]

    def finished(run: Run) -> Run:
        assert run.finish(START_S) == 0, run.text()
        assert run.left_over() == []
        return run

    live, rollout = started("train"), started("rollout", "--steps", "2", "--out", str(groups))
    finished(live)
    (trained,) = live.rows()
    assert trained["mismatch/abs_max"] < 1e-4, "over the supports of a truncated draw"
    assert trained["rollout/support_mean"] > 10 and trained["entropy/mean"] < 5.7 < np.log(320)

    said = finished(rollout).text()
    assert all(part in said for part in ("step 2/2  reward", "no signal", "prompt: ", " tokens, truncated: "))
    collected = [read_groups(groups / f"step_{n}.npz") for n in (1, 2)]
    assert [s.version for s in collected] == [0, 1] and not (tmp_path / "run-rollout" / "checkpoints").exists()
    for stored in collected:
        assert len(stored.groups) == 4
        for sample in (s for g in stored.groups for s in g.samples):
            check_invariants(sample)
            assert sample.reward is not None and sample.oldest_version == stored.version, "of the step's own version"
            assert sample.supports is not None and (sample.supports.sizes > 0).tolist() == sample.loss_mask.tolist()

    # The live run's first step, and a second one of groups that no trainer has seen.
    shutil.copy(live.directory / "groups" / "step_1.npz", groups / "step_1.npz")
    replay = started("train", "--replay", str(groups), "--train.num-steps", "5")
    evaluated = started("eval", "--checkpoint", "newest")
    finished(replay)
    first, second = replayed(tmp_path)
    assert (first["step"], second["step"]) == (1, 2)
    for name in (
        "loss/total",
        "loss/policy",
        "grad_norm",
        "mismatch/kl",
        "entropy/mean",
        "rollout/support_mean",
        "replay/agreement",
        "reward/mean",
        "lr",
    ):
        assert first[name] == pytest.approx(trained[name], rel=1e-6, abs=1e-12), name
    of_engines = ("weights", "eval", "ledger", "rollout", "data")
    of_training = {name for name in timeless(trained) if name.split("/")[0] not in of_engines} - {"reward/errors"}
    assert of_training <= set(first) and len(of_training) > 40
    assert second["grad_norm"] > 0 and second["replay/coverage"] == 1.0
    assert not (tmp_path / "run-replay" / "checkpoints").exists() and live.rows() == [trained]

    finished(evaluated)
    found = json.loads((tmp_path / "run-eval" / "eval.json").read_text())
    assert found["step"] == 1 and found["weights"] == str(live.directory / "checkpoints" / "step_1")
    scores = {name: value for name, value in trained.items() if name.startswith("eval/")}
    assert {n: v for n, v in found["metrics"].items() if not n.endswith("seconds")} == {
        n: v for n, v in scores.items() if not n.endswith("seconds")
    }
    assert "held_out" in evaluated.text() and not list((tmp_path / "run-eval").glob("exported-*"))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_two_replays_of_the_same_groups_are_equal_bit_for_bit(
    tiny_qwen3_moe: Path, tmp_path: Path, runs: list[Run]
) -> None:
    values, groups, found = settings(tiny_qwen3_moe, tmp_path), tmp_path / "groups", []
    for command, flags in (
        ("rollout", ("--out", str(groups))),
        ("train", ("--replay", str(groups))),
        ("train", ("--replay", str(groups))),
    ):
        runs.append(start_run(values, tmp_path, *flags, command=command))
        assert runs[-1].finish(START_S) == 0, runs[-1].text()
        found += [replayed(tmp_path)] if command == "train" else []
    assert found[0] == found[1] and found[0][0]["grad_norm"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_signal_ends_a_rollout_with_all_its_processes(tiny_qwen3_moe: Path, tmp_path: Path, runs: list[Run]) -> None:
    run = start_run(settings(tiny_qwen3_moe, tmp_path), tmp_path, "--steps", "1000", command="rollout")
    runs.append(run)
    run.wait_for((tmp_path / "run-rollout" / "groups" / "step_2.npz").exists, START_S)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish(60) == 143, run.text()
    assert "stopped by SIGTERM" in run.text() and "Traceback" not in run.text()
    assert run.left_over() == []
