"""Session fixtures of the engine tests: one tiny checkpoint and one real SGLang server on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.tiny_models import make_tiny_qwen3_moe


@pytest.fixture(scope="session")
def tiny_qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random fp32 Qwen3-MoE checkpoint with its tokenizer."""
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("checkpoints") / "tiny-qwen3-moe")
