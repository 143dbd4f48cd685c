"""What a trained model takes over from a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from mslime.backends.megatron.step.optimizer import follow_config, rates_of


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
