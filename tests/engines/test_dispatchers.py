"""Memory that megatron-core's token dispatchers keep of a micro-batch, on a real rank."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mslime.backends.megatron.step.trainer import MegatronTrainer
from tests.engines.trainer_ranks import make_config, run_trainers, shard_of
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

pytestmark = pytest.mark.timeout(180)


def _routing_weights_alive(trainer: MegatronTrainer) -> tuple[int, int]:
    """(routing weights that layers have computed in a step, how many of them are still in memory after it)."""
    from megatron.core.transformer.moe.router import TopKRouter  # only once the CPU platform is in place

    made: list[weakref.ref[Any]] = []
    route = TopKRouter.forward

    def forward(router: TopKRouter, *args: Any, **kwargs: Any) -> Any:
        probs, routing_map = route(router, *args, **kwargs)
        made.append(weakref.ref(probs))
        return probs, routing_map

    with mock.patch.object(TopKRouter, "forward", forward):
        trainer.train([shard_of(trainer)])
    return len(made), sum(each() is not None for each in made)


@pytest.mark.parametrize("recompute", ({}, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}))
def test_no_layer_keeps_a_micro_batch_after_the_step(tmp_path: Path, recompute: dict[str, Any]) -> None:
    config = make_config(make_tiny_qwen3_moe(tmp_path / "model"), tmp_path / "run", **recompute)
    ((made, alive),) = run_trainers(_routing_weights_alive, config)
    assert made >= 12 and alive == 0
