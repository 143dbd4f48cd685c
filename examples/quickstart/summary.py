"""The quickstart's summary: results, time spent, and next steps."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table


def main() -> None:
    """Print the table for one quickstart directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="outputs/quickstart")
    directory = parser.parse_args().directory
    rows = [json.loads(line) for line in (directory / "rl" / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in rows if "perf/step_seconds" in r]
    evals = [r for r in rows if "eval/held_out/accuracy" in r]
    console = Console()
    console.print(_table(evals, steps))
    console.print(f"\nreport: {directory / 'rl' / 'report.html'}   (open it in a browser)")
    console.print(f"trained model: {directory / 'rl' / 'hf'}")
    console.print("\nthe mslime command, in this shell: source .venv/bin/activate      (then: mslime --help)")
    console.print("next: your own reward in five minutes, on this machine: docs/your_own_reward.md")
    console.print(
        "also: bash scripts/quickstart.sh --pp --out outputs/quickstart-pp     (two pipeline stages)", soft_wrap=True
    )
    console.print(
        "      bash scripts/quickstart.sh -- --rollout.max-staleness 0         (synchronous, on-policy)", soft_wrap=True
    )


def _table(evals: list[dict[str, float]], steps: list[dict[str, float]]) -> Table:
    table = Table(title="quickstart", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    first, last = evals[0], evals[-1]
    table.add_row("held-out accuracy, greedy", *(f"{r['eval/held_out/accuracy']:.1%}" for r in (first, last)))
    for k in (1, 8):
        name = f"eval/sampled/pass@{k}"
        if name in first:
            table.add_row(f"held-out pass@{k}, sampled", f"{first[name]:.1%}", f"{last[name]:.1%}")
    table.add_row("reward of a step", f"{steps[0]['reward/mean']:.2f}", f"{steps[-1]['reward/mean']:.2f}")
    total = sum(r["perf/step_seconds"] for r in steps)
    parts = {
        "waiting for rollouts": "perf/wait_seconds",
        "training": "perf/train_seconds",
        "weight sync": "weights/seconds",
        "evaluation": "perf/eval_seconds",
    }
    for label, name in parts.items():
        spent = sum(r.get(name, 0.0) for r in steps)
        table.add_row(f"time {label}", "", f"{spent:.0f} s ({spent / total:.0%})")
    table.add_row(f"{len(steps)} steps", "", f"{total:.0f} s")
    table.add_row("route agreement, lowest", "", f"{min(r['replay/agreement'] for r in steps):.1%}")
    table.add_row("responses aborted / continued", "", f"{sum(r['rollout/aborted'] for r in steps):.0f} / "
                  f"{sum(r['rollout/recycled'] for r in steps):.0f}")  # fmt: skip
    return table


if __name__ == "__main__":
    main()
