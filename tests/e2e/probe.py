"""Records the functions of mslime that a run enters: a copy of the package with a probe in each function, and their
output."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "MSLIME_PROBE"
"""Names the directory into which every process writes the functions that it enters."""
VERBS = "run/training_run.py:TrainingRun."
_PROBE = '''
import os, sys, time
_directory = os.environ.get("MSLIME_PROBE", "")
_mark, _seen, _file, _pid = os.sep + "mslime" + os.sep, set(), None, None

def entered(name):
    """Write one line for each function and caller in each 20 ms."""
    global _file, _pid
    if not _directory:
        return
    frame, caller = sys._getframe(2), ""
    while frame is not None:
        code = frame.f_code
        if _mark in code.co_filename and code.co_name[0] != "<":
            found = code.co_filename.rpartition(_mark)[2] + ":" + code.co_qualname.partition(".<locals>")[0]
            if found != name:
                caller = found
                break
        frame = frame.f_back
    now = time.monotonic_ns()
    key = now // 20_000_000, caller, name
    if key in _seen:
        return
    if _pid != os.getpid():
        _pid = os.getpid()
        _file = open(f"{_directory}/{_pid}.txt", "a", buffering=1)
    _seen.add(key)
    _file.write(f"{now}|{caller}|{name}\\n")
'''


@dataclass(frozen=True)
class Entered:
    """One function, entered at some time.

    Attributes:
        at: ns of the machine's monotonic clock.
        caller: nearest function of the package on the stack; empty if there is none: another process, a thread or the
            event loop entered it.
        name: `folder/file.py:Class.method`; of an inner function, the function around it.
    """

    at: int
    caller: str
    name: str


def probed_copy(package: Path, out: Path) -> None:
    """Copy `package` to `out/mslime`, with a probe as the first statement of every function."""
    shutil.copytree(package, out / "mslime", ignore=shutil.ignore_patterns("__pycache__"))
    (out / "_probe.py").write_text(_PROBE)
    for path in sorted((out / "mslime").rglob("*.py")):
        lines = path.read_text().splitlines(keepends=True)
        for number, column, name in sorted(_first_statements(ast.parse("".join(lines)), ()), reverse=True):
            where = f"{path.relative_to(out / 'mslime')}:{name}"
            lines.insert(number - 1, " " * column + f'__import__("_probe").entered("{where}")\n')
        path.write_text("".join(lines))


def _first_statements(node: ast.AST, within: tuple[str, ...]) -> Iterator[tuple[int, int, str]]:
    """(line, column, name) of each function's first statement. Kernels have no Python code, protocols no code."""
    for child in ast.iter_child_nodes(node):
        inner = within
        if isinstance(child, ast.ClassDef):
            inner = (*within, child.name)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            outermost = not within or within[-1] != "()"
            inner = (*within, child.name, "()") if outermost else within
            name = ".".join(part for part in inner if part != "()")
            if "jit" not in " ".join(map(ast.unparse, child.decorator_list)):
                body = child.body[1:] if ast.get_docstring(child) is not None else child.body
                if body and body[0].lineno > child.lineno and body[0].col_offset > child.col_offset:
                    decorators = getattr(body[0], "decorator_list", [])
                    if not (isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)):
                        yield min([body[0].lineno, *(d.lineno for d in decorators)]), body[0].col_offset, name
        yield from _first_statements(child, inner)


def read(directory: Path) -> list[Entered]:
    """All entries of all processes, in order of time."""
    rows: list[Entered] = []
    for path in directory.glob("*.txt"):
        for line in path.read_text().splitlines():
            at, caller, name = line.split("|")
            rows.append(Entered(int(at), caller, name))
    return sorted(rows, key=lambda row: row.at)


def mentions(package: Path) -> dict[str, set[str]]:
    """By function, what its code could hand to another process or thread: `.method`, `Class.method`, `function`, and
    `.text` of a string. A class is its `Class.__init__`."""
    found: dict[str, set[str]] = {}

    def visit(node: ast.AST, where: str, within: str, function: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if function:
                found.setdefault(f"{where}:{within}", set()).update(_words(child))
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not function:
                name = f"{within}.{child.name}".lstrip(".")
                visit(child, where, name, not isinstance(child, ast.ClassDef))
            else:
                visit(child, where, within, function)

    for path in sorted(package.rglob("*.py")):
        visit(ast.parse(path.read_text()), str(path.relative_to(package)), "", False)
    return found


def _words(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Name):
        return {node.id, f"{node.id}.__init__"}
    if isinstance(node, ast.Attribute):
        return {f".{node.attr}", *([f"{node.value.id}.{node.attr}"] if isinstance(node.value, ast.Name) else [])}
    return {f".{node.value}"} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


RELAYS = ("run/ray_calls.py:HandleActor.ask", "rollout/service.py:LocalHandle.ask")
"""They call the method that they are given as `Class.method`."""
RECORDS = ("config/", "logs.py", "observe/", "data/sample_log.py")
"""Settings, logs and records: not part of a way, even if a verb calls them."""
THREADS = ("", "threads.py:in_thread")
"""Functions entered from these were passed by another function to a process, a thread or the event loop."""


def reached(root: str, rows: list[Entered], mentioned: dict[str, set[str]]) -> frozenset[str]:
    """What `root` reaches by a chain of calls, in these rows.

    A link of the chain is a call in one process, as recorded. Where a relay, another process, a thread or the event
    loop enters a function, the link is from each function of the chain that mentions it by name: of two methods of the
    same name both count if both were entered so. What runs beside the chain (health checks, the guard) does not count.
    """
    callees: dict[str, set[str]] = {}
    for row in rows:
        callees.setdefault(row.caller, set()).add(row.name)
    handed = {name for caller in (*RELAYS, *THREADS) for name in callees.get(caller, ())}
    handed |= callees.keys() - {row.name for row in rows}  # tasks that were begun earlier
    relayed = {name for relay in RELAYS for name in callees.get(relay, ())}
    chain, left = set[str](), [root]
    while left:
        name = left.pop()
        if not name or name in chain:
            continue
        chain.add(name)
        if name not in RELAYS + THREADS:
            left += callees.get(name, ())
        words = mentioned.get(name, set())
        for other in handed - chain:
            inner = other.partition(":")[2]
            if inner in words or (other not in relayed and "." in inner and f".{inner.rpartition('.')[2]}" in words):
                left.append(other)
    return frozenset(chain)


@dataclass(frozen=True)
class Way:
    """A stretch of a run, and the functions that its verbs reached outside settings, logs and records."""

    name: str
    functions: frozenset[str]

    def __str__(self) -> str:
        files = {function.partition(":")[0] for function in self.functions}
        return f"{self.name}: {len(self.functions)} functions in {len(files)} files"


def ways(rows: list[Entered], mentioned: dict[str, set[str]]) -> list[Way]:
    """The stretches of a synchronous run's last step; see `reached`."""

    def at(verb: str) -> int:
        return max(row.at for row in rows if row.name == VERBS + verb)

    def way(name: str, end: int, *verbs: str) -> Way:
        begin = at(verbs[0])
        inside = [row for row in rows if begin <= row.at < end]
        found = frozenset[str]().union(*(reached(VERBS + verb, inside, mentioned) for verb in verbs))
        return Way(name, frozenset(x for x in found if not x.startswith(RECORDS)))

    trained, published = at("train"), at("publish_weights")
    saved = min(row.at for row in rows if row.at > published and row.name == VERBS + "save")
    return [way("take to shards", trained, "take"), way("prompt to loss", published, "take", "train"),
            way("weight to engine", saved, "publish_weights")]  # fmt: skip
