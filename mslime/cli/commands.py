"""The `mslime` command: parse, call, print. Every subcommand lives in the room that owns its work."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mslime import __version__
from mslime.cli.convert import add_parser as add_convert
from mslime.cli.doctor import add_parser as add_doctor
from mslime.cli.scale import add_parser as add_scale
from mslime.config.errors import ConfigError, UserError, nearest, reading_run
from mslime.control.ray_watch import end
from mslime.control.stop import Stopped, outliving_readers

if TYPE_CHECKING:
    from mslime.config.schema import RunConfig

_HOW = (
    "A run is described by a YAML file, by flags, or by both; flags win. Every setting has a flag: "
    "`rollout: {max_staleness: 1}` is --rollout.max-staleness 1. Fields of megatron-core and SGLang that are not "
    "listed here can be given too, as --megatron.NAME, --sglang.NAME and --teacher.NAME (see mslime check --fields "
    "megatron)."
)
_RUNS = (["train"], ["rollout"], ["eval"], ["serve"])
"""Commands that work for hours."""
Run = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status: 2 for a user's mistake, 128 + number for a signal, 1 for a bug.

    Ends the process where Ray has been lost: its own code would wait for it at the exit.
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
        with outliving_readers() if words[:1] in _RUNS else nullcontext():
            return args.run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(stopped.describe(), file=sys.stderr)
        return stopped.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception:  # a bug. It goes no further: Ray's hook for errors would wait for a cluster that may be gone
        traceback.print_exc()
        return 1


def _parse(words: list[str]) -> argparse.Namespace:
    """The arguments of a command. One that takes settings gets a parser of its own, which knows them all."""
    for name, (about, add_own, run) in _TAKE_SETTINGS.items():
        if words[: len(name)] == list(name):
            return _parse_settings(name, about, add_own, run, words[len(name) :])
    parser, commands = _parser()
    if words and not words[0].startswith("-") and words[0] not in commands:
        raise ConfigError("command line", words[0], "there is no such command",
                          nearest(words[0], commands) or f"one of {', '.join(commands)}")  # fmt: skip
    return parser.parse_args(words)


def _parse_settings(
    name: tuple[str, ...], about: str, add_own: Callable[[Any], None], run: Run, words: list[str]
) -> argparse.Namespace:
    from mslime.config.flags import FlagParser, add_help, add_settings, normalised

    words = normalised(words)
    prog = f"mslime {' '.join(name)}"
    usage = f"{prog} [RUN.yaml] [options] [--SECTION.SETTING VALUE ...]"
    parser = FlagParser(prog, usage, f"{about[0].upper()}{about[1:]}. {_HOW}", allow_abbrev=False, add_help=False)
    add_help(parser)
    add_own(parser)
    add_settings(parser, words)
    parser.set_defaults(run=run)
    return parser.parse_args(words)


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser of all commands but those that take settings, and the names of all."""
    parser = argparse.ArgumentParser(
        "mslime",
        description="Reinforcement-learning post-training for MoE language models.",
        epilog="`mslime COMMAND --help` says more, and lists the settings where a command takes them.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for (*group, name), (about, _, _) in _TAKE_SETTINGS.items():
        if not group:
            commands.add_parser(name, help=about)  # for the list; `_parse` knows the rest
    about = "write one HTML page about a run, or about several side by side"
    report = commands.add_parser(
        "report", help=about,
        description=f"{about.capitalize()}: what it learnt, what is wrong, and where time and tokens went. The page "
        "needs no server and no network; a run may still go on (docs/report.md).",
    )  # fmt: skip
    report.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN", help="outputs/NAME")
    report.add_argument(
        "--out", type=Path, help="the page (default: report.html of the run, compare.html of the first)"
    )
    report.set_defaults(run=_report)
    _add_samples(commands.add_parser("samples", help="show responses of a run: the best, the worst, the longest ..."))
    _add_inspect(commands.add_parser("inspect", help="show responses of a run turn by turn and token by token"))
    add_scale(commands)
    add_convert(commands, _TAKE_SETTINGS["convert", "run"][0])
    models = commands.add_parser("models", help="list the model families and what works with each")
    models.add_argument("--markdown", action="store_true", help="as the page docs/models.md")
    models.set_defaults(run=_models)
    env = commands.add_parser("env", help="print versions and devices, for a bug report")
    env.set_defaults(run=_env)
    add_doctor(commands)
    return parser, list(commands.choices)


def _add_file(parser: Any, told: str = "YAML file; optional when everything is given as flags") -> None:
    parser.add_argument("config", nargs="?", type=Path, metavar="RUN.yaml", help=told)


def _add_samples(parser: Any) -> None:
    parser.add_argument("run_dir", type=Path, help="outputs/NAME")
    parser.add_argument("--step", type=int, help="of this step, as in the metrics (default: the newest)")
    parser.add_argument("--eval", nargs="?", const="", metavar="SET", help="of the evaluation, or of one held-out set")
    which = parser.add_mutually_exclusive_group()
    for order in ("best", "worst", "longest"):
        which.add_argument(f"--{order}", type=int, metavar="K", help=f"the K {order}, instead of a few of each kind")
    for kind, meaning in (
        ("truncated", "cut at the length limit"),
        ("continued", "sampled by several weight versions"),
    ):
        which.add_argument(f"--{kind}", action="store_true", help=f"those {meaning}")
    parser.add_argument("--json", action="store_true", help="print lines of JSON, with every token")
    parser.set_defaults(run=_samples)


def _add_inspect(parser: Any) -> None:
    parser.add_argument("run_dir", type=Path, help="outputs/NAME")
    parser.add_argument("--step", type=int, metavar="N", help="of this step, as in the metrics (default: the newest)")
    parser.add_argument("--eval", nargs="?", const="", metavar="SET", help="of the evaluation, or of one held-out set")
    parser.add_argument("--group", type=int, metavar="G", help="the kept responses of this group")
    parser.add_argument("--sample", type=int, metavar="I", help="this response of the group")
    parser.add_argument(
        "--color", choices=("version", "difference", "mask"), default="version",
        help="what a token's colour says: the weights that sampled it, its log-prob at the trainer minus that at the "
        "sampler, or whether it is trained",
    )  # fmt: skip
    parser.add_argument("--tokens", action="store_true", help="a line for each token, with log-probs and experts")
    parser.set_defaults(run=_inspect)


def _add_train(parser: Any) -> None:
    _add_file(parser)
    parser.add_argument(
        "--replay", type=Path, metavar="DIR",
        help="train on the groups in DIR (of mslime rollout, or of observe.save_groups), without engines; writes to "
        "output_dir/NAME-replay, saves no checkpoint",
    )  # fmt: skip


def _add_rollout(parser: Any) -> None:
    _add_file(parser)
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="how many steps' groups (default: 1)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where they go (default: output_dir/NAME-rollout/groups)"
    )


