"""The table of a rehearsal, in Markdown:  python -m tests.rehearsal.table OUTCOMES [--stamp STAMP]

Of outcomes of one state of the project. Ends with 1 where one of them is not well, or there are none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.rehearsal.outcomes import Check, Outcome

SHORT = {
    "logits - transformers'": "logits",
    "log-probs - the CPU trainer's": "log-probs",
    "gradients - the CPU trainer's": "gradients",
    "weights after a step - the CPU trainer's": "weights after a step",
    "loss - the CPU trainer's": "loss",
    "grad_norm / the CPU trainer's - 1": "grad_norm",
}
"""The columns of a trainer's numbers, by what `cases.judge` calls them."""
OTHERS = ("adapters", "engine", "full size", "Triton", "Transformer Engine", "weights")
"""What the names of cases begin with that are no trainers."""


def number(checks: Iterable[Check], what: str) -> str:
    """The cell of one comparison."""
    for check in checks:
        if check.what == what:
            return f"{check.value:.1e}{'' if check.well else ' NOT WELL'}"
    return "-"


def trainers(outcomes: list[Outcome]) -> list[str]:
    """A line for each trainer that was rehearsed."""
    head = f"| trainer | {' | '.join(SHORT.values())} | checkpoint, export, next step |"
    lines = [head, "|---" * (len(SHORT) + 2) + "|"]
    for outcome in outcomes:
        cells = [number(outcome.checks, what) for what in SHORT]
        others = [check.describe() for check in outcome.checks if check.what not in SHORT and not check.well]
        said = "NOT WELL: " + outcome.error.strip().splitlines()[-1] if outcome.error else "; ".join(others) or "well"
        lines.append(f"| {outcome.name} | {' | '.join(cells)} | {said} |")
    return lines


def the_rest(outcomes: list[Outcome]) -> list[str]:
    """A line for each of the rest."""
    lines = ["| other | what was found |", "|---|---|"]
    for outcome in outcomes:
        said = outcome.error.strip().splitlines()[-1:] or [check.describe() for check in outcome.checks]
        lines.append(f"| {outcome.name} | {'' if outcome.well else 'NOT WELL: '}{'; '.join(said)} |")
    return lines


def main() -> int:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outcomes", type=Path)
    parser.add_argument("--stamp", default="")
    given = parser.parse_args()
    paths = sorted(given.outcomes.glob("*.json"), key=lambda path: path.stat().st_mtime)
    found = [outcome for path in paths if (outcome := Outcome.read(path, given.stamp)) is not None]
    trained = [o for o in found if any(check.what in SHORT for check in o.checks) or not o.name.startswith(OTHERS)]
    rest = [o for o in found if o not in trained]
    print("\n".join([*trainers(trained), "", *the_rest(rest), ""]))
    well = sum(outcome.well for outcome in found)
    print(f"{well} of {len(found)} cases are well")
    return 0 if found and well == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
