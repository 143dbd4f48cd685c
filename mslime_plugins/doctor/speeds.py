"""Measured against nominal speeds: matrix products, memory, collectives. `measure` does the work."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from mslime.config.cluster import GpuSpec, nominal
from mslime.network import free_port
from mslime_plugins.doctor.findings import Finding, Node, fail, ok, unseen, warn
from mslime_plugins.doctor.network_checks import rdma_ports

WORKER = "mslime_plugins.doctor.measure"
"""The module of measurements, run in separate processes."""
DEADLINE_S = 300
CPU_RANKS = 2
CLOCKS_APART_MS = 100


@dataclass(frozen=True)
class SpeedThresholds:
    """Fractions of a GPU's nominal speed (`config/cluster.py`) below which a finding is `warn` or `fail`.

    Assumptions: an H100 at its power limit reaches two thirds to three quarters in large matrix products, a copy nine
    tenths of its memory, NCCL four fifths of NVLink in all-reduce and somewhat less in all-to-all.
    """

    warn: float
    fail: float


MATMUL, MEMORY = SpeedThresholds(0.55, 0.4), SpeedThresholds(0.75, 0.6)
ALL_REDUCE, ALL_TO_ALL = SpeedThresholds(0.6, 0.3), SpeedThresholds(0.5, 0.25)
STRAGGLER = 0.92
"""Fraction of the median GPU's speed; a slower one delays all others in every collective."""


class MeasurementFailed(Exception):
    """A measuring process has failed; the text is the end of its output."""


def check_speed(node: Node) -> Iterator[Finding]:
    """Matrix products and memory of all GPUs at once, because they share the host's power and cooling."""
    seconds = 5.0 if node.options.full else 1.0
    if not node.gpus:
        [found] = measured([["speed", "--device", "cpu", "--seconds", "0.5"]])
        yield unseen(f"{node.blind}; this CPU reaches {found['tflops'] * 1e3:,.0f} GFLOP/s in float32 and copies at "
                     f"{found['gb_per_s']:.1f} GB/s")  # fmt: skip
        return
    found = measured([["speed", "--device", f"cuda:{gpu.index}", "--seconds", f"{seconds}"] for gpu in _usable(node)])
    known = nominal(node.gpus[0].name)
    for name, label, unit, expected, share in (
        ("tflops", "bfloat16 matrix products", "TFLOP/s", known and known.tflops, MATMUL),
        ("gb_per_s", "memory", "GB/s", known and known.memory, MEMORY),
    ):
        yield from speed_findings(label, unit, [each[name] for each in found], expected, share)


def _usable(node: Node) -> Sequence[Any]:
    """The GPUs visible under CUDA_VISIBLE_DEVICES, numbered as in torch."""
    visible = node.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(node.gpus) if visible is None else len([word for word in visible.split(",") if word.strip()])
    return node.gpus[: min(count, len(node.gpus))]


def speed_findings(
    label: str, unit: str, found: Sequence[float], expected: float | None, share: SpeedThresholds
) -> Iterator[Finding]:
    """Findings about one speed of all GPUs.

    Args:
        found: of each GPU.
        expected: nominal speed; None: unknown.
    """
    least, middle = min(found), median(found)
    spread = f"{middle:,.0f} {unit}" + (f", the slowest GPU {least:,.0f}" if len(found) > 1 else "")
    values = {"median": round(middle, 1), "least": round(least, 1)}
    if expected is None:
        yield ok(f"{label}: {spread}; no reference value for this card", **values)
    else:
        text = f"{label}: {spread}, {middle / expected:.0%} of {expected:,.0f}"
        yield judged(middle / expected, share, text, _SLOW, values)
    if least < STRAGGLER * middle:
        yield warn(f"{label}: GPU {found.index(least)} reaches {least / middle:.0%} of the median",
                   "it slows down all others: check its clocks and temperature under load, or exclude it")  # fmt: skip


_SLOW = "see the lines of clocks and gpus; check for other processes, and nvidia-smi -q -d CLOCK,POWER under load"


def judged(ratio: float, share: SpeedThresholds, text: str, todo: str, values: Mapping[str, float]) -> Finding:
    """Finding about a speed as a fraction of the nominal one."""
    if ratio < share.fail:
        return fail(text, todo, **values)
    return warn(text, todo, **values) if ratio < share.warn else ok(text, **values)


