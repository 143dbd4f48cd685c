"""The `mslime` command: parse, call, print. Every subcommand is in the package that owns its work."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mslime import __version__
from mslime.cli.command import Command, add_run_file, config_of
from mslime.cli.convert import CONVERT, CONVERT_RUN
from mslime.cli.scale import SCALE
from mslime.config.errors import ConfigError, UserError, nearest
from mslime.config.plugins import found, load
from mslime.run.stop import Stopped, end, outliving_readers

if TYPE_CHECKING:
    from mslime.config.schema import RunConfig

_HOW = (
    "A run is described by a YAML file, by flags, or by both; flags take precedence. Every setting has a flag: "
    "`rollout: {max_staleness: 1}` is --rollout.max-staleness 1. Fields of megatron-core and SGLang that are not "
    "listed here are also valid, as --megatron.NAME, --sglang.NAME and --teacher.NAME (see mslime check --fields "
    "megatron)."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status: 2 for a user's mistake, 128 + number for a signal, 1 for a bug.

    Exits the process directly if Ray is lost: Ray's own code would wait for it at the exit.
    """
    status = _status(argv)
    end(status)
    return status


def _status(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if os.getcwd() not in sys.path:  # a console script has its own directory there; the run's processes have this one
        sys.path.append(os.getcwd())
    try:
        args = _parse(words)
        with outliving_readers() if args.command.runs_for_hours else nullcontext():
            return args.command.run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(stopped.describe(), file=sys.stderr)
        return stopped.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # from `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception:  # a bug. Do not re-raise: Ray's hook for errors would wait for a cluster that may be gone
        traceback.print_exc()
        return 1


def _parse(words: list[str]) -> argparse.Namespace:
    """Parse the arguments of a command; their `command` is the command itself."""
    if not words or words[0].startswith("-"):
        return _list_of_commands().parse_args(words)
    if words[:2] == ["convert", "run"]:  # the only kind with settings
        prog, command, rest = "mslime convert run", CONVERT_RUN, words[2:]
    else:
        prog, command, rest = f"mslime {words[0]}", _command(words[0]), words[1:]
    if command.takes_settings:
        from mslime.config.loader import FlagParser, add_help, add_settings, normalised

        rest = normalised(rest)
        usage = f"{prog} [RUN.yaml] [options] [--SECTION.SETTING VALUE ...]"
        parser = FlagParser(prog, usage, f"{command.describe()} {_HOW}", allow_abbrev=False, add_help=False)
        add_help(parser)
        command.add_arguments(parser)
        add_settings(parser, rest)
    else:
        parser = argparse.ArgumentParser(prog, description=command.describe(), epilog=command.epilog)
        command.add_arguments(parser)
    parser.set_defaults(command=command)
    return parser.parse_args(rest)


def _command(name: str) -> Command:
    """Built-in or plug-in command of this name. Raises ConfigError."""
    if (own := COMMANDS.get(name)) is not None:
        return own
    names = [*COMMANDS, *found("mslime.commands")]
    if name not in names:
        hint = nearest(name, names) or f"choose one of {', '.join(names)}"
        if not found("mslime.commands"):
            hint += "; plan, doctor, serve, report, samples and inspect need bash scripts/install.sh"
        raise ConfigError("command line", name, "unknown command", hint)
    return load("mslime.commands", name, "command line")


def _list_of_commands() -> argparse.ArgumentParser:
    """Parser of `mslime --help` and `mslime --version`."""
    parser = argparse.ArgumentParser(
        "mslime",
        description="Reinforcement-learning post-training for MoE language models.",
        epilog="`mslime COMMAND --help` explains a command and lists its settings.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.about)
    for name in found("mslime.commands"):
        if name not in COMMANDS:
            commands.add_parser(name, help=_about(name))
    return parser


def _about(name: str) -> str:
    try:
        return load("mslime.commands", name, name).about
    except ConfigError as error:  # one broken plug-in must not hide the other commands
        return error.rule


def _add_train(parser: Any) -> None:
    add_run_file(parser)
    parser.add_argument(
        "--replay", type=Path, metavar="DIR",
        help="train on the groups in DIR (from mslime rollout or observe.save_groups), without engines; writes to "
        "output_dir/NAME-replay, saves no checkpoint",
    )  # fmt: skip


def _add_rollout(parser: Any) -> None:
    add_run_file(parser)
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="steps to generate groups for (default: 1)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="directory for the groups (default: output_dir/NAME-rollout/groups)"
    )


def _add_eval(parser: Any) -> None:
    add_run_file(parser)
    parser.add_argument(
        "--checkpoint", metavar="WHICH",
        help="a training checkpoint: its directory, its step, or newest (default: the weights of model.path)",
    )  # fmt: skip


def _add_check(parser: Any) -> None:
    add_run_file(parser)
    parser.add_argument(
        "--fields", nargs="?", const="", metavar="SECTION",
        help="list all settings, or those of one section (rollout, algorithm.correction ...); megatron and sglang also "
        "list the engine's own fields, which can be passed through",
    )  # fmt: skip
    parser.add_argument("--markdown", action="store_true", help="with --fields: print the page docs/settings.md")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of RUN.yaml, for editors")
    parser.add_argument("--run-dir", action="store_true", help="print only the run's output directory")
    parser.add_argument(
        "--try", action="store_true", dest="try_functions",
        help="also call your functions that the settings name, on synthetic input (docs/extending.md)",
    )  # fmt: skip


def _add_models(parser: Any) -> None:
    parser.add_argument("--markdown", action="store_true", help="print the page docs/models.md")


def _train(args: argparse.Namespace) -> int:
    if args.replay is not None:
        from mslime.run.debug import replay

        return replay(config_of(args), args.replay)
    from mslime.run.run import run

    return run(config_of(args))


def _rollout(args: argparse.Namespace) -> int:
    from mslime.run.debug import generate

    return generate(config_of(args), args.steps, args.out)


def _eval(args: argparse.Namespace) -> int:
    from mslime.run.debug import evaluate

    return evaluate(config_of(args), args.checkpoint)


def _check(args: argparse.Namespace) -> int:
    if args.schema:
        from mslime.config.settings import as_json_schema

        print(as_json_schema(), end="")
        return 0
    if args.fields is not None:
        return _print_fields(args.fields, args.markdown)
    if args.run_dir:
        print(config_of(args).run_dir)
        return 0
    from rich.console import Console

    from mslime.checks.resolve import resolve
    from mslime.checks.run_tables import describe

    run = resolve(config_of(args))
    Console().print(describe(run))
    configs = [own.config for own in run.adapters.values()] or [run.config]
    return _try_functions(configs) if args.try_functions else 0


def _try_functions(configs: Sequence[RunConfig]) -> int:
    from rich.console import Console

    from mslime.checks.contracts import as_table, failed, try_run

    tried = [each for config in configs for each in try_run(config)]
    if not tried:
        print("the settings name none of your functions: nothing to try")
        return 0
    Console().print(as_table(tried))
    if error := failed(tried):
        raise error
    return 0


def _print_fields(section: str, markdown: bool) -> int:
    from mslime.config.passthrough import engine_fields
    from mslime.config.settings import all_settings, as_markdown

    if markdown:
        print(as_markdown(), end="")
        return 0
    ours = [s for s in all_settings() if not section or f"{s.section}.".startswith(f"{section}.")]
    if not ours:
        known = sorted({s.section for s in all_settings()} - {""})
        raise ConfigError("--fields", section, "unknown section",
                          nearest(section, known) or f"choose one of {', '.join(known)}")  # fmt: skip
    for setting in ours:
        print(f"{setting.path:45s} {setting.expected} [{setting.default or 'required'}]")
        print(f"{'':4s}{setting.description}")
    if section in ("megatron", "sglang"):
        print(f"\n{section}'s own fields, passed through unchanged:")
        for field in sorted(engine_fields(section).values(), key=lambda f: (f.owner, f.name)):
            print(f"{section}.{field.name:55s} {field.owner:32s} {field.expected()}")
    return 0


def _models(args: argparse.Namespace) -> int:
    from mslime.convert.support import as_markdown, as_table

    if args.markdown:
        print(as_markdown(), end="")
    else:
        from rich.console import Console

        Console().print(as_table())
    return 0


def _env(args: argparse.Namespace) -> int:
    from mslime.checks.environment import describe_environment

    print(describe_environment())
    return 0


COMMANDS = {
    "train": Command("run the training of RUN.yaml", _add_train, _train, takes_settings=True, runs_for_hours=True),
    "rollout": Command(
        "generate and score a step of RUN.yaml without training", _add_rollout, _rollout, takes_settings=True,
        runs_for_hours=True,
    ),
    "eval": Command(
        "score a model or a checkpoint on the held-out sets of RUN.yaml", _add_eval, _eval, takes_settings=True,
        runs_for_hours=True,
    ),
    "check": Command("validate RUN.yaml without starting an engine", _add_check, _check, takes_settings=True),
    "scale": SCALE,
    "convert": CONVERT,
    "models": Command("list the model families and the features that each supports", _add_models, _models),
    "env": Command("print versions and devices, for a bug report", lambda parser: None, _env),
}  # fmt: skip
"""Built-in commands; the group `mslime.commands` names those of plug-ins."""
