"""Cost of starting a server on a CPU: with forked processes, as in mslime, or spawned ones, as in SGLang.

    python benchmarks/engine_start.py [--rounds 3]

Starts one server of a tiny model at a time, both ways in turn, until it serves. `ratio` in the last line, one of JSON,
is the median over the rounds of the CPU seconds spawned over those forked. CPU seconds, because imports are all CPU,
and other work on the machine changes them little. The floor is one import of torch and SGLang by the server itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mslime.backends.sglang import server_process
from mslime.backends.sglang.flags import command_line
from mslime.config.resolved import engine_spec
from mslime.config.schema import RunConfig
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

SPAWNED = """
import sys
from mslime.backends.sglang import launch
if __name__ == "__main__":
    launch.fork_children = lambda: None
    launch.main(sys.argv[1:])
elif __name__ == "__mp_main__":
    launch.die_with_the_server()
    launch.listen_on_own_address()
"""
MEASURED = ("cpu_s", "wall_s", "mib")


def main(argv: Sequence[str] | None = None) -> None:
    """Start servers, print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    found: dict[str, list[tuple[float, ...]]] = {"forked": [], "spawned": []}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        script = root / "spawned.py"
        script.write_text(SPAWNED)
        run = RunConfig.model_validate(
            {
                "model": {"path": str(make_tiny_qwen3_moe(root / "model"))}, "data": {"prompts": ["unused.jsonl"]},
                "cluster": {"device": "cpu"}, "sglang": {"max_total_tokens": 16384},
                "deadlines": {"engine_start_s": 600},
            }
        )  # fmt: skip
        for number in range(args.rounds):
            for way, program in (("forked", None), ("spawned", script)):
                found[way].append(start(run, root / f"{way}{number}", program))
    table = Table("", "CPU s", "wall s", "MiB of its own")
    medians = {way: [statistics.median(column) for column in zip(*rows, strict=True)] for way, rows in found.items()}
    for way, figures in medians.items():
        table.add_row(way, *(f"{figure:.1f}" for figure in figures))
    Console().print(table)
    ratio = statistics.median(s[0] / f[0] for f, s in zip(found["forked"], found["spawned"], strict=True))
    each = {f"{way}_{name}": x for way, row in medians.items() for name, x in zip(MEASURED, row, strict=True)}
    print(json.dumps({"ratio": ratio, "rounds": args.rounds, **each}))


def start(run: RunConfig, logs: Path, program: Path | None) -> tuple[float, float, float]:
    """(CPU seconds, wall seconds, unshared MiB) of a server until it serves.

    Args:
        program: replaces mslime's own server program.
    """

    def command(fields: Mapping[str, Any]) -> list[str]:
        own = command_line(fields)
        return own if program is None else [own[0], str(program), *own[3:]]

    server_process.command_line = command
    process = server_process.ServerProcess(engine_spec(run), 0, logs)
    begin = time.monotonic()
    try:
        process.start()
        wall = time.monotonic() - begin
        processes = [psutil.Process(pid) for pid in process.pids]
        seconds = sum(times.user + times.system for times in (each.cpu_times() for each in processes))
        return seconds, wall, sum(each.memory_full_info().uss for each in processes) / 2**20
    finally:
        process.stop()


if __name__ == "__main__":
    main()
