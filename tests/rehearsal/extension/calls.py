"""Counts calls of the stand-in for `transformer_engine_torch`, so that a rehearsal can say which were made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

CALLS: Counter[str] = Counter()
"""By name of the function, in this process."""


def counted(function: Callable[P, T]) -> Callable[P, T]:
    """The function, with a count of its calls."""

    @wraps(function)
    def count(*args: P.args, **kwargs: P.kwargs) -> T:
        CALLS[function.__name__] += 1
        return function(*args, **kwargs)

    return count
