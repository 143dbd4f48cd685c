"""Random kills of engine processes in a real run, and whether the run stays correct.

    python benchmarks/chaos_engines.py [--kills 60] [--minutes M] [--engines 2] [--transport auto] [--seed 0]

A run on real engines (tiny model, CPU) trains, evaluates and saves. Repeatedly, one process of one engine (guard,
server, scheduler or detokenizer) gets SIGKILL or SIGSTOP: at a random moment, while the engine is paused for a weight
sync, or while it restarts. After each kill the run must make two more steps and have all engines back. Every sync
compares every bit of every engine's parameters with the trainer's, and a difference ends the run. The ledger must
balance in each step, and no trained token may be older than `rollout.max_staleness`.

With `--overlap`, the next kill follows two steps after the last one, even if engines are still starting, as long as
one serves. All engines must be back at the end.

`next_step_s` is the time from the signal to the end of the second step after it, `whole_s` the time until all engines
serve. Heartbeats and deadlines detect a stopped process; they are short here (15 s). `ratio`, in the last line (JSON),
is the median step time with an engine missing over that with all engines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from mslime.config.errors import UserError
from mslime.config.transports import AUTO, transport_names
from mslime.observe.names import by_step
from mslime.run.endpoint import ask

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.e2e.harness import Run, assert_balanced, start_run
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

PARTS = ("guard", "server", "scheduler", "detokenizer")
MOMENTS = ("any", "any", "sync", "start")
PATIENCE_S = 420.0


@dataclass(frozen=True)
class Event:
    """One injected failure and its consequences."""

    engine: str
    part: str
    signal: str
    moment: str
    next_step_s: float
    whole_s: float
    steps_meanwhile: int


def settings(model: Path, prompts: Path, engines: int, transport: str) -> dict[str, Any]:
    """Settings of a run without a last step."""
    return {
        "model": {"path": str(model)},
        "data": {
            "prompts": [str(prompts)], "eval_sets": [{"name": "held_out", "path": f"{prompts}@[:4]"}],
        },
        "cluster": {"device": "cpu"},
        "rollout": {
            "groups_per_step": 4, "group_size": 4, "max_response_tokens": 64, "max_staleness": 1, "on_stale": "mask",
        },
        "sglang": {"num_engines": engines, "max_total_tokens": 4096, "restarts": 1000},
        "reward": {"kind": "custom", "function": "tests.e2e.rewards:even_tokens"},
        "train": {"num_steps": 100_000, "lr": 1e-3},
        "observe": {"eval_every": 7},
        "checkpoint": {"save_every": 9, "keep": 2},
        "weights": {"verify": "always", "bucket_mib": 0.25, "transport": transport},
        "deadlines": {
            "engine_start_s": 180, "engine_silence_s": 16, "engine_request_s": 120, "engine_control_s": 15,
            "weight_sync_s": 40, "train_step_s": 100, "rollout_step_s": 300,
        },
    }  # fmt: skip


def family(run: Run, engine: str) -> list[psutil.Process]:
    """Processes of an engine: its guard and all descendants; empty if it has none."""
    index = engine.removeprefix("engine")
    for process in run.look():
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if "sglang.guard" in line and f"engine{index}-" in line:
                return [process, *process.children(recursive=True)]
    return []


def part_of(processes: Iterable[psutil.Process], part: str) -> psutil.Process | None:
    """Process with this role."""
    found = list(processes)
    if not found or part == "guard":
        return found[0] if found else None
    for process in found[1:]:
        with suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if part == "server" and "--served-model-name" in title:
                return process
            if part != "server" and f"sglang::{part}" in title:
                return process
    return None


def states(run: Run) -> dict[str, dict[str, Any]]:
    """States of the engines as `mslime scale` shows them."""
    try:
        found = asyncio.run(ask(run.directory))
    except UserError:
        return {}
    return {engine["name"]: engine for engine in found["engines"]}


def whole(run: Run, engines: int) -> bool:
    """Whether all engines serve."""
    return [e["state"] for e in states(run).values()] == ["serving"] * engines


def paused(url: str) -> bool:
    """Whether an engine serves and is paused."""
    try:
        return httpx.get(f"{url}/ready", timeout=2).status_code == 503
    except httpx.HTTPError:
        return False


def wait(run: Run, event: str, condition: Callable[[], bool], seconds: float = PATIENCE_S) -> float:
    """Wait until the condition holds; returns the seconds. Exits if the run has ended or the time limit is reached."""
    begin = time.monotonic()
    while not condition():
        if run.process.poll() is not None:
            raise SystemExit(f"the run ended while waiting for {event}:\n{run.text()[-6000:]}")
        if time.monotonic() - begin > seconds:
            raise SystemExit(f"no {event} within {seconds:.0f} s:\n{run.text()[-6000:]}")
        time.sleep(0.1)
    return time.monotonic() - begin


def strike(run: Run, dice: random.Random, engines: int) -> Event:
    """Inject one failure and wait until the run has recovered."""
    engine, moment = f"engine{dice.randrange(engines)}", dice.choice(MOMENTS)
    part, name = dice.choice(PARTS), dice.choice(["SIGKILL", "SIGKILL", "SIGSTOP"])
    if moment == "sync":
        url = states(run)[engine]["url"]
        wait(run, "a paused engine", lambda: paused(url), 120)
    elif moment == "start":
        victim = part_of(family(run, engine), "server")
        if victim is not None:
            victim.kill()
        wait(run, f"start of {engine}", lambda: states(run).get(engine, {}).get("state") == "starting", 120)
        wait(run, "its processes", lambda: len(family(run, engine)) > 1, 200)
        time.sleep(dice.uniform(0, 15))
    else:
        time.sleep(dice.uniform(0, 4))
    wait(run, f"the {part} of {engine}", lambda: part_of(family(run, engine), part) is not None, 200)
    victim, rows = part_of(family(run, engine), part), len(by_step(run.rows()))
    assert victim is not None, "it was running a moment ago"
    begin = time.monotonic()
    with suppress(psutil.NoSuchProcess):
        victim.send_signal(getattr(signal, name))
    wait(run, "two more steps", lambda: len(by_step(run.rows())) >= rows + 2)
    next_step = time.monotonic() - begin
    # Death is noticed at a sync, so an engine that still counts as serving may be dead.
    wait(run, "all engines", lambda: bool(family(run, engine)) and whole(run, engines))
    if name == "SIGSTOP" and part == "guard":
        with suppress(psutil.NoSuchProcess):  # this process only watches, so its loss has no effect
            victim.resume()
    elif name == "SIGSTOP":
        wait(run, "the end of the stopped process", lambda: not _stopped(victim))
        wait(run, "all engines", lambda: whole(run, engines))
    steps = len(by_step(run.rows())) - rows
    return Event(engine, part, name, moment, next_step, time.monotonic() - begin, steps)


class Watch:
    """Thread that records the state of each engine twice a second."""

    def __init__(self, run: Run) -> None:
        self.seen: list[tuple[float, dict[str, str]]] = []
        self._run, self._over = run, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.5):
            self.seen.append((time.monotonic(), {name: e["state"] for name, e in states(self._run).items()}))

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def back_after(self, engine: str, begin: float) -> float | None:
        """Seconds from a failure until the engine serves again; None if it never stopped serving."""
        away = False
        for moment, engines in self.seen:
            state = engines.get(engine)
            if moment < begin or state is None:
                continue
            if state == "serving" and away:
                return moment - begin
            away = away or state != "serving"
        return None


def strike_early(run: Run, dice: random.Random, engines: int) -> tuple[Event, float, psutil.Process]:
    """Inject one failure during earlier ones; returns it with its time and its process after two more steps."""
    engine = f"engine{dice.randrange(engines)}"
    wait(run, "another serving engine", lambda: _another(run, engine))
    part, name = dice.choice(PARTS), dice.choice(["SIGKILL", "SIGKILL", "SIGSTOP"])
    moment = "sync" if dice.random() < 0.3 else "any"
    if states(run)[engine]["state"] != "serving":
        moment = "start"
        wait(run, "its processes", lambda: len(family(run, engine)) > 1, 200)
        time.sleep(dice.uniform(0, 8))
    elif moment == "sync":
        url = states(run)[engine]["url"]
        with suppress(TimeoutError):
            _until(lambda: paused(url), 20)
    else:
        time.sleep(dice.uniform(0, 4))
    wait(run, f"the {part} of {engine}", lambda: part_of(family(run, engine), part) is not None, 200)
    victim, rows = part_of(family(run, engine), part), len(by_step(run.rows()))
    while victim is None:  # processes may have ended since the last look
        victim = part_of(family(run, engine), part)
    begin = time.monotonic()
    with suppress(psutil.NoSuchProcess):
        victim.send_signal(getattr(signal, name))
    wait(run, "two more steps", lambda: len(by_step(run.rows())) >= rows + 2)
    took = time.monotonic() - begin
    if name == "SIGSTOP" and part == "guard":
        with suppress(psutil.NoSuchProcess):  # this process only watches, so its loss has no effect
            victim.resume()
    return Event(engine, part, name, moment, took, 0.0, len(by_step(run.rows())) - rows), begin, victim


def _another(run: Run, engine: str) -> bool:
    return any(e["state"] == "serving" and name != engine for name, e in states(run).items())


def _until(condition: Callable[[], bool], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError
        time.sleep(0.02)


def strike_all(run: Run, dice: random.Random, arguments: argparse.Namespace, console: Console) -> list[Event]:
    """Inject all failures, each while earlier ones are being repaired; returns when all engines serve."""
    watch, struck = Watch(run), list[tuple[Event, float, psutil.Process]]()
    ends = time.monotonic() + 60 * arguments.minutes
    try:
        for number in range(arguments.kills):
            if time.monotonic() > ends:
                break
            struck.append(strike_early(run, dice, arguments.engines))
            check_books(run)
            console.print(f"{number + 1}/{arguments.kills} {struck[-1][0]}", soft_wrap=True)
        wait(run, "the end of the stopped processes", lambda: not any(_stopped(victim) for _, _, victim in struck))
        wait(run, "all engines", lambda: whole(run, arguments.engines))
        time.sleep(20)  # the last failure may not have been noticed yet
        wait(run, "all engines", lambda: whole(run, arguments.engines))
    finally:
        watch.stop()
    return [replace(event, whole_s=watch.back_after(event.engine, begin) or 0.0) for event, begin, _ in struck]


def _stopped(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def check_books(run: Run) -> int:
    """Check that the ledger balances in each step and that no trained token is too old; returns the number of steps."""
    rows = [row for row in by_step(run.rows()) if "ledger/trained_tokens" in row]  # without rows that hold only scores
    assert_balanced(rows)
    for row in rows:
        assert row["staleness/max"] <= 1, f"step {row['step']}: tokens of age {row['staleness/max']} were trained"
    return len(rows)


def measure(arguments: argparse.Namespace, directory: Path) -> None:
    """Run, inject failures, print."""
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "label": str(a + b)}) + "\n"
                               for a in range(6) for b in range(4)))  # fmt: skip
    model = make_tiny_qwen3_moe(directory / "model")
    run = start_run(settings(model, prompts, arguments.engines, arguments.transport), directory)
    events = list[Event]()
    dice, console = random.Random(arguments.seed), Console(width=120)
    try:
        wait(run, "the first steps", lambda: len(by_step(run.rows())) >= 3)
        ends = time.monotonic() + 60 * arguments.minutes
        if arguments.overlap:
            events = strike_all(run, dice, arguments, console)
        for number in range(0 if arguments.overlap else arguments.kills):
            if events and time.monotonic() > ends:
                break
            events.append(strike(run, dice, arguments.engines))
            check_books(run)
            last = events[-1]
            console.print(f"{number + 1}/{arguments.kills} {last}")
        run.process.terminate()
        status = run.finish(120)
        left = run.left_over()
        if status != 128 + signal.SIGTERM or left:
            raise SystemExit(f"the run ended with status {status} and left {left}")
        steps = check_books(run)
        report(arguments, events, steps, by_step(run.rows()), console)
    finally:
        run.stop()


def report(
    arguments: argparse.Namespace, events: list[Event], steps: int, rows: Sequence[Mapping[str, Any]], console: Console
) -> None:
    """Print the table and the line of JSON."""
    table = Table("signal", "part", "moment", "accidents", "next step, median s", "longest", "whole again, median s")
    keys = sorted({(e.signal, e.part, e.moment) for e in events})
    for key in keys:
        mine = [e for e in events if (e.signal, e.part, e.moment) == key]
        table.add_row(
            *key, str(len(mine)), f"{median(e.next_step_s for e in mine):.1f}",
            f"{max(e.next_step_s for e in mine):.1f}",
            f"{median(e.whole_s for e in mine):.0f}",
        )  # fmt: skip
    console.print(table)
    trained = [r for r in rows if "perf/step_seconds" in r and "weights/engines" in r]
    timed = [(r["perf/step_seconds"], r["weights/engines"]) for r in trained]
    full = [seconds for seconds, engines in timed if engines == arguments.engines]
    fewer = [seconds for seconds, engines in timed if engines < arguments.engines]
    print(json.dumps({
        "kills": len(events), "engines": arguments.engines, "transport": arguments.transport,
        "seed": arguments.seed, "steps": steps,
        "gone_on": len(events), "next_step_s": median(e.next_step_s for e in events),
        "longest_next_step_s": max(e.next_step_s for e in events), "whole_s": median(e.whole_s for e in events),
        "step_s": median(full), "step_with_one_gone_s": median(fewer) if fewer else None,
        "ratio": median(fewer) / median(full) if fewer else None,
    }))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time after which no failure is injected")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--transport", choices=transport_names(), default=AUTO, help="weights.transport")
    parser.add_argument(
        "--overlap", action="store_true", help="inject the next failure while engines are still starting"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="run in this directory and keep it")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the run ends with this process
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        measure(arguments, arguments.keep)
        return
    with tempfile.TemporaryDirectory() as directory:
        measure(arguments, Path(directory))


if __name__ == "__main__":
    main()
