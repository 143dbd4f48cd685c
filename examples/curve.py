"""Learning curves of runs as a table for a README: means of metrics over some steps, run beside run.

python -m examples.curve outputs/calculator/rl outputs/calculator/rl-2 --metrics reward/mean user/called --every 4
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

Steps = dict[int, dict[str, float]]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directories with a metrics.jsonl")
    parser.add_argument("--metrics", nargs="+", required=True, metavar="NAME", help="columns; names of metrics.jsonl")
    parser.add_argument("--every", type=int, default=5, metavar="N", help="steps of one line (default 5)")
    args = parser.parse_args()
    print("\n".join(table([read_steps(run / "metrics.jsonl") for run in args.runs], args.metrics, args.every)))


def read_steps(path: Path) -> Steps:
    """Metrics of each step. A step may have a second row, with evaluations that ran beside training."""
    steps: Steps = {}
    for row in map(json.loads, path.read_text().splitlines()):
        steps.setdefault(int(row["step"]), {}).update(row)
    return steps


def table(runs: Sequence[Steps], metrics: Sequence[str], every: int) -> list[str]:
    """Lines of a Markdown table: before the first step, then every `every` steps; `/` separates values of runs."""
    last = max(max(steps) for steps in runs)
    spans = [(0, 0), *((first, min(first + every - 1, last)) for first in range(1, last + 1, every))]
    lines = ["| steps | " + " | ".join(f"`{name}`" for name in metrics) + " |", "|---" * (len(metrics) + 1) + "|"]
    for first, end in spans:
        cells = [" / ".join(_mean(steps, name, first, end) for steps in runs) for name in metrics]
        lines.append(f"| {first if first == end else f'{first} to {end}'} | " + " | ".join(cells) + " |")
    return lines


def _mean(steps: Steps, name: str, first: int, end: int) -> str:
    found = [row[name] for step, row in steps.items() if first <= step <= end and name in row]
    return f"{sum(found) / len(found):.2f}" if found else "–"


if __name__ == "__main__":
    main()
