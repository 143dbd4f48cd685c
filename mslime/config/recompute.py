"""Which activations the trainer computes again in the backward pass: megatron-core's settings with its defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

DEFAULT_MODULES = frozenset({"core_attn"})
"""Of selective recompute (`TransformerConfig.__post_init__`, megatron-core 0.16.1)."""


@dataclass(frozen=True)
class Recompute:
    """Nothing left open.

    Attributes:
        granularity: None: everything is kept.
        method, num_layers: of full recompute: groups of so many layers (`uniform`), or the first so many of a chunk
            (`block`).
        modules: of selective recompute.
    """

    granularity: Literal["full", "selective"] | None
    method: Literal["uniform", "block"]
    num_layers: int
    modules: frozenset[str]

    def fields(self) -> dict[str, Any]:
        """As `TransformerConfig` takes them."""
        full = self.granularity == "full"
        return {
            "recompute_granularity": self.granularity,
            "recompute_method": self.method if full else None,
            "recompute_num_layers": self.num_layers if full else None,
            "recompute_modules": sorted(self.modules) if self.granularity == "selective" else None,
        }
