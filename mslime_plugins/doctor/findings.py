"""Results of a check, and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warn", "fail", "cannot see"]
STATUSES: tuple[Status, ...] = ("ok", "warn", "fail", "cannot see")


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        status: `cannot see`: the thing is absent, or this process may not read it.
        found: the value read or measured, with its unit, and the expected value if known.
        todo: advice; empty if nothing is to be done.
        values: the numbers of `found`, for JSON; the unit is in the name.
    """

    status: Status
    found: str
    todo: str = ""
    values: Mapping[str, float | int | str] = field(default_factory=dict)


def ok(found: str, **values: float | int | str) -> Finding:
    """A finding without action."""
    return Finding("ok", found, "", values)


def warn(found: str, todo: str, **values: float | int | str) -> Finding:
    """A finding for a run that works, but slower or closer to a limit than necessary."""
    return Finding("warn", found, todo, values)


def fail(found: str, todo: str, **values: float | int | str) -> Finding:
    """A finding for a run that will not work, or be far slower than the hardware's nominal speed."""
    return Finding("fail", found, todo, values)


def unseen(found: str, todo: str = "") -> Finding:
    """A finding for an unknown state."""
    return Finding("cannot see", found, todo)


@dataclass(frozen=True)
class Gpu:
    """One GPU as reported by its driver. None: the driver, or this kind of GPU, does not report it.

    Attributes:
        memory, used: bytes.
        uncorrected: ECC errors since the driver was loaded that could not be repaired.
        remap_pending, remap_failed: whether memory rows wait for a reset to be remapped, or could not be remapped.
        power_limit, power_default: watts.
        temperature: degrees Celsius.
        slowed_by: reasons for a reduced clock, other than idleness.
        pcie_width, pcie_width_most: lanes in use, and most lanes of the slot and the GPU.
        links: NVLinks that are up.
        processes: ids of processes with memory on it.
    """

    index: int
    name: str
    memory: int
    used: int
    ecc: bool | None = None
    uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    persistence: bool | None = None
    power_limit: float | None = None
    power_default: float | None = None
    temperature: int | None = None
    slowed_by: tuple[str, ...] = ()
    pcie_width: int | None = None
    pcie_width_most: int | None = None
    links: int = 0
    mig: bool = False
    processes: tuple[int, ...] = ()


@dataclass(frozen=True)
class DoctorOptions:
    """The user's options.

    Attributes:
        directory: of the checkpoints.
        model: a checkpoint for the test step; None: create a tiny one.
        full: measure longer, and start a trainer and an engine.
        nodes, node_rank, head: number of hosts in collectives, this one's index, HOST:PORT of index 0.
    """

    directory: Path = Path("outputs")
    model: Path | None = None
    full: bool = False
    nodes: int = 1
    node_rank: int = 0
    head: str = ""


@dataclass(frozen=True)
class Node:
    """The checked host.

    Attributes:
        gpus: those that the driver reports.
        blind: why there are none; empty if there are some.
        root: directory above all system paths.
    """

    options: DoctorOptions
    gpus: tuple[Gpu, ...] = ()
    blind: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    root: Path = Path("/")

    def read(self, path: str) -> str | None:
        """The text of a system file; None: missing, or not readable."""
        try:
            return (self.root / path.lstrip("/")).read_text().strip()
        except OSError:
            return None

    def listed(self, path: str) -> list[str]:
        """Names in a system directory, sorted; empty if it is missing."""
        directory = self.root / path.lstrip("/")
        return sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []


@dataclass(frozen=True)
class HostCheck:
    """One check of a host.

    Attributes:
        name: for --only and --skip.
        about: its subject, in a few words.
        run: returns one or more findings.
        full: runs only with --full, or by its name.
    """

    name: str
    about: str
    run: Callable[[Node], Iterable[Finding]]
    full: bool = False
