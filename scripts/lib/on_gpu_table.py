"""Table of scripts/on_gpu.sh: `python scripts/lib/on_gpu_table.py OUT` writes OUT/table.md and OUT/figures.jsonl.

They hold what OUT has so far.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

STEPS = ("doctor", "tests", "quickstart", "quickstart_off", "run", "step", "kernels")
ENDS = {0: "succeeded", 124: "cut off by its time limit", 130: "interrupted"}


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        found: as text; None: not measured yet.
        reached: whether it is as good as the goal; None: there is no goal.
    """

    name: str
    found: str | None
    goal: str = ""
    reached: bool | None = None

    def line(self) -> str:
        """A row of the table."""
        mark = {None: "", True: "yes", False: "**no**"}[self.reached if self.found is not None else None]
        return f"| {self.name} | {self.found or 'not measured'} | {self.goal} | {mark} |"


def main() -> None:
    """Write both files."""
    out = Path(sys.argv[1])
    figures = {step: figures_of(out, step) for step in STEPS}
    (out / "figures.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "status": ended[0], "seconds": ended[1], **figures[step]}) + "\n"
            for step in STEPS
            if (ended := status_of(out, step)) is not None
        )
    )
    (out / "table.md").write_text("\n".join(lines(out, figures)) + "\n")


def status_of(out: Path, step: str) -> tuple[int, int] | None:
    """(exit status, seconds) of a step that has run."""
    file = out / f"{step}.status"
    if not file.exists():
        return None
    status, seconds = file.read_text().split()
    return int(status), int(seconds)


def figures_of(out: Path, step: str) -> dict[str, Any]:
    """Figures of a step: all objects of one line in its log, or what its files hold."""
    if step in ("quickstart", "quickstart_off"):
        return quickstart_figures(out / "quickstart" / ("rl" if step == "quickstart" else "rl_off") / "metrics.jsonl")
    if step == "kernels":
        return kernel_figures(out / "kernels.json")
    log = out / f"{step}.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    if step == "tests":
        return test_figures(text)
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found |= json.loads(line)
            except ValueError:  # cut off
                continue
    return found


