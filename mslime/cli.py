"""The `mslime` command: parse, call, print. Every subcommand lives in the room that owns its work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mslime import __version__
from mslime.config.errors import UserError
from mslime.control.convert import add_parser as add_convert

if TYPE_CHECKING:
    from mslime.config.schema import RunConfig

_OWN_OPTIONS = ("--help", "--fields", "--checkpoint", "--out", "--gpus", "--gpu-memory-gb", "--json")
_OVERRIDES = "Any setting can be given as a flag, for example --rollout.max-staleness 1; flags win over the file."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status (2 for a user's mistake, 130 for Ctrl-C)."""
    own, flags = _split(list(sys.argv[1:] if argv is None else argv))
    args = _parser().parse_args(own)
    try:
        return args.run(args, flags)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The command's own words, and the settings given as flags (`--section.key value ...`, `--name x`).

    argparse cannot do this: it would take a setting's value for the optional YAML file. A word goes where the option
    before it went.
    """
    if argv[:1] not in (["train"], ["check"], ["plan"]) and argv[:2] != ["convert", "run"]:
        return argv, []
    own, flags = list[str](), list[str]()
    current = own
    for word in argv:
        if word.startswith("--"):
            current = own if word.split("=")[0] in _OWN_OPTIONS else flags
        current.append(word)
    return own, flags


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "mslime",
        description="Reinforcement-learning post-training for MoE language models.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="run the training of RUN.yaml", epilog=_OVERRIDES)
    train.add_argument(
        "config",
        nargs="?",
        type=Path,
        help="YAML file, before any flag; optional when everything is given as flags",
    )
    train.set_defaults(run=_train)
    check = commands.add_parser("check", help="validate RUN.yaml without starting an engine", epilog=_OVERRIDES)
    check.add_argument("config", nargs="?", type=Path)
    check.add_argument(
        "--fields",
        choices=["megatron", "sglang"],
        help="list the engine fields that can be passed through",
    )
    check.set_defaults(run=_check)
    plan = commands.add_parser("plan", help="memory, balance and weight-sync traffic of RUN.yaml", epilog=_OVERRIDES)
    plan.add_argument("config", nargs="?", type=Path, help="YAML file, before any flag; only model.path is required")
    plan.add_argument("--gpus", type=int, help="GPUs of the run, engines included (default: cluster.trainer_ranks)")
    plan.add_argument("--gpu-memory-gb", type=float, help="as sold: 80, 141 (default: cluster.gpu_memory_gb)")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.set_defaults(run=_plan)
    report = commands.add_parser("report", help="write one HTML page about a run")
    report.add_argument("run_dir", type=Path, help="outputs/NAME")
    report.set_defaults(run=_report)
    add_convert(commands, _convert_run)
    models = commands.add_parser("models", help="list the model families and what works with each")
    models.add_argument("--markdown", action="store_true", help="as the page docs/models.md")
    models.set_defaults(run=_models)
    env = commands.add_parser("env", help="print versions and devices, for a bug report")
    env.set_defaults(run=_env)
    return parser


def _load(args: argparse.Namespace, flags: Sequence[str]) -> RunConfig:
    from mslime.config.loader import load_config

    return load_config(args.config, flags)


def _train(args: argparse.Namespace, flags: Sequence[str]) -> int:
    from mslime.control.run import run

    return run(_load(args, flags))


def _check(args: argparse.Namespace, flags: Sequence[str]) -> int:
    from rich.console import Console

    if args.fields:
        return _print_fields(args.fields)
    from mslime.control.check import describe, resolve

    Console().print(describe(resolve(_load(args, flags))))
    return 0


def _plan(args: argparse.Namespace, flags: Sequence[str]) -> int:
    from mslime.plan.command import run_plan

    return run_plan(args.config, flags, args.gpus, args.gpu_memory_gb, args.json)


def _print_fields(engine: str) -> int:
    from mslime.config.passthrough import engine_fields

    for field in sorted(engine_fields(engine).values(), key=lambda f: (f.owner, f.name)):
        print(f"{engine}.{field.name:55s} {field.owner:32s} {field.expected()}")
    return 0


def _report(args: argparse.Namespace, flags: Sequence[str]) -> int:
    _no_flags(flags)
    from mslime.observe.report import write_report

    print(write_report(args.run_dir))
    return 0


def _convert_run(args: argparse.Namespace, flags: Sequence[str]) -> int:
    from mslime.control.run import export

    export(_load(args, flags), args.checkpoint, args.out)
    print(args.out)
    return 0


def _models(args: argparse.Namespace, flags: Sequence[str]) -> int:
    from mslime.convert.support import as_markdown, as_table, support_rows

    _no_flags(flags)
    if args.markdown:
        print(as_markdown(support_rows()), end="")
    else:
        from rich.console import Console

        Console().print(as_table(support_rows()))
    return 0


def _env(args: argparse.Namespace, flags: Sequence[str]) -> int:
    _no_flags(flags)
    from mslime.control.environment import describe_environment

    print(describe_environment())
    return 0


def _no_flags(flags: Sequence[str]) -> None:
    if flags:
        raise UserError("command line", " ".join(flags), "unknown arguments", "see --help")


if __name__ == "__main__":
    sys.exit(main())
