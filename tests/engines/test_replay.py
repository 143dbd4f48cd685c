"""Routing replay on real megatron-core ranks: every layout consumes the same routes and computes the same results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mslime.backends.megatron.replay.route_rows import token_keys
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.data.shard import TrainShard
from tests.engines.trainer_ranks import (
    FULL_RECOMPUTE,
    MOE_RECOMPUTE,
    largest_difference,
    loss_and_gradients,
    make_config,
    run_trainers,
    shard_of,
    to_hf,
)
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

pytestmark = pytest.mark.timeout(180)

LAYOUTS: dict[str, dict[str, Any]] = {
    "recompute": FULL_RECOMPUTE,
    "unpacked": {"train": {"packed": False}},
    "tp2_ep2": {"tp": 2, "ep": 2},
    "dp2_ep2": {"dp": 2, "ep": 2},
    "pp2": {"pp": 2},
    "pp2_vpp2": {"pp": 2, "vpp": 2},
    "tp2_pp2_ep2": {"tp": 2, "pp": 2, "ep": 2},
    "cp2": {"cp": 2},
    "cp2_tp2_ep2": {"cp": 2, "tp": 2, "ep": 2},
    "pp2_recompute": {"pp": 2, **FULL_RECOMPUTE},
    "pp2_vpp2_recompute": {"pp": 2, "vpp": 2, **FULL_RECOMPUTE},
    "pp2_recompute_moe": {"pp": 2, **MOE_RECOMPUTE},
    "pp2_vpp2_tp2_ep2_recompute_moe": {"pp": 2, "vpp": 2, "tp": 2, "ep": 2, **MOE_RECOMPUTE},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("replay") / "model")


def replayed_and_recorded(trainer: MegatronTrainer, shard: TrainShard) -> dict[str, Any]:
    """R3 with the shard's random routes (both passes), then R2, then natural routing, on one rank."""
    with trainer.routing.old_log_prob_pass(shard, 0) as routes:
        log_probs = trainer.runner.log_probs(shard, routes)
    first = trainer.routing.report(shard)
    with trainer.routing.gradient_pass(shard, 0) as routes:
        loss, gradients = loss_and_gradients(trainer, shard, routes)
    second = trainer.routing.report(shard)

    trainer.routing.mode = "r2"
    with trainer.routing.old_log_prob_pass(shard, 0) as routes:
        natural_log_probs = trainer.runner.log_probs(shard, routes)
    with trainer.routing.gradient_pass(shard, 0) as routes:
        recorded_loss, recorded_gradients = loss_and_gradients(trainer, shard, routes)
    recorded = trainer.routing.report(shard)
    natural_loss, natural_gradients = loss_and_gradients(trainer, shard, None)
    assert first is not None and second is not None and recorded is not None
    return {
        "log_probs": dict(zip(token_keys(shard).tolist(), log_probs.tolist(), strict=True)),
        "loss": loss,
        "gradients": gradients,
        "reports": (first, second),
        "recorded_loss": recorded_loss,
        "recorded_gradients": recorded_gradients,
        "recorded_report": recorded,
        "natural_loss": natural_loss,
        "natural_gradients": natural_gradients,
        "natural_log_probs": natural_log_probs,
    }


def _reference(trainer: MegatronTrainer) -> dict[str, Any]:
    found = replayed_and_recorded(trainer, shard_of(trainer))
    return found | {"gradients": to_hf(trainer, found["gradients"])}


