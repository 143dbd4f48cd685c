"""Runs of one task with different rollout settings, side by side: seconds a step, idle trainer, tokens lost, accuracy.

    python benchmarks/step_overlap.py RUN.yaml [--steps 12] [--out outputs/step_overlap] [--flag value ...]
    python benchmarks/step_overlap.py RUN.yaml --variant "masked=--rollout.on-stale mask" \
        --variant "kept=--rollout.on-stale keep" [--metric mismatch/kl ...] [--flag value ...]

Runs `mslime train` on RUN.yaml once for each variant, in turn, with equal settings apart from the variant's flags; by
default with `max_staleness` 0 and 2. `--metric` adds the mean of a metric over the steps to the table. The first two
steps of each run are left out of the times (engines and pipelines fill). Ideal: a step as long as the longer of
generation and training, instead of their sum, and no token lost. Ends with one line of JSON; ratios are of the first
variant over the last one.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mslime.observe.timeline import read_spans, step_window

WARM_UP = 2
DEFAULT = ["staleness0=--rollout.max-staleness 0", "staleness2=--rollout.max-staleness 2"]


def main() -> None:
    """Parse, run every variant, print the table and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("outputs/step_overlap"))
    parser.add_argument("--variant", action="append", metavar="NAME=FLAGS", help="a run with its flags; repeatable")
    parser.add_argument(
        "--metric", action="append", default=[], help="additional column: mean of this metric over steps; repeatable"
    )
    args, flags = parser.parse_known_args()
    measured: dict[str, dict[str, float | None]] = {}
    for variant in args.variant or DEFAULT:
        name, _, own = variant.partition("=")
        measured[name] = _run(args, [*flags, *shlex.split(own)], name)
    table = Table(title=f"{args.config}, steps {WARM_UP + 1} to {args.steps}")
    columns = ("run", "s a step", "trainer idle", "tokens/s generated", "age of tokens", "tokens lost", "accuracy")
    for name in (*columns, *args.metric):
        table.add_column(name, justify="right")
    for name, m in measured.items():
        accuracy = "–" if m["accuracy"] is None else f"{m['accuracy']:.1%}"
        table.add_row(
            name, f"{m['step']:.2f}", f"{m['idle']:.0%}", f"{m['rate']:,.0f}", f"{m['age']:.2f}", f"{m['lost']:.1%}",
            accuracy, *("–" if m[metric] is None else f"{m[metric]:.4g}" for metric in args.metric),
        )  # fmt: skip
    Console().print(table)
    first, *_, last = measured.values()
    assert first["step"] is not None and last["step"] is not None
    figures: dict[str, Any] = {"steps": args.steps, "runs": measured, "step_time_ratio": first["step"] / last["step"]}
    print(json.dumps(figures))


def _run(args: argparse.Namespace, flags: list[str], name: str) -> dict[str, float | None]:
    """Medians over steps; `lost`: share of all generated tokens that were masked or dropped; `accuracy`: of the first
    held-out set after the last step, None without one."""
    own = ["--name", name, "--output-dir", str(args.out), "--train.num-steps", str(args.steps), "--observe.eval-every",
           str(args.steps), "--observe.no-eval-at-start", "--checkpoint.no-save-hf"]  # fmt: skip
    subprocess.run([sys.executable, "-m", "mslime", "train", str(args.config), *own, *flags], check=True)
    directory = args.out / name
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    generated = sum(r.get("ledger/generated_tokens", 0) for r in rows)
    lost = sum(r.get("ledger/masked_tokens", 0) + r.get("ledger/dropped_tokens", 0) for r in rows)
    accuracies = [v for r in rows for key, v in r.items() if key.startswith("eval/") and key.endswith("/accuracy")]
    timed = [r for r in rows if r["step"] > WARM_UP and "perf/step_seconds" in r]
    return {
        "step": statistics.median(r["perf/step_seconds"] for r in timed),
        "idle": statistics.median(_trainer_idle(directory, r["step"]) for r in timed),
        "rate": statistics.median(r["rollout/tokens_per_s"] for r in timed if "rollout/tokens_per_s" in r),
        "age": statistics.mean(r["staleness/mean"] for r in timed),
        "lost": lost / generated,
        "accuracy": accuracies[0] if accuracies else None,
        **{name: _mean([r[name] for r in timed if name in r]) for name in args.metric},
    }


def _mean(values: list[float]) -> float | None:
    return statistics.mean(values) if values else None


def _trainer_idle(directory: Path, step: int) -> float:
    """Share of a step in which trainer rank 0 neither trains nor sends weights."""
    spans = [s for s in read_spans(directory) if s.step == step]
    window = step_window(spans, step)
    assert window is not None, f"step {step} is not on the timeline"
    busy = sum(s.end - s.start for s in spans if s.lane == "trainer 0")
    return 1 - busy / (window[1] - window[0])


if __name__ == "__main__":
    main()