def check_collectives(node: Node) -> Iterator[Finding]:
    """All-reduce and all-to-all over all GPUs, of several hosts with --nodes; over gloo without GPUs."""
    options = node.options
    here = len(_usable(node)) if node.gpus else CPU_RANKS
    ranks = here * options.nodes
    if node.gpus and ranks == 1:
        yield unseen("one GPU: there are no collectives to measure")
        return
    device = "cuda" if node.gpus else "cpu"
    mib = (1024 if options.full else 256) if node.gpus else 8
    rendezvous = options.head or f"127.0.0.1:{free_port()}"
    found = measured([
        ["collectives", "--device", f"cuda:{i}" if node.gpus else "cpu", "--rank", f"{options.node_rank * here + i}",
         "--ranks", f"{ranks}", "--rendezvous", f"tcp://{rendezvous}", "--mib", f"{mib}", "--seconds", "1"]
        for i in range(here)
    ])[0]  # fmt: skip
    if device == "cpu":
        where = f"{ranks} processes over gloo" + (f" on {options.nodes} machines" if options.nodes > 1 else "")
        yield unseen(f"NCCL: {node.blind}; {where}: all-reduce {found['all_reduce']:.2f}, all-to-all "
                     f"{found['all_to_all']:.2f} GB/s")  # fmt: skip
    else:
        known = nominal(node.gpus[0].name)
        yield from collective_findings(found, known, ranks, here, sum(rdma_ports(node).values()) / 8)
    if options.nodes > 1:
        apart = round(found["clock_ms"], 2)
        text = f"the machines' clocks are {apart:.1f} ms apart"
        if apart > CLOCKS_APART_MS:
            yield warn(text, "start chrony on all of them", clock_ms=apart)
        else:
            yield ok(text, clock_ms=apart)


def collective_findings(
    found: Mapping[str, float], known: GpuSpec | None, ranks: int, here: int, network: float
) -> Iterator[Finding]:
    """Findings about NCCL.

    Args:
        found: bus bandwidth by collective, GB/s.
        known: nominal values of the GPUs.
        ranks, here: GPUs in total, and of one host.
        network: total GB/s of one host's adapters.
    """
    limits = expected_bandwidth(known, ranks, here, network)
    where = f"of {ranks} GPUs" + (f" on {ranks // here} machines" if ranks > here else "")
    for name, label, share in (("all_reduce", "all-reduce", ALL_REDUCE), ("all_to_all", "all-to-all", ALL_TO_ALL)):
        rate, limit = found[name], limits[name]
        values = {"gb_per_s": round(rate, 2)}
        text = f"{label} {where}: {rate:,.0f} GB/s"
        if not limit:
            yield ok(f"{text}; no reference value for this card", **values)
        else:
            yield judged(rate / limit, share, f"{text}, {rate / limit:.0%} of {limit:,.0f}", _TALK, values)


_TALK = "see the lines of links, infiniband and nccl; NCCL_DEBUG=INFO logs NCCL's transport"


def expected_bandwidth(known: GpuSpec | None, ranks: int, here: int, network: float) -> dict[str, float]:
    """Bus bandwidth that the links allow, GB/s; 0: unknown.

    Within a host it is NVLink's. Over several hosts, an all-reduce crosses a host's boundary once in each direction
    with all adapters together. In an all-to-all, (n - here) / (n - 1) of a GPU's bytes go over its own adapter.
    """
    nvlink = known.nvlink if known else 0.0
    if ranks <= here:
        return {"all_reduce": nvlink, "all_to_all": nvlink}
    crossing = network / here * (ranks - 1) / (ranks - here)
    within = nvlink or network
    return {"all_reduce": min(within, network), "all_to_all": min(within, crossing)}


def measured(commands: Sequence[Sequence[str]]) -> list[Any]:
    """Results of `measure` processes, all run at once.

    Raises:
        MeasurementFailed: with the last line of the first failed process.
    """
    with tempfile.TemporaryDirectory() as scratch:
        started = []
        for number, words in enumerate(commands):
            with open(f"{scratch}/{number}", "w") as errors:
                started.append(subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", WORKER, *words], stdout=subprocess.PIPE,
                    stderr=errors, text=True,
                ))  # fmt: skip
        try:
            outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
        except subprocess.TimeoutExpired:
            raise MeasurementFailed(f"no result within {DEADLINE_S} s") from None
        finally:
            for process in started:
                process.kill()
                process.wait()
        for number, process in enumerate(started):
            if process.returncode:
                with open(f"{scratch}/{number}") as errors:
                    words = errors.read().strip().splitlines()
                raise MeasurementFailed((words or [f"exit status {process.returncode}"])[-1][:300])
    return [json.loads(each.strip().splitlines()[-1]) for each in outputs]
