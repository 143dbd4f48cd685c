"""Loads a validated RunConfig from YAML files and flags, with errors that a user can act on."""

from __future__ import annotations

import argparse
import re
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from mslime.config.base import EngineSection, alternatives
from mslime.config.errors import ConfigError, UserError, nearest
from mslime.config.passthrough import EngineField, engine_fields
from mslime.config.schema import ALONE, RunConfig
from mslime.config.settings import Setting, all_settings, engine_sections, expected, section_of, sections

# Settings as command-line flags, parsed by argparse with one option for each setting of the schema.
#
# argparse gets the number of words of each setting, so the YAML file may stand anywhere among the flags.
# `--help` names the sections, `--help SECTION` lists one, `--help all` everything. An engine's own fields, and unknown
# names, become options too: later validation rejects them with the nearest name. Why argparse and not a library above
# it: docs/decisions/0001-libraries.md.

_PREFIX = "setting:"
_TOP = "the run"
Parse = Callable[[str, str], Any]
"""(a YAML text, its name in messages) -> its value."""


class FlagParser(argparse.ArgumentParser):
    """A parser that raises ConfigError."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of ending the process."""
        raise ConfigError("command line", " ".join(self.prog.split()[:2]), message, f"see {self.prog} --help")


def add_help(parser: argparse.ArgumentParser) -> None:
    """Add `--help [SECTION]` to a parser without help that gets `add_settings`."""
    parser.add_argument(
        "-h", "--help", action=_Help, nargs="?", const="", metavar="SECTION", default=argparse.SUPPRESS,
        help="show this help; with a section's name, its settings (--help rollout); with `all`, everything",
    )  # fmt: skip


class _Help(argparse.Action):
    """Prints an overview, one section, or everything, and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: Any, *_: object) -> None:
        topic = str(values or "")
        print(parser.format_help() if topic == "all" else _help_of(parser, topic), end="")
        parser.exit()


def _help_of(parser: argparse.ArgumentParser, topic: str) -> str:
    """Help text: the command's own options and the names of the sections, or the settings of a section and its
    subsections.

    Raises:
        ConfigError: there is no such section.
    """
    about, made = sections(), cast("Any", parser)
    formatter = made._get_formatter()
    if not topic:
        formatter.add_usage(parser.usage, [], [])
        formatter.add_text(parser.description)
    shown = 0
    for group in made._action_groups:
        ours = group.title in about or group.title == _TOP
        if (f"{group.title}.".startswith(f"{topic}.") and ours) if topic else not ours:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
            shown += 1
    if topic and not shown:
        raise ConfigError("--help", topic, "unknown section",
                          nearest(topic, about) or "mslime train --help lists them")  # fmt: skip
    help_text = formatter.format_help()
    if topic:
        return help_text
    names = [name for name in about if name and "." not in name]
    lines = [
        f"  {name:<12}{textwrap.shorten(about[name].partition('. ')[0], 65, placeholder=' ...')}" for name in names
    ]
    head = "\nsettings (--help SECTION lists those of one section, --help all lists all):"
    return "\n".join([help_text.rstrip(), head, *lines]) + "\n"


def normalised(argv: Sequence[str]) -> list[str]:
    """Replace `-` by `_` in the names of flags, as they are declared."""
    words = list[str]()
    for word in argv:
        name, equals, value = word.partition("=")
        words.append((name.replace("_", "-") if name.startswith("--") else name) + equals + value)
    return words


def add_settings(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Add an option for each setting, in a group per section, and for every other name in `argv`.

    Args:
        parser: has the command's own options already.
        argv: `normalised` words that it will parse.
    """
    about, groups = sections(), dict[str, Any]()
    for setting in all_settings():
        if setting.section not in groups:
            groups[setting.section] = parser.add_argument_group(setting.section or _TOP, about[setting.section])
        help_text = f"{setting.description} [{setting.expected}; default {setting.default or 'none, required'}]"
        count = "*" if setting.listed else "?" if setting.boolean else None
        _add(groups[setting.section], setting.path, count, help_text.replace("%", "%%"))
    known = set(cast("Any", parser)._option_string_actions)
    flags = dict.fromkeys(word.partition("=")[0] for word in argv if word.startswith("--") and len(word) > 2)
    others = [flag[2:].replace("-", "_") for flag in flags if flag not in known]  # fields of the engines, and mistakes
    for name in dict.fromkeys(map(_without_no, others)):
        if "." not in name and name not in about:  # every field of an engine has its section
            flag = "--" + name.replace("_", "-")
            raise ConfigError("command line", flag, "unknown flag",
                              nearest(flag, known) or f"see {parser.prog} --help")  # fmt: skip
        _add(parser, name, _words_of(name), argparse.SUPPRESS)


