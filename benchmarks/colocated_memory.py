"""Memory of trainer and engine in each phase of a colocated run: measured, and as `mslime plan` counts it.

    python benchmarks/colocated_memory.py [--hidden 512] [--experts 16] [--steps 5]

Runs `mslime train` with `cluster.placement: colocated` on a CPU: one Megatron rank, one SGLang server, a synthetic
Qwen3-MoE in float32. The script samples the processes' memory (PSS, which divides shared pages among their users) and
assigns it to phases by the run's timeline. Processes use much memory beside weights, so each phase is compared with
the phase in which that side is offloaded. On a CPU the engine releases pages by madvise, and the trainer's state goes
to files (docs/colocated.md). This measures nothing about a GPU's memory.

The results are `ratio_*`: measured over planned. Activations are not compared, because a CPU's allocator keeps their
pages. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mslime.config.loader import build
from mslime.convert.families import read_hf_config
from mslime.observe.timeline import read_spans
from mslime_plugins.planner.plan import RunPlan, make_plan
from tests.e2e.harness import Run, start_run
from tests.e2e.test_run import settings
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

EVERY_S = 0.05
MIB = 1 << 20


def main() -> None:
    """Make the model, run, read memory, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    with TemporaryDirectory() as scratch:
        directory = Path(scratch)
        model = make_tiny_qwen3_moe(
            directory / "model", hidden_size=args.hidden, moe_intermediate_size=384, num_experts=args.experts
        )
        prompts = directory / "prompts.jsonl"
        rows = [{"prompt": f"{n} + {n} =", "label": str(2 * n)} for n in range(64)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        values = settings(
            model, prompts, cluster={"placement": "colocated"}, train={"num_steps": args.steps},
            weights={"transport": "shm", "bucket_mib": 16, "verify": "first"}, sglang={"max_total_tokens": 8192},
            checkpoint={"save_every": 0}, observe={"eval_every": 0, "eval_at_start": False},
        )  # fmt: skip
        plan = make_plan(build({**values, "data": {**values["data"], "max_prompt_tokens": 16}}), read_hf_config(model))
        measured = measure(values, directory)
    figures = compare(measured, plan)
    show(figures)
    print(json.dumps(figures))


@dataclass
class Watch:
    """Reads the memory of trainer and engine until it is stopped.

    Attributes:
        read: (time, bytes of the trainer rank, bytes of the engine's processes).
    """

    run: Run
    read: list[tuple[float, int, int]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Body of the thread."""
        trainer = engine = None
        while not self.ended.is_set():
            try:
                trainer = trainer or self._find("ray::TrainerActor")
                engine = engine or self._find("mslime.backends.sglang.launch")
                if trainer and engine:
                    parts = [engine, *engine.children(recursive=True)]
                    self.read.append((time.time(), _pss([trainer]), _pss(parts)))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                trainer = engine = None
            self.ended.wait(EVERY_S)

    def _find(self, title: str) -> psutil.Process | None:
        for process in psutil.Process(self.run.process.pid).children(recursive=True):
            if title in " ".join(process.cmdline()):
                return process
        return None


def _pss(processes: Sequence[psutil.Process]) -> int:
    return sum(process.memory_full_info().pss for process in processes)


def measure(values: dict[str, object], directory: Path) -> dict[str, tuple[float, float]]:
    """Bytes of (trainer, engine) in each phase: medians over its readings, without the first two steps."""
    run = start_run(values, directory)
    watch = Watch(run)
    thread = threading.Thread(target=watch.watch)
    thread.start()
    try:
        status = run.finish(1800)
        assert status == 0, run.text()
    finally:
        watch.ended.set()
        thread.join()
        run.stop()
    found: dict[str, list[tuple[float, int, int]]] = {}
    names = {"train": "train", "send weights": "send", "wait for rollouts": "generate"}
    for span in read_spans(run.directory):
        if span.step < 3 or span.name not in names:
            continue
        margin = 0.2 * (span.end - span.start)  # memory moves at both ends of a phase
        inside = [row for row in watch.read if span.start + margin <= row[0] <= span.end - margin]
        found.setdefault(names[span.name], []).extend(inside)
    assert found.keys() == set(names.values()) and all(found.values()), {k: len(v) for k, v in found.items()}
    return {
        phase: (statistics.median(row[1] for row in rows), statistics.median(row[2] for row in rows))
        for phase, rows in found.items()
    }


def compare(measured: dict[str, tuple[float, float]], plan: RunPlan) -> dict[str, float]:
    """Memory of each side in a phase above its offloaded state: measured, planned and their ratio."""
    memory, engine = plan.stages[0].memory, plan.engine
    assert engine is not None
    trainer = {phase: figures[0] - measured["generate"][0] for phase, figures in measured.items()}
    served = {phase: figures[1] - measured["train"][1] for phase, figures in measured.items()}
    pairs = {
        "trainer_send": (trainer["send"], memory.weights),
        "trainer_train": (trainer["train"], memory.states),
        "engine_send": (served["send"], engine.weights),
        "engine_generate": (served["generate"], engine.weights + engine.cache),
    }
    figures: dict[str, float] = {}
    for name, (found, planned) in pairs.items():
        figures |= {f"{name}_mib": found / MIB, f"{name}_planned_mib": planned / MIB, f"ratio_{name}": found / planned}
    for side, at in (("trainer", "generate"), ("engine", "train")):
        figures[f"{side}_asleep_mib"] = measured[at][0 if side == "trainer" else 1] / MIB
    return figures


def show(figures: dict[str, float]) -> None:
    """Print the figures as a table."""
    table = Table(title="MiB more than while offloaded")
    for head in ("", "measured", "planned", "ratio"):
        table.add_column(head, justify="right")
    labels = {
        "trainer_train": "trainer, train: weights, gradients, optimizer (and activations, measured)",
        "trainer_send": "trainer, send: weights (and buckets, measured)",
        "engine_generate": "engine, generate: weights, cache",
        "engine_send": "engine, send: weights",
    }
    for name, label in labels.items():
        cells = (figures[f"{name}_mib"], figures[f"{name}_planned_mib"])
        table.add_row(label, *(f"{cell:,.0f}" for cell in cells), f"{figures[f'ratio_{name}']:.2f}")
    console = Console(width=120)
    console.print(table)
    console.print(
        f"offloaded: trainer {figures['trainer_asleep_mib']:,.0f} MiB, engine {figures['engine_asleep_mib']:,.0f} MiB"
    )


if __name__ == "__main__":
    main()
