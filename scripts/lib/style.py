"""Figures of how the code reads, each beside its aim: lengths, annotations, probes, sizes, the walk of a prompt.

Aims are a thermometer: a long honest function is better than five that hide the order of things.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mslime"
BESIDE_THE_CORE = ("offline", "planner", "observe")
"""Rooms without which a run would train just as well."""
LONGEST_FUNCTION, LONGEST_FILE = 80, 500
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A file of the package."""

    path: Path
    lines: int
    tree: ast.Module

    def functions(self) -> Iterator[Function]:
        """All of them, methods and inner ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))


@dataclass(frozen=True)
class Figure:
    """One line of the report."""

    name: str
    value: float
    aim: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the value is as good as its aim."""
        return self.value >= self.aim if self.at_least else self.value <= self.aim


def read_modules() -> list[Module]:
    """Every module of the package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return [Module(path, text.count("\n"), ast.parse(text)) for path, text in zip(paths, texts, strict=True)]


def length(function: Function) -> int:
    """Lines from `def` to its last one."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def annotated(function: Function) -> bool:
    """Whether every parameter and the result have a type. Triton reads a kernel's annotations as its own."""
    if any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list):
        return True
    a = function.args
    given = [*a.posonlyargs, *a.args, *a.kwonlyargs]
    return function.returns is not None and all(x.annotation for x in given if x.arg not in ("self", "cls"))


def count(modules: list[Module], wanted: Callable[[ast.AST], bool]) -> int:
    """Nodes of all modules that are wanted."""
    return sum(wanted(node) for module in modules for node in ast.walk(module.tree))


def is_probe(node: ast.AST) -> bool:
    """`getattr` or `hasattr`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")


def walk_files() -> int:
    """Files on the way of a prompt to its loss, by the first section of docs/walk.md."""
    page = ROOT / "docs/walk.md"
    first = page.read_text(encoding="utf-8").split("\n## ")[1] if page.exists() else ""
    return len(set(re.findall(r"`(mslime/[\w/]+\.py):", first)))


def figures(modules: list[Module]) -> list[Figure]:
    """The report."""
    functions = [f for module in modules for f in module.functions()]
    lengths = sorted(length(f) for f in functions)
    thousands = sum(m.lines for m in modules) / 1000
    core = [m for m in modules if m.path.relative_to(PACKAGE).parts[0] not in BESIDE_THE_CORE]
    return [
        Figure("median lines of a function", statistics.median(lengths), 10),
        Figure("90th percentile", lengths[int(0.9 * (len(lengths) - 1))], 30),
        Figure("longest function", lengths[-1], LONGEST_FUNCTION),
        Figure("longest file", max(m.lines for m in modules), LONGEST_FILE),
        Figure("annotated functions, %", round(100 * sum(map(annotated, functions)) / len(functions), 1), 100, True),
        Figure("getattr and hasattr in 1,000 lines", round(count(modules, is_probe) / thousands, 2), 1),
        Figure("try in 1,000 lines", round(count(modules, lambda n: isinstance(n, ast.Try)) / thousands, 2), 3),
        Figure("files", len(modules), 165),
        Figure(f"lines without {', '.join(BESIDE_THE_CORE)}", sum(m.lines for m in core), 20_000),
        Figure("files from a prompt to its loss (docs/walk.md)", walk_files(), 30),
    ]


def main() -> int:
    """Print the report and what is too long. Returns 0: nothing here is a reason to fail."""
    modules = read_modules()
    for figure in figures(modules):
        mark = "ok" if figure.met else "--"
        print(f"{mark}  {figure.name:52s} {figure.value:>10,g}   aim {figure.aim:,g}")
    for module in modules:
        name = module.path.relative_to(ROOT)
        if module.lines > LONGEST_FILE:
            print(f"      {name}: {module.lines} lines")
        for function in module.functions():
            if length(function) > LONGEST_FUNCTION:
                print(f"      {name}:{function.lineno} {function.name}: {length(function)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
