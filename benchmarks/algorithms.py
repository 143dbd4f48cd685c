"""The quickstart's task under several algorithms, and under stale data with and without correction: plot and table.

    python benchmarks/algorithms.py [--only gspo,cispo] [--seeds 1234,2] [--steps 30] [--out outputs/algorithms]

For each seed, all variants share one supervised warm start; then each variant is one `mslime train` run. Prompts and
their order, responses per step, number of optimizer steps and learning rate are the same. Each loss keeps its own clip
range. The variants `stale_*` and `fresh` are GRPO at `rollout.max_staleness` 4 and 0, with twice as many optimizer
steps.

Finished variants are not run again, and interrupted ones continue, so the same command resumes a comparison.
`--plot-only` draws and prints the existing results. Writes algorithms.png and algorithms.md into --out; the plot needs
`pip install 'mslime[benchmarks]'`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from mslime.config.loader import merge, read_values

QUICKSTART = Path(__file__).resolve().parents[1] / "examples" / "quickstart"
TRAIN = (sys.executable, "-m", "mslime", "train")
BUDGET: dict[str, Any] = {
    "rollout": {"max_staleness": 0, "over_sampling": 1.0, "concurrency": 256},
    "train": {"optimizer_steps_per_rollout": 4, "lr": 1e-4, "min_lr": 1e-5},
    "checkpoint": {"keep": 1, "save_hf": False},
    "observe": {"eval_every": 5, "save_rollouts": "none"},
}
"""Settings of every variant, on top of run.yaml. Four optimizer steps per rollout: losses that differ in their trust
region are equal at the first step, where the ratio is 1.
"""

CRITIC = {"lr": 3e-4, "min_lr": 3e-5, "warmup_steps": 2}
"""Learning rate of the value head, which starts at 0. The warm-up is part of the budget."""

OF_THE_LOSS = ("clip_low", "clip_high", "loss_aggregation")
"""Settings that run.yaml gives for GRPO; here every loss uses its own defaults."""


@dataclass(frozen=True)
class Variant:
    """One line of the comparison.

    Attributes:
        label, colour: in table and plot.
        panel: index of the plot's panel that it belongs to.
        settings: by section, on top of BUDGET.
    """

    label: str
    colour: str
    panel: int
    settings: dict[str, dict[str, Any]]


def _stale(preset: str, max_staleness: int = 4) -> dict[str, dict[str, Any]]:
    """Eight optimizer steps per rollout. The policy moves further from its samplers, and the trainer is the bottleneck:
    data becomes as old as allowed.
    """
    return {
        "rollout": {"max_staleness": max_staleness},
        "train": {"optimizer_steps_per_rollout": 8},
        "algorithm": {"correction": {"preset": preset}},
    }


VARIANTS: dict[str, Variant] = {
    "grpo": Variant("GRPO", "C0", 0, {}),
    "gspo": Variant("GSPO", "C1", 0, {"algorithm": {"loss": "gspo"}}),
    "cispo": Variant("CISPO", "C2", 0, {"algorithm": {"loss": "cispo"}}),
    "ppo": Variant("PPO with critic", "C3", 0, {"algorithm": {"advantage": "gae"}, "critic": CRITIC}),
    "reinforce_pp": Variant("REINFORCE++", "C4", 0, {"algorithm": {"advantage": "reinforce_pp"}}),
    "fresh": Variant("staleness 0, tis", "0.4", 1, _stale("tis", 0)),
    "stale_none": Variant("staleness 4, no correction", "C3", 1, _stale("none")),
    "stale_tis": Variant("staleness 4, tis", "C0", 1, _stale("tis")),
    "stale_mis": Variant("staleness 4, mis", "C2", 1, _stale("mis")),
}


@dataclass(frozen=True)
class Curve:
    """Measurements of one run.

    Attributes:
        steps: number of steps.
        greedy, sampled: held-out accuracy by step, where evaluated.
        metrics: means over the steps, and some maxima (`max ...`).
        seconds: of the steps without evaluations, engine start and saving.
    """

    steps: int
    greedy: dict[int, float]
    sampled: dict[int, float]
    metrics: dict[str, float]
    seconds: float


def main() -> int:
    """Run missing variants, then draw and print; returns 1 if a variant failed."""
    args = _arguments()
    console = Console(stderr=True)
    names = args.only or list(VARIANTS)
    failed = list[str]()
    if not args.plot_only:
        for seed in args.seeds:
            _warm_start(args.out / f"seed{seed}", seed, console)
            for i, name in enumerate(names):
                console.rule(f"{VARIANTS[name].label}, seed {seed} ({i + 1} of {len(names)})")
                if not _train(name, args.out / f"seed{seed}", seed, args.steps, console):
                    failed.append(f"{name} (seed {seed})")
    curves = {name: found for name in VARIANTS if (found := _curves(args.out, name, args.seeds, args.steps))}
    if curves:
        text = table(curves, args.threshold)
        (args.out / "algorithms.md").write_text(text)
        print(text)
        draw(curves, args.out / "algorithms.png")
        console.print(f"{args.out}/algorithms.md and algorithms.png")
    if failed:
        console.print(f"[red]failed:[/] {', '.join(failed)}; read their logs/")
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_names, metavar="A,B", help=f"from {', '.join(VARIANTS)} (default: all)")
    parser.add_argument("--seeds", type=lambda s: [int(x) for x in s.split(",")], default=[1234], metavar="N,M")
    parser.add_argument("--steps", type=int, default=30, help="steps of 256 responses (default 30)")
    parser.add_argument("--threshold", type=float, default=0.8, help="sampled accuracy to reach (default 0.8)")
    parser.add_argument("--out", type=Path, default=Path("outputs/algorithms"))
    parser.add_argument("--plot-only", action="store_true", help="run nothing; draw and print existing results")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [n for n in names if n not in VARIANTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: unknown variant; choose from {', '.join(VARIANTS)}")
    return names


# ------------------------------------------------------------------------------------------------------------- running


def _warm_start(directory: Path, seed: int, console: Console) -> None:
    """Make the task and the model, and train supervised as in scripts/quickstart.sh, once per seed."""
    if not (directory / "task" / "heldout.jsonl").exists():
        command = [sys.executable, "-m", "examples.quickstart.make_task", "--out", str(directory.resolve() / "task")]
        subprocess.run([*command, "--seed", str(seed)], check=True, cwd=QUICKSTART.parents[1])
    if (directory / "sft" / "hf" / "config.json").exists():
        return
    console.rule(f"supervised warm start, seed {seed}")
    flags = ["--output-dir", str(directory), "--seed", str(seed), "--model.path", f"{directory}/task/model"]
    subprocess.run(
        [*TRAIN, str(QUICKSTART / "sft.yaml"), *flags, "--data.prompts", f"{directory}/task/sft.jsonl"], check=True
    )


def _train(name: str, directory: Path, seed: int, steps: int, console: Console) -> bool:
    """Train one variant unless it is finished; returns whether it is finished now."""
    run = directory / name
    config = run / "variant.json"
    settings = settings_of(name, directory, seed, steps)
    match state_of(settings, json.loads(config.read_text()) if config.exists() else None, _rows(run)):
        case "other":
            raise SystemExit(f"{run} was made with other settings ({config}); move it away, or choose another --out")
        case "done":
            console.print("already done")
            return True
        case _:
            run.mkdir(parents=True, exist_ok=True)
            config.write_text(json.dumps(settings, indent=1))  # JSON is YAML
            return subprocess.run([*TRAIN, str(config)], check=False).returncode == 0


def settings_of(name: str, directory: Path, seed: int, steps: int) -> dict[str, Any]:
    """Run configuration of one variant: run.yaml, BUDGET and its own settings."""
    heldout = directory / "task" / "heldout.jsonl"
    base = read_values(QUICKSTART / "run.yaml")
    base["algorithm"] = {k: v for k, v in base["algorithm"].items() if k not in OF_THE_LOSS}
    sets = [
        {"name": "held_out", "path": str(heldout)},
        {"name": "sampled", "path": f"{heldout}@[:128]", "samples_per_prompt": 4, "temperature": 1.0},
    ]
    paths = {
        "name": name, "output_dir": str(directory), "seed": seed, "model": {"path": f"{directory}/sft/hf"},
        "data": {"prompts": [f"{directory}/task/train.jsonl"], "eval_sets": sets}, "train": {"num_steps": steps},
    }  # fmt: skip
    return reduce(merge, (paths, BUDGET, VARIANTS[name].settings), base)


def state_of(settings: Mapping[str, Any], before: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> str:
    """State of a run directory: `new`, `continue`, `done`, or `other` if it holds a run with other settings.

    Args:
        settings, before: configuration of this run, and of the run in the directory (None: no run).
        rows: its metrics so far.
    """
    if before is None:
        return "new"
    if before != settings:
        return "other"
    return "done" if rows and rows[-1]["step"] >= settings["train"]["num_steps"] else "continue"


# ------------------------------------------------------------------------------------------------------------- reading


def _rows(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _curves(out: Path, name: str, seeds: Sequence[int], steps: int) -> dict[int, Curve]:
    """Available curves by seed, up to `steps`."""
    runs = {seed: [r for r in _rows(out / f"seed{seed}" / name) if r["step"] <= steps] for seed in seeds}
    return {seed: curve_of(rows) for seed, rows in runs.items() if len(rows) > 1}


MEANS = (
    "staleness/mean", "mismatch/kl", "correction/effective_share", "correction/mean_weight",
    "correction/clipped_fraction", "correction/masked_fraction", "loss/clip_fraction", "loss/entropy", "grad_norm",
)  # fmt: skip


def curve_of(rows: Sequence[Mapping[str, float | None]]) -> Curve:
    """Curve of a run from the rows of its metrics.jsonl."""
    steps = [r for r in rows if "perf/step_seconds" in r]
    metrics = {n: fmean(found) for n in MEANS if (found := [v for r in steps if (v := r.get(n)) is not None])}
    for name in ("staleness/max", "mismatch/kl"):
        metrics[f"max {name}"] = max(r.get(name) or 0.0 for r in steps)
    spent = (float(r["perf/step_seconds"] or 0) - float(r.get("perf/eval_seconds") or 0) for r in steps)
    return Curve(
        len(steps),
        _scores(rows, "eval/held_out/accuracy"),
        _scores(rows, "eval/sampled/pass@1"),
        metrics,
        sum(spent),
    )


def _scores(rows: Sequence[Mapping[str, float | None]], name: str) -> dict[int, float]:
    return {int(r["step"] or 0): float(value) for r in rows if (value := r.get(name)) is not None}


def steps_to(scores: Mapping[int, float], threshold: float) -> float | None:
    """Step at which the line through `scores` (by step) first reaches `threshold`; None: never."""
    points = sorted(scores.items())
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 >= threshold:
            return float(x0) if y0 >= threshold else x0 + (x1 - x0) * (threshold - y0) / (y1 - y0)
    return None


# ------------------------------------------------------------------------------------------------------------- showing


def table(curves: Mapping[str, Mapping[int, Curve]], threshold: float) -> str:
    """Markdown table: one row per variant, several seeds side by side."""
    heads = [
        "variant", "greedy at the end", "sampled at the end", "sampled, mean over the run",
        f"steps to {threshold:.0%} sampled", "s a step", "age mean, max", "mismatch KL mean, max", "ESS",
        "weights bounded", "masked", "clipped by the loss", "entropy",
    ]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, by_seed in curves.items():
        cells = zip(*(_cells(curve, threshold) for curve in by_seed.values()), strict=True)
        lines.append(f"| {VARIANTS[name].label} | " + " | ".join(" / ".join(c) for c in cells) + " |")
    return "\n".join(lines) + "\n"


def _cells(curve: Curve, threshold: float) -> list[str]:
    m = curve.metrics

    def share(name: str) -> str:
        return f"{m[name]:.1%}" if name in m else "-"

    return [
        f"{_last(curve.greedy):.1%}",
        f"{_last(curve.sampled):.1%}",
        f"{fmean(score for step, score in curve.sampled.items() if step):.1%}",
        "never" if (reached := steps_to(curve.sampled, threshold)) is None else f"{reached:.0f}",
        f"{curve.seconds / curve.steps:.1f}",
        f"{m['staleness/mean']:.1f}, {m['max staleness/max']:.0f}",
        f"{_nats(m['mismatch/kl'])}, {_nats(m['max mismatch/kl'])}",
        share("correction/effective_share"),
        share("correction/clipped_fraction"),
        share("correction/masked_fraction"),
        share("loss/clip_fraction"),
        f"{m['loss/entropy']:.2f}" if "loss/entropy" in m else "-",
    ]


def _nats(value: float) -> str:
    return "0" if value < 1e-9 else f"{value:.2g}"  # rounding errors are shown as 0


def _last(scores: Mapping[int, float]) -> float:
    return scores[max(scores)]


def draw(curves: Mapping[str, Mapping[int, Curve]], path: Path) -> None:
    """Two panels, algorithms and staleness: held-out accuracy of sampled responses as lines, greedy as points.

    With several seeds the line is their mean and the band goes from the lowest to the highest.
    """
    import matplotlib  # pyright: ignore[reportMissingImports]  # an extra

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]  # an extra

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for i, panel in enumerate(panels):
        shown = [n for n in curves if VARIANTS[n].panel == i]
        for name in shown:
            colour = VARIANTS[name].colour
            runs = list(curves[name].values())
            x = sorted(set.intersection(*(set(c.sampled) for c in runs)))
            found = [[c.sampled[step] for c in runs] for step in x]
            panel.plot(x, [fmean(f) for f in found], color=colour, label=VARIANTS[name].label, lw=1.8)
            if len(runs) > 1:
                panel.fill_between(x, [min(f) for f in found], [max(f) for f in found], color=colour, alpha=0.15, lw=0)
            for run in runs:
                panel.plot(run.greedy.keys(), run.greedy.values(), "o", color=colour, ms=4, mew=0, alpha=0.7)
        panel.set_title(("Algorithms, synchronous", "GRPO, data up to 4 versions old")[i], fontsize=11)
        panel.set_xlabel(f"step (256 responses, {4 + 4 * i} optimizer steps)")
        panel.grid(alpha=0.25)
        if shown:
            panel.legend(loc="lower right", fontsize=9, frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(0, 1.02)
    panels[0].set_ylabel("held-out accuracy\nline: sampled at temperature 1, points: greedy")
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
