"""Eight adapters in one run on the real engines, whose steps share passes through two pipeline stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mslime.convert.peft import AdapterFile
from mslime.data.checkpoints import newest, read_manifest
from mslime.observe.names import is_known
from tests.e2e.harness import Run, assert_balanced, start_run
from tests.e2e.test_lora import newest_agree
from tests.e2e.test_run import START_S, STEP_S, settings
from tests.e2e.test_several_adapters import finish, of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

EIGHT: dict[str, dict[str, Any]] = {
    "plain": {},
    "small": {"lora": {"rank": 2, "alpha": 3, "rs_lora": True}, "train": {"lr": 2e-3}},
    "attention": {"lora": {"targets": ["attention"]}, "algorithm": {"loss": "gspo"}},
    "experts": {"lora": {"targets": ["experts"]}, "train": {"lr_warmup_steps": 1}},
    "queries": {"lora": {"targets": ["q_proj", "v_proj"]}, "train": {"optimizer_steps_per_rollout": 2}},
    "kept_near": {"algorithm": {"kl_coef": 0.1}, "rollout": {"group_size": 4}},
    "ahead": {"rollout": {"max_staleness": 1}, "algorithm": {"correction": {"preset": "tis"}}},
    "slow": {"reward": {"function": "tests.e2e.rewards:slow", "timeout_s": 60}, "train": {"num_steps": 1}},
}
"""Rank, layers, learning rate, loss, group size, freshness, reward and number of steps differ."""


@pytest.fixture(scope="module")
def trained(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("eight")
    for number, name in enumerate(EIGHT):
        rows = [{"prompt": f"{i}+{number}=", "label": str(i + number)} for i in range(24)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = settings(
        tiny_qwen3_moe,
        directory / "plain.jsonl",
        cluster={"trainer_ranks": 2},
        megatron={"pipeline_model_parallel_size": 2},
        lora={"rank": 4, "alpha": 8, "sync": "adapter"},
        train={"num_steps": 2, "lr": 1e-2},
        rollout={"groups_per_step": 2, "group_size": 2, "max_response_tokens": 12},
        observe={"save_groups": True},
    )
    values["adapters"] = [
        {"name": name, "data": {"prompts": str(directory / f"{name}.jsonl")}, **entry} for name, entry in EIGHT.items()
    ]
    run = start_run(values, directory)
    finish(run, 16)
    return run


def test_each_of_eight_has_books_metrics_and_files_of_its_own(trained: Run) -> None:
    """Their steps shared passes; every token of each is accounted for, and was sampled by the version in its ledger."""
    together = list[float]()
    for name, entry in EIGHT.items():
        own, steps = of(trained, name), entry.get("train", {}).get("num_steps", 2)
        rows = own.rows()
        assert [row["step"] for row in rows] == list(range(1, steps + 1)), name
        assert_balanced(rows)
        assert all(newest_agree(row) and row["weights/probe_log_probs"] < 1e-4 for row in rows), name
        assert all(row["weights/pause_seconds"] == 0 and is_known(key) for row in rows for key in row), name
        together += [row.get("perf/adapters_together", 1.0) for row in rows]
        saved = newest(own.directory / "checkpoints")
        assert saved is not None and read_manifest(saved).extra["next_step"] == steps
        lora = {"rank": 4, "alpha": 8} | entry.get("lora", {})
        exported = AdapterFile.open(own.directory / "hf").lora
        assert (exported.rank, exported.alpha) == (lora["rank"], lora["alpha"])
        assert len(list(own.directory.glob("groups/*"))) == steps
    assert max(together) >= 2, together


@pytest.mark.parametrize("name", ["small", "queries"])
def test_its_steps_are_those_of_a_run_of_it_alone(trained: Run, name: str, tmp_path: Path) -> None:
    """Its own file, given the groups that it was trained on beside the others, gives the same numbers to the bit."""
    own = of(trained, name)
    alone = start_run({}, tmp_path, "--replay", str(own.directory / "groups"), config=own.directory / "config.yaml")
    assert alone.finish(START_S + 2 * STEP_S) == 0, alone.text()
    replayed = Run(alone.process, own.directory.parent / f"{name}-replay", alone.output).rows()
    assert len(replayed) == 2
    for together, row in zip(own.rows(), replayed, strict=True):
        kinds = ("loss/", "mismatch/", "advantage/", "entropy/", "replay/", "grad_norm")
        same = {key for key in row if key.startswith(kinds)}
        assert {"loss/total", "grad_norm", "mismatch/kl"} <= same and len(same) > 10
        assert {key: row[key] for key in same} == {key: together[key] for key in same}