def _add_eval(parser: Any) -> None:
    _add_file(parser)
    parser.add_argument(
        "--checkpoint", metavar="WHICH",
        help="a training checkpoint: its directory, its step, or newest (default: the weights of model.path)",
    )  # fmt: skip


def _add_serve(parser: Any) -> None:
    _add_file(parser, "YAML file with model, cluster, megatron, sglang and lora; optional when all is given as flags")


def _add_check(parser: Any) -> None:
    _add_file(parser)
    parser.add_argument(
        "--fields", nargs="?", const="", metavar="SECTION",
        help="list the settings, of one section if it is named (rollout, algorithm.correction ...); megatron and "
        "sglang also list the fields of the engine's own, which can be passed through",
    )  # fmt: skip
    parser.add_argument("--markdown", action="store_true", help="with --fields: as the page docs/settings.md")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of RUN.yaml, for editors")
    parser.add_argument(
        "--try", action="store_true", dest="try_functions",
        help="also call the functions of yours that the settings name, on made-up input (docs/extending.md)",
    )  # fmt: skip


def _add_plan(parser: Any) -> None:
    _add_file(parser, "YAML file; only model.path is required")
    parser.add_argument("--gpus", type=int, help="GPUs of the run, engines included (default: cluster.trainer_ranks)")
    parser.add_argument("--gpu-memory-gb", type=float, help="as sold: 80, 141 (default: cluster.gpu_memory_gb)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--strict", action="store_true", help="end with status 1, not 3, when the plan is tight")
    parser.add_argument(
        "--search", action="store_true",
        help="find layouts of trainer and engines that fit --gpus, the fastest first; sizes that are set are kept",
    )  # fmt: skip
    parser.add_argument("--top", type=int, default=5, metavar="K", help="with --search: how many (default: 5)")
    parser.add_argument(
        "--gpu", default="", metavar="NAME",
        help='with --search: the GPU, as "NVIDIA H100" (default: the usual one with so much memory)',
    )  # fmt: skip


def _add_convert_run(parser: Any) -> None:
    parser.add_argument("config", type=Path, help="the run's config.yaml")
    parser.add_argument("--checkpoint", type=Path, help="default: the newest complete one of the run")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; must not exist")


def _values(args: argparse.Namespace) -> dict[str, Any]:
    """What the file and the flags say, not yet validated."""
    from mslime.config.flags import given_settings
    from mslime.config.loader import merge, parse_yaml, read_yaml

    return merge(read_yaml(args.config) if args.config else {}, given_settings(args, parse_yaml))


def _load(args: argparse.Namespace) -> RunConfig:
    from mslime.config.loader import build

    return build(_values(args))


def _train(args: argparse.Namespace) -> int:
    if args.replay is not None:
        from mslime.control.debug import replay

        return replay(_load(args), args.replay)
    from mslime.control.run import run

    return run(_load(args))


def _rollout(args: argparse.Namespace) -> int:
    from mslime.control.debug import generate

    return generate(_load(args), args.steps, args.out)


def _eval(args: argparse.Namespace) -> int:
    from mslime.control.debug import evaluate

    return evaluate(_load(args), args.checkpoint)


def _serve(args: argparse.Namespace) -> int:
    from mslime.serve.start import serve

    return serve(_values(args))


