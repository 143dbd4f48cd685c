"""The quickstart's task with quantised engines, against plain ones, with and without corrections.

    python benchmarks/quantised_engines.py [--only fp8,fp8_tis] [--steps 16] [--out outputs/quantised-engines]

All variants share one supervised warm start, quantised by `mslime convert`; then each variant is one synchronous
`mslime train` run on the same prompts in the same order. So the weights' format in the engines is the only difference
between sampler and trainer. The model is the quickstart's in other sizes, because FP8 blocks are 128 x 128 and engines
take whole blocks only. On a CPU the engines' kernels are emulated (docs/quantised_engines.md): weights are quantised,
activations are not.

Finished variants are not run again, and interrupted ones continue, so the same command resumes a comparison. Prints a
table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from mslime.config.loader import merge, read_values

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.tiny_model import write_model

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
MSLIME = (sys.executable, "-m", "mslime")
SIZES = {"moe_intermediate_size": 128, "num_key_value_heads": 4}
"""Sizes that give whole FP8 blocks, also for keys and values: 4 heads of 32."""
ONE_RANK = {"megatron": {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 1}}
BUDGET: dict[str, Any] = {
    "rollout": {"max_staleness": 0, "partial": False, "over_sampling": 1.0, "concurrency": 256},
    "train": {"optimizer_steps_per_rollout": 4, "lr": 1e-4, "min_lr": 1e-5, "lr_warmup_steps": 0},
    "weights": {"verify": "first"},
    "checkpoint": {"keep": 1, "save_hf": False, "save_every": 4},
    "observe": {"eval_every": 8, "save_rollouts": "none"},
}
FORMATS = {"fp8": (), "int4": ("--group", "32")}
"""Arguments of `mslime convert`."""


def _variant(weights: str, correction: str, replay: str) -> tuple[str, dict[str, Any]]:
    return weights, {"algorithm": {"correction": {"preset": correction}}, "train": {"replay": replay}}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": _variant("plain", "none", "off"),
    "plain_r3": _variant("plain", "none", "r3"),
    "fp8": _variant("fp8", "none", "off"),
    "fp8_tis": _variant("fp8", "tis", "off"),
    "fp8_r3": _variant("fp8", "none", "r3"),
    "fp8_both": _variant("fp8", "tis", "r3"),
    "int4_both": _variant("int4", "tis", "r3"),
}
"""Weights of the engines, and the settings of each variant."""
LABELS = {
    "plain": "float32", "plain_r3": "float32 + R3", "fp8": "FP8", "fp8_tis": "FP8 + TIS", "fp8_r3": "FP8 + R3",
    "fp8_both": "FP8 + TIS + R3", "int4_both": "INT4 experts + TIS + R3",
}  # fmt: skip
COLUMNS = {
    "mismatch KL": ("mismatch/kl", "{:.2g}"), "ratio p99": ("mismatch/ratio_p99", "{:.3f}"),
    "largest log-prob difference": ("mismatch/abs_max", "{:.2g}"), "loss ratio p01": ("loss/ratio_p01", "{:.3f}"),
    "loss ratio p99": ("loss/ratio_p99", "{:.3f}"), "routes alike": ("replay/agreement", "{:.2%}"),
    "least layer": ("replay/agreement_min_layer", "{:.2%}"),
    "weights bounded": ("correction/clipped_fraction", "{:.2%}"),
}  # fmt: skip
"""Metrics averaged over the steps, with their formats."""


def main() -> int:
    """Run missing variants, then print; returns 1 if a variant failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_names, metavar="A,B", help=f"from {', '.join(VARIANTS)} (default: all)")
    parser.add_argument("--steps", type=int, default=16, help="steps of 256 responses (default 16)")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--out", type=Path, default=Path("outputs/quantised-engines"))
    parser.add_argument("--table-only", action="store_true", help="run nothing; print existing results")
    args = parser.parse_args()
    console, failed = Console(stderr=True), list[str]()
    if not args.table_only:
        _warm_start(args.out, args.seed, console)
        for name in args.only or VARIANTS:
            console.rule(LABELS[name])
            if not _train(name, args.out, args.seed, args.steps):
                failed.append(name)
    found = {name: measured(rows) for name in VARIANTS if len(rows := _rows(args.out / name)) > 1}
    Console(width=240).print(table(found))
    if failed:
        console.print(f"[red]failed:[/] {', '.join(failed)}; read their logs/")
    print(json.dumps(found))
    return 1 if failed else 0


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: unknown variant; choose from {', '.join(VARIANTS)}")
    return names


