"""Predictions of a weight sync at full size: what `mslime plan` says of four models on 64 to 1,024 GPUs.

    python benchmarks/predict_sync.py

Nothing is run, and no figure is a measurement. The layouts are those of the launch scripts; half of the GPUs train, in
more data-parallel copies as there are more, and half serve, in more engines. Numbers of GPUs on which the layout does
not fit are left out. "What if" follows the same schedule with other rates: it says what a change would be worth.

The last line is JSON: by model and GPUs `bound_s`, `predicted_s`, its parts, `limit`, senders, engines, buckets, and
`ratio_bound` (predicted over bound); `what_if` by model, seconds of each change at the largest number of GPUs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from mslime.config.errors import UserError
from mslime.planner.command import plan_config
from mslime.planner.plan import RunPlan, make_plan

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.fixtures.full_size import CONFIGS, published_config

SNAPSHOTS = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "snapshots"
AIMS = {"qwen3-30B-A3B": 1.0, "qwen3-235B-A22B": 3.0, "deepseek-v3": 6.0, "kimi-k2": 6.0}
"""Seconds."""
SIZES = (64, 128, 256, 512, 1024)
COPY_GB_PER_S = {80: 1200, 141: 1680}
"""70% of half of what an H100's and an H200's memory moves as sold (3,350 and 4,800 GB/s); an assumption."""
WHAT_IF: dict[str, dict[str, dict[str, float]]] = {
    "as it is": {},
    "1 ms a request": {"cluster": {"sync_request_ms": 1}},
    "buckets of 4 GiB": {"weights": {"bucket_mib": 4096}},
    "recorded loading": {"cluster": {"sync_tensor_us": 0}},
    "8 adapters a machine": {"cluster": {"gpu_network_gbits": 3200}},
    "all of these": {
        "cluster": {"gpu_network_gbits": 3200, "sync_tensor_us": 0, "sync_request_ms": 1},
        "weights": {"bucket_mib": 4096},
    },
}  # fmt: skip


def plan_on(model: str, gpus: int, change: dict[str, dict[str, float]] | None = None) -> RunPlan:
    """The plan of a launch script's layout on so many GPUs. Raises UserError where the layout does not divide them."""
    chosen = yaml.safe_load((SNAPSHOTS / f"{model}.yaml").read_text())["configuration"]
    names = ("cluster", "megatron", "sglang", "weights", "train")
    sections: dict[str, Any] = {name: dict(chosen.get(name, {})) for name in names}
    servers = gpus // 2 // sections["sglang"]["tp_size"]
    copies = COPY_GB_PER_S[int(sections["cluster"].get("gpu_memory_gb", 80))]
    sections["cluster"] |= {"trainer_ranks": gpus // 2, "gpu_copy_gb_per_s": copies}
    sections["sglang"] |= {"num_engines": servers}
    if "urls" in sections["sglang"]:
        sections["sglang"]["urls"] = [f"http://engine{number}:30000" for number in range(servers)]
    # Only weights are asked about: a step needs at least a response for every data-parallel rank.
    sections["rollout"] = {"groups_per_step": 1024}
    for name, values in (change or {}).items():
        sections[name] |= values
    config = plan_config({"model": {"path": str(CONFIGS / model)}, **sections})
    return make_plan(config, published_config(model))


def figures_of(plan: RunPlan, engines: int) -> dict[str, Any]:
    """What the table shows."""
    found = plan.prediction
    assert found is not None
    parts = {f"{name}_s": seconds for name, seconds in found.parts.items()}
    return {
        "layout": plan.layout.describe(), "senders": len(plan.syncs), "engines": engines,
        "buckets": sum(sender.buckets for sender in plan.syncs), "gib": plan.sync_bytes / 2**30,
        "bound_s": plan.sync_seconds, "predicted_s": found.seconds, **parts, "limit": found.limit,
        "ratio_bound": found.seconds / plan.sync_seconds,
    }  # fmt: skip


def predictions(model: str) -> dict[int, dict[str, Any]]:
    """By number of GPUs, of those on which the launch script's layout fits."""
    found: dict[int, dict[str, Any]] = {}
    for gpus in SIZES:
        try:
            plan = plan_on(model, gpus)
        except UserError as error:
            print(f"{model} on {gpus} GPUs: {error}", file=sys.stderr)
            continue
        trainer_fits = all(problem.where.startswith("engine") for problem in plan.problems)
        if not trainer_fits or not plan.engine_gpus:
            print(f"{model} on {gpus} GPUs: does not fit", file=sys.stderr)
            continue
        assert plan.engine is not None
        found[gpus] = figures_of(plan, plan.engine_gpus // _tp_size(model))
    return found


def _tp_size(model: str) -> int:
    return yaml.safe_load((SNAPSHOTS / f"{model}.yaml").read_text())["configuration"]["sglang"]["tp_size"]


def what_if(model: str) -> dict[str, float]:
    """Predicted seconds of each change, on the most GPUs."""
    plans = {name: plan_on(model, SIZES[-1], change).prediction for name, change in WHAT_IF.items()}
    return {name: found.seconds for name, found in plans.items() if found is not None}


def main() -> None:
    """Predict and print."""
    console, found = Console(width=140), {model: predictions(model) for model in AIMS}
    table = Table(title="predicted, not run: seconds of one sync")
    columns = ("model", "GPUs", "layout", "engines", "buckets", "GiB", "at least", "prediction", "fill", "wire", "load",
               "latency", "aim")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for model, by_gpus in found.items():
        for gpus, f in by_gpus.items():
            seconds = (f[name] for name in ("bound_s", "predicted_s", "fill_s", "wire_s", "load_s", "latency_s"))
            table.add_row(
                model, f"{gpus:,}", f["layout"], str(f["engines"]), f"{f['buckets']:,}", f"{f['gib']:.1f}",
                *(f"{each:.2f}" for each in seconds), f"{AIMS[model]:g}",
            )  # fmt: skip
    console.print(table)
    changed = {model: what_if(model) for model in AIMS}
    table = Table(title=f"what if, on {SIZES[-1]:,} GPUs: predicted seconds")
    for column in ("", *changed):
        table.add_column(column, justify="right")
    for name in WHAT_IF:
        table.add_row(name, *(f"{by_name[name]:.2f}" for by_name in changed.values()))
    console.print(table)
    print(json.dumps({**found, "what_if": changed}))


if __name__ == "__main__":
    main()
