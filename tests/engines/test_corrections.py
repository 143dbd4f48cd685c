"""Corrections by segment, sequence and age on real trainer ranks: equal to one process, which equals NumPy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.algorithm import AlgorithmConfig
from mslime.data.shard import TrainShard
from tests.engines.trainer_ranks import (
    largest_difference,
    make_config,
    metrics_and_gradients,
    run_trainers,
    shard_of,
    to_hf,
)
from tests.fixtures.tiny_models import make_tiny_qwen3_dense
from tests.unit import algorithms_reference as reference

pytestmark = pytest.mark.timeout(120)

SEGMENT = {"level": "segment", "kept_weight": "ratio"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo, truncated by segment": {"correction": {**SEGMENT, "preset": "tis", "high": 1.1}},
    "gspo, masked by segment": {
        "loss": "gspo", "clip_low": 0.02, "clip_high": 0.02,
        "correction": {**SEGMENT, "preset": "mis", "low": 0.7, "high": 1.4},
    },
    "cispo, old ones weigh less": {"loss": "cispo", "correction": {"preset": "tis", "max_age": 1, "old_weight": 0.3}},
    "topr, old ones masked": {"loss": "topr", "correction": {"preset": "bypass", "max_age": 2}},
    "gmpo, sequences dropped": {"loss": "gmpo", "correction": {"preset": "geo_rs", "low": 0.99, "high": 1.05}},
}  # fmt: skip
USER = "tests.unit.user_functions"
TWINS: dict[str, dict[str, Any]] = {
    "built in": {"loss": "ppo", "correction": {"preset": "mis", "low": 0.8, "high": 1.2}},
    "a user's": {"loss": f"{USER}:ppo_again", "correction": {"function": f"{USER}:narrow_mis"}},
}
"""The same algorithm twice."""
LAYOUTS: dict[str, dict[str, int]] = {"cp2": {"cp": 2}, "tp2_dp2": {"tp": 2, "dp": 2}}


def with_segments(shard: TrainShard, log_probs: Tensor) -> TrainShard:
    """The shard with three weight versions in each response, borders within context-parallel chunks, ages up to 10.

    Old and behaviour log-probs are near the model's, and follow from the sequence's id, so that every split of the
    sequences over ranks has the same.
    """
    columns: dict[str, list[np.ndarray]] = {"index": [], "ages": [], "old": [], "behaviour": []}
    for sequence, (start, stop) in zip(shard.sequence_ids.tolist(), shard.spans(), strict=True):
        random, n = np.random.default_rng(sequence), stop - start
        segment = np.searchsorted([n // 3 + 1, n // 2 + 2], np.arange(n), side="right")
        known = log_probs[start:stop].numpy()
        columns["index"].append(segment)
        columns["ages"].append(np.array([10 - sequence, 1, 0])[segment])
        columns["old"].append(known + random.normal(0, 0.02, n))
        columns["behaviour"].append(known + random.normal(0, 0.15, n))
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    return replace(
        shard,
        segment_index=joined["index"].astype(np.int32),
        segment_ages=joined["ages"].astype(np.int32),
        old_log_probs=joined["old"].astype(np.float32),
        behaviour_log_probs=joined["behaviour"].astype(np.float32),
    )


def every_algorithm(trainer: MegatronTrainer) -> dict[str, Any]:
    """Metrics and this rank's gradients under each algorithm; the shard and its log-probs."""
    plain = replace(shard_of(trainer), routes=None)
    log_probs = trainer.log_probs(plain)
    shard, runner = with_segments(plain, log_probs), trainer.runner
    found: dict[str, Any] = {}
    for name, fields in (ALGORITHMS | TWINS).items():
        spec = replace(trainer.spec, algorithm=AlgorithmConfig(**fields))
        trainer.runner = replace(runner, spec=spec)
        found[name] = metrics_and_gradients(trainer, shard, None)
    return {"found": found, "shard": shard, "log_probs": log_probs}


