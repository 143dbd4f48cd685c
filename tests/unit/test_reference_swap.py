"""The reference policy's weights come into the model and go out again, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mslime.backends.cpu.megatron import install

install()

from mslime.backends.megatron.step import reference  # noqa: E402
from mslime.backends.megatron.step.reference import ReferencePolicy  # noqa: E402


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Linear:
    """A stand-in for a chunk, whose checkpoint is all ones."""
    built = torch.nn.Linear(3, 2)

    def load(chunks: list[torch.nn.Module], *_: object) -> None:
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.fill_(1.0)

    monkeypatch.setattr(reference, "load_hf_weights", load)
    monkeypatch.setattr(reference, "named_local_params", lambda chunks: chunks[0].named_parameters())
    return built


def test_weights_are_the_references_inside_and_their_own_afterwards(model: Any) -> None:
    policy = ReferencePolicy([model], {}, SimpleNamespace())  # type: ignore[arg-type]
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[float("nan"), -0.0, 3e-45], [1e38, 2.0, -1.0]]))
    before = model.weight.detach().clone()
    with policy.swapped_in():
        assert (model.weight == 1).all() and (model.bias == 1).all()
    assert torch.equal(model.weight.detach().view(torch.int32), before.view(torch.int32))


def test_copies_of_weights_on_a_gpu_are_pinned(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = torch.empty_like

    def empty_like(tensor: torch.Tensor, device: str, pin_memory: bool) -> torch.Tensor:
        asked.append(pin_memory)
        return real(tensor, device=device)

    class OnGpu(torch.nn.Parameter):
        is_cuda = True  # type: ignore[assignment]

    monkeypatch.setattr(torch, "empty_like", empty_like)
    model.weight = OnGpu(model.weight.detach())
    ReferencePolicy([model], {}, SimpleNamespace())  # type: ignore[arg-type]
    assert asked == [True, False]
