"""Figures on the style of the code, each beside its aim: sizes, names, lengths, annotations.

Aims are not limits: one long, clear function is better than five that hide the order of operations.
tests/e2e/test_walk.py counts the functions that a step of a run enters.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST_FUNCTION, LONGEST_FILE = 100, 700
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A file of the package."""

    path: Path
    lines: int
    tree: ast.Module

    def functions(self) -> Iterator[Function]:
        """All functions of the file, including methods and inner ones."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))


@dataclass(frozen=True)
class Figure:
    """One line of the report."""

    name: str
    value: float
    aim: float | None
    at_least: bool = False

    @property
    def on_target(self) -> bool:
        """Whether the value meets its aim, if it has one."""
        if self.aim is None:
            return True
        return self.value >= self.aim if self.at_least else self.value <= self.aim


def read_modules(folder: str) -> list[Module]:
    """Every module below a folder."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return [Module(path, text.count("\n"), ast.parse(text)) for path, text in zip(paths, texts, strict=True)]


def length(function: Function) -> int:
    """Lines from `def` to its last one."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def annotated(function: Function) -> bool:
    """Whether every parameter and the result have a type. Triton interprets a kernel's annotations itself."""
    if any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list):
        return True
    a = function.args
    given = [*a.posonlyargs, *a.args, *a.kwonlyargs]
    return function.returns is not None and all(x.annotation for x in given if x.arg not in ("self", "cls"))


def count(modules: list[Module], wanted: Callable[[ast.AST], bool]) -> int:
    """Number of nodes in all modules that match."""
    return sum(wanted(node) for module in modules for node in ast.walk(module.tree))


def is_probe(node: ast.AST) -> bool:
    """`getattr` or `hasattr`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")


def top_level_classes(modules: list[Module]) -> list[str]:
    """Names of the classes outside of other classes and functions."""
    return [node.name for module in modules for node in module.tree.body if isinstance(node, ast.ClassDef)]


def is_protocol(node: ast.AST) -> bool:
    """A class with `Protocol` among its bases."""
    return isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)


def takes_whole_run(node: ast.AST) -> bool:
    """A function with a parameter of type `RunConfig`."""
    if not isinstance(node, Function):
        return False
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return any(x.annotation is not None and "RunConfig" in ast.unparse(x.annotation) for x in given)


def words(folder: str) -> int:
    """Words in all hand-written Markdown pages below a folder; the page of settings is generated from the schema."""
    pages = [path for path in (ROOT / folder).rglob("*.md") if path != ROOT / "docs/settings.md"]
    return sum(len(path.read_text(encoding="utf-8").split()) for path in pages)


def figures(core: list[Module], plugins: list[Module], tests: list[Module]) -> list[Figure]:
    """The report."""
    modules = [*core, *plugins]
    functions = [f for module in modules for f in module.functions()]
    lengths = sorted(length(f) for f in functions)
    lines = sum(m.lines for m in modules)
    names = Counter(top_level_classes(modules))
    public = sum(count for name, count in names.items() if not name.startswith("_"))
    return [
        Figure("core: lines", sum(m.lines for m in core), 56_000),
        Figure("core: files", len(core), 250),
        Figure("plug-ins: lines", sum(m.lines for m in plugins), 15_000),
        Figure("tests: lines", sum(m.lines for m in tests), 52_000),
        Figure("public classes", public, 480),
        Figure("protocols", count(modules, is_protocol), 15),
        Figure("class names with two meanings", sum(n > 1 for n in names.values()), 0),
        Figure(
            "file names that occur twice", sum(n > 1 for n in Counter(m.path.stem for m in modules).values()) - 1, 15
        ),
        Figure("functions that take the whole run's settings", count(modules, takes_whole_run), 60),
        Figure("median lines of a function", statistics.median(lengths), 10),
        Figure("90th percentile", lengths[int(0.9 * (len(lengths) - 1))], 30),
        Figure("longest function", lengths[-1], LONGEST_FUNCTION),
        Figure("longest file", max(m.lines for m in modules), LONGEST_FILE),
        Figure("annotated functions, %", round(100 * sum(map(annotated, functions)) / len(functions), 1), 100, True),
        Figure("getattr and hasattr in 1,000 lines", round(1000 * count(modules, is_probe) / lines, 2), 1),
        Figure("try in 1,000 lines", round(1000 * count(modules, lambda n: isinstance(n, ast.Try)) / lines, 2), None),
        Figure("words in docs and results", words("docs") + words("benchmarks"), 60_000),
    ]


def main() -> int:
    """Print the report, and files and functions that are too long. Returns 0: no figure is an error."""
    core, plugins = read_modules("mslime"), read_modules("mslime_plugins")
    for figure in figures(core, plugins, read_modules("tests")):
        mark, aim = "ok" if figure.on_target else "--", "" if figure.aim is None else f"   aim {figure.aim:,}"
        print(f"{mark}  {figure.name:52s} {figure.value:>10,}{aim}")
    for module in [*core, *plugins]:
        name = module.path.relative_to(ROOT)
        if module.lines > LONGEST_FILE:
            print(f"      {name}: {module.lines} lines")
        for function in module.functions():
            if length(function) > LONGEST_FUNCTION:
                print(f"      {name}:{function.lineno} {function.name}: {length(function)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
