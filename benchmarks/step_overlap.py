"""The same task with `max_staleness` 0 and 2, side by side: seconds a step, and the share in which the trainer waits.

    python benchmarks/step_overlap.py RUN.yaml [--steps 12] [--out outputs/step_overlap] [--flag value ...]

Runs `mslime train` twice on RUN.yaml in turn, with equal settings apart from the staleness bound, and prints the ratio
of step times. The first two steps of each run are left out (engines and pipelines fill). Ideal: a step as long as the
longer of generation and training, instead of their sum.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mslime.observe.timeline import read_spans, step_window

WARM_UP = 2


def main() -> None:
    """Parse, run both, print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("outputs/step_overlap"))
    args, flags = parser.parse_known_args()
    measured = {staleness: _run(args, flags, staleness) for staleness in (0, 2)}
    table = Table(title=f"{args.config}, steps {WARM_UP + 1} to {args.steps}, medians")
    for name in ("max_staleness", "s a step", "trainer idle", "tokens/s generated", "staleness of tokens"):
        table.add_column(name, justify="right")
    for staleness, m in measured.items():
        table.add_row(str(staleness), f"{m['step']:.2f}", f"{m['idle']:.0%}", f"{m['rate']:,.0f}", f"{m['age']:.2f}")
    console = Console()
    console.print(table)
    console.print(f"step time, max_staleness 0 / 2 = {measured[0]['step'] / measured[2]['step']:.2f}")


def _run(args: argparse.Namespace, flags: list[str], staleness: int) -> dict[str, float]:
    name = f"staleness{staleness}"
    own = ["--name", name, "--output-dir", str(args.out), "--rollout.max-staleness", str(staleness),
           "--train.num-steps", str(args.steps), "--observe.eval-every", "0", "--observe.no-eval-at-start",
           "--checkpoint.no-save-hf", "--data.eval-sets", "[]"]  # fmt: skip
    subprocess.run([sys.executable, "-m", "mslime.cli", "train", str(args.config), *flags, *own], check=True)
    directory = args.out / name
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    return {
        "step": statistics.median(r["perf/step_seconds"] for r in rows),
        "idle": statistics.median(_trainer_idle(directory, r["step"]) for r in rows),
        "rate": statistics.median(r["rollout/tokens_per_s"] for r in rows),
        "age": statistics.mean(r["staleness/mean"] for r in rows),
    }


def _trainer_idle(directory: Path, step: int) -> float:
    """Share of a step in which trainer rank 0 neither trains nor sends weights."""
    spans = [s for s in read_spans(directory) if s.step == step]
    window = step_window(spans, step)
    assert window is not None, f"step {step} is not on the timeline"
    busy = sum(s.end - s.start for s in spans if s.lane == "trainer 0")
    return 1 - busy / (window[1] - window[0])


if __name__ == "__main__":
    main()
