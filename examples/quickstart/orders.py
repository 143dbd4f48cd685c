"""A reward for the quickstart's other order: its demonstrations show both, and its labels have one."""

from __future__ import annotations

from mslime.data.sample import Sample


def descending(sample: Sample) -> float:
    """1 where the response is the list in descending order, which is the label read backwards."""
    return float(sample.response.strip() == str(sample.label)[::-1])
