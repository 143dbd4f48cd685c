"""The quickstart's task: put a list of digits in ascending order. The answer to `[52817]` is `12578`.

Defines the lists, their answers, and careless demonstrations for the supervised warm start. Prompts and answers are
plain text over the symbols of `examples/tiny_model.py`. Free of torch; all random numbers come from the given
generator.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

MIN_DIGITS, MAX_DIGITS = 2, 7
ASCENDING_SHARE = 0.35
"""Share of the demonstrations that are right. The others put the digits in descending order."""


@dataclass(frozen=True)
class Row:
    """One line of a prompt file.

    Attributes:
        prompt: the list, as the model sees it.
        label: the expected response (training and held-out rows) or the demonstrated one (supervised rows).
        metadata: the number of digits and the order of the label.
    """

    prompt: str
    label: str
    metadata: dict[str, object]


def ascending(digits: str) -> str:
    """The right answer."""
    return "".join(sorted(digits))


def descending(digits: str) -> str:
    """The careless demonstrators' answer."""
    return ascending(digits)[::-1]


def question(digits: str) -> Row:
    """A row with the right answer."""
    return _row(digits, "ascending")


def demonstration(digits: str, rng: random.Random) -> Row:
    """A row that shows the right answer with probability ASCENDING_SHARE; the prompt does not reveal which."""
    return _row(digits, "ascending" if rng.random() < ASCENDING_SHARE else "descending")


def _row(digits: str, order: str) -> Row:
    label = ascending(digits) if order == "ascending" else descending(digits)
    return Row(f"[{digits}]", label, {"digits": len(digits), "order": order})


def held_out_lists(count: int, rng: random.Random) -> list[str]:
    """`count` different lists; all lengths are equally likely while unseen lists of them are left."""
    found: dict[str, None] = {}
    lists = _lists(rng)
    while len(found) < count:
        found[next(lists)] = None
    return list(found)


def training_lists(count: int, held_out: frozenset[str], rng: random.Random) -> list[str]:
    """`count` lists, none of them held out. Short lists occur several times, because there are few of them."""
    lists = (digits for digits in _lists(rng) if digits not in held_out)
    return [next(lists) for _ in range(count)]


def _lists(rng: random.Random) -> Iterator[str]:
    """Endless lists: uniform in length, then uniform in digits."""
    while True:
        yield "".join(rng.choice("0123456789") for _ in range(rng.randint(MIN_DIGITS, MAX_DIGITS)))
