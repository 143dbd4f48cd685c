"""Prompts generated on demand: `data: {source: "examples.extending.source:Sums"}`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from mslime.config.schema import DataConfig


class Sums:
    """Endless sums of two numbers that grow with the number of prompts drawn."""

    def __init__(self, data: DataConfig, seed: int) -> None:
        self._seed, self._drawn = seed, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            largest = 10 + self._drawn // 100
            a, b = random.Random(self._seed * 1_000_003 + self._drawn).choices(range(largest), k=2)
            self._drawn += 1  # before the yield: a state saved after it continues with the next one
            yield {"prompt": f"{a} + {b} =", "label": str(a + b), "metadata": {"data_source": "sums"}}

    def state_dict(self) -> dict[str, Any]:
        """State for checkpoints: any JSON value."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called on a resume, before the first prompt is drawn."""
        self._drawn = state["drawn"]
