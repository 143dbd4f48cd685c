"""Whole runs on the real engines, started and watched from outside as a user would."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from mslime.backends.sglang.guard import shared_memory_of
from mslime.convert.hf import HFCheckpoint
from mslime.data.checkpoints import critic_directory, newest, read_manifest, step_directory
from mslime.data.ledger import Ledger
from mslime.observe.names import by_step, is_known
from mslime.observe.samples import file_of, read_samples, recorded_steps
from mslime.observe.timeline import Span, read_spans
from mslime.rollout.state import open_state, unpack_groups
from mslime_plugins.report.page import write_report
from mslime_plugins.report.sample_tokens import telling, telling_of_step, versions_of
from tests.e2e.harness import (
    ROOT,
    Run,
    assert_balanced,
    assert_listeners_are_documented,
    interrupt,
    start_program,
    start_run,
)
from tests.fixtures.killing_transport import DEATHS, VARIABLE

START_S, STEP_S = 240.0, 120.0
"""Generous: CI has two cores. They bound a hang, they do not measure anything."""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(24)))
    return path


def settings(model_path: Path, prompts: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model": {"path": str(model_path)},
        "data": {"prompts": [str(prompts)]},
        "cluster": {"device": "cpu"},
        "rollout": {"groups_per_step": 4, "group_size": 4, "max_response_tokens": 24},
        "reward": {"kind": "custom", "function": "tests.e2e.rewards:even_tokens"},
        "train": {"num_steps": 2, "lr": 1e-3},
        "deadlines": {"engine_control_s": 60, "weight_sync_s": 60, "train_step_s": 100, "rollout_step_s": 200},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return values


def message(number: int, role: str, content: str) -> dict[str, Any]:
    """One message of a conversation; every other one has its content in parts."""
    return {"role": role, "content": [{"type": "text", "text": content}] if number % 2 else content}


def saved_step(run: Run) -> int:
    """The step at which the run's newest checkpoint continues."""
    saved = newest(run.directory / "checkpoints")
    assert saved is not None, run.text()
    return read_manifest(saved).extra["next_step"]


FUNCTIONS = "tests.e2e.functions"
OWN: dict[str, Any] = {
    "algorithm": {
        "advantage": f"{FUNCTIONS}:centred", "loss": f"{FUNCTIONS}:ppo_that_tells",
        "correction": f"{FUNCTIONS}:no_weights",
    },
    "hooks": {"step": f"{FUNCTIONS}:half_way"},
    "weights": {"transport": "examples.extending.transport:timed"},
}  # fmt: skip
"""A run in which whatever can be is a user's."""

TP2_EP2 = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}


def check_logs(logs: Path, console: str) -> None:
    """Each process logs its begin and end, with time and name, in few lines a step; the driver's log contains the
    console's."""
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d{4}"

    def told(name: str, process: str) -> list[str]:
        lines = (logs / name).read_text().splitlines()
        return [found[1] for line in lines if (found := re.match(rf"{stamp} {process} INFO (.*)", line))]

    for rank in (0, 1):
        told_by_rank = told(f"trainer_rank{rank}.log", f"trainer {rank}")
        loads = [line.partition(" loaded by ")[2] for line in told_by_rank if line.startswith("http")]
        assert loads == ["the model's own loader: first load", "recorded copies"], "each once, not for every bucket"
        lines = [line for line in told_by_rank if not line.startswith("http")]
        order = (
            "placed on", "starting at", "connecting to the other ranks", "building the model", "reading the weights of",
            "building the optimizer", "connecting to http", "sending weights of version 0", "log-probs of 1 probe(s)",
            "step 1: log-probs", "step 1: training", "sending weights of version 1", "log-probs of 1 probe(s)",
            "saving", "step 2: log-probs", "step 2: training", "sending weights of version 2",
            "log-probs of 1 probe(s)", "saving", "exporting",
        )  # fmt: skip
        begun = [line for line in lines if ": done in " not in line]
        assert len(lines) == 2 * len(begun) - 1, "whatever is begun ends, with a duration"
        # A probe is scored twice where an engine adds other tokens to its text than it did after the last sync.
        probe = "log-probs of 1 probe(s)"
        once = [line for before, line in zip(["", *begun], begun, strict=False) if (before, line) != (probe, probe)]
        assert [line.startswith(start) for start, line in zip(order, once, strict=True)] == [True] * len(order), once
    rollouts = told("rollouts.log", "rollouts")
    assert any(line.startswith("step 2: sent to the trainer, reward 0.") for line in rollouts)
    assert sum("evaluating on held_out: done in" in line for line in rollouts) == 2
    assert "starting the server: done in" in (logs / "engine0_actor.log").read_text()
    driver = told("driver.log", "driver")
    assert driver[0].startswith("start of mslime") and driver[-1].startswith("done: ")
    for line in (
        line for line in console.splitlines() if line.startswith(("starting ", "engine0: ", "saved ", "step 2/2"))
    ):
        assert line.partition("  eta")[0] in driver, "what the console says is in the driver's log"
    assert console.count("starting 2 trainer rank(s)") == 1


