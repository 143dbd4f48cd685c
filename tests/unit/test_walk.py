"""docs/walk.md: every stop is a function that exists, and each is really called by the stop that it stands under."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = (ROOT / "docs/walk.md").read_text(encoding="utf-8").split("\n## ")[1:]
MOST_FILES = 30
_STOP = re.compile(r"^( *)- `(mslime/[\w/]+\.py):([\w.]+)`", re.MULTILINE)


@dataclass(frozen=True)
class Stop:
    """A line of the walk, and the line that it stands under."""

    path: str
    name: str
    caller: Stop | None

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"


def stops(section: str) -> list[Stop]:
    """The stops of a section. One stands under the nearest one before it that is indented less."""
    found: list[Stop] = []
    above: list[tuple[int, Stop]] = []
    for blanks, path, name in _STOP.findall(section):
        above = [(depth, stop) for depth, stop in above if depth < len(blanks)]
        stop = Stop(path, name, above[-1][1] if above else None)
        above.append((len(blanks), stop))
        found.append(stop)
    return found


@cache
def code_of(path: str) -> dict[str, str]:
    """The source of functions and classes of a file, and of methods as `Class.method`."""
    text = (ROOT / path).read_text(encoding="utf-8")
    code: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            code[node.name] = ast.get_source_segment(text, node) or ""
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                code[f"{node.name}.{inner.name}"] = ast.get_source_segment(text, inner) or ""
    return code


ALL = list(dict.fromkeys(stop for section in SECTIONS for stop in stops(section)))


def test_the_walk_has_both_ways() -> None:
    prompt, weight = SECTIONS[0], SECTIONS[1]
    assert "prompt" in prompt.splitlines()[0] and "weight" in weight.splitlines()[0]
    assert len(stops(prompt)) > 20 and len(stops(weight)) > 10


@pytest.mark.parametrize("stop", ALL, ids=str)
def test_a_stop_exists_and_is_called_by_the_one_above_it(stop: Stop) -> None:
    assert (ROOT / stop.path).is_file()
    assert stop.name in code_of(stop.path)
    if stop.caller is not None:
        called = stop.name.rpartition(".")[2]
        assert re.search(rf"\b{called}\b", code_of(stop.caller.path)[stop.caller.name]), (
            f"{stop.caller} has no {called}"
        )


def test_a_prompt_reaches_its_loss_within_thirty_files() -> None:
    files = {stop.path for stop in stops(SECTIONS[0])}
    assert len(files) <= MOST_FILES, f"{len(files)} files"
    assert {"rollout", "backends", "algorithms", "control", "data"} <= {path.split("/")[1] for path in files}
