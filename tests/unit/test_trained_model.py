"""When a trained model gathers its parameters, and in which dtype they leave it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mslime.backends.megatron.step import trained_model, trainer
from mslime.backends.megatron.step.optimizer import follow_config, rates_of
from mslime.backends.megatron.step.trained_model import TrainedModel
from mslime.config.layout import ParallelLayout
from mslime.config.megatron import MegatronConfig
from mslime.config.schema import DeadlineConfig
from mslime.config.weights import WeightsConfig
from tests.unit.weights_world import MOE_CONFIG


class FakeGroup:
    """Of buckets whose gathering a pass may have begun."""

    def __init__(self) -> None:
        self.param_gather_handle: object = None
        self.waits = 0

    def start_param_sync(self, force_sync: bool) -> None:
        assert force_sync and self.param_gather_handle is not None, "that would be a gathering"
        self.param_gather_handle, self.waits = None, self.waits + 1


class FakeChunk:
    """A data-parallel wrapper that counts its gatherings."""

    def __init__(self) -> None:
        self.gathered, self.hooked = 0, True
        self.bucket_groups, self.expert_parallel_bucket_groups = [FakeGroup()], [FakeGroup()]

    def start_param_sync(self, force_sync: bool) -> None:
        assert force_sync
        self.gathered += 1

    def disable_forward_pre_hook(self, param_sync: bool) -> None:
        assert self.hooked
        self.gathered, self.hooked = self.gathered + param_sync, False

    def enable_forward_pre_hook(self) -> None:
        self.hooked = True


class FakeSender:
    """Of weights; keeps its options alone."""

    def __init__(self, options: Any) -> None:
        self.options, self.export = options, None


@pytest.fixture
def model() -> Any:
    made: Any = object.__new__(TrainedModel)
    made.spec = SimpleNamespace(megatron=SimpleNamespace(overlap_param_gather=True))
    made.wrapped, made._gathered, made._has_gradients, made.step = [FakeChunk(), FakeChunk()], False, False, 0
    made.schedule = SimpleNamespace(step=lambda steps: None)
    made.optimizer = SimpleNamespace(step=lambda: (True, 1.0, None), param_groups=[{"lr": 0.1}])
    made.parallel, made.device = SimpleNamespace(rank=0), None
    return made


def gatherings(model: Any) -> list[int]:
    return [chunk.gathered for chunk in model.wrapped]


def test_parameters_are_gathered_once_after_a_step_however_often_they_are_asked_for(model: Any) -> None:
    for step in (1, 2, 3):
        for _ in range(2):
            with model.weights_in_place():
                assert not any(chunk.hooked for chunk in model.wrapped)
            model.sync_params()
        assert gatherings(model) == [step, step] and all(chunk.hooked for chunk in model.wrapped)
        model._has_gradients = True
        model.apply_gradients()


def test_what_a_pass_has_begun_to_gather_is_waited_for(model: Any) -> None:
    model.sync_params()
    group = model.wrapped[1].expert_parallel_bucket_groups[0]
    group.param_gather_handle = object()
    model.sync_params()
    assert group.waits == 1 and gatherings(model) == [1, 1]


def test_a_loaded_checkpoint_leaves_each_group_the_learning_rates_of_this_run() -> None:
    """Embeddings have their own with `decoupled_lr`."""
    groups = [{"max_lr": 0.1, "min_lr": 0.0, "lr": 0.0}, {"max_lr": 0.02, "min_lr": 0.01, "lr": 0.0}]
    optimizer, stepped = cast(Any, SimpleNamespace(param_groups=groups)), list[int]()
    schedule = cast(Any, SimpleNamespace(num_steps=7, step=stepped.append))
    rates = rates_of(optimizer)
    for group in groups:  # what a checkpoint of another run brings
        group["max_lr"] = group["min_lr"] = 5.0
    follow_config(optimizer, schedule, rates, restart=False)
    assert rates_of(optimizer) == [(0.1, 0.0), (0.02, 0.01)] and (schedule.num_steps, stepped) == (7, [0])
    follow_config(optimizer, schedule, rates, restart=True)
    assert schedule.num_steps == 0


def test_a_resume_takes_note_of_the_learning_rates_before_a_checkpoint_brings_its_own(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = model.optimizer.param_groups[0]
    group |= {"max_lr": 0.1, "min_lr": 0.01}
    model.spec.layout, model._state = SimpleNamespace(describe=str), SimpleNamespace(changed=lambda: None)
    model._stored, model.schedule.num_steps = model.wrapped, 7

    def fake_load(directory: Path, chunks: Any, optimizer: Any, schedule: Any, *, layout: str) -> dict[str, Any]:
        group["max_lr"] = group["min_lr"] = 5.0
        return {"step": 7}

    monkeypatch.setattr(trained_model, "load_checkpoint", fake_load)
    assert model.load(Path("unused")) == {"step": 7} and model.step == 7
    assert (group["max_lr"], group["min_lr"]) == (0.1, 0.01)


@pytest.mark.parametrize(("task", "dtype"), [("rl", "float32"), ("sft", "bfloat16")])
def test_engines_are_sent_the_dtype_that_they_hold_and_exports_have_the_checkpoints(
    task: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        trainer, "WeightSender", lambda _rules, _groups, _params, options, *_, **__: FakeSender(options)
    )
    monkeypatch.setattr(trainer.dist, "get_backend", lambda: "gloo")
    made: Any = object.__new__(trainer.MegatronTrainer)
    made.hf_config, made.adapters, made.device = MOE_CONFIG | {"dtype": "bfloat16"}, None, SimpleNamespace(type="cpu")
    made.base = SimpleNamespace(groups=object())
    made.spec = SimpleNamespace(
        train=SimpleNamespace(task=task), asked_engine_dtype="auto", megatron=MegatronConfig(), checkpoint=Path("c"),
        weights=WeightsConfig(), deadlines=DeadlineConfig(), name="run", layout=ParallelLayout(), as_stored=False,
    )  # fmt: skip
    options = made.weight_sender().options
    assert (options.dtype, options.export_dtype) == (dtype, "bfloat16")
