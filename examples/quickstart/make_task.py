"""Makes what the quickstart starts from: a tiny Qwen3-MoE with random weights, its tokenizer, and the files of prompts.

    python -m examples.quickstart.make_task --out outputs/quickstart/task --seed 1234

writes `model/` (config.json, model.safetensors, generation_config.json, tokenizer), `sft.jsonl` (demonstrations, most
of them wrong), `train.jsonl` (prompts for reinforcement learning) and `heldout.jsonl` (prompts that are in neither).
The same seed makes the same files.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict
from pathlib import Path

from examples.quickstart.task import Row, demonstration, held_out_lists, question, training_lists
from examples.tiny_model import write_model, write_rows

DEMONSTRATIONS, TRAINING_PROMPTS, HELD_OUT_PROMPTS = 4096, 4096, 256


def main() -> None:
    """Write everything below --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write; made when missing")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="of weights and prompts (default 1234)")
    args = parser.parse_args()
    parameters = write_model(args.out / "model", args.seed)
    print(f"{args.out / 'model'}: Qwen3-MoE, 4 layers, 16 experts top-2, {parameters / 1e6:.1f} M parameters, random")
    for name, rows in make_rows(args.seed).items():
        write_rows(args.out / f"{name}.jsonl", map(asdict, rows))
        print(f"{args.out / name}.jsonl: {len(rows)} rows, such as {rows[0].prompt} -> {rows[0].label}")


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
    main()
