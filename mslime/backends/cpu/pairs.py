"""Pairs of SGLang servers (0.5.23) on a CPU: what the half that prefills lacks there. A patch of `cpu.sglang`."""

from __future__ import annotations

from typing import Any


def plain_indices(module: Any) -> None:
    """Let pages be named by ordinary memory: pinned memory, and an event of a stream, need an accelerator."""
    module.MooncakeKVSender.supports_host_tensor_indices = False
