"""Log-probs of watched sequences equal those of the policy at the start of a step, gathered from real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.run.trainers import _joined
from tests.engines.trainer_ranks import make_config, run_trainers, shard_of
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

pytestmark = pytest.mark.timeout(180)

WATCHED = (1, 4, 6, 99)
"""Sequences of both data-parallel ranks, and one that does not exist."""


def _watch(trainer: MegatronTrainer) -> dict[str, Any]:
    """One step with the routes of the rollout; returns its log-probs, and those of a forward pass before it."""
    shard = shard_of(trainer)
    before = trainer.log_probs(shard, replay=True).numpy()
    trainer.watch.begin(WATCHED)
    trainer.train([shard])
    spans = dict(zip(shard.sequence_ids.tolist(), shard.spans(), strict=True))
    expected = {n: before[slice(*spans[n])] for n in WATCHED if n in spans}
    found = trainer.watch.found
    trainer.watch.begin(())
    trainer.train([shard])
    return {"log_probs": found, "expected": expected, "unwatched": trainer.watch.found}


@pytest.mark.parametrize(
    "layout",
    [{}, {"dp": 2, "ep": 2}, {"cp": 2}, {"tp": 2, "pp": 2, "ep": 2}, {"train": {"packed": False}}, "before"],
    ids=["one", "dp2_ep2", "cp2", "tp2_pp2_ep2", "unpacked", "old_log_probs"],
)
def test_watched_log_probs_are_those_of_the_policy_before_its_update(layout: Any, tmp_path: Path) -> None:
    config = make_config(make_tiny_qwen3_moe(tmp_path / "model"), tmp_path, **({} if layout == "before" else layout))
    if layout == "before":
        algorithm = config.algorithm.model_copy(update={"old_log_probs": "always"})
        config = config.model_copy(update={"algorithm": algorithm})
    results = run_trainers(_watch, config)
    found = _joined(results)
    assert sorted(found) == [1, 4, 6] and not any(result["unwatched"] for result in results)
    expected = {number: values for result in results for number, values in result["expected"].items()}
    for number, values in found.items():
        assert layout == "before" or np.isnan(values[0]), "nothing predicts a first token"
        np.testing.assert_allclose(values[1:], expected[number][1:], atol=1e-5)
