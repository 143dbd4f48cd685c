"""docs/walk.md: every stop is a function that exists. tests/e2e/test_walk.py compares the page with a run."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.probe import RELAYS, Entered, mentions, reached

ROOT = Path(__file__).parents[2]
_STOP = re.compile(r"^( *)- `mslime/([\w/]+\.py):([\w.]+)`", re.MULTILINE)


@dataclass(frozen=True)
class Stop:
    """A line of the walk, and the line that it stands under."""

    path: str
    name: str
    caller: Stop | None

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"


def all_stops() -> list[Stop]:
    """The stops of the page. One stands under the nearest one before it that is indented less."""
    found: list[Stop] = []
    above: list[tuple[int, Stop]] = []
    for section in (ROOT / "docs/walk.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        above.clear()
        for blanks, path, name in _STOP.findall(section):
            above = [(depth, stop) for depth, stop in above if depth < len(blanks)]
            stop = Stop(path, name, above[-1][1] if above else None)
            above.append((len(blanks), stop))
            found.append(stop)
    return found


@cache
def functions_of(path: str) -> frozenset[str]:
    """Functions of a file, and methods as `Class.method`."""
    body = ast.parse((ROOT / "mslime" / path).read_text(encoding="utf-8")).body
    pairs = [("", node) for node in body]
    pairs += [(f"{node.name}.", inner) for node in body if isinstance(node, ast.ClassDef) for inner in node.body]
    return frozenset(p + n.name for p, n in pairs if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def test_the_walk_has_both_ways() -> None:
    names = {str(stop) for stop in all_stops()}
    assert len(names) > 60
    assert {"algorithms/losses.py:policy_loss", "weights/buckets.py:pack"} <= names


@pytest.mark.parametrize("stop", dict.fromkeys(all_stops()), ids=str)
def test_a_stop_exists(stop: Stop) -> None:
    assert stop.name in functions_of(stop.path)


def test_only_a_chain_of_calls_counts(tmp_path: Path) -> None:
    """A call, a relayed verb and a thread are links; what the event loop or a relay enters beside them is none."""
    (tmp_path / "a.py").write_text(
        "class Run:\n    def take(self):\n        actor.ask.remote(There.groups)\n        plain()\n"
        "def plain():\n    in_thread(self.work)\n"
    )
    relay = RELAYS[0]
    links = [("", "a.py:Run.take"), ("a.py:Run.take", "a.py:plain"), ("", relay),
             (relay, "b.py:There.groups"), (relay, "b.py:There.report"),
             ("b.py:There.report", "b.py:Count.of"), ("threads.py:in_thread", "b.py:Way.work"),
             ("", "b.py:Health.beat")]  # fmt: skip
    rows = [Entered(at, caller, name) for at, (caller, name) in enumerate(links)]
    found = reached("a.py:Run.take", rows, mentions(tmp_path))
    assert found == {
        "a.py:Run.take",
        relay,
        "a.py:plain",
        "b.py:There.groups",
        "threads.py:in_thread",
        "b.py:Way.work",
    }
