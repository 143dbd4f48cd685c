"""Rewards for the end-to-end tests: they score random models, with differing rewards within groups."""

from __future__ import annotations

import time

from mslime.data.sample import Sample

SLOW_S = 12.0


def even_tokens(sample: Sample) -> float:
    """Share of even token ids in the response."""
    response = sample.tokens[sample.prompt_length :]
    return float((response % 2 == 0).mean()) if len(response) else 0.0


def slow(sample: Sample) -> float:
    """`even_tokens`, so late that a step of 16 takes longer than an engine's start."""
    time.sleep(SLOW_S)
    return even_tokens(sample)


def raises(sample: Sample) -> float:
    """Always fails."""
    raise RuntimeError(f"no score for sample {sample.index}")
