"""Runs whose engines share the trainer's GPUs: they learn the same as runs on separate GPUs, and survive the same
accidents."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from mslime.observe.names import by_step, is_known
from mslime.observe.samples import file_of, recorded_steps
from mslime.observe.timeline import read_spans
from mslime_plugins.report.sample_tokens import telling, versions_of
from tests.e2e.functions import WAITS_AT
from tests.e2e.harness import Run, start_run
from tests.e2e.test_engine_gone import engines_of, more_steps, scale
from tests.e2e.test_managers import assert_books_hold
from tests.e2e.test_run import START_S, STEP_S, TP2_EP2, prompts, saved_step, settings
from tests.fixtures.killing_transport import kill_family

__all__ = ["prompts"]
SHARED: dict[str, Any] = {"cluster": {"placement": "colocated"}, "weights": {"transport": "shm", "verify": "always"}}
FIXED = {
    "max_total_tokens": 4096, "enable_deterministic_inference": True, "attention_backend": "torch_native",
    "disable_radix_cache": True,
}  # fmt: skip
ONE_BY_ONE = {"concurrency": 1}
"""Requests that are computed alone, and whole, give the same bits in every run; those of a batch, or after a cached
prefix, need not."""
APART = {"time", "rest", "weights/changed", "perf", "idle", "rollout/tokens_per_s"}
"""Names, and beginnings of names, of metrics in which two equal runs may differ."""


def learnt(row: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a row that reflect learning."""
    times = ("_seconds", "/seconds", "gb_per_s")
    return {k: v for k, v in row.items() if k not in APART and k.split("/")[0] not in APART and not k.endswith(times)}


def same_run(model: Path, rows: Path, directory: Path, steps: int, **sections: Any) -> Run:
    """A run that draws the same tokens each time, with a reference policy and two optimizer steps a rollout."""
    values = settings(
        model, rows, rollout=ONE_BY_ONE, sglang=FIXED,
        algorithm={"kl_coef": 0.1}, train={"num_steps": steps, "optimizer_steps_per_rollout": 2},
        checkpoint={"save_every": 1}, observe={"eval_every": 2},
        data={"eval_sets": [{"name": "held_out", "path": f"{rows}@[:2]"}]}, megatron=TP2_EP2,
    )  # fmt: skip
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return start_run(values, directory)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("steps", "killed_at"), [(2, 0), (4, 2)])
def test_a_colocated_run_learns_step_by_step_what_a_separate_one_does_also_when_it_is_killed(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run], steps: int, killed_at: int
) -> None:
    def begin(name: str, **sections: Any) -> Run:
        runs.append(same_run(tiny_qwen3_moe, prompts, tmp_path / name, steps, **sections))
        return runs[-1]

    apart = begin("apart", weights=SHARED["weights"])
    assert apart.finish(START_S + steps * STEP_S) == 0, apart.text()
    shared, said = begin("shared", **SHARED), ""
    if killed_at:
        shared.wait_for((shared.directory / "checkpoints" / f"step_{killed_at}").is_dir, START_S + steps * STEP_S)
        shared.process.kill()
        shared.process.wait()
        assert shared.left_over(60) == []
        shared, said = begin("shared", **SHARED), shared.text()
        assert shared.finish(START_S + steps * STEP_S) == 0 and "continuing from" in shared.text()
    assert shared.finish(START_S + steps * STEP_S) == 0, shared.text()
    assert shared.left_over() == [] and all(is_known(name) for row in shared.rows() for name in row)
    expected, found = by_step(apart.rows()), by_step(shared.rows())
    assert [row["step"] for row in found] == [*range(steps + 1)]
    assert learnt(found[0]) == learnt(expected[0]), "scores of the weights that both begin with"
    for want, got in zip(expected[1:], found[1:], strict=True):
        assert want["loss/kl"] > 0 and want["reward/std"] > 0 and want["grad_norm"] > 0
        assert learnt(got) == learnt(want), f"step {want['step']}"
        changes = [got[f"perf/{what}_seconds"] for what in ("release", "sleep", "wake", "resume")]
        assert min(changes) > 0 and "perf/sleep_seconds" not in want
    compared = re.findall(r"^version (\d+): 135 tensors in the engines equal", said + shared.text(), re.MULTILINE)
    assert {*map(int, compared)} == {*range(steps + 1)}, "every bit, after every sync"
    check_turns((shared.directory / "logs" / "rollouts.log").read_text())