@pytest.fixture(scope="module")
def reference(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of one process, as a file."""
    path = tmp_path_factory.mktemp("reference") / "reference.pt"
    torch.save(run_trainers(_reference, make_config(checkpoint, path.parent))[0], path)
    return path


def _compare(trainer: MegatronTrainer, path: Path) -> dict[str, Any]:
    reference, shard = torch.load(path, weights_only=False), shard_of(trainer)
    found = replayed_and_recorded(trainer, shard)
    recorded, natural = found["recorded_gradients"], found["natural_gradients"]
    log_probs = found["log_probs"]
    return {
        "loss": found["loss"],
        "gradient": largest_difference(trainer, found["gradients"], reference["gradients"]),
        "log_prob": max(abs(value - reference["log_probs"][key]) for key, value in log_probs.items()),
        "reports": found["reports"],
        "recorded_report": found["recorded_report"],
        "recorded_equals_natural": found["recorded_loss"] == found["natural_loss"]
        and all(torch.equal(recorded[name], natural[name]) for name in natural),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_routes_give_the_loss_and_gradients_of_one_process_in_every_layout(
    layout: str, checkpoint: Path, reference: Path, tmp_path: Path
) -> None:
    results = run_trainers(_compare, make_config(checkpoint, tmp_path, **LAYOUTS[layout]), reference)
    alone = torch.load(reference, weights_only=False)
    expected = alone["reports"][1]
    assert expected.coverage == 1.0 and max(expected.agreement.values()) < 0.5, "the routes are not the routers' own"
    for result in results:
        assert abs(result["loss"] - alone["loss"]) < 1e-5
        assert result["gradient"] < 2e-5
        assert result["log_prob"] < 1e-4
        for report in result["reports"]:
            assert (report.fingerprint, report.rows) == (expected.fingerprint, expected.rows)
            assert report.coverage == 1.0 and set(report.agreement) == {0, 1, 2, 3}
        assert result["recorded_equals_natural"], "recording and replaying changes not one bit"
        assert result["recorded_report"].coverage == 1.0
        assert set(result["recorded_report"].agreement.values()) == {1.0}


def test_replay_changes_the_loss(reference: Path) -> None:
    """Otherwise the comparisons above would compare natural routing with itself."""
    alone = torch.load(reference, weights_only=False)
    assert abs(alone["loss"] - alone["natural_loss"]) > 1e-3
    assert alone["recorded_loss"] == alone["natural_loss"]


def _aged(trainer: MegatronTrainer, path: Path | None) -> dict[str, Any]:
    """Both passes with the first half of every sequence sampled by weights 2 versions older; then with all of it."""
    shard = shard_of(trainer)
    first_half = [np.arange(n) < n // 2 for n in shard.lengths]
    ages = 2 * np.concatenate(first_half).astype(np.int32)
    found: dict[str, Any] = {}
    for name, segment_ages, max_age in (("all", ages, None), ("young", ages, 1), ("none", np.full_like(ages, 2), 1)):
        trainer.routing.max_age = max_age
        aged = replace(shard, segment_ages=segment_ages)
        with trainer.routing.old_log_prob_pass(aged, 0) as routes:
            log_probs = trainer.runner.log_probs(aged, routes)
        reports = [trainer.routing.report(aged)]
        with trainer.routing.gradient_pass(aged, 0) as routes:
            loss, gradients = loss_and_gradients(trainer, aged, routes)
        reports.append(trainer.routing.report(aged))
        found[name] = {"loss": loss, "reports": reports, "log_probs": log_probs}
        if path is None:
            found[name]["gradients"] = to_hf(trainer, gradients)
        else:
            whole = torch.load(path, weights_only=False)[name]["gradients"]
            found[name]["gradient"] = largest_difference(trainer, gradients, whole)
    natural_loss, natural = loss_and_gradients(trainer, shard, None)
    found["natural"] = {"loss": natural_loss, "gradients": to_hf(trainer, natural) if path is None else None}
    return found


@pytest.fixture(scope="module")
def aged(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of one process when rows are replayed by age, as a file."""
    path = tmp_path_factory.mktemp("aged") / "aged.pt"
    torch.save(run_trainers(_aged, make_config(checkpoint, path.parent), None)[0], path)
    return path


def test_old_routes_are_left_to_the_routers_and_the_shares_say_so(aged: Path) -> None:
    alone = torch.load(aged, weights_only=False)
    for name, share in (("all", 0.0), ("none", 1.0)):
        for report in alone[name]["reports"]:
            assert (report.coverage, report.too_old) == (1 - share, share)
    for report in alone["young"]["reports"]:
        assert 0.2 < report.coverage < 0.8 and report.coverage + report.too_old == pytest.approx(1.0, abs=1e-12)
        assert 0 < report.rows < alone["all"]["reports"][0].rows
    assert alone["none"]["loss"] == alone["natural"]["loss"] and alone["none"]["reports"][1].rows == 0
    differ = {name: alone[name]["loss"] for name in ("all", "young", "none")}
    assert len({round(loss, 4) for loss in differ.values()}) == 3, differ
    for name, gradient in alone["natural"]["gradients"].items():
        assert torch.equal(gradient, alone["none"]["gradients"][name]), name


@pytest.mark.parametrize("layout", ["recompute", "tp2_ep2", "pp2_vpp2", "cp2"])
def test_replay_by_age_is_the_same_in_every_layout(layout: str, checkpoint: Path, aged: Path, tmp_path: Path) -> None:
    alone = torch.load(aged, weights_only=False)
    for result in run_trainers(_aged, make_config(checkpoint, tmp_path, **LAYOUTS[layout]), aged):
        for name in ("all", "young", "none"):
            assert abs(result[name]["loss"] - alone[name]["loss"]) < 1e-5 and result[name]["gradient"] < 2e-5
            assert result[name]["reports"] == alone[name]["reports"]


def _with_dense_layers(trainer: MegatronTrainer, path: Path | None) -> dict[str, Any]:
    shard = shard_of(trainer, layers=(1, 3))
    with trainer.routing.gradient_pass(shard, 0) as routes:
        loss, gradients = loss_and_gradients(trainer, shard, routes)
    report = trainer.routing.report(shard)
    if path is None:
        return {"loss": loss, "gradients": to_hf(trainer, gradients), "report": report, "layers": trainer.moe_layer_ids}
    alone = torch.load(path, weights_only=False)
    largest = largest_difference(trainer, gradients, alone["gradients"])
    return {"loss": loss, "gradient": largest, "report": report, "layers": trainer.moe_layer_ids}


def test_dense_layers_between_do_not_shift_the_routes(tmp_path: Path) -> None:
    """Layers 0 and 2 are dense; with interleaved stages each rank then holds one kind of layer only."""
    model = make_tiny_qwen3_moe(tmp_path / "model", mlp_only_layers=[0, 2])
    alone = run_trainers(_with_dense_layers, make_config(model, tmp_path), None)[0]
    torch.save(alone, tmp_path / "alone.pt")
    config = make_config(model, tmp_path, pp=2, vpp=2, **FULL_RECOMPUTE)
    results = run_trainers(_with_dense_layers, config, tmp_path / "alone.pt")
    assert alone["layers"] == (1, 3) and [r["layers"] for r in results] == [(), (1, 3)]
    for result in results:
        assert result["report"].fingerprint == alone["report"].fingerprint
        assert set(result["report"].agreement) == {1, 3}
        assert abs(result["loss"] - alone["loss"]) < 1e-5 and result["gradient"] < 2e-5