def given_settings(found: argparse.Namespace, parse: Parse) -> dict[str, Any]:
    """Given settings as nested plain values. Raises ConfigError.

    Several words make a list; a flag without a value is true, `--section.no-name` is false.
    """
    values = dict[str, Any]()
    for key, words in vars(found).items():
        if key.startswith(_PREFIX):
            path = key.removeprefix(_PREFIX)
            flag = "--" + path.replace("_", "-")
            section, dot, leaf = path.rpartition(".")
            if words:
                items = [parse(word, flag) for word in words]
                _assign(values, path, items[0] if len(items) == 1 else items, flag)
            else:
                _assign(values, section + dot + leaf.removeprefix("no_"), not leaf.startswith("no_"), flag)
    return values


def _add(group: Any, path: str, count: str | None, help_text: str) -> None:
    """Add an option that takes exactly one word (None), at most one (`?`: a boolean), or any number (`*`)."""
    flag, dest = "--" + path.replace("_", "-"), _PREFIX + path
    kept: dict[str, Any] = {"dest": dest, "default": argparse.SUPPRESS, "help": help_text}
    if count == "?":
        group.add_argument(flag, action=_Words, nargs="?", const="true", metavar="true", **kept)
        head, _, leaf = flag.rpartition(".")
        negated = f"{head}.no-{leaf}" if head else f"--no-{leaf.removeprefix('--')}"
        group.add_argument(negated, action="store_const", const=["false"], **{**kept, "help": argparse.SUPPRESS})
    else:
        group.add_argument(flag, action=_Words, nargs=count, metavar="VALUE", **kept)


class _Words(argparse.Action):
    """Stores the words of an option as a list."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, *_: object) -> None:
        words = [values] if isinstance(values, str) else list(values or [])
        setattr(namespace, self.dest, words)


def _words_of(name: str) -> str | None:
    """Number of words of a flag that is not a setting of mslime."""
    if (setting := _setting_of_adapter(name)) is not None:
        return "*" if setting.listed else "?" if setting.boolean else None
    section, _, leaf = name.partition(".")
    field: EngineField | None = None
    with suppress(KeyError, ConfigError):  # unknown section, or the engine is not installed
        field = engine_fields(engine_sections()[section].engine).get(leaf.removeprefix("extra.")) if leaf else None
    if field is None:
        return "*"
    if field.kinds == (bool,):
        return "?"
    return "*" if list in field.kinds else None


def _setting_of_adapter(name: str) -> Setting | None:
    """Setting of one adapter that `adapters.NAME.SECTION.SETTING` refers to."""
    head, _, own = name.partition(".")
    path = own.partition(".")[2]
    return next((s for s in all_settings() if s.path == path), None) if head == "adapters" else None


def _without_no(name: str) -> str:
    """Name of an adapter's boolean setting without its negation `no_`; other names unchanged."""
    section, _, leaf = name.rpartition(".")
    plain = f"{section}.{leaf.removeprefix('no_')}"
    setting = _setting_of_adapter(plain)
    return plain if setting is not None and setting.boolean else name


def _assign(values: dict[str, Any], path: str, value: Any, flag: str) -> None:
    *within, leaf = path.split(".")
    target = values
    for section in within:
        inner: Any = target.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(flag, value, f"{section} is given as a value and as a section", "use one of the two")
        target = cast("dict[str, Any]", inner)
    if isinstance(target.get(leaf), dict) and not isinstance(value, dict):
        raise ConfigError(flag, value, f"{leaf} is given as a value and as a section", "use one of the two")
    target[leaf] = value


_WORDS = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp")