def check_turns(log: str) -> None:
    """Check the log: a sync, its probe, and the engines' memory meanwhile; then nothing, for a step."""
    order = re.findall(r"INFO (engines hold [\w, ]+|probing|comparing|continuing with)[^:\n]*$", log, re.MULTILINE)
    turns = ["engines hold weights", "comparing", "engines hold cuda_graph, kv_cache, weights", "probing",
             "engines hold weights", "engines hold cuda_graph, kv_cache, weights", "continuing with"]  # fmt: skip
    assert order[: len(turns) + 1] == [*turns, "engines hold nothing"]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_an_engine_dies_while_its_memory_is_the_trainers_and_the_run_goes_on_whole(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them, on two ranks, and then the only one that is left; responses are interrupted at each step's end."""
    monkeypatch.setenv(WAITS_AT, str(tmp_path))
    values = settings(
        tiny_qwen3_moe, prompts, **SHARED, megatron=TP2_EP2, train={"num_steps": 500}, checkpoint={"save_every": 0},
        rollout={"over_sampling": 2.0, "max_response_tokens": 96}, sglang={"num_engines": 2, "max_total_tokens": 4096},
        algorithm={"loss": "tests.e2e.functions:ppo_that_waits"},
    )  # fmt: skip
    run = start_run(values, tmp_path)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 1, START_S + STEP_S)
    kill_while_it_trains(run, tmp_path, "engine1")
    more_steps(run)
    assert "sending weights to 1 of 2 engines" in run.text()
    assert re.search(r"engine1 is gone \(.*\): it will be restarted when the trainer is offloaded", run.text())
    run.wait_for(lambda: engines_of(run)[-1] == 2, START_S)
    assert min(engines_of(run)) == 1 and "engine1 is back at http" in run.text()
    assert scale(run, "--drain", "engine1") == {"engine0": "serving"}
    kill_while_it_trains(run, tmp_path, "engine0")
    run.wait_for(lambda: "engine0 is back at http" in run.text(), START_S)
    more_steps(run)
    assert "no engine is left" in run.text() and engines_of(run)[-1] == 1
    assert sum(row["rollout/aborted"] for row in by_step(run.rows())) > 0, "responses went on across a sleep"
    run.process.terminate()
    assert run.finish(120) == 128 + signal.SIGTERM, run.text()
    assert saved_step(run) == len(by_step(run.rows()))
    assert_books_hold(run, values["rollout"]["groups_per_step"])
    assert run.left_over() == []


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_one_step_ahead_responses_go_on_across_the_trainers_turns(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    """Engines begin the next step's responses in their turn, the trainer interrupts them, and they go on after it; in
    mid-run all is killed, and resumed. Evaluations have engines that are there."""
    values = settings(
        tiny_qwen3_moe, prompts, **SHARED, megatron=TP2_EP2, train={"num_steps": 6}, checkpoint={"save_every": 1},
        rollout={"max_staleness": 1, "max_response_tokens": 160, "groups_per_step": 2},
        algorithm={"correction": {"preset": "tis"}}, observe={"eval_every": 2, "eval_at_start": False},
        data={"eval_sets": [{"name": "held_out", "path": f"{prompts}@[:4]", "max_response_tokens": 16}]},
    )  # fmt: skip
    run = start_run(values, tmp_path)
    runs.append(run)
    run.wait_for((run.directory / "checkpoints" / "step_3").is_dir, START_S + 3 * STEP_S)
    run.process.kill()
    run.process.wait()
    assert run.left_over(60) == []
    run = start_run(values, tmp_path)
    runs.append(run)
    assert run.finish(START_S + 3 * STEP_S) == 0, run.text()
    rows = by_step(run.rows())
    assert [row["step"] for row in rows] == [*range(1, 7)]
    assert [row["step"] for row in rows if "eval/held_out/accuracy" in row] == [2, 4, 6]
    # older tokens of a response that was interrupted twice are kept, because there is a correction (rollout.on_stale)
    assert max(row["staleness/max"] for row in rows) >= 1 and all(row["replay/coverage"] == 1.0 for row in rows)
    assert sum(row["rollout/recycled"] for row in rows) > 0, "responses went on across a sleep"
    spans = read_spans(run.directory)
    trained = [span for span in spans if span.name == "train" and span.lane.startswith("trainer")]
    evaluated = [span for span in spans if span.name == "evaluate" and span.lane.startswith("engine")]
    assert trained and evaluated
    assert not any(t.start < e.end and e.start < t.end for t in trained for e in evaluated)
    kept = [sample for step in recorded_steps(run.directory) for sample in telling(file_of(run.directory, step))]
    assert any(len(versions_of(sample)) > 1 for sample in kept)
    assert_books_hold(run, values["rollout"]["groups_per_step"])
    assert run.left_over() == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_teacher_on_the_trainers_gpus_sleeps_and_scores_the_same_when_it_is_awake(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    """The teacher is the model itself. Its scores of step 1, after it was offloaded during the first sync, equal the
    policy's, so there is nothing to distil; later there is. Responses are interrupted with it at the end of each turn.
    """
    values = settings(
        tiny_qwen3_moe, prompts, **SHARED, megatron=TP2_EP2, train={"num_steps": 3}, checkpoint={"save_every": 2},
        rollout={"max_staleness": 1, "max_response_tokens": 96},
        teacher={"path": str(tiny_qwen3_moe), "placement": "colocated", "max_total_tokens": 4096},
        algorithm={"advantage": "none", "opd_coef": 1.0, "correction": {"preset": "tis"}},
    )  # fmt: skip
    run = start_run(values, tmp_path)
    runs.append(run)
    assert run.finish(START_S + 3 * STEP_S) == 0, run.text()
    rows = by_step(run.rows())
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(-rows[0]["advantage/min"], rows[0]["advantage/max"]) < 1e-4 < rows[-1]["advantage/max"]
    log = (run.directory / "logs" / "rollouts.log").read_text()
    held = re.findall(r"INFO teachers hold ([\w, ]+?)(?:$|:| began| \()", log, re.MULTILINE)
    assert len(held) >= 6 and "nothing" in held[0], held
    gave = re.findall(r"released (\d+) bytes: .*weights", (run.directory / "logs" / "teacher0.log").read_text())
    assert len(gave) >= 3 and min(map(int, gave)) > 1 << 19, "its weights, and its cache"
    assert run.left_over() == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_only_teacher_dies_while_it_sleeps_and_the_run_ends_with_what_it_has_trained(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WAITS_AT, str(tmp_path))
    values = settings(
        tiny_qwen3_moe, prompts, **SHARED, megatron=TP2_EP2, train={"num_steps": 500}, checkpoint={"save_every": 0},
        teacher={"path": str(tiny_qwen3_moe), "placement": "colocated", "max_total_tokens": 4096},
        algorithm={"opd_coef": 1.0, "loss": "tests.e2e.functions:ppo_that_waits"},
    )  # fmt: skip
    run = start_run(values, tmp_path)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 1, START_S + STEP_S)
    kill_while_it_trains(run, tmp_path, "teacher0")
    assert run.finish(STEP_S + 120) == 2, run.text()
    assert re.search(r"(?s)teacher = 'no server is left': teachers are not restarted.*teacher0", run.text()), run.text()
    assert saved_step(run) == 2, "the step in which it died was trained"
    assert run.left_over() == []


def kill_while_it_trains(run: Run, directory: Path, name: str) -> None:
    """A server, in the middle of a step of the trainer."""
    (directory / "stop").touch()
    run.wait_for((directory / "here").exists, STEP_S)
    kill_family(run.find(f"--served-model-name {name}-"))
    (directory / "here").unlink()
    (directory / "stop").unlink()
