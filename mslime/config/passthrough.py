"""Fields of the two engines' own configuration classes, read from the installed packages without importing them.

megatron-core's dataclasses and SGLang's argument namespaces are parsed as source text. A misspelt or ill-typed
pass-through key is rejected in milliseconds, on a machine without torch, against the installed version.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mslime.config.errors import ConfigError, nearest

MEGATRON_SOURCES: dict[str, tuple[str, ...]] = {
    "megatron/core/model_parallel_config.py": ("ModelParallelConfig",),
    "megatron/core/transformer/transformer_config.py": ("TransformerConfig", "MLATransformerConfig"),
    "megatron/core/optimizer/optimizer_config.py": ("OptimizerConfig",),
    "megatron/core/distributed/distributed_data_parallel_config.py": ("DistributedDataParallelConfig",),
}
SGLANG_FIELDS_DIRECTORY = "sglang/srt/arg_groups/fields"


@dataclass(frozen=True)
class EngineField:
    """One field of an engine's configuration.

    Attributes:
        name: the engine's own spelling.
        owner: class that declares it.
        kinds: accepted Python types; empty if the annotation is too complex to check here.
        choices: accepted values of a Literal; empty otherwise.
        optional: None is accepted.
    """

    name: str
    owner: str
    kinds: tuple[type, ...]
    choices: tuple[object, ...]
    optional: bool

    def accepts(self, value: object) -> bool:
        """Whether `value` fits the annotation, as far as the source shows."""
        if value is None:
            return self.optional or not (self.kinds or self.choices)
        if self.choices and value in self.choices:
            return True
        if isinstance(value, bool):
            return bool in self.kinds or not (self.kinds or self.choices)
        if isinstance(value, int) and float in self.kinds:
            return True
        return isinstance(value, self.kinds) if self.kinds else not self.choices

    def expected(self) -> str:
        """The annotation in words."""
        parts = [repr(c) for c in self.choices] + [k.__name__ for k in self.kinds] + ["null"] * self.optional
        return " or ".join(parts) or "any value"


_SIMPLE: dict[str, type] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "list": list,
    "List": list,
    "dict": dict,
    "Dict": dict,
    "tuple": list,
    "Tuple": list,
}


_Read = tuple[set[type], set[object], bool, bool]


def _read_annotation(node: ast.expr) -> _Read:
    """(types, literal values, None accepted, fully understood) of an annotation."""
    match node:
        case ast.Constant(value=None):
            return set(), set(), True, True
        case ast.Constant(value=str() as text):
            return _read_annotation(ast.parse(text, mode="eval").body)
        case ast.Name(id=name) if name in _SIMPLE:
            return {_SIMPLE[name]}, set(), False, True
        case ast.Attribute(value=ast.Name(id="torch"), attr="dtype"):
            return set(), {"bfloat16", "float16", "float32"}, False, True
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _merge([left, right])
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            types, choices, _, known = _read_annotation(inner)
            return types, choices, True, known
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=parts)):
            return _merge(parts)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            values = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return set(), {ast.literal_eval(v) for v in values}, False, True
        case ast.Subscript(value=ast.Name(id="A" | "Annotated"), slice=ast.Tuple(elts=[inner, *more])):
            types, choices, optional, known = _read_annotation(inner)
            listed = _listed_choices(more)
            return (
                (set(), listed, optional, known)
                if listed and types <= {str, int}
                else (types, choices, optional, known)
            )
        case ast.Subscript(value=ast.Name(id=name)) if name in _SIMPLE:
            return {_SIMPLE[name]}, set(), False, True
        case _:
            return set(), set(), False, False


def _listed_choices(arguments: list[ast.expr]) -> set[object]:
    """The `choices` of SGLang's `Arg(...)`, given directly or by the name of a list; empty if there are none."""
    calls = [a for a in arguments if isinstance(a, ast.Call)]
    for value in (k.value for call in calls for k in call.keywords if k.arg == "choices"):
        if isinstance(value, ast.Name):
            return _named_choices().get(value.id, set())
        return _literals(value)
    return set()


def _literals(node: ast.expr) -> set[object]:
    plain = isinstance(node, ast.List | ast.Tuple) and all(isinstance(e, ast.Constant) for e in node.elts)
    return set(ast.literal_eval(node)) if plain else set()


