"""Makes the inputs of the proposer and the solvers: a tiny Qwen3-MoE that chats, demonstrations, and tasks.

    python -m examples.proposer_solver.make_task --out outputs/proposer_solver/task --seed 1234

writes `model/`, `sft.jsonl` (proposals of any length, and lists that careless people sorted, most of them in descending
order), `train.jsonl` (digits with which a proposal begins) and `heldout.jsonl` (lists to sort). The same seed makes the
same files.
"""

from __future__ import annotations

import random
from typing import Any

from examples.proposer_solver.agents import LONGEST
from examples.tiny_model import make_task

WORDS = ("propose ", "sort ")
"""Words that are one token each; digits are spelled."""
FIRST = 2
"""Digits with which a proposal begins."""
ASCENDING = 0.35
"""Share of the demonstrations of solvers that are right. The others put the digits in descending order."""
DEMONSTRATIONS, TRAINING, HELD_OUT = 6144, 2048, 128


def make_rows(seed: int) -> dict[str, list[dict[str, Any]]]:
    """Rows of the files sft, train and heldout. No held-out list is among the demonstrations."""
    rng = random.Random(seed)
    held_out = list(dict.fromkeys(_digits(rng) for _ in range(2 * HELD_OUT)))[:HELD_OUT]
    avoid = frozenset(held_out)
    shown = [digits for digits in (_digits(rng) for _ in range(DEMONSTRATIONS)) if digits not in avoid]
    return {
        "sft": [_proposed(d) if i % 3 == 0 else _sorted(d, rng) for i, d in enumerate(shown)],
        "train": [_row(f"propose {first}", first) for first in (_spelled(FIRST, rng) for _ in range(TRAINING))],
        "heldout": [_row(f"sort {digits}", "".join(sorted(digits))) for digits in held_out],
    }


def _digits(rng: random.Random) -> str:
    return _spelled(rng.randint(FIRST + 1, LONGEST), rng)


def _spelled(count: int, rng: random.Random) -> str:
    return "".join(rng.choices("0123456789", k=count))


def _proposed(digits: str) -> dict[str, Any]:
    return _conversation(f"propose {digits[:FIRST]}", digits)


def _sorted(digits: str, rng: random.Random) -> dict[str, Any]:
    return _conversation(f"sort {digits}", "".join(sorted(digits, reverse=rng.random() >= ASCENDING)))


def _conversation(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _row(question: str, label: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": question}], "label": label}


if __name__ == "__main__":
    make_task(__doc__, make_rows, WORDS)
