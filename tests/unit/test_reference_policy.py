"""The reference policy's copies in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mslime.backends.megatron.step import asleep, reference
from mslime.backends.megatron.step.reference import ReferencePolicy


def test_weights_are_swapped_bit_for_bit_and_lie_in_blocks_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch rounds each block of pinned memory up to a power of two, which these are."""
    block = 1 << 7
    drawn = torch.Generator().manual_seed(0)
    weights = {
        "matrix": torch.randn(17, 9, generator=drawn).bfloat16(), "bias": torch.randn(5, generator=drawn),
        "scale": torch.randn((), generator=drawn),
    }  # fmt: skip
    old = {name: weight.clone() for name, weight in weights.items()}

    def load(*unused: Any) -> None:
        for weight in weights.values():
            weight.mul_(2)

    monkeypatch.setattr(asleep, "CHUNK", block)
    monkeypatch.setattr(reference, "load_hf_weights", load)
    monkeypatch.setattr(reference, "named_local_params", lambda chunks: iter(weights.items()))
    policy = ReferencePolicy([], {}, Any)  # type: ignore[arg-type]
    new = {name: weight.clone() for name, weight in weights.items()}
    for name, weight in weights.items():
        weight.copy_(old[name])
    for _ in range(2):
        with policy.swapped_in():
            assert all(torch.equal(weights[name], new[name]) for name in weights)
        assert all(torch.equal(weights[name], old[name]) for name in weights)
    size = sum(weight.nbytes for weight in weights.values())
    for store in (policy._weights, policy._own):
        assert [part.nbytes for part in store._blocks] == [block] * -(-size // block)
