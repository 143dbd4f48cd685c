"""Makes the inputs of the walk on the grid: a tiny Qwen3-MoE, demonstrations of careless walkers, and tasks.

    python -m examples.navigation.make_task --out outputs/navigation/task --seed 1234

writes `model/`, `sft.jsonl` (walks in which two moves of five are drawn at random), `train.jsonl` and `heldout.jsonl`.
The same seed makes the same files.
"""

from __future__ import annotations

import random
from typing import Any

from examples.navigation.grid import MOVES, SIZE, Place, distance, moved, text_of
from examples.tiny_model import make_task

CARELESS = 0.4
"""Share of the moves of a demonstration that are drawn at random."""
MOST_MOVES, LONGEST = 8, 6
"""Most moves of a walk, as in run.yaml, and of the shortest way."""
DEMONSTRATIONS, TRAINING, HELD_OUT = 4096, 2048, 128


def make_rows(seed: int) -> dict[str, list[dict[str, Any]]]:
    """Rows of the files sft, train and heldout. No held-out pair of start and goal occurs in the other two."""
    rng = random.Random(seed)
    held_out = list(dict.fromkeys(_pair(rng) for _ in range(2 * HELD_OUT)))[:HELD_OUT]
    avoid = frozenset(held_out)

    def pairs(count: int) -> list[tuple[Place, Place]]:
        found: list[tuple[Place, Place]] = []
        while len(found) < count:
            pair = _pair(rng)
            found += [] if pair in avoid else [pair]
        return found

    return {
        "sft": [_row(*pair, _walk(*pair, rng)) for pair in pairs(DEMONSTRATIONS)],
        "train": [_row(*pair) for pair in pairs(TRAINING)],
        "heldout": [_row(*pair) for pair in held_out],
    }


def _pair(rng: random.Random) -> tuple[Place, Place]:
    while True:
        start, goal = ((rng.randrange(SIZE), rng.randrange(SIZE)) for _ in range(2))
        if 1 <= distance(start, goal) <= LONGEST:
            return start, goal


def _walk(place: Place, goal: Place, rng: random.Random) -> str:
    """A careless walk as the model sees it: place, move, next place, and so on."""
    walk = ""
    for _ in range(MOST_MOVES):
        nearer = [move for move in MOVES if distance(moved(place, move), goal) < distance(place, goal)]
        move = rng.choice([*MOVES] if rng.random() < CARELESS else nearer)
        walk, place = f"{walk}{text_of(place)}{move}", moved(place, move)
        if place == goal:
            break
    return walk


def _row(start: Place, goal: Place, label: str | None = None) -> dict[str, Any]:
    """Row of one task. The prompt names the goal: `(37)`. The label is the number of moves needed; it is not used."""
    prompt = f"({goal[0]}{goal[1]})"
    shortest = str(distance(start, goal))
    return {"prompt": prompt, "label": label or shortest, "metadata": {"start": list(start), "goal": list(goal)}}


if __name__ == "__main__":
    make_task(__doc__, make_rows)
