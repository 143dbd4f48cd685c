"""Settings as command-line flags, parsed by argparse with one option for each setting of the schema.

argparse knows how many words each setting takes, so the YAML file may stand anywhere among the flags. `--help` names
the sections, `--help SECTION` lists one, `--help all` everything. An engine's own fields, and names that nobody knows,
become options when they are met: whoever validates them says what is wrong, with the nearest name. Why argparse and not
a library above it: docs/decisions/0001-libraries.md.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from mslime.config.errors import ConfigError, nearest
from mslime.config.passthrough import EngineField, engine_fields
from mslime.config.settings import Setting, all_settings, engine_sections, sections

_PREFIX = "setting:"
_TOP = "the run"
Parse = Callable[[str, str], Any]
"""(a YAML text, what it is called in messages) -> its value."""


class FlagParser(argparse.ArgumentParser):
    """A parser whose mistakes are ConfigErrors."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of ending the process."""
        raise ConfigError("command line", " ".join(self.prog.split()[:2]), message, f"see {self.prog} --help")


def add_help(parser: argparse.ArgumentParser) -> None:
    """Add `--help [SECTION]` to a parser that has none, and that gets `add_settings`."""
    parser.add_argument(
        "-h", "--help", action=_Help, nargs="?", const="", metavar="SECTION", default=argparse.SUPPRESS,
        help="this; with a section's name its settings (--help rollout), with `all` everything",
    )  # fmt: skip


class _Help(argparse.Action):
    """Prints what fits a screen, one section, or everything, and ends the process."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        asked = str(values or "")
        print(parser.format_help() if asked == "all" else _help_of(parser, asked), end="")
        parser.exit()


def _help_of(parser: argparse.ArgumentParser, asked: str) -> str:
    """The command's own options and the names of the sections; or the settings of a section and those below it.

    Raises:
        ConfigError: there is no such section.
    """
    about, made = sections(), cast("Any", parser)
    formatter = made._get_formatter()
    if not asked:
        formatter.add_usage(parser.usage, [], [])
        formatter.add_text(parser.description)
    shown = 0
    for group in made._action_groups:
        ours = group.title in about or group.title == _TOP
        if (f"{group.title}.".startswith(f"{asked}.") and ours) if asked else not ours:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
            shown += 1
    if asked and not shown:
        raise ConfigError("--help", asked, "there is no such section",
                          nearest(asked, about) or "mslime train --help names them")  # fmt: skip
    told = formatter.format_help()
    if asked:
        return told
    names = [name for name in about if name and "." not in name]
    lines = [
        f"  {name:<12}{textwrap.shorten(about[name].partition('. ')[0], 65, placeholder=' ...')}" for name in names
    ]
    head = "\nsettings (--help SECTION lists those of a section, --help all lists all of them):"
    return "\n".join([told.rstrip(), head, *lines]) + "\n"


def normalised(argv: Sequence[str]) -> list[str]:
    """The words with the names of flags as they are declared: `-` for `_`."""
    words = list[str]()
    for word in argv:
        name, equals, value = word.partition("=")
        words.append((name.replace("_", "-") if name.startswith("--") else name) + equals + value)
    return words


def add_settings(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Add an option for each setting, in a group for each section, and for every other name that `argv` holds.

    Args:
        parser: has the command's own options already.
        argv: `normalised` words that it will parse.
    """
    about, groups = sections(), dict[str, Any]()
    for setting in all_settings():
        if setting.section not in groups:
            groups[setting.section] = parser.add_argument_group(setting.section or _TOP, about[setting.section])
        told = f"{setting.description} [{setting.expected}; default {setting.default or 'none, required'}]"
        count = "*" if setting.listed else "?" if setting.boolean else None
        _add(groups[setting.section], setting.path, count, told.replace("%", "%%"))
    for name in dict.fromkeys(map(_without_no, _other_names(parser, argv))):
        if "." not in name and name not in about:  # every field of an engine has its section
            flag, known = "--" + name.replace("_", "-"), cast("Any", parser)._option_string_actions
            raise ConfigError("command line", flag, "there is no such flag",
                              nearest(flag, known) or f"see {parser.prog} --help")  # fmt: skip
        _add(parser, name, _words_of(name), argparse.SUPPRESS)


def given_settings(found: argparse.Namespace, parse: Parse) -> dict[str, Any]:
    """The settings that were given, as nested plain values. Raises ConfigError.

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


def _add(group: Any, path: str, count: str | None, told: str) -> None:
    """An option that takes exactly one word (None), at most one (`?`: a boolean), or any number (`*`)."""
    flag, dest = "--" + path.replace("_", "-"), _PREFIX + path
    kept: dict[str, Any] = {"dest": dest, "default": argparse.SUPPRESS, "help": told}
    if count == "?":
        group.add_argument(flag, action=_Words, nargs="?", const="true", metavar="true", **kept)
        head, _, leaf = flag.rpartition(".")
        negated = f"{head}.no-{leaf}" if head else f"--no-{leaf.removeprefix('--')}"
        group.add_argument(negated, action="store_const", const=["false"], **{**kept, "help": argparse.SUPPRESS})
    else:
        group.add_argument(flag, action=_Words, nargs=count, metavar="VALUE", **kept)


class _Words(argparse.Action):
    """Keeps the words of an option, as a list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        words = [values] if isinstance(values, str) else list(values or [])
        setattr(namespace, self.dest, words)


def _other_names(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Names of flags in `argv` that the parser does not know: fields of the engines, and mistakes."""
    known = set(cast("Any", parser)._option_string_actions)
    flags = dict.fromkeys(word.partition("=")[0] for word in argv if word.startswith("--") and len(word) > 2)
    return [flag[2:].replace("-", "_") for flag in flags if flag not in known]


def _words_of(name: str) -> str | None:
    """How many words a flag takes that is no setting of ours."""
    if (setting := _setting_of_adapter(name)) is not None:
        return "*" if setting.listed else "?" if setting.boolean else None
    field = _engine_field(name)
    if field is None:
        return "*"
    if field.kinds == (bool,):
        return "?"
    return "*" if list in field.kinds else None


def _setting_of_adapter(name: str) -> Setting | None:
    """The setting that `adapters.NAME.SECTION.SETTING` is of one adapter."""
    head, _, own = name.partition(".")
    path = own.partition(".")[2]
    return next((s for s in all_settings() if s.path == path), None) if head == "adapters" else None


def _without_no(name: str) -> str:
    """The name of a boolean setting of an adapter, of which `no_` says that it is false; others as they are."""
    section, _, leaf = name.rpartition(".")
    plain = f"{section}.{leaf.removeprefix('no_')}"
    setting = _setting_of_adapter(plain)
    return plain if setting is not None and setting.boolean else name


def _engine_field(name: str) -> EngineField | None:
    section, _, leaf = name.partition(".")
    try:
        return engine_fields(engine_sections()[section].engine).get(leaf.removeprefix("extra.")) if leaf else None
    except (KeyError, ConfigError):  # no such section, or the engine is not installed
        return None


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