def _warm_start(out: Path, seed: int, console: Console) -> None:
    """Make the task and the model, train supervised as in scripts/quickstart.sh on one rank, then quantise copies."""
    task = out.resolve() / "task"
    if not (task / "heldout.jsonl").exists():
        subprocess.run(
            [sys.executable, "-m", "examples.quickstart.make_task", "--out", str(task), "--seed", str(seed)],
            check=True, cwd=ROOT,
        )  # fmt: skip
    if not (out / "model").exists():
        console.print(f"{write_model(out / 'model', seed, None, **SIZES) / 1e6:.1f} M parameters in whole blocks")
    if not (out / "sft" / "hf" / "config.json").exists():
        console.rule("supervised warm start")
        paths = {"output_dir": str(out), "seed": seed, "model": {"path": f"{out}/model"},
                 "data": {"prompts": [f"{task}/sft.jsonl"]}}  # fmt: skip
        settings = reduce(merge, (paths, ONE_RANK), read_values(QUICKSTART / "sft.yaml"))
        (out / "sft.json").write_text(json.dumps(settings, indent=1))
        subprocess.run([*MSLIME, "train", str(out / "sft.json")], check=True)
    for kind, flags in FORMATS.items():
        if not (out / f"sft-{kind}" / "config.json").exists():
            subprocess.run(
                [*MSLIME, "convert", kind, str(out / "sft/hf"), str(out / f"sft-{kind}"), *flags], check=True
            )


def _train(name: str, out: Path, seed: int, steps: int) -> bool:
    """Train one variant unless it is finished; returns whether it is finished now."""
    run, config = out / name, out / f"{name}.json"
    settings = settings_of(name, out, seed, steps)
    if config.exists() and json.loads(config.read_text()) != settings:
        raise SystemExit(f"{run} was made with other settings ({config}); move it away, or choose another --out")
    config.write_text(json.dumps(settings, indent=1))  # JSON is YAML
    rows = _rows(run)
    return (
        bool(rows and rows[-1]["step"] >= steps)
        or not subprocess.run([*MSLIME, "train", str(config)], check=False).returncode
    )


def settings_of(name: str, out: Path, seed: int, steps: int) -> dict[str, Any]:
    """Run configuration of one variant: run.yaml, BUDGET and its own settings."""
    weights, own = VARIANTS[name]
    heldout = out / "task" / "heldout.jsonl"
    sets = [
        {"name": "held_out", "path": str(heldout)},
        {"name": "sampled", "path": f"{heldout}@[:64]", "samples_per_prompt": 4, "temperature": 1.0},
    ]
    paths = {
        "name": name, "output_dir": str(out), "seed": seed,
        "model": {"path": str(out / ("sft/hf" if weights == "plain" else f"sft-{weights}"))},
        "data": {"prompts": [str(out / "task" / "train.jsonl")], "eval_sets": sets}, "train": {"num_steps": steps},
    }  # fmt: skip
    return reduce(merge, (paths, ONE_RANK, BUDGET, own), read_values(QUICKSTART / "run.yaml"))


def _rows(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measured(rows: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Figures from a run's rows: means over its steps, rewards by step, and held-out scores by step."""
    steps = [row for row in rows if "perf/step_seconds" in row]
    means = {}
    for name, _ in COLUMNS.values():
        known = [value for row in steps if (value := row.get(name)) is not None]
        means[name] = fmean(known) if known else None
    return {
        "steps": len(steps),
        "means": means,
        "reward": [round(float(row["reward/mean"] or 0), 4) for row in steps],
        "held_out": _scores(rows, "eval/held_out/accuracy"),
        "sampled": _scores(rows, "eval/sampled/pass@1"),
    }


def _scores(rows: Sequence[Mapping[str, float | None]], name: str) -> dict[int, float]:
    return {int(row["step"] or 0): round(float(value), 4) for row in rows if (value := row.get(name)) is not None}


def table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """Table with one row per variant."""
    made = Table(title="Engines under one trainer of float32", title_justify="left")
    heads = ("engines hold", *COLUMNS, "reward: first, middle, last quarter", "held out, greedy", "held out, sampled")
    for name in heads:
        made.add_column(name, justify="left" if name == heads[0] else "right")
    for name, run in found.items():
        cells = [
            "-" if run["means"][key] is None else shown.format(run["means"][key]) for key, shown in COLUMNS.values()
        ]
        rewards, quarter = run["reward"], max(1, len(run["reward"]) // 4)
        middle = len(rewards) // 2 - quarter // 2
        parts = (rewards[:quarter], rewards[middle : middle + quarter], rewards[-quarter:])
        made.add_row(
            LABELS[name], *cells, ", ".join(f"{fmean(part):.2f}" for part in parts),
            _over_time(run["held_out"]), _over_time(run["sampled"]),
        )  # fmt: skip
    return made


def _over_time(scores: Mapping[int, float]) -> str:
    return " > ".join(f"{scores[step]:.1%}" for step in sorted(scores))


if __name__ == "__main__":
    sys.exit(main())