def whole(trainer: MegatronTrainer) -> dict[str, Any]:
    """`every_algorithm` in one process, gradients under Hugging Face names."""
    result = every_algorithm(trainer)
    result["found"] = {name: (m, to_hf(trainer, g)) for name, (m, g) in result["found"].items()}
    return result


def compared(trainer: MegatronTrainer, alone: dict[str, Any]) -> dict[str, tuple[dict[str, float], float]]:
    """(metrics, largest difference of this rank's gradients from its parts of one process's) under each algorithm; 0
    where `alone` lacks it: so many tensors are all that one message takes."""
    found = every_algorithm(trainer)["found"]
    return {
        name: (m, largest_difference(trainer, g, alone[name][1]) if name in alone else 0.0)
        for name, (m, g) in found.items()
    }


def config(directory: Path, **sizes: int) -> Any:
    return make_config(directory / "model", directory, train={"replay": "off"}, **sizes)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("corrections")
    make_tiny_qwen3_dense(made / "model")
    return made


@pytest.fixture(scope="module")
def alone(directory: Path) -> dict[str, Any]:
    (result,) = run_trainers(whole, config(directory))
    return result


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_process_reports_what_numpy_finds_from_its_log_probs(name: str, alone: dict[str, Any]) -> None:
    shard, algorithm = alone["shard"], AlgorithmConfig(**ALGORITHMS[name])
    sequence = np.repeat(np.arange(len(shard.lengths)), shard.lengths)
    first = {s: int(np.flatnonzero(shard.loss_mask & (sequence == s))[0]) for s in range(len(shard.lengths))}
    tokens = reference.Tokens(
        log_probs=alone["log_probs"].numpy().astype(np.float64),
        old=shard.old_log_probs.astype(np.float64),
        behaviour=shard.behaviour_log_probs.astype(np.float64),
        reference=np.zeros(len(sequence)),
        entropy=np.zeros(len(sequence)),
        advantages=shard.advantages.astype(np.float64),
        weights=shard.weights.astype(np.float64),
        mask=shard.loss_mask,
        sequence=sequence,
        segment=sequence * 3 + shard.segment_index,
        ages=np.minimum(shard.segment_ages, 8),
        positions=np.arange(len(sequence)) - np.array([first[s] for s in sequence]),
    )
    expected = reference.policy_loss(tokens, algorithm)
    metrics, _ = alone["found"][name]
    compare = [n for n in expected if "entropy" not in n and n != "loss/kl"]
    assert {n: metrics[n] for n in compare} == pytest.approx({n: expected[n] for n in compare}, rel=1e-4, abs=1e-5)
    assert {"mismatch/kl_age_0", "mismatch/kl_age_1", "mismatch/kl_age_8"} <= set(compare)
    touched = ("correction/clipped_fraction", "correction/masked_fraction")
    assert any(0 < metrics[n] < 1 for n in touched) or metrics["correction/mean_weight"] < 0.9, metrics


def test_a_users_loss_and_correction_that_say_the_same_train_the_same_bits(alone: dict[str, Any]) -> None:
    (metrics, gradients), (expected, built_in) = alone["found"]["a user's"], alone["found"]["built in"]
    assert gradients.keys() == built_in.keys() and all(g.equal(built_in[name]) for name, g in gradients.items())
    assert {n for n in expected if metrics[n] != expected[n]} <= {"correction/clipped_fraction"}
    assert (
        metrics["user/twice"] == pytest.approx(2 * metrics["user/ratio"]) and expected["correction/masked_fraction"] > 0
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_segments_and_ages_are_corrected_alike_in_every_layout(
    layout: str, directory: Path, alone: dict[str, Any]
) -> None:
    known = {name: alone["found"][name] for name in ALGORITHMS}
    for found in run_trainers(compared, config(directory, **LAYOUTS[layout]), known):
        for name, (metrics, difference) in found.items():
            expected, gradients = alone["found"][name]
            largest = max(float(g.abs().max()) for g in gradients.values())
            assert metrics == pytest.approx(expected, rel=2e-4, abs=2e-6), name
            assert difference < 2e-5 * max(largest, 1.0) and largest > 1e-3, (name, difference, largest)
