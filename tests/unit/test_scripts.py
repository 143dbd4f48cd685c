"""Benchmarks and examples, which no type checker reads: what they take from the project is there."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path for pattern in ("benchmarks/*.py", "examples/**/*.py", "scripts/*.py") for path in ROOT.glob(pattern)
)


def imports(tree: ast.Module) -> Iterator[tuple[ast.ImportFrom, str]]:
    """Each name that a script takes from this repository, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("mslime", "tests"):
            yield from ((node, alias.name) for alias in node.names)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_imports_what_exists(script: Path) -> None:
    for node, name in imports(ast.parse(script.read_text())):
        module = importlib.import_module(node.module or "")
        assert hasattr(module, name) or importlib.import_module(f"{node.module}.{name}"), f"line {node.lineno}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_that_needs_the_tests_finds_them_from_anywhere(script: Path) -> None:
    """`python benchmarks/x.py` finds `mslime`, which is installed, and its own directory; `tests` it does not."""
    text = script.read_text()
    needs = [node.lineno for node, _ in imports(ast.parse(text)) if (node.module or "").startswith("tests")]
    if needs:
        made = [number for number, line in enumerate(text.splitlines(), 1) if "sys.path.insert(" in line]
        assert made and min(made) < min(needs), "sys.path.insert(0, the repository's root) comes first"
