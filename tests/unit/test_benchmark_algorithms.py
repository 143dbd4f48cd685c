"""The parts of benchmarks/algorithms.py that run no engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.algorithms import VARIANTS, Curve, curve_of, settings_of, state_of, steps_to, table
from mslime.config.loader import load_config


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_a_legal_run_and_keeps_what_its_loss_starts_from(name: str, tmp_path: Path) -> None:
    file = tmp_path / "variant.json"
    file.write_text(json.dumps(settings_of(name, tmp_path, 7, 30)))
    config = load_config(file)
    clip = {"ppo": (0.2, 0.28, "token"), "gspo": (3e-4, 4e-4, "sequence"), "cispo": (1.0, 4.0, "token")}
    algorithm = config.algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.loss_aggregation) == clip[algorithm.loss]
    assert (config.rollout.max_staleness, config.seed) == (4 if name.startswith("stale") else 0, 7)


def test_a_finished_run_is_left_alone_and_an_interrupted_one_goes_on() -> None:
    settings = {"train": {"num_steps": 3}}
    assert state_of(settings, None, []) == "new"
    assert state_of(settings, settings, [{"step": 2}]) == "continue"
    assert state_of(settings, settings, []) == "continue"
    assert state_of(settings, settings, [{"step": 3}]) == "done"
    assert state_of(settings, {"train": {"num_steps": 4}}, [{"step": 3}]) == "other"


def test_the_threshold_is_reached_between_two_evaluations() -> None:
    assert steps_to({0: 0.2, 10: 0.6, 5: 0.4, 15: 1.0}, 0.8) == pytest.approx(12.5)
    assert steps_to({0: 0.9, 5: 0.9}, 0.8) == 0
    assert steps_to({0: 0.2, 5: 0.9, 10: 0.1}, 0.9) == 5
    assert steps_to({0: 0.2, 5: 0.7}, 0.8) is None


def test_a_curve_leaves_evaluation_out_of_the_time_and_the_state_before_training_out_of_the_means() -> None:
    scores = {"eval/held_out/accuracy": 0.1, "eval/sampled/pass@1": 0.3, "perf/eval_seconds": 9.0}
    rows = [
        {"step": 0, **scores},
        {"step": 1, "perf/step_seconds": 2.0, "staleness/mean": 0.0, "staleness/max": 1.0, "mismatch/kl": None},
        {"step": 2, "perf/step_seconds": 12.0, "staleness/mean": 1.0, "mismatch/kl": 0.5, **scores},
    ]
    curve = curve_of(rows)
    assert (curve.steps, curve.seconds) == (2, 5.0)
    assert curve.greedy == {0: 0.1, 2: 0.1} and curve.sampled == {0: 0.3, 2: 0.3}
    assert curve.metrics["staleness/mean"] == 0.5 and curve.metrics["mismatch/kl"] == 0.5
    assert curve.metrics["max staleness/max"] == 1.0


def test_seeds_stand_side_by_side_in_the_table() -> None:
    metrics = {"staleness/mean": 0.0, "max staleness/max": 0.0, "mismatch/kl": 0.0, "max mismatch/kl": 0.0}
    curve = Curve(2, {0: 0.1, 2: 0.5}, {0: 0.1, 2: 0.9}, metrics, 3.0)
    row = table({"grpo": {1: curve, 2: curve}}, 0.8).splitlines()[2]
    assert row.startswith("| GRPO | 50.0% / 50.0% | 90.0% / 90.0% | 90.0% / 90.0% | 2 / 2 | 1.5 / 1.5 |")
