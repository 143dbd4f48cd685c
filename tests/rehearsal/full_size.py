"""Rehearses training steps and weight syncs at full size, each on one rank of its cluster, beside what `plan` says:

    python -m tests.rehearsal.full_size OUT [--only TEXT] [--stamp STAMP]

`full_size_step` measures one rank in a process of its own. A component that differs from the plan by more than 5%, and
by more than 64 MiB, is not well; nor is a step that does. The table is left in OUT/full_size.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.rehearsal.outcomes import Check, Outcome, directory_name, finish, options, true

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
COMPONENTS = ("weights", "gradients", "optimizer", "activations", "working", "logits", "sync", "step")
"""Of `planner.trainer_memory.TrainerMemory`; `step` is the peak of a step, all components together, and `sync` is
compared with what the plan says of this rank: of a stage it says what the sender does that needs most."""
SHARE, AT_LEAST = 0.05, 64 << 20
DEADLINE_S = 900


@dataclass(frozen=True)
class Rank:
    """Whose step is measured.

    Attributes:
        script: of scripts/models.
        rank: global.
        gpu_gib: memory of the GPU.
        ranks: of the trainer, where they are not the script's.
    """

    script: str
    rank: int
    gpu_gib: int
    ranks: int | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"full size: {self.script}, rank {self.rank}" + (f" of {self.ranks:,}" if self.ranks else "")


RANKS = (
    Rank("qwen3-30B-A3B-8gpus", 0, 80),
    Rank("glm4.5-355B-A32B-64gpus", 8, 80),
    Rank("deepseek-v3-128gpus", 8, 80),
    Rank("deepseek-v3-128gpus", 120, 80),
    Rank("qwen3-235B-A22B", 0, 141),
    Rank("qwen3-235B-A22B", 48, 141),
    Rank("deepseek-v3", 517, 141, 1024),
    Rank("deepseek-v3", 768, 141, 1024),
)


def measure(rank: Rank) -> dict[str, Any]:
    """What `full_size_step` prints."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.full_size_step", rank.script, str(rank.rank)]
    command += ["--ranks", str(rank.ranks)] if rank.ranks else []
    env = os.environ | {"FAKE_CUDA_GIB": str(rank.gpu_gib)}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def judge(found: dict[str, Any]) -> list[Check]:
    """Every component beside the plan's."""
    measured, planned = found["measured"], found["planned"]
    checks = [true("layout", f"{found['layout']}, stage {found['stage']}, {found['tokens']} tokens", True)]
    for name in COMPONENTS:
        ours, said = measured[name], _planned(found, name)
        apart = abs(ours - said)
        text = f"{ours / GIB:.2f} GiB, the plan says {said / GIB:.2f}"
        checks.append(true(name, text, apart <= AT_LEAST or apart <= SHARE * said))
    checks.append(true("left after a step", f"{measured['left'] / (1 << 20):.0f} MiB", measured["left"] < AT_LEAST))
    fits = measured["reserved"] + planned["reserve"] <= planned["gpu"] or measured["step"] > planned["gpu"]
    checks.append(true("torch's allocator reserves", f"{measured['reserved'] / GIB:.2f} GiB", fits))
    return checks


def _planned(found: dict[str, Any], name: str) -> int:
    return found["measured"]["sync as planned"] if name == "sync" else found["planned"][name]


def table_of(found: dict[str, dict[str, Any]]) -> Table:
    """GiB by component: measured, and the plan's behind it."""
    table = Table(title="GiB, measured / planned")
    for heading in ("rank", "layout", "stage", *COMPONENTS, "reserved"):
        table.add_column(heading, justify="left" if heading in ("rank", "layout") else "right")
    for name, each in found.items():
        measured = each["measured"]
        cells = [f"{measured[key] / GIB:.2f} / {_planned(each, key) / GIB:.2f}" for key in COMPONENTS]
        shown = name.removeprefix("full size: ")
        table.add_row(shown, each["layout"], str(each["stage"]), *cells, f"{measured['reserved'] / GIB:.2f}")
    return table


def main() -> int:
    """Measure what has not been measured, and print all of it."""
    given = options(__doc__).parse_args()
    by_name = {rank.name: rank for rank in RANKS if given.only in rank.name}
    results = given.out / "full_size"
    results.mkdir(parents=True, exist_ok=True)

    def kept(name: str) -> Path:
        return results / f"{directory_name(name)}.json"

    def one(name: str) -> Outcome:
        begin = time.monotonic()
        try:
            found = measure(by_name[name])
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return Outcome(name, [], str(error), time.monotonic() - begin)
        kept(name).write_text(json.dumps(found))
        return Outcome(name, judge(found), "", time.monotonic() - begin)

    status = finish(list(by_name), one, given.out / "outcomes", given.stamp)
    found = {name: json.loads(kept(name).read_text()) for name in by_name if kept(name).exists()}
    Console(width=220).print(table_of(found))
    return status


if __name__ == "__main__":
    sys.exit(main())
