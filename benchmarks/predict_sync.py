"""Predictions of a weight sync at full size: what `mslime plan` says of four models on 64 to 1,024 GPUs.

    python benchmarks/predict_sync.py

Nothing is run, and no figure is a measurement. The layouts are those of the launch scripts; half of the GPUs train, in
more data-parallel copies as there are more, and half serve, in more engines. Numbers of GPUs on which the layout does
not fit are left out. "What if" follows the same schedule with other rates: it says what a change would be worth.
First `weights.transport: broadcast`, then `relay`, with each number of senders (`weights.senders`) that the layout has.

The last line is JSON: by model and GPUs `bound_s`, `predicted_s`, its parts, `limit`, `senders`, `engines`, `buckets`,
and `ratio_bound` (predicted over bound); `what_if` by model, seconds of each change at the largest number of GPUs.
`relay` by model, number of senders and GPUs the same, with `bounds_s`, `lanes` (ranks of an engine, on one machine,
that receive from senders), `ratio_broadcast` (predicted over what broadcast is predicted to take), and whether the
`engine_fits`; `relay_what_if`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from mslime.config.errors import UserError
from mslime.planner.command import plan_config
from mslime.planner.plan import RunPlan, make_plan
from mslime.planner.sync import lane_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.fixtures.full_size import CONFIGS, published_config

SNAPSHOTS = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "snapshots"
AIMS = {"qwen3-30B-A3B": 1.0, "qwen3-235B-A22B": 3.0, "deepseek-v3": 6.0, "kimi-k2": 6.0}
"""Seconds."""
SIZES = (64, 128, 256, 512, 1024)
COPY_GB_PER_S = {80: 1200, 141: 1680}
"""70% of half of what an H100's and an H200's memory moves as sold (3,350 and 4,800 GB/s); an assumption."""
WHAT_IF: dict[str, dict[str, dict[str, Any]]] = {
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

RELAY_SENDERS = (8, 16, 32)
RELAY_WHAT_IF: dict[str, dict[str, dict[str, Any]]] = {
    "as it is": {},
    "recorded loading": {"cluster": {"sync_tensor_us": 0}},
    "recorded loading, 800 Gb/s": {"cluster": {"sync_tensor_us": 0, "gpu_network_gbits": 800}},
    "buckets of 256 MiB": {"weights": {"bucket_mib": 256}},
    "buckets of 4 GiB": {"weights": {"bucket_mib": 4096}},
    "1 ms a start of a collective": {"cluster": {"sync_collective_ms": 1}},
    "70% of network and NVLink": {"cluster": {"gpu_network_gbits": 280, "gpu_nvlink_gb_per_s": 315}},
    "copies of 840 GB/s": {"cluster": {"gpu_copy_gb_per_s": 840}},
    "800 Gb/s a GPU": {"cluster": {"gpu_network_gbits": 800}},
    "NVLink of 900 GB/s": {"cluster": {"gpu_nvlink_gb_per_s": 900}},
}  # fmt: skip


def plan_on(model: str, gpus: int, change: dict[str, dict[str, Any]] | None = None) -> RunPlan:
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


def predictions(
    model: str, sizes: Iterable[int] = SIZES, change: dict[str, dict[str, Any]] | None = None
) -> dict[int, dict[str, Any]]:
    """By number of GPUs, of those on which the launch script's layout fits."""
    found: dict[int, dict[str, Any]] = {}
    for gpus in sizes:
        try:
            plan = plan_on(model, gpus, change)
        except UserError as error:
            print(f"{model} on {gpus} GPUs: {error}", file=sys.stderr)
            continue
        trainer_fits = all(problem.where.startswith("engine") for problem in plan.problems)
        if not trainer_fits or not plan.engine_gpus:
            print(f"{model} on {gpus} GPUs: does not fit", file=sys.stderr)
            continue
        assert plan.engine is not None
        found[gpus] = figures_of(plan, plan.engine_gpus // plan.engine_ranks)
        if plan.transport == "relay":
            found[gpus] |= {
                "bounds_s": dict(plan.bounds), "lanes": len(lane_bytes(plan.syncs, plan.near_ranks)),
                "engine_fits": not any(problem.where.startswith("engine") for problem in plan.problems),
            }  # fmt: skip
    return found


def relay_predictions(model: str, broadcast: dict[int, dict[str, Any]]) -> dict[int, dict[int, dict[str, Any]]]:
    """By number of senders, of those that the layout has, and the fewest and most GPUs that broadcast has."""
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for senders in RELAY_SENDERS:
        chosen = {"weights": {"transport": "relay", "senders": senders}}
        by_gpus = predictions(model, (min(broadcast), max(broadcast)), chosen)
        for gpus, figures in by_gpus.items():
            figures["ratio_broadcast"] = figures["predicted_s"] / broadcast[gpus]["predicted_s"]
            found.setdefault(figures["senders"], {})[gpus] = figures
    return found


def what_if(model: str) -> dict[str, float]:
    """Predicted seconds of each change, on the most GPUs."""
    plans = {name: plan_on(model, SIZES[-1], change).prediction for name, change in WHAT_IF.items()}
    return {name: found.seconds for name, found in plans.items() if found is not None}


def relay_what_if(model: str) -> dict[str, float]:
    """The same with the most senders of `RELAY_SENDERS`."""
    most = {"transport": "relay", "senders": RELAY_SENDERS[-1]}
    changes = {name: {**change, "weights": most | change.get("weights", {})} for name, change in RELAY_WHAT_IF.items()}
    plans = {name: plan_on(model, SIZES[-1], change).prediction for name, change in changes.items()}
    return {name: found.seconds for name, found in plans.items() if found is not None}


def print_predictions(console: Console, found: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Of broadcast, by model and GPUs."""
    table = Table(title="predicted, not run: seconds of one sync by broadcast")
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


def print_relay(console: Console, found: dict[str, dict[int, dict[int, dict[str, Any]]]]) -> None:
    """By model, senders and GPUs."""
    table = Table(title="predicted, not run: seconds of one sync by relay")
    columns = ("model", "GPUs", "senders", "lanes", "buckets", "at least: wire", "inside", "fill", "prediction",
               "fill", "wire", "inside", "load", "latency", "aim", "of broadcast")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for model, by_senders in found.items():
        for senders, by_gpus in by_senders.items():
            for gpus, f in by_gpus.items():
                bounds = (f["bounds_s"][name] for name in ("wire", "inside", "fill"))
                names = ("predicted_s", "fill_s", "wire_s", "inside_s", "load_s", "latency_s")
                table.add_row(
                    model, f"{gpus:,}", str(senders), str(f["lanes"]), f"{f['buckets']:,}",
                    *(f"{each:.2f}" for each in (*bounds, *(f[name] for name in names))), f"{AIMS[model]:g}",
                    f"{f['ratio_broadcast']:.2f}",
                )  # fmt: skip
    console.print(table)


def print_what_if(console: Console, title: str, changed: dict[str, dict[str, float]]) -> None:
    """Seconds by model and change, on the most GPUs."""
    table = Table(title=f"what if, {title} on {SIZES[-1]:,} GPUs: predicted seconds")
    for column in ("", *changed):
        table.add_column(column, justify="right")
    for name in next(iter(changed.values())):
        table.add_row(name, *(f"{by_name[name]:.2f}" for by_name in changed.values()))
    console.print(table)


def main() -> None:
    """Predict and print."""
    console, found = Console(width=180), {model: predictions(model) for model in AIMS}
    relay = {model: relay_predictions(model, found[model]) for model in AIMS}
    changed = {model: what_if(model) for model in AIMS}
    relay_changed = {model: relay_what_if(model) for model in AIMS}
    print_predictions(console, found)
    print_what_if(console, "broadcast", changed)
    print_relay(console, relay)
    print_what_if(console, f"relay of at most {RELAY_SENDERS[-1]} senders", relay_changed)
    print(json.dumps({**found, "what_if": changed, "relay": relay, "relay_what_if": relay_changed}))


if __name__ == "__main__":
    main()
