"""What a rehearsal found: one line for each thing that was compared, with the bound that it must keep.

Outcomes lie in files, one for each case, so that a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        what: is compared with what.
        value: of the difference, or how many; in words where it is no number.
        bound: the largest value that is well; None: `well` says it.
        well: whether it is as it should be.
    """

    what: str
    value: float | str
    bound: float | None
    well: bool

    def describe(self) -> str:
        """For a table."""
        value = f"{self.value:.1e}" if isinstance(self.value, float) else str(self.value)
        bound = "" if self.bound is None else f" (at most {self.bound:.0e})"
        return f"{'' if self.well else 'NOT WELL: '}{self.what} {value}{bound}"


def at_most(what: str, value: float, bound: float) -> Check:
    """A difference with its bound; one that is not a number is not well."""
    return Check(what, float(value), bound, bool(value <= bound))


def true(what: str, said: str, well: bool) -> Check:
    """Something that is or is not so."""
    return Check(what, said, None, well)


@dataclass(frozen=True)
class Outcome:
    """What one case came to.

    Attributes:
        name: of the case.
        checks: in order.
        error: what ended it early, in its own words; empty where nothing did.
        seconds: that it took.
    """

    name: str
    checks: Sequence[Check]
    error: str
    seconds: float

    @property
    def well(self) -> bool:
        """Whether it came to its end, and every check is kept. A case without checks has shown nothing."""
        return not self.error and bool(self.checks) and all(check.well for check in self.checks)

    def write(self, path: Path, stamp: str) -> None:
        """As JSON.

        Args:
            stamp: of what was rehearsed; `read` gives back outcomes of the same only.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".tmp").write_text(json.dumps({"stamp": stamp, "at": time.time(), **asdict(self)}, indent=1))
        path.with_suffix(".tmp").rename(path)

    @classmethod
    def read(cls, path: Path, stamp: str) -> Outcome | None:
        """None where there is none, or it is of something else."""
        if not path.exists():
            return None
        found = json.loads(path.read_text())
        if found["stamp"] != stamp:
            return None
        return cls(found["name"], [Check(**check) for check in found["checks"]], found["error"], found["seconds"])


def options(description: str | None) -> argparse.ArgumentParser:
    """What every part of the rehearsal is told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of references and outcomes")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--stamp", default="", help="what is rehearsed; outcomes of something else are made anew")
    return parser


def directory_name(name: str) -> str:
    """A name without characters that a shell minds."""
    return re.sub(r"\W+", "-", name)


def report(outcome: Outcome) -> None:
    """What a case came to, for whoever watches."""
    print(f"{'well' if outcome.well else 'NOT WELL'}  {outcome.name} ({outcome.seconds:.0f} s)", flush=True)
    for check in outcome.checks:
        if not check.well or check.bound is not None:
            print(f"      {check.describe()}")
    if outcome.error:
        print("      " + "\n      ".join(outcome.error.splitlines()[-12:]), flush=True)


def attempt(name: str, work: Callable[[], list[Check]]) -> Outcome:
    """Run one case: what it found, or what it raised."""
    begin = time.monotonic()
    try:
        return Outcome(name, work(), "", time.monotonic() - begin)
    except Exception as error:
        return Outcome(name, [], f"{type(error).__name__}: {error}", time.monotonic() - begin)


def finish(names: Sequence[str], work: Callable[[str], Outcome], directory: Path, stamp: str) -> int:
    """Run the cases that are not well yet, print all of them, and return an exit status."""
    outcomes: list[Outcome] = []
    for name in names:
        path = directory / f"{directory_name(name)}.json"
        outcome = Outcome.read(path, stamp)
        if outcome is None or not outcome.well:
            outcome = work(name)
            outcome.write(path, stamp)
        report(outcome)
        outcomes.append(outcome)
    return 0 if all(outcome.well for outcome in outcomes) else 1
