"""Makes the inputs of the quickstart: a tiny Qwen3-MoE with random weights, its tokenizer, and the files of prompts.

    python -m examples.quickstart.make_task --out outputs/quickstart/task --seed 1234

writes `model/` (config.json, model.safetensors, generation_config.json, tokenizer), `sft.jsonl` (demonstrations, most
of them wrong), `train.jsonl` (prompts for reinforcement learning) and `heldout.jsonl` (prompts that are in neither).
The same seed makes the same files.
"""

from __future__ import annotations

import random
from dataclasses import asdict

from examples.quickstart.task import Row, demonstration, held_out_lists, question, training_lists
from examples.tiny_model import make_task

DEMONSTRATIONS, TRAINING_PROMPTS, HELD_OUT_PROMPTS = 4096, 4096, 256


def make_rows(seed: int) -> dict[str, list[Row]]:
    """Rows of the files sft, train and heldout. No held-out list occurs in the other two."""
    rng = random.Random(seed)
    held_out = held_out_lists(HELD_OUT_PROMPTS, rng)
    avoid = frozenset(held_out)
    return {
        "sft": [demonstration(digits, rng) for digits in training_lists(DEMONSTRATIONS, avoid, rng)],
        "train": [question(digits) for digits in training_lists(TRAINING_PROMPTS, avoid, rng)],
        "heldout": [question(digits) for digits in held_out],
    }


if __name__ == "__main__":
    make_task(__doc__, lambda seed: {name: [asdict(row) for row in rows] for name, rows in make_rows(seed).items()})
