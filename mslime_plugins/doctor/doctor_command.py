"""`mslime doctor`: selects checks, runs them one after the other, and prints the findings."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from mslime.config.errors import ConfigError, nearest
from mslime_plugins.doctor.findings import STATUSES, DoctorOptions, Finding, HostCheck, Node, Status, fail
from mslime_plugins.doctor.gpus import check_clocks, check_driver, check_gpus, check_links, see_gpus
from mslime_plugins.doctor.host import check_clock, check_disk, check_host, check_limits, check_shared_memory
from mslime_plugins.doctor.network_checks import check_address, check_infiniband, check_loopback, check_nccl
from mslime_plugins.doctor.packages import check_kernels, check_packages
from mslime_plugins.doctor.speeds import check_collectives, check_speed
from mslime_plugins.doctor.step import check_step

CHECKS = (
    HostCheck("driver", "NVIDIA driver, and the CUDA version of torch", check_driver),
    HostCheck("gpus", "models, memory, ECC errors, MIG, other processes", check_gpus),
    HostCheck("clocks", "persistence mode, power limit, heat, reduced clocks", check_clocks),
    HostCheck("links", "NVLinks and PCIe lanes", check_links),
    HostCheck("infiniband", "RDMA devices, their rates, nvidia_peermem", check_infiniband),
    HostCheck("nccl", "variables of NCCL and gloo, against the interfaces", check_nccl),
    HostCheck("address", "address of the machine's name", check_address),
    HostCheck("loopback", "HTTP to this machine, proxies, ports", check_loopback),
    HostCheck("host", "memory and cores", check_host),
    HostCheck("shared_memory", "size of /dev/shm", check_shared_memory),
    HostCheck("limits", "open files, processes, locked memory", check_limits),
    HostCheck("disk", "space and speed of the checkpoints' disk", check_disk),
    HostCheck("clock", "whether the clock is synchronised", check_clock),
    HostCheck("packages", "versions against the pins, imports", check_packages),
    HostCheck("kernels", "mslime's and Transformer Engine's kernels against plain torch", check_kernels),
    HostCheck("speed", "matrix products and memory against the GPU's specification", check_speed),
    HostCheck("collectives", "all-reduce and all-to-all against the links", check_collectives),
    HostCheck("step", "a trainer and an engine, two steps, their mismatch", check_step, full=True),
)
"""Checks, ordered so that a fault of one explains later faults."""
_STYLES: dict[Status, str] = {"ok": "green", "warn": "bold yellow", "fail": "bold red", "cannot see": "dim"}


@dataclass(frozen=True)
class CheckFindings:
    """A check with its findings.

    Attributes:
        seconds: its duration.
    """

    check: str
    seconds: float
    findings: tuple[Finding, ...]


def run_doctor(
    options: DoctorOptions,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    *,
    as_json: bool = False,
    strict: bool = False,
) -> int:
    """Check this host and print the findings.

    Args:
        only, skip: names of checks; `only` also takes those that otherwise need --full.
        as_json: one JSON object on stdout at the end; progress goes to stderr.
        strict: a warning counts as a failure.

    Returns:
        0: nothing failed (`cannot see` does not count). 1: something failed.

    Raises:
        ConfigError: a check is unknown, or an option contradicts another.
    """
    check_options(options)
    chosen = choose(only, skip, options.full)
    gpus, blind = see_gpus()
    node = Node(options, gpus, blind, dict(os.environ))
    console, progress = Console(), Console(stderr=True, quiet=not sys.stderr.isatty())
    examined: list[CheckFindings] = []
    for number, check in enumerate(chosen, 1):
        with progress.status(f"{number} of {len(chosen)}: {check.name} ({check.about})"):
            examined.append(examine(check, node))
        if not as_json:
            for line in lines_of(examined[-1]):
                console.print(line, soft_wrap=True)
    status = 1 if failed(examined, strict=strict) else 0
    if as_json:
        print(json.dumps(as_dict(examined, status), indent=2))
    else:
        console.print(summary(examined))
    return status


def check_options(options: DoctorOptions) -> None:
    """Check the options. Raises ConfigError."""
    if options.nodes < 1:
        raise ConfigError("--nodes", options.nodes, "must be at least 1", "set the number of machines")
    if not 0 <= options.node_rank < options.nodes:
        raise ConfigError("--node-rank", options.node_rank, f"must be from 0 to {options.nodes - 1}",
                          "number the machines from 0, each once")  # fmt: skip
    if options.nodes > 1 and not options.head.rpartition(":")[0]:
        raise ConfigError("--head", options.head, "several machines need an address to connect to",
                          "set HOST:PORT of machine 0, the same on all")  # fmt: skip
    if options.model is not None and not (options.model / "config.json").is_file():
        raise ConfigError("--model", str(options.model), "has no config.json",
                          "set the directory of a Hugging Face checkpoint, or remove it")  # fmt: skip


def choose(only: Sequence[str], skip: Sequence[str], full: bool) -> list[HostCheck]:
    """The checks to run, in order. Raises ConfigError for unknown names, and if no check is left."""
    names = [check.name for check in CHECKS]
    for flag, given in (("--only", only), ("--skip", skip)):
        for name in given:
            if name not in names:
                raise ConfigError(flag, name, "unknown check",
                                  nearest(name, names) or f"choose one of {', '.join(names)}")  # fmt: skip
    found = [c for c in CHECKS if (c.name in only if only else full or not c.full) and c.name not in skip]
    if not found:
        raise ConfigError("--skip", ", ".join(skip), "no check is left", "remove --skip or --only")
    return found


def examine(check: HostCheck, node: Node) -> CheckFindings:
    """Run one check. An exception becomes a finding, and later checks still run."""
    began, found = time.perf_counter(), []
    try:
        found.extend(check.run(node))
    except Exception as error:
        words = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        found.append(fail(f"the check failed: {words}", f"mslime doctor --only {check.name} repeats it"))
    return CheckFindings(check.name, time.perf_counter() - began, tuple(found))


def lines_of(examined: CheckFindings) -> list[Text]:
    """Terminal lines: status, check, finding, and advice below it."""
    lines = []
    for finding in examined.findings:
        line = Text(f"{finding.status:<11}", style=_STYLES[finding.status])
        line.append(f"{examined.check:<14}", style="default")
        lines.append(line.append(finding.found, style="default"))
        if finding.todo:
            lines.append(Text(f"{'':25}-> {finding.todo}"))
    return lines


def count(examined: Sequence[CheckFindings]) -> dict[Status, int]:
    """Findings by status."""
    found = [finding.status for each in examined for finding in each.findings]
    return {status: found.count(status) for status in STATUSES}


def failed(examined: Sequence[CheckFindings], *, strict: bool) -> bool:
    """Whether something failed."""
    counted = count(examined)
    return bool(counted["fail"] or (strict and counted["warn"]))


def summary(examined: Sequence[CheckFindings]) -> Text:
    """The last line."""
    counted = count(examined)
    worst: Status = "fail" if counted["fail"] else "warn" if counted["warn"] else "ok"
    numbers = ", ".join(f"{number} {status}" for status, number in counted.items() if number)
    return Text(f"\n{numbers} in {sum(each.seconds for each in examined):.0f} s", style=_STYLES[worst])


def as_dict(examined: Sequence[CheckFindings], status: int) -> dict[str, Any]:
    """For JSON."""
    return {
        "machine": socket.gethostname(),
        "time": time.time(),
        "exit_status": status,
        "counted": count(examined),
        "checks": [asdict(each) for each in examined],
    }
