"""Runs from FP8 and INT4 checkpoints: the engine holds quantised weights, the trainer plain ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mslime.convert.hf import HFCheckpoint
from mslime.observe.names import by_step, is_known
from mslime.offline.jobs import run_job
from mslime.offline.requantise import ToFp8, ToInt4
from tests.e2e.harness import Run, assert_balanced, start_run
from tests.e2e.test_run import START_S, STEP_S, TP2_EP2, prompts, settings
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

__all__ = ["prompts"]
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "num_key_value_heads": 4}
"""In whole blocks, as SGLang's FP8 layers want them."""


SEPARATE: dict[str, Any] = {"rollout": {"max_staleness": 1}, "weights": {"verify": "always"}}
SHARED: dict[str, Any] = {
    "cluster": {"placement": "colocated"}, "weights": {"transport": "shm", "verify": "always"},
    "rollout": {"max_staleness": 0},
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("number", "placed"),
    [("fp8", SEPARATE), ("fp8", SHARED), ("int4", SHARED)],
    ids=["fp8 separate", "fp8 colocated", "int4 colocated"],
)
def test_a_run_from_quantised_weights_trains_and_resumes_with_engines_that_hold_such(
    prompts: Path, tmp_path: Path, runs: list[Run], number: str, placed: dict[str, Any]
) -> None:
    plain, model = make_tiny_qwen3_moe(tmp_path / "plain", **SIZES), tmp_path / number
    run_job(ToFp8(plain, power_of_two=False) if number == "fp8" else ToInt4(plain), model)
    stored = len(HFCheckpoint(model).stored)
    # The probe is between plain and quantised weights: 4 bits take a random model of this size 0.6 nats away.
    weights = placed["weights"] | ({"probe_tolerance": 1.5} if number == "int4" else {})

    def begin(steps: int) -> Run:
        values = settings(
            model, prompts, megatron=TP2_EP2, train={"num_steps": steps}, **(placed | {"weights": weights}),
            algorithm={"correction": {"preset": "tis"}}, checkpoint={"save_every": 1, "hf_every": 2},
        )  # fmt: skip
        runs.append(start_run(values, tmp_path / "run"))
        return runs[-1]

    first = begin(2)
    assert first.finish(START_S + 2 * STEP_S) == 0, first.text()
    run = begin(3)
    assert run.finish(START_S + STEP_S) == 0, run.text()
    assert "continuing from" in run.text() and run.left_over() == []
    rows = by_step(run.rows())
    assert [row["step"] for row in rows if row["step"]] == [1, 2, 3]
    assert all(is_known(name) for row in run.rows() for name in row)
    assert_balanced([row for row in rows if row["step"]])
    said = first.text() + run.text()
    compared = re.findall(rf"^version (\d+): {stored} tensors in the engines equal", said, re.MULTILINE)
    assert {*map(int, compared)} == {0, 1, 2, 3}, "numbers and scales, after every sync"
    trained = [row for row in rows if row["step"]]
    assert all(0 < row["mismatch/kl"] < 1 and row["replay/coverage"] == 1.0 for row in trained), trained
    exported = tmp_path / "run" / "run" / "hf_step_2"
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())