def quickstart_figures(metrics: Path) -> dict[str, Any]:
    """Accuracy, mismatch, and compared syncs of a run with weights.verify: always."""
    rows = (
        [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
        if metrics.exists()
        else []
    )
    steps = [row for row in rows if row.get("mismatch/kl") is not None]
    accuracy = [row["eval/held_out/accuracy"] for row in rows if "eval/held_out/accuracy" in row]
    found: dict[str, Any] = {}
    if accuracy:
        found |= {"accuracy_before": accuracy[0], "accuracy_after": accuracy[-1]}
    if steps:
        found |= {
            "steps": steps[-1]["step"], "mismatch_kl": fmean(row["mismatch/kl"] for row in steps),
            "syncs_equal": sum("weights/bytes" in row for row in steps),
            "step_seconds": fmean(row["perf/step_seconds"] for row in steps),
        }  # fmt: skip
    return found


def test_figures(log: str) -> dict[str, Any]:
    """Numbers of tests, and names of those that failed, over all calls: the last outcome of a test counts."""
    outcomes = {
        name: end for end, name in re.findall(r"\b(PASSED|FAILED|ERROR|SKIPPED) (tests/gpu\S*::.*?)\s*$", log, re.M)
    }
    ends = list(outcomes.values())
    failed = sorted(name for name, end in outcomes.items() if end in ("FAILED", "ERROR"))
    return {"passed": ends.count("PASSED"), "skipped": ends.count("SKIPPED"), "failed": failed} if ends else {}


def kernel_figures(file: Path) -> dict[str, Any]:
    """Floor of memory traffic over the time of mslime's fused kernels, by dtype and pass."""
    rows = json.loads(file.read_text())["figures"] if file.exists() else []
    fused = {row["dtype"]: row for row in rows if row["way"] == "fused, reused"}
    return {
        f"{name}_{dtype}": row[f"{name}_floor"] / row[name]
        for dtype, row in fused.items()
        for name in ("forward", "backward")
        if row[f"{name}_floor"]
    }


def lines(out: Path, figures: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Lines of the Markdown file."""
    device = next((f["device"] for f in figures.values() if "device" in f), "device unknown")
    commit = (out / "commit").read_text().strip() if (out / "commit").exists() else "unknown"
    yield f"{device}, commit {commit}"
    yield ""
    yield "| step | end | seconds |"
    yield "|---|---|---|"
    for step in STEPS:
        status = status_of(out, step)
        end = "not run" if status is None else ENDS.get(status[0], f"failed with status {status[0]}")
        yield f"| {step} | {end} | {'' if status is None else status[1]} |"
    yield ""
    yield "| figure | found | goal | reached |"
    yield "|---|---|---|---|"
    for row in rows(figures):
        yield row.line()


def rows(figures: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    """Rows of the second table."""
    tests, quick, off = figures["tests"], figures["quickstart"], figures["quickstart_off"]
    run, step, kernels = figures["run"], figures["step"], figures["kernels"]
    ran = f"{tests['passed']} passed, {len(tests['failed'])} failed, {tests['skipped']} skipped" if tests else None
    yield Row("GPU tests", ran, "all pass", bool(tests) and tests["passed"] > 0 and not tests["failed"])
    learnt = _of(quick, "accuracy_after", lambda x: f"{quick['accuracy_before']:.1%} -> {x:.1%}")
    yield Row("quickstart, held-out accuracy", learnt, ">= 90%", quick.get("accuracy_after", 0) >= 0.9)
    yield Row("quickstart, syncs with every bit equal", _of(quick, "syncs_equal", str), "all of its steps",
              bool(quick) and quick.get("syncs_equal") == quick.get("steps"))  # fmt: skip
    both = (
        f"{quick['mismatch_kl']:.1e} / {off['mismatch_kl']:.1e}"
        if "mismatch_kl" in quick and "mismatch_kl" in off
        else None
    )
    yield Row("quickstart, mismatch KL with / without R3", both)
    kl, without = run.get("mismatch_kl_r3"), run.get("mismatch_kl_off")
    yield Row("mismatch KL with R3, widths of Qwen3-30B-A3B", _of(run, "mismatch_kl_r3", "{:.1e}".format), "<= 5e-4",
              kl is not None and kl <= 5e-4)  # fmt: skip
    yield Row("mismatch KL without R3 / with", f"{without / kl:.1f}" if kl and without is not None else None, ">= 2",
              bool(kl) and without is not None and without >= 2 * kl)  # fmt: skip
    yield at_least("replayed (token, layer) pairs", run, "replay_coverage", 1.0, "{:.2%}")
    yield at_least("training step, TFLOP/s of model operations in bf16", step, "model_tflops", 200, "{:.0f}")
    yield at_least("FP8 step, bf16 over it (best recipe)", _best(step), "fp8", 1.2)
    for dtype in ("bf16", "fp32"):
        for way in ("forward", "backward"):
            yield at_least(f"log-probs and entropy, {way}, {dtype}: floor / time", kernels, f"{way}_{dtype}", 0.75)
    yield at_most("packing of a sync / copying its bytes", step, "ratio_packing", 1.25)
    yield at_most("sync by handles / copying its bytes twice", run, "ratio_handles", 1.5)
    yield at_most("sleep / bytes over the measured rate to the host", step, "ratio_sleep", 1.2)
    yield at_most("wake / bytes over the measured rate from the host", step, "ratio_wake", 1.2)
    yield at_least("engine, tokens/s with log-probs and routes / without", run, "ratio_engine", 0.9)
    yield near("memory of a step / plan", step, "ratio_memory")
    yield near("memory of the engine's weights / plan", run, "ratio_engine_weights")
    yield near("memory of the engine's cache / plan", run, "ratio_engine_cache")
    for name in ("matmul_per_s", "copy_bytes_per_s", "to_host_bytes_per_s", "from_host_bytes_per_s"):
        yield Row(name, _of(step or run, name, "{:.3g}".format))


def _of(figures: Mapping[str, Any], name: str, text: Any) -> str | None:
    return text(figures[name]) if name in figures else None


def _best(step: Mapping[str, Any]) -> dict[str, float]:
    ratios = [value for name, value in step.items() if name.startswith("ratio_fp8_")]
    return {"fp8": max(ratios)} if ratios else {}


def at_least(label: str, figures: Mapping[str, Any], name: str, goal: float, form: str = "{:.2f}") -> Row:
    """A figure that should be large."""
    return Row(label, _of(figures, name, form.format), f">= {form.format(goal)}", figures.get(name, -1) >= goal)


def at_most(label: str, figures: Mapping[str, Any], name: str, goal: float) -> Row:
    """A figure that should be small."""
    return Row(label, _of(figures, name, "{:.2f}".format), f"<= {goal:.2f}", figures.get(name, goal + 1) <= goal)


def near(label: str, figures: Mapping[str, Any], name: str) -> Row:
    """A figure that should be 1."""
    return Row(label, _of(figures, name, "{:.3f}".format), "0.95 to 1.05", abs(figures.get(name, 0) - 1) <= 0.05)


if __name__ == "__main__":
    main()
