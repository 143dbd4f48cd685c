"""Makers of transports, as users write them; the wrong ones."""

from __future__ import annotations

from typing import Any


def of_a_plain_class(link: Any) -> object:
    """Makes something that is not a Transport."""
    return object()


def of_two(link: Any, engines: Any) -> None:
    """Takes one argument too many."""
