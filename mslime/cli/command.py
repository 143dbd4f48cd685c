"""Definition of an `mslime` subcommand, and helpers that several of them share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mslime.config.schema import RunConfig


@dataclass(frozen=True)
class Command:
    """A subcommand. A package adds one by an entry point of the group `mslime.commands`.

    Attributes:
        about: one line for the list of commands, without a capital and a full stop.
        add_arguments: adds its arguments to an argparse parser.
        run: does its work; returns the exit status. A UserError is printed and ends the process with status 2.
        takes_settings: a run's settings are its arguments too: `RUN.yaml` and `--SECTION.SETTING VALUE`. `values_of`
            and `config_of` return them.
        description: first paragraph of its `--help` (default: `about`).
        epilog: last paragraph of its `--help`.
        runs_for_hours: continues after its output is closed (`| head`, a closed terminal).
    """

    about: str
    add_arguments: Callable[[Any], None]
    run: Callable[[argparse.Namespace], int]
    takes_settings: bool = False
    description: str = ""
    epilog: str = ""
    runs_for_hours: bool = False

    def describe(self) -> str:
        """First paragraph of its help."""
        return self.description or f"{self.about[0].upper()}{self.about[1:]}."


def add_run_file(parser: Any, about: str = "YAML file; optional if all settings are given as flags") -> None:
    """Add the argument RUN.yaml to a command with settings."""
    parser.add_argument("config", nargs="?", type=Path, metavar="RUN.yaml", help=about)


def values_of(args: argparse.Namespace) -> dict[str, Any]:
    """Settings in RUN.yaml and flags, not yet validated. Raises ConfigError for an unreadable file."""
    from mslime.config.loader import given_settings, merge, parse_yaml, read_yaml

    return merge(read_yaml(args.config) if args.config else {}, given_settings(args, parse_yaml))


def config_of(args: argparse.Namespace) -> RunConfig:
    """Validated configuration from RUN.yaml and flags. Raises ConfigError."""
    from mslime.config.loader import build

    return build(values_of(args))
