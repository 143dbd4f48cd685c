"""What a check says, and what it may look at."""

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
        status: `cannot see`: the thing is not here, or this process may not look at it; nobody knows how it is.
        found: what was read or measured, with its unit, and what was expected where that is known.
        todo: what to do about it; empty where nothing is to be done.
        values: the numbers of `found`, for JSON; the unit is in the name.
    """

    status: Status
    found: str
    todo: str = ""
    values: Mapping[str, float | int | str] = field(default_factory=dict)


def ok(found: str, **values: float | int | str) -> Finding:
    """Nothing to do."""
    return Finding("ok", found, "", values)


def warn(found: str, todo: str, **values: float | int | str) -> Finding:
    """A run works, and is slower or nearer to a limit than it need be."""
    return Finding("warn", found, todo, values)


def fail(found: str, todo: str, **values: float | int | str) -> Finding:
    """A run will not work, or far below what the machine is sold for."""
    return Finding("fail", found, todo, values)


def unseen(found: str, todo: str = "") -> Finding:
    """Nobody knows."""
    return Finding("cannot see", found, todo)


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver tells. None: the driver, or this kind of GPU, does not tell.

    Attributes:
        memory, used: bytes.
        uncorrected: ECC errors since the driver was loaded that could not be repaired.
        remap_pending, remap_failed: whether rows of memory wait for a reset to be replaced, or could not be.
        power_limit, power_default: watts.
        temperature: degrees Celsius.
        slowed_by: why its clock is below what it could be, other than that it has nothing to do.
        pcie_width, pcie_width_most: lanes in use now, and that the slot and the GPU could use.
        links: NVLinks that are up.
        processes: ids of those that have memory on it.
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
class Options:
    """What the user asked for.

    Attributes:
        directory: where checkpoints are to be written.
        model: a checkpoint for the step; None: a tiny one is made.
        full: measure longer, and start a trainer and an engine.
        nodes, node_rank, head: machines that take part in collectives, this one's number, HOST:PORT of number 0.
    """

    directory: Path = Path("outputs")
    model: Path | None = None
    full: bool = False
    nodes: int = 1
    node_rank: int = 0
    head: str = ""


@dataclass(frozen=True)
class Node:
    """The machine.

    Attributes:
        gpus: those that the driver shows.
        blind: why there are none; empty where there are.
        root: what paths of the system are below.
    """

    options: Options
    gpus: tuple[Gpu, ...] = ()
    blind: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    root: Path = Path("/")

    def read(self, path: str) -> str | None:
        """The text of a file of the system; None: it is not there, or not for us."""
        try:
            return (self.root / path.lstrip("/")).read_text().strip()
        except OSError:
            return None

    def listed(self, path: str) -> list[str]:
        """Names in a directory of the system, sorted; none where it is not there."""
        directory = self.root / path.lstrip("/")
        return sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []


@dataclass(frozen=True)
class Check:
    """One part of a machine.

    Attributes:
        name: for --only and --skip.
        about: what is looked at, in a few words.
        run: gives one finding or several.
        full: only with --full, or by its name.
    """

    name: str
    about: str
    run: Callable[[Node], Iterable[Finding]]
    full: bool = False
