"""Makes the inputs of the calculator's example: a tiny Qwen3-MoE that chats, demonstrations, and questions.

    python -m examples.calculator.make_task --out outputs/calculator/task --seed 1234

writes `model/`, `sft.jsonl` (conversations; three of ten use the calculator, in the others the answer is guessed),
`train.jsonl` and `heldout.jsonl`. The same seed makes the same files.
"""

from __future__ import annotations

import json
import random
from typing import Any

from examples.tiny_model import make_task

WORDS = ("name", "arguments", "multiply")
"""Words that are one token each, as in any model's vocabulary; all other text is spelled."""
CALLED = 0.3
"""Share of the demonstrations that use the calculator."""
DEMONSTRATIONS, TRAINING, HELD_OUT = 8192, 4096, 128
Question = tuple[int, int]


def make_rows(seed: int) -> dict[str, list[dict[str, Any]]]:
    """Rows of the files sft, train and heldout. No question of one file occurs in another."""
    rng = random.Random(seed)
    numbers = rng.sample(range(900 * 900), DEMONSTRATIONS + TRAINING + HELD_OUT)
    questions = [(100 + n // 900, 100 + n % 900) for n in numbers]
    shown, trained = questions[:DEMONSTRATIONS], questions[DEMONSTRATIONS:-HELD_OUT]
    return {
        "sft": [{"messages": demonstration(question, rng)} for question in shown],
        "train": [_row(question) for question in trained],
        "heldout": [_row(question) for question in questions[-HELD_OUT:]],
    }


def demonstration(question: Question, rng: random.Random) -> list[dict[str, Any]]:
    """A conversation: with the calculator, or with a guess whose first digit and number of digits are right."""
    a, b = question
    if rng.random() >= CALLED:
        first, *others = str(a * b)
        guess = first + "".join(rng.choices("0123456789", k=len(others)))
        return [_question(question), {"role": "assistant", "content": guess}]
    call = {"name": "multiply", "arguments": json.dumps({"a": a, "b": b})}
    return [
        _question(question),
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_0", "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]


def _question(question: Question) -> dict[str, Any]:
    return {"role": "user", "content": f"{question[0]}*{question[1]}"}


def _row(question: Question) -> dict[str, Any]:
    return {"prompt": [_question(question)], "label": str(question[0] * question[1])}


if __name__ == "__main__":
    make_task(__doc__, make_rows, WORDS)
