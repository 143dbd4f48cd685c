"""Weights that leave the model come back bit for bit: for the reference policy's, and of an offloaded trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mslime.backends.cpu.megatron_patches import install

install()

from mslime.backends.megatron.step import base_model, offload  # noqa: E402
from mslime.backends.megatron.step.base_model import ReferencePolicy  # noqa: E402


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Linear:
    """A stand-in for a chunk, whose checkpoint is all ones."""
    built = torch.nn.Linear(3, 2)

    def load(chunks: list[torch.nn.Module], *_: object) -> None:
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.fill_(1.0)

    monkeypatch.setattr(base_model, "load_hf_weights", load)
    monkeypatch.setattr(base_model, "named_local_params", lambda chunks: chunks[0].named_parameters())
    return built


def test_weights_are_the_references_inside_and_their_own_afterwards(model: Any) -> None:
    policy = ReferencePolicy([model], {}, SimpleNamespace())  # type: ignore[arg-type]
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[float("nan"), -0.0, 3e-45], [1e38, 2.0, -1.0]]))
    before = model.weight.detach().clone()
    with policy.swapped_in():
        assert (model.weight == 1).all() and (model.bias == 1).all()
    assert torch.equal(model.weight.detach().view(torch.int32), before.view(torch.int32))


def test_a_weight_that_is_given_another_dtype_gets_its_reference_in_that(model: Any) -> None:
    """As megatron-core's wrapper for bfloat16 does, after the reference was read."""
    policy = ReferencePolicy([model], {}, SimpleNamespace())  # type: ignore[arg-type]
    model.bias.data = torch.tensor([0.5, -2.0], dtype=torch.bfloat16)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        with policy.swapped_in():
            assert (model.weight == 1).all() and (model.bias == 1).all() and model.bias.dtype == torch.bfloat16
        assert all(torch.equal(now, old) for now, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_copies_lie_in_blocks_of_one_size_which_are_pinned_for_a_gpu(
    model: Any, monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    """PyTorch rounds each block of pinned memory up to a power of two, which these are."""
    made: list[tuple[int, bool]] = []
    real = torch.empty

    def empty(size: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        made.append((size, pin_memory))
        return real(size, dtype=dtype)

    class FakeOnGpu(torch.nn.Parameter):
        is_cuda = True  # type: ignore[assignment]

    monkeypatch.setattr(offload, "CHUNK", 1 << 3)
    monkeypatch.setattr(torch, "empty", empty)
    if on_gpu:
        model.weight = FakeOnGpu(model.weight.detach())
    policy = ReferencePolicy([model], {}, SimpleNamespace())  # type: ignore[arg-type]
    for _ in range(2):
        with policy.swapped_in():
            pass
    assert made == [(8, on_gpu)] * 2 * 4, "32 bytes of reference and as many of its own, each once"


def test_a_trainer_that_sleeps_puts_away_what_is_large_can_shrink_and_lies_on_its_device(tmp_path: Path) -> None:
    large, of_numpy = torch.arange(4096.0), torch.from_numpy(np.arange(4096.0))
    held = [torch.nn.Parameter(each) for each in (large, torch.ones(8), of_numpy, torch.empty(4096, device="meta"))]
    wrapped: Any = SimpleNamespace(module=torch.nn.ParameterList(held), buffers=[], expert_parallel_buffers=[])
    state = offload.DeviceState([wrapped], SimpleNamespace(), torch.device("cpu"), tmp_path)  # type: ignore[arg-type]
    state.hold(("optimizer", "gradients"))
    assert [each.untyped_storage().nbytes() for each in held] == [0, 8 * 4, 4096 * 8, 4096 * 4]
    state.hold(offload.PARTS)
    assert torch.equal(held[0].detach(), torch.arange(4096.0))
