"""Commands that this package adds to `mslime`. Their code is imported when a command runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mslime.cli.command import Command, add_run_file, values_of
from mslime.config.errors import UserError, reading_run


def _add_plan(parser: Any) -> None:
    add_run_file(parser, "YAML file; only model.path is required")
    parser.add_argument("--gpus", type=int, help="GPUs of the run, engines included (default: cluster.trainer_ranks)")
    parser.add_argument(
        "--gpu-memory-gb", type=float, help="nominal memory of a GPU: 80, 141 (default: cluster.gpu_memory_gb)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--strict", action="store_true", help="exit with status 1, not 3, if the plan is tight")
    parser.add_argument(
        "--search", action="store_true",
        help="find layouts of trainer and engines that fit --gpus, the fastest first; configured sizes are kept",
    )  # fmt: skip
    parser.add_argument("--top", type=int, default=5, metavar="K", help="with --search: number of layouts (default: 5)")
    parser.add_argument(
        "--gpu", default="", metavar="NAME",
        help='with --search: the GPU, for example "NVIDIA H100" (default: the usual one with that much memory)',
    )  # fmt: skip


def _plan(args: argparse.Namespace) -> int:
    from mslime_plugins.planner.plan_command import run_plan, run_search

    if args.search:
        return run_search(
            values_of(args), args.gpus, args.gpu_memory_gb, top=args.top, gpu=args.gpu, as_json=args.json,
            strict=args.strict,
        )  # fmt: skip
    return run_plan(values_of(args), args.gpus, args.gpu_memory_gb, args.json, args.strict)


PLAN = Command(
    "memory, balance and weight-sync traffic of RUN.yaml", _add_plan, _plan, takes_settings=True,
)  # fmt: skip


def _add_serve(parser: Any) -> None:
    add_run_file(
        parser, "YAML file with model, cluster, megatron, sglang and lora; optional if all settings are given as flags"
    )


def _serve(args: argparse.Namespace) -> int:
    from mslime_plugins.serve.start import serve

    return serve(values_of(args))


SERVE = Command(
    "let clients of the tinker SDK train adapters on RUN.yaml's model, and sample", _add_serve, _serve,
    takes_settings=True, runs_for_hours=True,
)  # fmt: skip


def _add_doctor(parser: Any) -> None:
    parser.add_argument("--full", action="store_true", help="also start a trainer and an engine, and measure longer")
    parser.add_argument("--only", nargs="+", action="extend", default=[], metavar="CHECK", help="run only these checks")
    parser.add_argument("--skip", nargs="+", action="extend", default=[], metavar="CHECK", help="skip these checks")
    parser.add_argument("--list", action="store_true", help="list the checks and exit")
    parser.add_argument(
        "--directory", type=Path, default=Path("outputs"), metavar="DIR",
        help="directory for checkpoints, whose disk is checked (default: outputs)",
    )  # fmt: skip
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint for the step (default: a generated tiny Qwen3-MoE)"
    )
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N",
        help="machines in the collectives; run the same command on all of them at once, with --only collectives",
    )  # fmt: skip
    parser.add_argument(
        "--node-rank", type=int, default=0, metavar="I", help="index of this machine, from 0 (default: 0)"
    )
    parser.add_argument(
        "--head", default="", metavar="HOST:PORT", help="address and free port of machine 0, the same on all"
    )
    parser.add_argument("--strict", action="store_true", help="exit with status 1 also for warnings")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _doctor(args: argparse.Namespace) -> int:
    from mslime_plugins.doctor.doctor_command import CHECKS, run_doctor
    from mslime_plugins.doctor.findings import DoctorOptions

    if args.list:
        for check in CHECKS:
            print(f"{check.name:15s}{check.about}{' (--full)' if check.full else ''}")
        return 0
    options = DoctorOptions(args.directory, args.model, args.full, args.nodes, args.node_rank, args.head)
    return run_doctor(options, args.only, args.skip, as_json=args.json, strict=args.strict)


DOCTOR = Command(
    "check this machine before a run: GPUs, links, networks, disk, kernels, speeds",
    _add_doctor,
    _doctor,
    description="Checks this machine: driver, GPUs, links, networks, disk, packages, kernels, speeds against the GPU's "
    "specification. Each line reports ok, warn, fail or cannot see, the finding, and advice. Takes about a minute; "
    "with --full a trainer and an engine are started, and their log-probs compared. With several machines, run it on "
    "each.",
    epilog="Exit status: 1 if a check failed, else 0; 2 for a mistake in the options.",
)


def _add_report(parser: Any) -> None:
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN", help="outputs/NAME")
    parser.add_argument(
        "--out", type=Path, help="output file (default: report.html in the run, or compare.html in the first run)"
    )


def _report(args: argparse.Namespace) -> int:
    from mslime_plugins.api import report

    print(report(*args.run_dirs, out=args.out))
    return 0


REPORT = Command(
    "write one HTML page about a run, or about several side by side",
    _add_report,
    _report,
    description="Write one HTML page about a run, or about several side by side: learning curves, problems, and the "
    "use of time and tokens. The page needs no server and no network; the run may still be active (docs/report.md).",
)


def _add_samples(parser: Any) -> None:
    parser.add_argument("run_dir", type=Path, help="outputs/NAME")
    parser.add_argument("--step", type=int, help="of this step, as in the metrics (default: the newest)")
    parser.add_argument("--eval", nargs="?", const="", metavar="SET", help="of the evaluation, or of one held-out set")
    which = parser.add_mutually_exclusive_group()
    for order in ("best", "worst", "longest"):
        which.add_argument(f"--{order}", type=int, metavar="K", help=f"show the K {order}, not a few of each kind")
    for kind, meaning in (
        ("truncated", "cut at the length limit"),
        ("continued", "sampled by several weight versions"),
    ):
        which.add_argument(f"--{kind}", action="store_true", help=f"show responses {meaning}")
    parser.add_argument("--json", action="store_true", help="print JSON lines, with every token")


def _samples(args: argparse.Namespace) -> int:
    from rich.console import Console

    from mslime_plugins.report.samples_command import SampleSelection, show_samples

    orders = {order: count for order in ("best", "worst", "longest") if (count := getattr(args, order)) is not None}
    order, count = next(iter(orders.items()), ("", 0))
    if orders and count < 1:
        raise UserError(f"--{order}", count, "must be at least 1", "set how many responses to show")
    kind = "truncated" if args.truncated else "continued" if args.continued else ""
    wanted = SampleSelection(args.step, args.eval is not None, args.eval or "", order, count, kind)
    with reading_run(args.run_dir):
        show_samples(args.run_dir, wanted, Console(), args.json)
    return 0


SAMPLES = Command("show responses of a run: the best, the worst, the longest ...", _add_samples, _samples)


def _add_inspect(parser: Any) -> None:
    parser.add_argument("run_dir", type=Path, help="outputs/NAME")
    parser.add_argument("--step", type=int, metavar="N", help="of this step, as in the metrics (default: the newest)")
    parser.add_argument("--eval", nargs="?", const="", metavar="SET", help="of the evaluation, or of one held-out set")
    parser.add_argument("--group", type=int, metavar="G", help="show the kept responses of this group")
    parser.add_argument("--sample", type=int, metavar="I", help="show this response of the group")
    parser.add_argument(
        "--color", choices=("version", "difference", "mask"), default="version",
        help="meaning of a token's colour: the weight version that sampled it, the trainer's log-prob minus the "
        "sampler's, or whether it is trained",
    )  # fmt: skip
    parser.add_argument("--tokens", action="store_true", help="print a line per token, with log-probs and experts")


def _inspect(args: argparse.Namespace) -> int:
    from rich.console import Console

    from mslime_plugins.report.inspect_command import InspectSelection, inspect_run

    wanted = InspectSelection(
        args.step, args.eval is not None, args.eval or "", args.group, args.sample, args.color, args.tokens
    )
    with reading_run(args.run_dir):
        inspect_run(args.run_dir, wanted, Console())
    return 0


INSPECT = Command("show responses of a run turn by turn and token by token", _add_inspect, _inspect)
