"""The plug-in that narrows routes inside an engine, with SGLang's own encoding and decoding around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pybase64
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mslime.backends.sglang.generating import decode_routes
from mslime.config.model_facts import ModelFacts
from mslime.engine_plugin.dispatch import narrow, narrowed

LAYERS, TOP_K = 3, 2


def model(experts: int) -> ModelFacts:
    return ModelFacts(
        vocab_size=9, max_positions=99, num_layers=LAYERS, num_experts=experts, top_k=TOP_K, moe_layer_ids=(0, 1, 2)
    )


def as_sglang(self: Any, batch: Any) -> Any:
    """What SGLang's method does with routes: their bytes as base64."""
    encoded = [None if t is None else pybase64.b64encode(t.numpy().tobytes()).decode() for t in batch.routed_experts]
    return SimpleNamespace(routed_experts=encoded)


def sent(*routes: torch.Tensor | None) -> list[str | None]:
    return narrow(as_sglang, None, SimpleNamespace(routed_experts=list(routes))).routed_experts


@given(st.sampled_from([8, 256, 257, 384, 65536]), st.integers(0, 20), st.integers(0, 2**32 - 1))
def test_what_an_engine_sends_is_read_as_it_was(experts: int, rows: int, seed: int) -> None:
    routes = np.random.default_rng(seed).integers(0, experts, (rows, LAYERS, TOP_K)).astype(np.int32)
    (text,) = sent(torch.from_numpy(routes))
    assert text is not None
    np.testing.assert_array_equal(decode_routes(text, rows, model(experts)), routes)


def test_each_request_of_a_batch_has_the_narrowest_of_its_own() -> None:
    few, more = torch.full((4, LAYERS, TOP_K), 255, dtype=torch.int32), torch.full((4, 3, 2), 256, dtype=torch.int32)
    found = sent(few, None, more)
    assert found[1] is None and [text[:3] for text in (found[0], found[2]) if text] == ["u1:", "u2:"]
    assert len(found[0] or "") < 4 * LAYERS * TOP_K * 4 / 3 + 8


@pytest.mark.parametrize("routes", [
    torch.tensor([[-1, 2]], dtype=torch.int32), torch.tensor([[1, 70000]], dtype=torch.int32),
    torch.tensor([[1, 2]], dtype=torch.int64), torch.empty((0, LAYERS, TOP_K), dtype=torch.int32),
])  # fmt: skip
def test_what_cannot_be_narrowed_is_sent_as_it_is(routes: torch.Tensor) -> None:
    assert narrowed(routes) == ("", routes)


@pytest.mark.parametrize("nothing", [None, []])
def test_a_batch_without_routes_is_left_alone(nothing: list[torch.Tensor] | None) -> None:
    answers = SimpleNamespace(routed_experts=nothing)
    assert narrow(lambda self, batch: answers, None, SimpleNamespace(routed_experts=nothing)) is answers
