"""Makers of transports, as users write them; the wrong ones."""

from __future__ import annotations

from typing import Any


def of_two(link: Any, engines: Any) -> None:
    """Takes one argument too many."""
