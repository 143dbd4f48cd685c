"""Several adapters on one base in one run, on the real engines: each has its own ledger, steps, files and end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mslime.convert.peft import AdapterFile
from mslime.data.checkpoints import newest, read_manifest
from mslime.observe.names import is_known
from tests.e2e.harness import Run, assert_balanced, interrupt, start_run
from tests.e2e.test_lora import exported_to, newest_agree
from tests.e2e.test_run import START_S, STEP_S, settings

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    for name, sign in (("quick", "+"), ("slow", "*")):
        rows = [{"prompt": f"{i}{sign}1=", "label": str(i + 1)} for i in range(24)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def several(model: Path, data: Path, **sections: Any) -> dict[str, Any]:
    """Two adapters that differ in data, reward, layers, learning rate, loss and freshness."""
    lora = {"rank": 4, "alpha": 8, "sync": "adapter"}
    train = {"num_steps": 3, "lr": 1e-2}
    values = settings(model, data / "quick.jsonl", lora=lora, train=train, observe={"save_groups": True})
    values["adapters"] = [
        {"name": "quick"},
        {
            "name": "slow",
            "data": {"prompts": str(data / "slow.jsonl")},
            "reward": {"function": "tests.e2e.rewards:slow", "timeout_s": 60},
            "lora": {"rank": 2, "targets": ["attention"]},
            "train": {"num_steps": 1, "lr": 1e-3},
            "algorithm": {"kl_coef": 0.01, "loss": "gspo"},
            "rollout": {"groups_per_step": 2, "group_size": 2, "max_staleness": 1},
        },
    ]
    return values | sections


def of(run: Run, name: str) -> Run:
    """The part of a run that belongs to one adapter."""
    return Run(run.process, run.directory / "adapters" / name, run.output)


def finish(run: Run, steps: int) -> None:
    try:
        assert run.finish(START_S + steps * STEP_S) == 0, run.text()
        assert run.left_over() == []
    finally:
        run.stop()


@pytest.fixture(scope="module")
def trained(tiny_qwen3_moe: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = start_run(several(tiny_qwen3_moe, data), tmp_path_factory.mktemp("run"))
    finish(run, 4)
    return run


@pytest.mark.nightly
def test_a_task_with_a_slow_reward_does_not_hold_the_other_up(trained: Run) -> None:
    """Every token of each is accounted for, and was sampled by the version in its ledger."""
    lines = trained.text().splitlines()
    (last,), (first,) = ([i for i, line in enumerate(lines) if line.startswith(each)] for each in (
        "quick: step 3/3", "slow: step 1/1"
    ))  # fmt: skip
    assert last < first, "the slow one was waited for"
    quick, slow = (of(trained, name).rows() for name in ("quick", "slow"))
    assert [row["step"] for row in quick] == [1, 2, 3] and [row["step"] for row in slow] == [1]
    for rows in (quick, slow):
        assert_balanced(rows)
        assert all(newest_agree(row) and row["weights/probe_log_probs"] < 1e-4 for row in rows)
        assert all(row["mismatch/kl"] < 1e-6 and row["weights/pause_seconds"] == 0 for row in rows)
        assert all(is_known(name) for row in rows for name in row)
    assert all(row["staleness/mean"] == 0 and row["version"] == row["step"] for row in quick)
    assert "loss/kl" in slow[0] and "loss/kl" not in quick[0]
    for name, tensors in (("quick", 56), ("slow", 32)):
        assert f"{name}: version 0: {tensors} tensors in the engines equal the trainer's, bit for bit" in lines


@pytest.mark.nightly
def test_each_adapter_has_files_of_its_own(trained: Run) -> None:
    ranks, found = {}, {}
    for name, steps in (("quick", 3), ("slow", 1)):
        own = of(trained, name).directory
        exported = AdapterFile.open(own / "hf")
        ranks[name], found[name] = (exported.lora.rank, exported.lora.alpha), exported_to(own / "hf")
        assert any(float(t.abs().max()) > 0 for key, t in found[name].items() if ".lora_B." in key)
        saved = newest(own / "checkpoints")
        assert saved is not None and read_manifest(saved).extra["next_step"] == steps
        assert sorted(path.name for path in own.glob("groups/*")) == [f"step_{i}.npz" for i in range(1, steps + 1)]
    assert ranks == {"quick": (4, 8), "slow": (2, 8)} and len(found["quick"]) > len(found["slow"])


@pytest.mark.nightly
def test_an_adapters_steps_are_those_of_a_run_of_it_alone(trained: Run, tmp_path: Path) -> None:
    """Its own file, given the groups that it was trained on beside the other, gives the same numbers to the bit."""
    own = of(trained, "quick").directory
    alone = start_run({}, tmp_path, "--replay", str(own / "groups"), config=own / "config.yaml")
    finish(alone, 3)
    replayed = Run(alone.process, own.parent / "quick-replay", alone.output).rows()
    assert [row["step"] for row in replayed] == [1, 2, 3]
    for together, row in zip(of(trained, "quick").rows(), replayed, strict=True):
        same = {
            k for k in row if k.startswith(("loss/", "mismatch/", "advantage/", "entropy/", "replay/", "grad_norm"))
        }
        assert {"loss/total", "grad_norm", "mismatch/kl"} <= same and len(same) > 10
        assert {k: row[k] for k in same} == {k: together[k] for k in same}


# -------------------------------------------------------------------------------------------------- when things break


def long(model: Path, data: Path, **sections: Any) -> dict[str, Any]:
    """Two adapters with many steps; responses of one last longer than a step."""
    values = several(model, data)
    values["checkpoint"] = {"save_every": 1}
    values["train"] |= {"num_steps": 100}
    second = values["adapters"][1]
    train = {"num_steps": 100, "lr": 1e-2, "replay_max_age": 0}  # else newest tokens follow on routes of older weights
    second |= {"reward": {"function": "tests.e2e.rewards:even_tokens"}, "train": train}
    second["rollout"] |= {"max_response_tokens": 200}
    second["algorithm"] = {"correction": {"preset": "tis"}}
    return values | sections


def steps_of(run: Run) -> dict[str, int]:
    return {name: len(of(run, name).rows()) for name in ("quick", "slow")}


@pytest.mark.nightly
def test_a_run_that_is_killed_goes_on_with_the_books_of_every_adapter(
    tiny_qwen3_moe: Path, data: Path, tmp_path: Path
) -> None:
    values = long(tiny_qwen3_moe, data)
    run = start_run(values, tmp_path)
    try:
        run.wait_for(lambda: min(steps_of(run).values()) >= 3, START_S + 8 * STEP_S)
        run.process.kill()
        run.process.wait()
        assert run.left_over(60) == []
    finally:
        run.stop()
    saved: dict[str, int] = {}
    for name in steps_of(run):
        directory = newest(of(run, name).directory / "checkpoints")
        assert directory is not None
        saved[name] = read_manifest(directory).extra["next_step"]
    assert len(set(saved.values())) > 1 or min(saved.values()) >= 2, "each goes on from its own checkpoint"
    values["adapters"].append({"name": "late", "train": {"num_steps": 1}, "lora": {"rank": 8}})
    flags = [f"--adapters.{name}.train.num-steps={steps + 2}" for name, steps in saved.items()]
    again = start_run(values, tmp_path, *flags)
    finish(again, 5)
    assert [row["step"] for row in of(again, "late").rows()] == [1], "one that was added begins"
    for name, steps in saved.items():
        rows = {row["step"]: row for row in of(again, name).rows()}  # a step may have been logged, and not saved
        assert list(rows) == list(range(1, steps + 3)), name
        assert_balanced(list(rows.values()))
        assert not [row for row in rows.values() if not newest_agree(row)], name
        assert all(row["weights/probe_log_probs"] < 1e-4 for row in rows.values())
        assert f"{name}: version {steps}: " in again.text(), "the engines were given what was saved"


@pytest.mark.nightly
def test_every_adapter_is_saved_when_the_run_is_stopped(tiny_qwen3_moe: Path, data: Path, tmp_path: Path) -> None:
    run = start_run(long(tiny_qwen3_moe, data, checkpoint={"save_every": 0}), tmp_path)
    try:
        run.wait_for(lambda: min(steps_of(run).values()) >= 1, START_S + 4 * STEP_S)
        interrupt(run)
        assert run.finish(STEP_S) == 130, run.text()
        assert run.left_over() == []
    finally:
        run.stop()
    for name, made in steps_of(run).items():
        saved = newest(of(run, name).directory / "checkpoints")
        assert saved is not None and read_manifest(saved).extra["next_step"] == made, run.text()


@pytest.mark.nightly
def test_an_engine_that_comes_back_has_the_newest_of_every_adapter(
    tiny_qwen3_moe: Path, data: Path, tmp_path: Path
) -> None:
    run = start_run(long(tiny_qwen3_moe, data), tmp_path)
    try:
        run.wait_for(lambda: min(steps_of(run).values()) >= 1, START_S + 4 * STEP_S)
        engines = [p for p in run.look() if "mslime.backends.sglang.launch" in " ".join(p.cmdline())]
        engines[0].kill()
        before = steps_of(run)
        run.wait_for(lambda: all(steps_of(run)[n] >= before[n] + 3 for n in before), START_S + 8 * STEP_S)
    finally:
        run.stop()
    assert "no engine is left" in run.text()
    for name in before:
        rows = of(run, name).rows()
        assert_balanced(rows)
        assert not [row for row in rows if not newest_agree(row)], name
        assert all(row["weights/probe_log_probs"] < 1e-4 for row in rows)


@pytest.mark.nightly
def test_an_adapter_that_fails_ends_the_run_and_the_other_is_saved(
    tiny_qwen3_moe: Path, data: Path, tmp_path: Path
) -> None:
    values = long(tiny_qwen3_moe, data, checkpoint={"save_every": 0})
    values["adapters"][1] |= {"hooks": {"step": "tests.e2e.functions:fails_at_step_2"}}
    run = start_run(values, tmp_path)
    try:
        assert run.finish(START_S + 8 * STEP_S) == 2, run.text()
        assert run.left_over() == []
    finally:
        run.stop()
    assert "adapter slow failed" in run.text()
    saved = newest(of(run, "quick").directory / "checkpoints")
    assert saved is not None and read_manifest(saved).extra["next_step"] == len(of(run, "quick").rows())