class _Loader(yaml.SafeLoader):
    """YAML with intuitive types: `1e-4` is a number, only true and false are booleans (`replay: off` is text), dates
    are text; a repeated key in a mapping, and a value that contains itself, are errors.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _WORDS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Value of a node, built at once: PyYAML then refuses a value that contains itself (`&a [*a]`)."""
        return cast("Any", super()).construct_object(node, deep=True)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Mapping of a node. Keys must be text and unique, apart from those that `<<` merges."""
        seen = set[str]()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue  # `<<: *name`: the mapping's own keys win
            name = cast("Any", self).construct_object(key, deep=True)
            if not isinstance(name, str):
                raise yaml.MarkedYAMLError(
                    problem=f"the key {name!r} is not text", problem_mark=key.start_mark, note="put the key in quotes"
                )
            if name in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {name!r} appears twice", problem_mark=key.start_mark,
                    note="keep one of the two, or merge their contents",
                )  # fmt: skip
            seen.add(name)
        return super().construct_mapping(node, deep)


_RESOLVERS = {
    "tag:yaml.org,2002:float": (r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$", "-+0123456789"),
    "tag:yaml.org,2002:bool": (r"^(true|True|TRUE|false|False|FALSE)$", "tTfF"),
}
for _tag, (_pattern, _first) in _RESOLVERS.items():
    cast("Any", _Loader).add_implicit_resolver(_tag, re.compile(_pattern), list(_first))


def parse_yaml(text: str, source: str) -> Any:
    """Parse a YAML text. Raises ConfigError naming `source` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        where = f"{source}:{error.problem_mark.line + 1}" if error.problem_mark else source
        raise ConfigError(
            where, error.problem, "is not valid YAML", error.note or "check indentation, colons and quotes there"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # control characters, numbers, depth
        message = " ".join(str(error).split())[:200]
        raise ConfigError(source, message, "is not valid YAML", "write plain text, numbers and lists there") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Mapping in a YAML file. Raises ConfigError if it is missing, broken, or not a mapping."""
    if not _is_file(path):
        several = [part.strip() for part in str(path).split(",")]
        if len(several) > 1 and all(_is_file(Path(part)) for part in several):
            raise ConfigError(
                "config file", str(path), "a run takes one configuration file", "merge them into one; flags override it"
            )
        raise ConfigError("config file", str(path), "no such file", "check the path; examples/ holds complete ones")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("config file", str(path), f"cannot be read as UTF-8 text ({error})",
                          "give the path of a YAML file") from None  # fmt: skip
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(
            str(path), type(values).__name__, "the file must hold a mapping of sections", "start with `model:`"
        )
    return cast("dict[str, Any]", values)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # the name is too long, or contains a NUL
        return False


def parse_flags(flags: Sequence[str]) -> dict[str, Any]:
    """`--rollout.max-staleness 1` (or `=1`) to {"rollout": {"max_staleness": 1}}; see `flags`. Raises ConfigError."""
    parser, words = FlagParser("mslime", add_help=False, allow_abbrev=False), normalised(flags)
    add_settings(parser, words)
    return given_settings(parser.parse_args(words), parse_yaml)


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge section by section; `over` takes precedence, and lists are replaced as a whole."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(value, dict) and isinstance(below, dict)
        if key == "adapters" and isinstance(value, dict) and isinstance(below, list):
            merged[key] = _with_entries(cast("list[Any]", below), cast("dict[str, Any]", value))
            continue
        merged[key] = merge(cast("dict[str, Any]", below), cast("dict[str, Any]", value)) if both else value
    return merged


def _with_entries(entries: list[Any], over: dict[str, Any]) -> list[Any]:
    """Entries of `adapters` with the flags of some of them, by name; - and _ are equivalent in names."""
    found = list(entries)
    named = {i: str(cast("dict[str, Any]", e).get("name")) for i, e in enumerate(entries) if isinstance(e, dict)}
    places = {name.replace("-", "_"): i for i, name in named.items()}
    for name, values in over.items():
        place = places.get(name.replace("-", "_"))
        if place is None or not isinstance(values, dict):
            raise ConfigError(f"adapters.{name}", values, "must name an adapter of the run "
            f"({', '.join(places) or 'none'}) and a setting",
                              nearest(name, places) or "for example --adapters.NAME.train.lr")  # fmt: skip
        found[place] = merge(found[place], cast("dict[str, Any]", values))
    return found


def read_values(path: Path | None, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Values from a YAML file and/or flags, not yet validated; flags take precedence. Raises ConfigError."""
    return merge(read_yaml(path) if path else {}, parse_flags(flags))


def load_config(path: Path | None, flags: Sequence[str] = ()) -> RunConfig:
    """Run configuration from a YAML file and/or flags; flags take precedence. Raises ConfigError."""
    return build(read_values(path, flags))


def build(values: dict[str, Any], *, rules: bool = True) -> RunConfig:
    """Validate plain values. Raises ConfigError for the first mistake, with the nearest known name for unknown keys.

    Args:
        rules: check sections against each other; without, each section is checked alone.
    """
    values = _wrap_lists(values)
    try:
        return RunConfig.model_validate(values, context=None if rules else ALONE)
    except ValidationError as error:
        raise _first_error(error, values) from None


def _wrap_lists(values: dict[str, Any]) -> dict[str, Any]:
    """Wrap single values given for settings that are lists: a flag with one value has no list syntax."""
    for setting in all_settings():
        section, _, key = setting.path.rpartition(".")
        found = values.get(section)
        if setting.listed and isinstance(found, dict) and key in found:
            given = cast("Any", found[key])
            if not isinstance(given, list | tuple | types.NoneType):
                values = {**values, section: {**found, key: [given]}}
    if isinstance(entries := values.get("adapters"), list):
        own = cast("list[Any]", entries)
        wrapped = [_wrap_lists(cast("dict[str, Any]", e)) if isinstance(e, dict) else e for e in own]
        values = {**values, "adapters": wrapped}
    return values


def _first_error(error: ValidationError, values: dict[str, Any]) -> UserError:
    # Unknown keys first: a misspelt key usually also makes a required one missing, and is the better clue.
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return cause
    location, field, _ = _placed(first["loc"])
    parts, value = _named(location, values), first["input"]
    path = ".".join(parts)
    if first["type"] == "extra_forbidden":
        known = known_keys(location[:-1])
        hint = nearest(str(location[-1]), known) or f"known keys here: {', '.join(sorted(known))}"
        return ConfigError(path, value, "unknown key", hint)
    if first["type"] in ("model_type", "model_attributes_type"):
        above = 2 if parts[0] == "adapters" else 0  # an adapter's settings have the names of the run's
        own = ".".join(parts[above:])
        example = next((".".join([*parts[:above], s.path]) for s in all_settings() if own and s.section == own), None)
        hint = f"set one of its settings, for example {example} or --{example.replace('_', '-')}" if example else (
            "write a mapping of its settings")  # fmt: skip
        return ConfigError(path, value, "is a section, not a value", hint)
    if first["type"] == "missing":
        needed = [s.path for s in all_settings() if f"{s.path}.".startswith(f"{path}.") and not s.default]
        flag = f", or give --{needed[0].replace('_', '-')}" if needed else ""
        return ConfigError(needed[0] if needed else path, None, "is required", f"add it to the file{flag}")
    rule = "must be a path" if first["type"] == "path_type" else first["msg"].removeprefix("Value error, ")
    secret = field is not None and SecretStr in alternatives(field.annotation)
    return ConfigError(path, "(not shown)" if secret else value, rule,
                       f"expected: {expected(field)}" if field is not None else "correct the value")  # fmt: skip


_Location = Sequence[int | str]


def _placed(location: _Location) -> tuple[_Location, FieldInfo | None, type[BaseModel] | None]:
    """(location without pydantic's names for members of a union, its innermost setting, its innermost section)."""
    model: type[BaseModel] | None = RunConfig
    field, found = cast("FieldInfo | None", None), list[int | str]()
    for part in location:
        if isinstance(part, str) and model is not None:
            field = model.model_fields.get(part)
            model = _section_within(field.annotation) if field is not None else None
        elif isinstance(part, str) and field is not None and not _is_mapping(field):
            continue
        found.append(part)
    return found, field, model


def _section_within(annotation: Any) -> type[BaseModel] | None:
    """Section in an annotation, or of the entries of a list."""
    return next(filter(None, map(section_of, (annotation, *typing.get_args(annotation)))), None)


def _is_mapping(field: FieldInfo) -> bool:
    return any(typing.get_origin(kind) is dict for kind in alternatives(field.annotation))


def _named(location: _Location, values: dict[str, Any]) -> list[str]:
    """Parts of the dotted path of a mistake, with an adapter's name instead of its index."""
    path = [str(part) or "''" for part in location]
    if path[:1] == ["adapters"] and len(path) > 1 and path[1].isdecimal():
        entry: Any = values["adapters"][int(path[1])]
        if isinstance(entry, dict):
            path[1] = str(cast("dict[str, Any]", entry).get("name", path[1]))
    return path


def known_keys(location: _Location) -> set[str]:
    """Keys that a section of the configuration accepts, the engine's own included."""
    model = _placed(location)[2]
    assert model is not None, location
    engine = set(engine_fields(model.engine)) if issubclass(model, EngineSection) else set[str]()
    return set(model.model_fields) | engine
