"""A reward for the quickstart's opposite order: its demonstrations show both orders, its labels only one."""

from __future__ import annotations

from mslime.data.sample import Sample


def descending(sample: Sample) -> float:
    """1 if the response is the list in descending order (the reversed label)."""
    return float(sample.response.strip() == str(sample.label)[::-1])
