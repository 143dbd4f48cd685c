"""The tiny checkpoint, as for the engine tests, and fixtures that start runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.harness import Run
from tests.engines.conftest import tiny_qwen3_moe, tiny_qwen3_moe_bf16

__all__ = ["runs", "tiny_qwen3_moe", "tiny_qwen3_moe_bf16"]


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    """Runs started by a test; whatever still lives of them afterwards is ended."""
    started: list[Run] = []
    yield started
    for run in started:
        run.stop()
