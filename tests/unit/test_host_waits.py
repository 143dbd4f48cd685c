"""In a micro-batch the host never waits for the GPU: it launches the next one's work while this one's computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mslime.algorithms.losses import client_loss, policy_loss, sft_loss, value_loss
from mslime.algorithms.policies import LOSSES
from mslime.algorithms.statistics import LossStatistics
from mslime.config.algorithm import PRESETS, AlgorithmConfig, CorrectionConfig
from mslime.config.serve import LossChoice

from .algorithms_reference import random_tokens
from .test_algorithms_losses import LENGTHS, algorithm, as_inputs

WAITS = {"aten::nonzero", "aten::masked_select", "aten::_local_scalar_dense", "aten::item", "aten::lift_fresh"}
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class HostWaits(TorchDispatchMode):
    """Names of operations that would let the host wait until a GPU has done all work queued before.

    This is a model of something that only a GPU shows. There, a boolean index and `nonzero` return a number of rows
    that the host reads, `item` and `bool` read a value, and a tensor of a Python list is copied from pageable memory;
    on a CPU such a tensor passes `lift_fresh`. Copies between devices do not appear here (`tests/rehearsal` has those).
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        indices = args[1] if name in INDEXED else ()
        if name in WAITS or any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


READS: dict[str, tuple[Callable[[], object], str]] = {
    "boolean index": (lambda: torch.ones(3)[torch.ones(3) > 0], "aten::index"),
    "list as an index": (lambda: torch.ones(3, 3)[:, [0, 2]], "aten::lift_fresh"),
    "boolean write": (lambda: torch.ones(3).index_put_((torch.ones(3) > 0,), torch.ones(1)), "aten::index_put_"),
    "number": (lambda: float(torch.ones(3).sum()), "aten::_local_scalar_dense"),
    "condition": (lambda: bool((torch.ones(3) > 0).all()), "aten::_local_scalar_dense"),
    "rows": (lambda: torch.ones(3).nonzero(), "aten::nonzero"),
    "chosen values": (lambda: torch.ones(3).masked_select(torch.ones(3) > 0), "aten::masked_select"),
    "tensor of a list": (lambda: torch.tensor([1, 2]), "aten::lift_fresh"),
}  # fmt: skip


@pytest.mark.parametrize("kind", READS)
def test_a_read_by_the_host_is_seen(kind: str) -> None:
    read, name = READS[kind]
    with HostWaits() as waits:
        read()
    assert name in waits.found


@pytest.mark.parametrize("config", [
    *(AlgorithmConfig(loss=loss) for loss in LOSSES),
    *(algorithm(CorrectionConfig(preset=preset)) for preset in PRESETS),
    algorithm(loss="tests.unit.user_functions:ppo_again"),
], ids=lambda config: f"{config.loss}_{config.correction.preset}")  # fmt: skip
def test_a_policy_loss_and_its_statistics_wait_for_no_gpu(config: AlgorithmConfig) -> None:
    tokens = random_tokens(np.random.default_rng(0), LENGTHS, 0.5)
    total = LossStatistics.zeros().merge(policy_loss(as_inputs(tokens), config).statistics)  # constants are made here
    inputs = as_inputs(tokens)
    with HostWaits() as waits:
        output = policy_loss(inputs, config)
        total.merge(output.statistics)
        output.loss.backward()
    assert waits.found == []


def test_other_losses_wait_for_no_gpu() -> None:
    log_probs, mask, column = torch.ones(4, requires_grad=True), torch.tensor([True, False, True, True]), torch.ones(4)
    choices = [LossChoice(name=name) for name in ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")]
    with HostWaits() as waits:
        sft_loss(log_probs, column, mask).loss.backward()
        value_loss(log_probs, column, column, column, mask, 0.2).loss.backward()
        for choice in choices:
            client_loss(choice, log_probs, mask, column, column, column).loss.backward()
    assert waits.found == []
