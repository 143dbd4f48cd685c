"""A run whose engines die, return, are added and removed during training: it continues, and loses nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from mslime.backends.sglang.server_process import ServerProcess
from mslime.config.keys import NO_KEYS
from mslime.config.resolved import engine_spec
from mslime.observe.names import by_step
from mslime.observe.samples import file_of, read_samples
from mslime.observe.timeline import read_spans
from tests.e2e.harness import ROOT, Run, assert_balanced, start_run
from tests.e2e.test_managers import GROUPS, assert_books_hold, assert_each_prompt_once
from tests.e2e.test_run import START_S, STEP_S, prompts, saved_step, settings
from tests.engines.conftest import cpu_run
from tests.fixtures.killing_transport import VARIABLE, kill_family

__all__ = ["prompts"]
LONG = 256
"""Tokens of a response that takes a while."""
ACCIDENTS = "tests.fixtures.killing_transport:FakeAccidents"


def start(
    model: Path, rows: Path, directory: Path, restarts: int = 3, engines: int = 2,
    reward: dict[str, Any] | None = None, managers: int = 1, tokens: int = 96,
    held_out: Sequence[dict[str, Any]] = (), **weights: Any,
) -> Run:  # fmt: skip
    """A run that compares every sync and never ends by itself."""
    rollout = {
        "max_staleness": 1, "on_stale": "mask", "max_response_tokens": tokens, "groups_per_step": GROUPS,
        "managers": managers,
    }  # fmt: skip
    sglang = {"num_engines": engines, "max_total_tokens": 4096, "restarts": restarts}
    sections = {
        "train": {"num_steps": 500},
        "checkpoint": {"save_every": 0},
        "observe": {"save_rollouts": "all"},
        "data": {"eval_sets": list(held_out)},
    }
    if reward is not None:
        sections["reward"] = reward
    weights = {"verify": "always", **weights}
    return start_run(settings(model, rows, rollout=rollout, sglang=sglang, weights=weights, **sections), directory)


def scale(run: Run, *options: str) -> dict[str, str]:
    """`mslime scale`, which waits until it is done; the state of each engine then."""
    words = [sys.executable, "-m", "mslime", "scale", str(run.directory), "--json", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=START_S, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return {engine["name"]: engine["state"] for engine in json.loads(done.stdout)["engines"]}


def more_steps(run: Run, steps: int = 2) -> None:
    """Wait for so many."""
    before = len(run.rows())
    run.wait_for(lambda: len(run.rows()) >= before + steps, (steps + 1) * STEP_S)


def generated(run: Run, engine: str) -> set[int]:
    """The steps for which an engine has generated."""
    return {s.step for s in read_spans(run.directory) if (s.lane, s.name) == (engine, "generate")}


def kill_engine(run: Run, index: int) -> None:
    """One that is of this run."""
    kill_family(run.find(f"--served-model-name engine{index}-"))


def kill_engines_that_generate(run: Run, first: int, *others: int) -> None:
    """Kill an engine that its log shows far from the end of its responses, and the others in any state."""
    families = [run.find(f"--served-model-name engine{index}-") for index in (first, *others)]
    doomed = [each for process in families for each in (*process.children(recursive=True), process)]
    decoding = re.compile(r"Decode batch, #running-req: ([0-9]+), #token: ([0-9]+)")
    end = time.monotonic() + STEP_S
    with (run.directory / "logs" / f"engine{first}.log").open() as log:
        log.seek(0, os.SEEK_END)
        while not (found := decoding.search(log.readline())) or int(found[2]) > int(found[1]) * LONG / 2:
            assert time.monotonic() < end and run.process.poll() is None, run.text()
            time.sleep(0.005)
    for each in doomed:
        each.kill()


def check_books(run: Run) -> None:
    """Check that the run ended and lost nothing. Tokens that an engine's death made too old were masked, not
    trained."""
    rows = by_step(run.rows())
    assert all(row["staleness/max"] <= 1 for row in rows)
    assert saved_step(run) == len(rows)
    assert_books_hold(run)
    assert run.left_over() == []


def engines_of(run: Run) -> list[int]:
    """How many engines took the weights of each step."""
    return [int(row["weights/engines"]) for row in by_step(run.rows()) if "weights/engines" in row]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_engines_die_between_buckets_and_all_at_once_and_the_run_goes_on_whole(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken syncs are those of versions 2 to 4: a death, then a wrong bit and a lost answer with the engine that
    is left. That engines have whole weights is compared bit for bit, at every sync."""
    monkeypatch.setenv(VARIABLE, f"kill:1@2 flip@3 lose@4 {uuid.uuid4()}")
    run = start(tiny_qwen3_moe, prompts, tmp_path, transport=ACCIDENTS, bucket_mib=0.25)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 5, START_S + 7 * STEP_S)
    assert all(f"version {v}: " in run.text() for v in range(5)) and "the trainer's, bit for bit" in run.text()
    assert run.rows()[0]["weights/buckets"] > 2 and engines_of(run)[:2] == [2, 1]
    assert [row["weights/repeats"] for row in by_step(run.rows())[:5]] == [0, 1, 1, 1, 0]
    assert re.search(r"sending all weights again: .* has other values; 1 of \d+ tensors differ", run.text())
    assert re.search("sending all weights again: .*no answer came", run.text())
    assert re.search(r"engine1 is gone \(.*\): it is being restarted", run.text())
    run.wait_for(lambda: engines_of(run)[-1] == 2, START_S)
    back = len(run.rows())
    more_steps(run)
    assert "engine1 is back at http" in run.text() and "sending weights to 2 of 2 engines" in run.text()
    assert max(generated(run, "engine1")) > back, "it generates again"
    assert scale(run, "--drain", "engine0") == {"engine1": "serving"}
    more_steps(run)
    assert engines_of(run)[-1] == 1 and max(generated(run, "engine0")) <= len(run.rows())
    kill_engine(run, 1)  # the only one that is left
    run.wait_for(lambda: run.text().count("engine1 is back at http") == 2, START_S)
    more_steps(run)
    assert "no engine is left" in run.text() and engines_of(run)[-1] == 1
    run.process.terminate()
    assert run.finish(120) == 128 + signal.SIGTERM, run.text()
    check_books(run)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_weights_that_are_not_the_trainers_are_found_by_what_they_say_and_sent_again(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits are compared in the first two syncs only."""
    monkeypatch.setenv(VARIABLE, f"scale@3 {uuid.uuid4()}")
    run = start(tiny_qwen3_moe, prompts, tmp_path, transport=ACCIDENTS, bucket_mib=0.25, verify="probe")
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 5, START_S + 7 * STEP_S)
    rows = by_step(run.rows())[:5]
    assert [row["weights/repeats"] for row in rows] == [0, 0, 1, 0, 0]
    assert all(row["weights/probe_log_probs"] < 1e-5 and row["weights/probe_routes"] == 1 for row in rows)
    told = re.findall("(sending all weights again: .*|version [0-9]+: [0-9]+ tensors in the engines)", run.text())
    assert [text[:9] for text in told] == ["version 0", "version 1", "all weigh", "version 3"], told
    assert "log-probs off by" in told[2]
    run.process.terminate()
    assert run.finish(120) == 128 + signal.SIGTERM, run.text()
    check_books(run)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_an_engine_that_refuses_a_bucket_twice_is_left_out_and_started_again(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"refuse:1@2 {uuid.uuid4()}")
    run = start(tiny_qwen3_moe, prompts, tmp_path, transport=ACCIDENTS, bucket_mib=0.25)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 3, START_S + 5 * STEP_S)
    assert engines_of(run)[:3] == [2, 1, 1] and by_step(run.rows())[1]["weights/repeats"] == 2
    assert re.search(r"engine1 is gone \(.*does not take this bucket.*\): it is being restarted", run.text())
    run.wait_for(lambda: engines_of(run)[-1] == 2, START_S)
    more_steps(run)
    run.process.terminate()
    assert run.finish(120) == 128 + signal.SIGTERM, run.text()
    check_books(run)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_an_engine_that_dies_while_it_generates_is_left_out_of_the_next_sync(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    run = start(tiny_qwen3_moe, prompts, tmp_path, restarts=0)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 1, START_S + STEP_S)
    kill_engine(run, 1)
    more_steps(run, 4)
    assert engines_of(run)[-1] == 1 and "engine1 is gone" in run.text() and "it is not restarted" in run.text()
    kill_engine(run, 0)
    assert run.finish(120) == 2, run.text()
    assert "engine0.log" in run.text() or "engine1.log" in run.text()
    check_books(run)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_managers_wait_for_the_only_engine_of_one_of_them_and_for_all_and_lose_no_request(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    """Each of two managers has one engine: its groups have nowhere else to go, so that no sync is without one."""
    run = start(tiny_qwen3_moe, prompts, tmp_path, managers=2, tokens=LONG)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 1, START_S + 2 * STEP_S)
    for doomed, what in ((1,), "a rollout manager has no engine left"), ((0, 1), "no engine is left"):
        steps, backs = len(run.rows()), run.text().count("is back at http") + len(doomed)
        kill_engines_that_generate(run, *doomed)
        run.wait_for(lambda n=backs: run.text().count("is back at http") == n, START_S + STEP_S)
        more_steps(run, 3)
        assert what in run.text().replace("\n", " "), run.text()
        assert all(max(generated(run, f"engine{index}")) > steps + 1 for index in (0, 1)), "both generate again"
    run.process.terminate()
    assert run.finish(120) == 128 + signal.SIGTERM, run.text()
    assert "the run continues from" not in run.text(), "the trainer and the managers are those of the beginning"
    assert set(engines_of(run)) == {2}
    compared = re.findall(r"version [0-9]+: ([0-9]+) tensors in the engines equal the trainer's", run.text())
    assert len(compared) >= len(run.rows()) and len(set(compared)) == 1, "all engines, in each sync"
    check_books(run)
    assert_each_prompt_once(run)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_an_evaluation_of_two_managers_begins_again_when_the_engine_of_one_dies_in_it(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    """The one before the first step."""
    rows, each = 8, 4
    held_out = {"name": "held_out", "path": f"{prompts}@[:{rows}]", "max_response_tokens": LONG}
    held_out |= {"samples_per_prompt": each, "temperature": 1}
    run = start(tiny_qwen3_moe, prompts, tmp_path, managers=2, held_out=[held_out])
    runs.append(run)
    run.wait_for(lambda: "version 0: " in run.text(), START_S)
    kill_engines_that_generate(run, 1)
    run.wait_for(lambda: len(run.rows()) >= 3, 2 * START_S + 3 * STEP_S)
    told = run.text().replace("\n", " ")
    assert "restarting the evaluation of step 0" in told and "a rollout manager has no engine left" in told
    scored = read_samples(file_of(run.directory, 0, evaluation=True))
    assert sorted((s["group"], s["index"]) for s in scored) == [(g, i) for g in range(rows) for i in range(each)]
    run.process.terminate()
    assert run.finish(120) == 128 + signal.SIGTERM, run.text()
    assert "the run continues from" not in run.text()
    trained = [row for row in by_step(run.rows()) if row["step"] > 0]
    assert_balanced(trained)
    assert saved_step(run) == len(trained)
    assert_each_prompt_once(run)
    assert run.left_over() == []


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_engines_are_added_attached_and_let_go_while_the_run_trains(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    """1 -> 3 -> 2 -> 3 with an external one -> 2 without it; the run leaves that engine unchanged."""
    run = start(tiny_qwen3_moe, prompts, tmp_path, engines=1)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 1, START_S + STEP_S)
    assert scale(run) == {"engine0": "serving"}
    assert scale(run, "--engines", "3") == dict.fromkeys(("engine0", "engine1", "engine2"), "serving")
    more_steps(run)
    assert engines_of(run)[-1] == 3 and generated(run, "engine1") and generated(run, "engine2")
    assert scale(run, "--engines", "2") == dict.fromkeys(("engine0", "engine1"), "serving")
    more_steps(run)
    assert engines_of(run)[-1] == 2
    server = ServerProcess(engine_spec(cpu_run(tiny_qwen3_moe)), 9, tmp_path, keys=NO_KEYS, routes=True)
    url = server.start().url
    try:
        assert scale(run, "--attach", url)["engine3"] == "serving"
        more_steps(run)
        assert engines_of(run)[-1] == 3 and generated(run, "engine3")
        assert "engine3" not in scale(run, "--drain", url)
        assert httpx.get(f"{url}/ready", timeout=30).status_code == 200, "another run may have it"
        more_steps(run)
        run.process.terminate()
        assert run.finish(120) == 128 + signal.SIGTERM, run.text()
        assert httpx.get(f"{url}/ready", timeout=30).status_code == 200, "it is neither paused nor gone"
    finally:
        server.stop()
    check_books(run)