def check_senders(spans: Sequence[Span], row: dict[str, Any]) -> None:
    """Each sender's buckets lie within the time in which its rank sent weights, and their durations match the
    metrics."""
    lasted = []
    for rank in (0, 1):
        mine = [s for s in spans if s.step == row["step"] and s.lane.endswith(f" {rank}")]
        whole = next(s for s in mine if s.name == "send weights")
        buckets = [s for s in mine if s.name == "send bucket"]
        assert buckets and {s.lane for s in buckets} == {f"sender {rank}"}
        assert whole.start - 1e-2 <= min(s.start for s in buckets) <= max(s.end for s in buckets) <= whole.end + 1e-2
        lasted.append(sum(s.end - s.start for s in buckets))
    assert row["weights/send_seconds"] == pytest.approx(max(lasted), abs=0.02)
    assert (
        row["weights/send_seconds"] + row["weights/turn_seconds"] < row["weights/seconds"] > row["weights/fill_seconds"]
    )


@pytest.mark.timeout(900)
def test_a_run_trains_resumes_in_another_layout_and_reports(
    tiny_qwen3_moe_bf16: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    evals = {"eval_sets": [{"name": "held_out", "path": f"{prompts}@[:4]"}]}
    values = settings(
        tiny_qwen3_moe_bf16, prompts, megatron=TP2_EP2, data=evals, checkpoint={"save_every": 1},
        observe={"save_rollouts": "all"},
    ) | OWN  # fmt: skip
    values["data"] = {"source": f"{FUNCTIONS}:Increments", **evals}
    first = start_run(values, tmp_path)
    runs.append(first)
    assert first.finish(START_S + 2 * STEP_S) == 0, first.text()
    assert first.left_over() == []
    assert "bit for bit" in first.text()
    rows = first.rows()
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert all(is_known(name) for row in rows for name in row)
    for row in rows[1:]:
        assert row["replay/coverage"] == 1.0 and row["replay/agreement"] == 1.0
        assert row["mismatch/abs_max"] < 1e-3 and row["mismatch/kl"] < 1e-7
        assert row["ledger/trained_tokens"] > 0 and row["staleness/max"] == 0
        assert row["user/done"] == row["step"] / 2 and row["user/ratio"] == row["user/ratio_seen"]
        assert row["user/ratio"] == pytest.approx(1, abs=1e-3) and row["correction/mean_weight"] == 1.0
        responses = list(read_samples(file_of(first.directory, row["step"])))
        for told in telling_of_step(first.directory, row["step"]):
            pairs = zip(told["log_probs"], told["trainer_log_probs"], strict=True)
            assert all(
                abs(own - trainers) < 1e-3 for own, trainers in pairs if own is not None and trainers is not None
            )
            assert told["routes"]["layers"] == [0, 1, 2, 3]
        rewards, advantages = ([response[key] for response in responses] for key in ("reward", "advantage"))
        assert len(responses) == 16 and sum(rewards) / 16 == pytest.approx(row["reward/mean"])
        assert max(advantages) == pytest.approx(row["advantage/max"]) and responses[0]["prompt"].endswith("+1=")
    assert rows[0]["eval/held_out/accuracy"] is not None
    assert len(list(read_samples(file_of(first.directory, 0, evaluation=True)))) == 4
    assert recorded_steps(first.directory, evaluation=True) == [0, 2]
    exported = json.loads((first.directory / "hf" / "config.json").read_text())
    assert exported["dtype"] == "bfloat16", "as the checkpoint that it was trained from"
    assert {info.dtype for info in HFCheckpoint(first.directory / "hf").info.values()} == {"BF16"}

    check_logs(first.directory / "logs", first.text())
    check_senders(read_spans(first.directory), rows[-1])
    assert rows[-1]["weights/probe_log_probs"] < 1e-5 and rows[-1]["weights/probe_routes"] == 1
    assert 0 < rows[-1]["weights/probe_seconds"] < rows[-1]["weights/pause_seconds"]
    sender = (first.directory / "logs" / "trainer_rank0.log").read_text()
    assert len(re.findall(r"^bucket 0 \(stage 0, .*\): \d+ bytes in ", sender, re.MULTILINE)) == 3, "versions 0, 1, 2"

    # Two pipeline stages instead of TP2 EP2: the checkpoint is resharded, the metrics go on.
    resumed = (
        settings(tiny_qwen3_moe_bf16, prompts, megatron={"pipeline_model_parallel_size": 2}, train={"num_steps": 3})
        | OWN
    )
    resumed["data"] = values["data"]
    # This time by the example of docs/python.md, which is given a thread that is not the main one.
    example = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/python.md").read_text(), re.DOTALL | re.MULTILINE)[0]
    in_a_thread = f"import threading\nthread = threading.Thread(target=exec, args=({example!r}, {{}}))\n"
    second = start_program(in_a_thread + "thread.start()\nthread.join()\n", resumed, tmp_path)
    runs.append(second)
    assert second.finish(START_S + STEP_S) == 0, second.text()
    rows = second.rows()
    said = ["4 layers, PP2", "fits", f"3 steps, reward {rows[-1]['reward/mean']:.3f}", "report.html"]
    assert all(text in line for text, line in zip(said, second.text().splitlines(), strict=True)), second.text()
    assert [r["step"] for r in rows] == [0, 1, 2, 3] and rows[-1]["replay/coverage"] == 1.0
    assert rows[-1]["user/ratio"] == pytest.approx(1, abs=1e-3), "told by the last stage, and known on the first"
    drawn = [response["prompt"] for step in (1, 2) for response in read_samples(file_of(first.directory, step))]
    later = {response["prompt"] for response in read_samples(file_of(second.directory, 3))}
    assert set(drawn) == {f"{i}+1=" for i in range(8)} and later <= {f"{i}+1=" for i in range(8, 12)}
    assert recorded_steps(second.directory) == [1, 2, 3] and 0 < len(telling(file_of(second.directory, 3))) < 16
    assert second.left_over() == []

    page = write_report(second.directory).read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_a_critic_is_warmed_up_on_gpus_of_its_own_and_resumes_on_the_policys(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    apart = {"placement": "separate", "warmup_steps": 1, "lr": 1e-2}
    values = settings(tiny_qwen3_moe, prompts, algorithm={"advantage": "gae"}, checkpoint={"save_every": 1})
    first = start_run(values | {"critic": apart}, tmp_path)
    runs.append(first)
    assert first.finish(START_S + 2 * STEP_S) == 0, first.text()
    assert first.left_over() == []
    warm, trained = first.rows()
    assert "grad_norm" not in warm and "grad_norm" in trained, "the policy waits for its critic"
    assert warm["loss/value"] > 0 and warm["critic/lr"] == 1e-2
    checkpoint = step_directory(first.directory / "checkpoints", 2)
    assert read_manifest(critic_directory(checkpoint)) and read_manifest(checkpoint)

    values["megatron"] = TP2_EP2
    values["train"] = values["train"] | {"num_steps": 3}
    second = start_run(values | {"critic": apart | {"placement": "shared"}}, tmp_path)
    runs.append(second)
    assert second.finish(START_S + STEP_S) == 0, second.text()
    assert "continuing from" in second.text() and "no critic in" not in second.text()
    rows = second.rows()
    assert [r["step"] for r in rows] == [1, 2, 3] and {"grad_norm", "critic/grad_norm"} <= set(rows[-1])
    assert all(is_known(name) for row in rows for name in row)
    assert not list((first.directory / "checkpoints" / "critic").glob("step_1")), "as many are kept as of the policy"
    assert second.left_over() == []


def assert_evaluated_beside_training(spans: Sequence[Span], step: int) -> None:
    """A version is waited for after the next step is trained, and before its weights are replaced."""

    def first(name: str, step: int, lane: str = "driver") -> Span:
        return next(s for s in spans if s.name == name and s.step == step and s.lane.startswith(lane))

    evaluated, waited = first("evaluate", step, "engine"), first("wait for evaluation", step + 1)
    trained, sent = first("train", step + 1, "trainer"), first("send weights", step + 1, "trainer")
    assert evaluated.start <= trained.start and trained.end - 1e-3 <= waited.start
    assert max(evaluated.end, waited.end) <= sent.start + 1e-3


@pytest.mark.timeout(600)
def test_an_asynchronous_run_recycles_partial_rollouts_within_the_staleness_bound(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    rollout = {"max_staleness": 2, "on_stale": "mask", "max_response_tokens": 160, "groups_per_step": 2}
    # Its teacher, on a server of its own, is the model itself, so at first there is nothing to distil.
    teacher, distil = {"path": str(tiny_qwen3_moe), "max_total_tokens": 4096}, {"advantage": "none", "opd_coef": 1.0}
    values = settings(
        tiny_qwen3_moe, prompts, rollout=rollout, train={"num_steps": 4}, teacher=teacher, algorithm=distil,
        data={"eval_sets": [{"name": "held_out", "path": f"{prompts}@[:4]", "max_response_tokens": 16}]},
        observe={"eval_every": 2, "eval_at_start": False},
    )  # fmt: skip
    run = start_run(values, tmp_path)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 1, START_S + STEP_S)
    assert_listeners_are_documented(run)
    assert run.finish(3 * STEP_S) == 0, run.text()
    rows = by_step(run.rows())
    assert [r["step"] for r in rows if "eval/held_out/accuracy" in r] == [2, 4]
    assert_evaluated_beside_training(read_spans(run.directory), step=2)
    assert len(rows) == 4 and all(r["staleness/max"] <= 2 for r in rows)
    assert sum(r["rollout/aborted"] for r in rows) > 0 and sum(r["rollout/recycled"] for r in rows) > 0
    assert all(r["replay/coverage"] == 1.0 for r in rows)
    kept = [sample for step in recorded_steps(run.directory) for sample in telling(file_of(run.directory, step))]
    continued = [sample for sample in kept if "continued" in sample["kinds"]]
    assert continued and all(len(versions_of(sample)) > 1 for sample in continued)
    assert max(-rows[0]["advantage/min"], rows[0]["advantage/max"]) < 1e-4 < rows[-1]["advantage/max"]
    assert run.left_over() == []


def open_to_others(process: psutil.Process) -> int:
    """Ports of a process that other machines reach."""
    listening = [c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return sum(not ip.startswith(("127.", "::1", "::ffff:127.")) for ip in listening)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_ctrl_c_in_mid_run_loses_no_step_and_leaves_no_process_behind(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    run = start_run(settings(tiny_qwen3_moe, prompts, train={"num_steps": 500}, checkpoint={"save_every": 0}), tmp_path)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 1, START_S + STEP_S)
    guard = run.find("mslime.backends.sglang.launch")
    # The guard, the server, and the scheduler and the detokenizer that it forks.
    assert [open_to_others(p) for p in (guard, *guard.children(recursive=True))] == [0] * 4
    # Ray listens everywhere, with one port a worker; what a trainer rank opens besides is on loopback.
    assert open_to_others(run.find("ray::TrainerActor")) == open_to_others(run.find("ray::RolloutActor")) == 1
    interrupt(run)
    assert run.finish(60) == 130, run.text()
    assert "stopped by SIGINT: saved step " in run.text()
    assert saved_step(run) == len(run.rows()), "the last row is the one of the saved step"
    assert run.left_over() == []


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_driver_that_is_killed_while_its_engine_starts_leaves_nothing_behind(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    """Processes that have only just been started, Ray's agents, and shared memory of the engine."""
    run = start_run(settings(tiny_qwen3_moe, prompts), tmp_path)
    runs.append(run)
    run.wait_for(lambda: "engine0: starting its processes" in run.text(), START_S)
    run.wait_for(lambda: len(run.find("mslime.backends.sglang.launch").children(recursive=True)) >= 3, START_S)
    files = shared_memory_of([p.pid for p in run.look()])
    run.process.kill()
    run.process.wait()
    assert run.left_over(30) == []
    assert not [path for path in files if path.exists()]


def with_a_killed_sender(values: dict[str, Any], notes: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Three steps on two ranks, each saved; in the sync after the second a sender is killed between two buckets."""
    monkeypatch.setenv(VARIABLE, f"die@2 {uuid.uuid4()}")
    monkeypatch.setenv(DEATHS, str(notes))
    transport = "tests.fixtures.killing_transport:FakeAccidents"
    return values | {
        "megatron": TP2_EP2,
        "weights": {"transport": transport, "bucket_mib": 0.25, "verify": "always"},
        "train": values["train"] | {"num_steps": 3},
        "checkpoint": {"save_every": 1, "save_hf": False},
    }


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_engines_outlive_a_trainer_rank_that_is_killed_between_two_buckets(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the sync after the second step: another trainer continues from the first, and the same server generates."""
    run = start_run(with_a_killed_sender(settings(tiny_qwen3_moe, prompts), tmp_path, monkeypatch), tmp_path)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 1, START_S + 2 * STEP_S)
    server = run.find("mslime.backends.sglang.launch").pid
    run.wait_for(lambda: "the run continues from step 1 (1 of 3 in a row)" in run.text(), 2 * STEP_S)
    run.wait_for(lambda: len(run.rows()) >= 2, START_S + 2 * STEP_S)
    assert run.find("mslime.backends.sglang.launch").pid == server
    assert run.finish(2 * STEP_S) == 0, run.text()
    assert "trainer rank" in run.text() and (tmp_path / "version_2").exists() and "engine0 is gone" not in run.text()
    assert (run.directory / "logs" / "engine0.log").read_text().count("server_args=") == 1
    rows = by_step(run.rows())
    assert [row["step"] for row in rows] == [1, 2, 3] and saved_step(run) == 3
    assert_balanced(rows)
    assert run.left_over() == []


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_trainer_rank_that_is_killed_between_two_buckets_is_named_and_the_run_started_again(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the sync after the second step, when the first is saved: the engine waits for a bucket that never comes."""
    values = settings(tiny_qwen3_moe, prompts, cluster={"trainer_ranks": 2, "restarts": 0})
    command = ["bash", str(ROOT / "scripts/train_again.sh"), "run", sys.executable, "-m", "mslime"]
    source = f"import os; os.execvp('bash', {[*command, 'train', 'run.yaml']!r})"
    run = start_program(source, with_a_killed_sender(values, tmp_path, monkeypatch), tmp_path)
    runs.append(run)
    assert run.finish(2 * START_S + 5 * STEP_S) == 0, run.text()
    assert "trainer rank" in run.text() and "trainer_rank" in run.text() and (tmp_path / "version_2").exists()
    assert "the run failed with status 2; restarting it in 1 s (1 of 3 in a row)" in run.text()
    rows = by_step(run.rows())
    assert [row["step"] for row in rows] == [1, 2, 3] and saved_step(run) == 3
    assert_balanced(rows)
    assert run.left_over() == []


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_killed_engine_ends_the_run_names_its_log_and_loses_no_step(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    sections = {"train": {"num_steps": 500}, "checkpoint": {"save_every": 0}, "sglang": {"restarts": 0}}
    run = start_run(settings(tiny_qwen3_moe, prompts, **sections), tmp_path)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 2, START_S + 2 * STEP_S)
    run.find("mslime.backends.sglang.launch").kill()
    assert run.finish(120) == 2, run.text()
    assert "engine0" in run.text() and "engine0.log" in run.text()
    assert saved_step(run) == len(run.rows())
    assert run.left_over() == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_killed_rollout_service_loses_no_step_and_its_groups_begin_again(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    rollout = {"max_staleness": 2, "over_sampling": 2.0, "max_response_tokens": 160, "groups_per_step": 2}
    sections = {"train": {"num_steps": 500}, "checkpoint": {"save_every": 0}, "cluster": {"restarts": 0}}
    values = settings(tiny_qwen3_moe, prompts, rollout=rollout, **sections)
    run = start_run(values, tmp_path)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 3, START_S + 3 * STEP_S)
    run.find("ray::RolloutActor").kill()
    assert run.finish(120) == 2, run.text()
    assert "rollout service" in run.text() and "unfinished groups will begin again" in run.text()
    done = saved_step(run)
    assert done == len(run.rows()) and run.left_over() == []

    values["train"] = values["train"] | {"num_steps": done + 1}
    again = start_run(values, tmp_path)
    runs.append(again)
    assert again.finish(START_S + STEP_S) == 0, again.text()
    rows = again.rows()
    assert [row["step"] for row in rows] == list(range(1, done + 2))
    checkpoint = newest(run.directory / "checkpoints")
    assert checkpoint is not None
    with open_state(checkpoint / "rollouts.npz") as (state, stored):
        held = unpack_groups(state["groups"], stored)
    ledger = Ledger.from_state(state["ledger"])
    assert sum(s.trainable_tokens for g in held for s in g.samples) == ledger.pending
    assert ledger.dropped["lost"] > 0 and ledger.trained == sum(row["ledger/trained_tokens"] for row in rows)
    made = state["next_group_id"]
    assert made == 2 * (done + 1) + len(held) + state["counters"].get("stale_groups", 0), "no prompt is lost or doubled"


@pytest.mark.timeout(600)
def test_a_reward_that_raises_ends_the_run_with_its_own_words(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    reward = {"kind": "custom", "function": "tests.e2e.rewards:raises"}
    run = start_run(settings(tiny_qwen3_moe, prompts, reward=reward), tmp_path)
    runs.append(run)
    assert run.finish(START_S + STEP_S) == 2, run.text()
    assert "no score for sample" in run.text() and "tests.e2e.rewards:raises" in run.text()
    assert run.left_over() == []


STOP_AND_TRAIN_AGAIN = """
import json, signal, threading, time
from pathlib import Path
import mslime

handlers = lambda: [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
told, stop, before = {{}}, threading.Event(), handlers()

def until_told():
    try:
        mslime.train("run.yaml", stop=stop)
    except mslime.Stopped as stopped:
        told["stopped"] = stopped.outcome

thread = threading.Thread(target=until_told)
thread.start()
while thread.is_alive() and "\\"step\\": 8," not in Path("run/metrics.jsonl").read_text():
    time.sleep(0.1)
stop.set()
thread.join()
other = {{"train": {train}, "output_dir": {output_dir!r}, "checkpoint": {{"load": {load!r}}}}}
result = mslime.train(mslime.load_config("run.yaml", **other))
told |= {{"steps": result.steps, "loss": result.metrics["loss/nll"], "hf": str(result.hf)}}
print(json.dumps(told | {{"handlers_kept": handlers() == before}}))
"""  # fmt: skip


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_supervised_run_lowers_the_loss_resumes_and_exports(
    tiny_qwen3_moe: Path, tmp_path: Path, runs: list[Run]
) -> None:
    turns = [
        [message(i, "user", f"{i}+1="), message(i, "assistant", f"{i + 1}"), message(i, "user", "sure?"),
         message(i, "assistant", "yes")] for i in range(24)
    ]  # fmt: skip
    path = tmp_path / "conversations.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in turns))
    data = {"prompts": [f"{path}@[4:]"], "messages_key": "messages"}
    data |= {"eval_sets": [{"name": "held_out", "path": f"{path}@[:4]"}]}
    train = {"task": "sft", "num_steps": 6, "lr": 1e-3, "sft_batch_size": 8}
    best = {"save_every": 2, "keep": 1, "keep_best": "eval/held_out/nll", "keep_best_is": "min"}
    values = settings(tiny_qwen3_moe, path, data=data, train=train, checkpoint=best, observe={"eval_every": 2})
    run = start_run(values, tmp_path)
    runs.append(run)
    assert run.finish(START_S) == 0, run.text()
    rows = run.rows()
    losses = [r["loss/nll"] for r in rows[1:]]
    assert [r["step"] for r in rows] == list(range(7)) and losses[-1] < losses[0]
    held_out = {r["step"]: r["eval/held_out/nll"] for r in rows if "eval/held_out/nll" in r}
    assert list(held_out) == [0, 2, 4, 6] and held_out[6] < held_out[0]
    assert all(r["eval/held_out/tokens"] == 4 * len("2eyese") for r in rows if r["step"] in held_out)
    kept = {int(saved.name.removeprefix("step_")) for saved in (run.directory / "checkpoints").glob("step_*")}
    assert kept == {6, min([2, 4, 6], key=held_out.__getitem__)}
    shutil.copytree(run.directory / "hf", tmp_path / "hf_of_step_6")

    # From Python: in a thread until it is told to stop, then another run in the main thread of the same process, which
    # begins from the first one's checkpoint with a schedule of its own.
    load = str(step_directory(run.directory / "checkpoints", 6))
    other = {**train, "num_steps": 2, "lr": 5e-4, "lr_decay_style": "linear"}
    program = STOP_AND_TRAIN_AGAIN.format(train=other, output_dir=str(tmp_path / "other"), load=load)
    again = {**values, "train": {**train, "num_steps": 10**6}, "checkpoint": {"save_every": 0}}
    again |= {"observe": {"eval_every": 0, "eval_at_start": False}}
    both = start_program(program, again, tmp_path)
    runs.append(both)
    assert both.finish(2 * START_S) == 0, both.text()
    told = json.loads(both.text())  # and nothing else is printed
    last = saved_step(both)
    assert told["stopped"].endswith(f"step_{last}") and last > 6, told
    assert [r["step"] for r in both.rows()] == list(range(last + 1))
    rows = [json.loads(line) for line in (tmp_path / "other/run/metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2] and rows[0]["lr"] == pytest.approx(2.5e-4) and rows[1]["lr"] == 0
    assert rows[0]["loss/nll"] < losses[0]
    assert told["steps"] == 2 and told["loss"] == rows[1]["loss/nll"] and Path(told["hf"], "config.json").is_file()
    assert told["handlers_kept"] and both.left_over() == []

    # The training checkpoint of step 6 is the checkpoint that the first run exported at its end.
    out, checkpoint = tmp_path / "converted", step_directory(run.directory / "checkpoints", 6)
    command = [sys.executable, "-m", "mslime", "convert", "run", str(run.directory / "config.yaml")]
    command += ["--checkpoint", str(checkpoint), "--out", str(out)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=START_S)
    converted, exported = HFCheckpoint(out), HFCheckpoint(tmp_path / "hf_of_step_6")
    assert set(converted.info) == set(exported.info)
    assert all(bool((converted.tensor(n) == exported.tensor(n)).all()) for n in exported.info)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_trainer_rank_and_an_engine_that_are_lost_at_once_are_both_replaced(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    """The run continues with the remaining engine before the other is back, and also after the loss of the service."""
    sections = {"train": {"num_steps": 500}, "checkpoint": {"save_every": 1, "keep": 1, "save_hf": False}}
    run = start_run(settings(tiny_qwen3_moe, prompts, sglang={"num_engines": 2}, **sections), tmp_path)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 2, START_S + 2 * STEP_S)
    engines = [p for p in run.look() if "mslime.backends.sglang.launch" in " ".join(p.cmdline())]
    run.find("ray::TrainerActor").kill()
    engines[0].kill()
    run.wait_for(lambda: "(1 of 3 in a row)" in run.text(), 3 * STEP_S)
    steps = len(run.rows())
    run.wait_for(lambda: len(run.rows()) > steps and " joins at " in run.text(), 2 * START_S)
    assert any(f"engine{n} is gone" in run.text() for n in (0, 1)), run.text()
    steps = len(run.rows())
    run.find("ray::RolloutActor").kill()
    run.wait_for(lambda: "rollout service" in run.text() and len(run.rows()) > steps + 1, START_S + 5 * STEP_S)
    run.process.send_signal(signal.SIGINT)
    assert run.finish(60) == 130, run.text()
    assert_balanced(by_step(run.rows()))
    assert run.left_over() == []
