"""`mslime doctor`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_ABOUT = (
    "Examines this machine: driver, GPUs, links, networks, disk, packages, kernels, speeds against what the GPU is "
    "sold for. Each line says ok, warn, fail or cannot see, what was found, and what to do. Takes about a minute; with "
    "--full a trainer and an engine are started, and their log-probs compared. On several machines, run it on each."
)


def add_parser(commands: Any) -> None:
    """The command and its arguments."""
    parser = commands.add_parser(
        "doctor", help="examine this machine before a run: GPUs, links, networks, disk, kernels, speeds",
        description=_ABOUT,
        epilog="Ends with status 1 where something failed, else with 0; 2: a mistake in the options.",
    )  # fmt: skip
    parser.add_argument("--full", action="store_true", help="also start a trainer and an engine, and measure longer")
    parser.add_argument("--only", nargs="+", action="extend", default=[], metavar="CHECK", help="these checks")
    parser.add_argument("--skip", nargs="+", action="extend", default=[], metavar="CHECK", help="all but these")
    parser.add_argument("--list", action="store_true", help="name the checks, and end")
    parser.add_argument(
        "--directory", type=Path, default=Path("outputs"), metavar="DIR",
        help="where checkpoints are to go, whose disk is examined (default: outputs)",
    )  # fmt: skip
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="the step's checkpoint (default: a tiny Qwen3-MoE, made for it)"
    )
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N",
        help="machines in the collectives; run the same on each at once, with --only collectives",
    )  # fmt: skip
    parser.add_argument("--node-rank", type=int, default=0, metavar="I", help="number of this one, from 0 (default: 0)")
    parser.add_argument("--head", default="", metavar="HOST:PORT", help="a free port of machine 0, the same on all")
    parser.add_argument(
        "--strict", action="store_true", help="end with status 1 also when something is to be warned of"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine, print; 1 where something failed."""
    from mslime.doctor.command import CHECKS, run_doctor
    from mslime.doctor.findings import Options

    if args.list:
        for check in CHECKS:
            print(f"{check.name:15s}{check.about}{' (--full)' if check.full else ''}")
        return 0
    options = Options(args.directory, args.model, args.full, args.nodes, args.node_rank, args.head)
    return run_doctor(options, args.only, args.skip, as_json=args.json, strict=args.strict)