def _check(args: argparse.Namespace) -> int:
    from rich.console import Console

    if args.schema:
        from mslime.config.settings import as_json_schema

        print(as_json_schema(), end="")
        return 0
    if args.fields is not None:
        return _print_fields(args.fields, args.markdown)
    from mslime.preflight.describe import describe
    from mslime.preflight.resolve import resolve

    run = resolve(_load(args))
    Console().print(describe(run))
    configs = [own.config for own in run.adapters.values()] or [run.config]
    return _try_functions(configs) if args.try_functions else 0


def _try_functions(configs: Sequence[RunConfig]) -> int:
    from rich.console import Console

    from mslime.preflight.contracts import as_table, failed, try_run

    tried = [each for config in configs for each in try_run(config)]
    if not tried:
        print("the settings name no function of yours: nothing to try")
        return 0
    Console().print(as_table(tried))
    if error := failed(tried):
        raise error
    return 0


def _plan(args: argparse.Namespace) -> int:
    from mslime.planner.command import run_plan, run_search

    if args.search:
        return run_search(
            _values(args), args.gpus, args.gpu_memory_gb, top=args.top, gpu=args.gpu, as_json=args.json,
            strict=args.strict,
        )  # fmt: skip
    return run_plan(_values(args), args.gpus, args.gpu_memory_gb, args.json, args.strict)


def _print_fields(section: str, markdown: bool) -> int:
    from mslime.config.passthrough import engine_fields
    from mslime.config.settings import all_settings, as_markdown

    if markdown:
        print(as_markdown(), end="")
        return 0
    ours = [s for s in all_settings() if not section or f"{s.section}.".startswith(f"{section}.")]
    if not ours:
        known = sorted({s.section for s in all_settings()} - {""})
        raise ConfigError("--fields", section, "there is no such section",
                          nearest(section, known) or f"name one of {', '.join(known)}")  # fmt: skip
    for setting in ours:
        print(f"{setting.path:45s} {setting.expected} [{setting.default or 'required'}]")
        print(f"{'':4s}{setting.description}")
    if section in ("megatron", "sglang"):
        print(f"\nfields of {section}'s own, passed through as they are:")
        for field in sorted(engine_fields(section).values(), key=lambda f: (f.owner, f.name)):
            print(f"{section}.{field.name:55s} {field.owner:32s} {field.expected()}")
    return 0


def _report(args: argparse.Namespace) -> int:
    from mslime.api import report

    print(report(*args.run_dirs, out=args.out))
    return 0


def _samples(args: argparse.Namespace) -> int:
    from rich.console import Console

    from mslime.observe.samples_view import Wanted, show_samples

    orders = {order: count for order in ("best", "worst", "longest") if (count := getattr(args, order)) is not None}
    order, count = next(iter(orders.items()), ("", 0))
    if orders and count < 1:
        raise UserError(f"--{order}", count, "must be at least 1", "say how many responses to show")
    kind = "truncated" if args.truncated else "continued" if args.continued else ""
    wanted = Wanted(args.step, args.eval is not None, args.eval or "", order, count, kind)
    with reading_run(args.run_dir):
        show_samples(args.run_dir, wanted, Console(), args.json)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from rich.console import Console

    from mslime.observe.inspect_view import Inspected, inspect_run

    wanted = Inspected(
        args.step, args.eval is not None, args.eval or "", args.group, args.sample, args.color, args.tokens
    )
    with reading_run(args.run_dir):
        inspect_run(args.run_dir, wanted, Console())
    return 0


def _convert_run(args: argparse.Namespace) -> int:
    from mslime.control.export import export

    export(_load(args), args.checkpoint, args.out)
    print(args.out)
    return 0


def _models(args: argparse.Namespace) -> int:
    from mslime.convert.support import as_markdown, as_table, support_rows

    if args.markdown:
        print(as_markdown(support_rows()), end="")
    else:
        from rich.console import Console

        Console().print(as_table(support_rows()))
    return 0


def _env(args: argparse.Namespace) -> int:
    from mslime.preflight.environment import describe_environment

    print(describe_environment())
    return 0


_TAKE_SETTINGS: dict[tuple[str, ...], tuple[str, Callable[[Any], None], Run]] = {
    ("train",): ("run the training of RUN.yaml", _add_train, _train),
    ("rollout",): ("generate and score a step of RUN.yaml without training", _add_rollout, _rollout),
    ("eval",): ("score a model or a checkpoint on the held-out sets of RUN.yaml", _add_eval, _eval),
    ("serve",): ("let clients of the tinker SDK train adapters on RUN.yaml's model, and sample", _add_serve, _serve),
    ("check",): ("validate RUN.yaml without starting an engine", _add_check, _check),
    ("plan",): ("memory, balance and weight-sync traffic of RUN.yaml", _add_plan, _plan),
    ("convert", "run"): (
        "write a run's checkpoint as a Hugging Face checkpoint",
        _add_convert_run,
        _convert_run,
    ),
}
"""Commands that take a run's settings: what they do, their own arguments, and what runs them."""
