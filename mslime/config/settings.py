"""Every setting of a run, listed from the schema: for flags, `--help`, `mslime check --fields` and docs/settings.md.

The schema defines all of it; this module contains no name of a setting.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from mslime.config.base import EngineSection, KnownValues, alternatives
from mslime.config.schema import RunConfig

_WORDS = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", type(None): "null",
          SecretStr: "text"}  # fmt: skip
_BOUNDS = {Ge: ("ge", ">="), Gt: ("gt", ">"), Le: ("le", "<="), Lt: ("lt", "<")}


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        path: `rollout.max_staleness`.
        section: everything before the last dot; empty at the top.
        expected: accepted values, in words.
        default: in YAML; empty for a required one.
        description: of the schema.
        boolean, listed: whether it is true or false, or takes several values.
    """

    path: str
    section: str
    expected: str
    default: str
    description: str
    boolean: bool
    listed: bool


@functools.cache
def all_settings() -> tuple[Setting, ...]:
    """Every setting, in the order of the schema."""
    return tuple(_settings(RunConfig, ""))


def sections() -> dict[str, str]:
    """First paragraph on each section, by its path; the top is the empty one."""
    return {path: " ".join((model.__doc__ or "").split("\n\n")[0].split()) for path, model in _sections(RunConfig, "")}


def engine_sections() -> dict[str, type[EngineSection]]:
    """Sections that also accept an engine's own fields, by name."""
    found = {name: section_of(field.annotation) for name, field in RunConfig.model_fields.items()}
    return {name: model for name, model in found.items() if model is not None and issubclass(model, EngineSection)}


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Section in an annotation, if there is one."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def as_markdown() -> str:
    """Text of docs/settings.md."""
    lines = [
        "# Settings", "",
        "Written by `mslime check --fields --markdown`. A setting is a line of the YAML file or a flag: "
        "`rollout.max_staleness` is `rollout: {max_staleness: 1}` or `--rollout.max-staleness 1`. In brackets: values, "
        "default. `megatron`, `sglang` and `teacher` also accept any of the engine's own fields (`mslime check "
        "--fields megatron`). For completion in an editor, begin the YAML file with `# yaml-language-server: "
        "$schema=PATH/docs/mslime.schema.json`.",
    ]  # fmt: skip
    about = sections()
    for path, text in about.items():
        own = [s for s in all_settings() if s.section == path]
        if not own:
            continue
        lines += ["", f"## {path or 'The run'}", "", text, ""]
        for s in own:
            default = f"`{s.default}`" if s.default else "required"
            lines.append(f"- `{s.path}` ({s.expected}, {default}): {' '.join(s.description.split())}")
    return "\n".join(lines) + "\n"


def as_json_schema() -> str:
    """JSON schema of the YAML file, for editors."""
    schema = RunConfig.model_json_schema()
    for section in engine_sections().values():
        schema["$defs"][section.__name__]["additionalProperties"] = True  # the engine's own fields
    return json.dumps(schema, indent=1) + "\n"


def _sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield from _sections(inner, f"{path}.{name}".lstrip("."))


def _settings(model: type[BaseModel], section: str) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        path = f"{section}.{name}".lstrip(".")
        inner = section_of(field.annotation)
        if inner is not None:
            yield from _settings(inner, path)
            continue
        kinds = alternatives(field.annotation)
        yield Setting(
            path,
            section,
            expected(field),
            _default(field),
            " ".join((field.description or "").split()),
            kinds in ({bool}, {bool, type(None)}),
            any(typing.get_origin(kind) in (list, tuple) for kind in kinds),
        )


def expected(field: FieldInfo) -> str:
    """Accepted values of a setting in words, with their bounds."""
    text = _in_words(field.annotation)
    known = [name for rule in field.metadata if isinstance(rule, KnownValues) for name in rule.names]
    text = f"{', '.join(known)} or {text}" if known else text
    bounds = [
        f"{sign} {_number(getattr(rule, name))}"
        for rule in field.metadata
        for kind, (name, sign) in _BOUNDS.items()
        if isinstance(rule, kind)
    ]
    return " ".join([text, *bounds])


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _in_words(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        bounds = [m for m in parts[1:] if isinstance(m, FieldInfo)]
        words = [f"{s} {_number(getattr(r, n))}" for b in bounds for r in b.metadata for k, (n, s) in _BOUNDS.items()
                 if isinstance(r, k)]  # fmt: skip
        return " ".join([_in_words(parts[0]), *words])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_in_words(part) for part in parts))
    if origin is typing.Literal:
        return ", ".join(str(part) for part in parts)
    if origin in (list, tuple):
        return f"list of {_in_words(parts[0])}"
    if origin is dict:
        return "mapping"
    inner = section_of(annotation)
    if inner is not None:
        return "{" + ", ".join(inner.model_fields) + "}"
    return _WORDS.get(annotation, "any value")


def _default(field: FieldInfo) -> str:
    value: object = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return ""
    return str(value) if isinstance(value, str | Path) else json.dumps(value, default=str)