@functools.cache
def _named_choices() -> dict[str, set[object]]:
    """SGLang's lists of choices by name."""
    path = _distribution_path("sglang", "sglang/srt/arg_groups/choices.py", "sglang")
    tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
    return {
        node.targets[0].id: _literals(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def _merge(parts: list[ast.expr]) -> _Read:
    types, choices, optional, known = set[type](), set[object](), False, True
    for part in parts:
        more_types, more_choices, may_be_none, understood = _read_annotation(part)
        types |= more_types
        choices |= more_choices
        optional, known = optional or may_be_none, known and understood
    return types, choices, optional, known


def _fields_of_class(node: ast.ClassDef) -> dict[str, EngineField]:
    found: dict[str, EngineField] = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_"):
            types, choices, optional, known = _read_annotation(item.annotation)
            if not known:
                types, choices, optional = set[type](), set[object](), True
            found[item.target.id] = EngineField(
                item.target.id, node.name, tuple(types), tuple(sorted(choices, key=str)), optional
            )
    return found


def installed_version(package: str) -> str | None:
    """Version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _distribution_path(distribution: str, relative: str, field: str) -> Path:
    if installed_version(distribution) is None:
        raise ConfigError(
            field,
            relative,
            f"{distribution} is not installed, so its fields cannot be checked",
            "install mslime with scripts/install.sh, or remove the pass-through keys",
        )
    return Path(str(importlib.metadata.distribution(distribution).locate_file(relative)))


@functools.cache
def megatron_fields() -> dict[str, EngineField]:
    """Every field of megatron-core's configuration dataclasses, by name."""
    found: dict[str, EngineField] = {}
    for relative, classes in MEGATRON_SOURCES.items():
        tree = ast.parse(_distribution_path("megatron-core", relative, "megatron").read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                found = {**_fields_of_class(node), **found}
    return found


@functools.cache
def sglang_fields() -> dict[str, EngineField]:
    """Every input field of SGLang's ServerArgs, by name."""
    directory = _distribution_path("sglang", SGLANG_FIELDS_DIRECTORY, "sglang")
    found: dict[str, EngineField] = {}
    for path in sorted(directory.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and "_NS_PATH" in ast.unparse(node):
                found.update(_fields_of_class(node))
    return found


def engine_fields(engine: str) -> dict[str, EngineField]:
    """Every engine field that the section `megatron` or `sglang` accepts, by name."""
    return {"megatron": megatron_fields, "sglang": sglang_fields}[engine]()


def is_finite(value: object) -> bool:
    """Whether all numbers in plain values, lists and mappings included, are finite."""
    if isinstance(value, dict):
        return all(map(is_finite, cast("dict[object, object]", value).values()))
    if isinstance(value, list | tuple):
        return all(map(is_finite, cast("list[object]", value)))
    return not isinstance(value, float) or math.isfinite(value)


def collect_extra(
    section: str, engine: str, values: dict[str, Any], own: set[str], reserved: dict[str, str]
) -> dict[str, Any]:
    """Move the engine's keys into `extra`, checking names and values.

    Args:
        section: its name, for messages.
        engine: `megatron` or `sglang`, the owner of the fields.
        values: of the user in that section.
        own: mslime's typed keys of the section.
        reserved: engine fields that mslime sets itself, with the reason.

    Raises:
        ConfigError: unknown key, a value of the wrong type, or a reserved field.
    """
    known = engine_fields(engine)
    kept = {k: v for k, v in values.items() if k in own}
    given: Any = values.get("extra", {})
    if not isinstance(given, dict):
        raise ConfigError(f"{section}.extra", given, "must be a mapping of the engine's fields", "write {name: value}")
    extra: dict[Any, Any] = {**given, **{k: v for k, v in values.items() if k not in own}}
    for key, value in extra.items():
        path = f"{section}.{key}"
        if not isinstance(key, str):
            raise ConfigError(path, value, "field names must be text", "correct the name")
        if key in reserved:
            raise ConfigError(path, value, f"mslime sets this field itself: {reserved[key]}", "remove it")
        if key not in known:
            hint = nearest(key, {*known, *own} - {"extra"})
            raise ConfigError(
                path,
                value,
                f"the installed {engine} engine has no such field",
                hint or f"see `mslime check --fields {engine}` for the {len(known)} known names",
            )
        if isinstance(value, str) and not value.strip():
            raise ConfigError(path, value, "must not be empty", "remove it, or write null")
        if not is_finite(value):
            raise ConfigError(path, value, "numbers must be finite", "correct the value")
        if not known[key].accepts(value):
            raise ConfigError(
                path, value, f"{known[key].owner}.{key} takes {known[key].expected()}", "correct the value"
            )
    return {**kept, "extra": extra}
