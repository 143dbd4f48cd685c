"""The tiny checkpoint, as for the engine tests."""

from tests.engines.conftest import tiny_qwen3_moe, tiny_qwen3_moe_bf16

__all__ = ["tiny_qwen3_moe", "tiny_qwen3_moe_bf16"]
