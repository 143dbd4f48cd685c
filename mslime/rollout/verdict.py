"""What a reward function said about one sample: a number, perhaps with process rewards, or why there is none.

A module of its own, because verdicts travel between a worker process, where its program is `__main__`, and its parent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, SupportsFloat


@dataclass(frozen=True)
class Verdict:
    """What became of scoring one sample.

    Attributes:
        reward: 0 when there is an error.
        error: why there is no reward; empty when there is one.
        steps: process rewards, (position of the token that ends the step, reward).
    """

    reward: float
    error: str = ""
    steps: tuple[tuple[int, float], ...] = ()


def checked(value: Any, length: int) -> Verdict:
    """The verdict on what a function returned for a sample of `length` tokens: a finite number, or one with steps."""
    value, steps = value if isinstance(value, tuple) and len(value) == 2 else (value, ())
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        return Verdict(0.0, f"returned {value!r:.80}, which is not a number")
    reward = float(value)
    if not math.isfinite(reward):
        return Verdict(0.0, f"returned {reward}, which is not finite")
    try:
        pairs = tuple((int(at), float(of_step)) for at, of_step in steps)
    except (TypeError, ValueError):
        return Verdict(0.0, f"returned process rewards {steps!r:.80}, which are not pairs of position and reward")
    wrong = next((pair for pair in pairs if not 0 <= pair[0] < length or not math.isfinite(pair[1])), None)
    if wrong is not None:
        return Verdict(0.0, f"returned the process reward {wrong}: not finite, or beyond the {length} tokens")
    return Verdict(reward, steps=pairs)
