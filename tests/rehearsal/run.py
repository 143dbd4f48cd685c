"""Rehearses the CUDA trainer on a machine without a GPU, case by case:

    python -m tests.rehearsal.run OUT [--only TEXT] [--list]

In the GPU environment, with the fake runtime loaded (scripts/rehearse_gpu.sh does both). OUT has the references; what a
case came to is kept there, so that a run that was interrupted goes on. Ends with 1 where something is not well.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.engines.megatron_ranks import RankFailed, run_ranks
from tests.rehearsal.cases import Case, cases, judge
from tests.rehearsal.outcomes import Outcome, directory_name, finish, options
from tests.rehearsal.worker import rehearse

DEADLINE_S = 1200


def one(case: Case, families: Path) -> Outcome:
    """Rehearse one case in processes of its own."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as out:
        try:
            family = families / directory_name(case.family)
            found = run_ranks(rehearse, case.ranks, case, family, Path(out), deadline_s=DEADLINE_S)
        except RankFailed as error:
            return Outcome(case.name, [], str(error), time.monotonic() - begin)
    return Outcome(case.name, judge(case, found), "", time.monotonic() - begin)


def main() -> int:
    """Run what has not been run, and print all of it."""
    parser = options(__doc__)
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    given = parser.parse_args()
    chosen = [case for case in cases() if given.only in case.name]
    if given.list:
        print("\n".join(case.name for case in chosen))
        return 0
    by_name = {case.name: case for case in chosen}
    return finish(
        list(by_name), lambda name: one(by_name[name], given.out / "families"), given.out / "outcomes", given.stamp
    )


if __name__ == "__main__":
    sys.exit(main())
