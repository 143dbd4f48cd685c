"""From YAML files and flags to a validated RunConfig, with errors a person can act on."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from mslime.config.base import EngineSection
from mslime.config.errors import ConfigError, UserError, nearest
from mslime.config.passthrough import engine_fields
from mslime.config.schema import RunConfig


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: `1e-4` is a number, and only true and false are booleans (`replay: off` is a word)."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_RESOLVERS = {
    "tag:yaml.org,2002:float": (r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$", "-+0123456789"),
    "tag:yaml.org,2002:bool": (r"^(true|True|TRUE|false|False|FALSE)$", "tTfF"),
}
for _tag, (_pattern, _first) in _RESOLVERS.items():
    cast("Any", _Loader).add_implicit_resolver(_tag, re.compile(_pattern), list(_first))


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text. Raises ConfigError naming `source` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        where = f"{source}:{error.problem_mark.line + 1}" if error.problem_mark else source
        raise ConfigError(
            where, error.problem, "is not valid YAML", "check indentation, colons and quotes there"
        ) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError when it is missing, broken, or no mapping."""
    if not path.is_file():
        raise ConfigError("config file", str(path), "no such file", "check the path; examples/ holds complete ones")
    values = parse_yaml(path.read_text(), str(path))
    if not isinstance(values, dict):
        raise ConfigError(
            str(path), type(values).__name__, "the file must hold a mapping of sections", "start with `model:`"
        )
    return cast("dict[str, Any]", values)


def parse_flags(flags: Sequence[str]) -> dict[str, Any]:
    """`--rollout.max-staleness 1` (or `=1`) to {"rollout": {"max_staleness": 1}}.

    Several values make a list; a flag without a value is true, `--no-...` is false for the last part of the name.
    """
    values: dict[str, Any] = {}
    position = 0
    while position < len(flags):
        flag = flags[position]
        if not flag.startswith("--"):
            raise ConfigError("flags", flag, "expected a flag such as --rollout.group-size", "put -- before its name")
        name, _, inline = flag[2:].partition("=")
        position += 1
        words = [inline] if "=" in flag else []
        while "=" not in flag and position < len(flags) and not flags[position].startswith("--"):
            words.append(flags[position])
            position += 1
        _assign(values, name, words)
    return values


def _assign(values: dict[str, Any], name: str, words: list[str]) -> None:
    *sections, leaf = [part.replace("-", "_") for part in name.split(".")]
    if not words and leaf.startswith("no_"):
        leaf, parsed = leaf[3:], False
    else:
        items = [parse_yaml(w, f"--{name}") for w in words]
        parsed = True if not items else items[0] if len(items) == 1 else items
    target = values
    for section in sections:
        inner: Any = target.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"--{name}", words, f"{section} is given as a value and as a section", "use one of the two"
            )
        target = cast("dict[str, Any]", inner)
    target[leaf] = parsed


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` wins, section by section; lists are replaced whole."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(value, dict) and isinstance(below, dict)
        merged[key] = merge(cast("dict[str, Any]", below), cast("dict[str, Any]", value)) if both else value
    return merged


def read_values(path: Path | None, flags: Sequence[str] = ()) -> dict[str, Any]:
    """What a YAML file and/or flags say, not yet validated; flags win. Raises ConfigError."""
    return merge(read_yaml(path) if path else {}, parse_flags(flags))


def load_config(path: Path | None, flags: Sequence[str] = ()) -> RunConfig:
    """The run configuration of a YAML file and/or flags; flags win. Raises ConfigError."""
    return build(read_values(path, flags))


def build(values: dict[str, Any]) -> RunConfig:
    """Validate plain values. Raises ConfigError for the first mistake, with the nearest known name for unknown keys."""
    values = _wrap_lists(values)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise _first_error(error, values) from None


def _wrap_lists(values: dict[str, Any]) -> dict[str, Any]:
    """A flag with one value cannot know that it is a list: wrap single values given for fields that are lists."""
    for section, key in (
        ("data", "prompts"),
        ("sglang", "urls"),
        ("teacher", "urls"),
        ("rollout", "stop"),
        ("rollout", "stop_token_ids"),
        ("megatron", "recompute_modules"),
    ):
        found = values.get(section)
        if isinstance(found, dict) and key in found and not isinstance(found[key], list | types.NoneType):
            values = {**values, section: {**found, key: [found[key]]}}
    return values


def _first_error(error: ValidationError, values: dict[str, Any]) -> UserError:
    # Unknown keys first: a misspelt key usually also makes a required one missing, and is the better clue.
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return cause
    path = ".".join(str(p) for p in first["loc"])
    if first["type"] == "extra_forbidden":
        known = known_keys(first["loc"][:-1])
        return ConfigError(
            path,
            first["input"],
            "unknown key",
            nearest(str(first["loc"][-1]), known) or f"known keys here: {', '.join(sorted(known))}",
        )
    if first["type"] == "missing":
        return ConfigError(path, None, "is required", f"add it to the file, or give --{path.replace('_', '-')}")
    return ConfigError(path, first["input"], first["msg"], "correct the value")


def known_keys(location: Sequence[int | str]) -> set[str]:
    """The keys that a section of the configuration takes, the engine's own included."""
    model: type[BaseModel] = RunConfig
    for part in location:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        model = next(
            m for m in (annotation, *typing.get_args(annotation)) if isinstance(m, type) and issubclass(m, BaseModel)
        )
    engine = set(engine_fields(model.engine)) if issubclass(model, EngineSection) else set[str]()
    return set(model.model_fields) | engine
