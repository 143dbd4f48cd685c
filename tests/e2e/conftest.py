"""The tiny checkpoint, as for the engine tests."""

from tests.engines.conftest import tiny_qwen3_moe

__all__ = ["tiny_qwen3_moe"]
