"""Rehearses the training of adapters on the CUDA path, on a machine without a GPU:

    python -m tests.rehearsal.adapters OUT [--only TEXT] [--stamp STAMP]

Three steps with the base as reference policy, on Transformer Engine's layers, against one process of the CPU trainer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.engines.megatron_parity import Case
from tests.engines.megatron_ranks import run_ranks
from tests.engines.trainer_ranks import PARALLEL
from tests.rehearsal.cases import RECOMPUTE, describe
from tests.rehearsal.outcomes import Check, at_most, attempt, directory_name, finish, options, true
from tests.rehearsal.reference import ADAPTED
from tests.rehearsal.worker import adapt

LAYOUTS: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    ({}, {}),
    ({"tp": 2, "ep": 2}, {}),
    ({"pp": 2}, RECOMPUTE),
    ({"dp": 2, "ep": 2}, {"use_distributed_optimizer": True}),
)


def cases() -> dict[str, tuple[str, Case]]:
    """(family, what its trainer is) by name."""
    found: dict[str, tuple[str, Case]] = {}
    for family in ADAPTED:
        for layout, own in LAYOUTS:
            sizes = {PARALLEL[key]: size for key, size in layout.items() if key != "dp"}
            world = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)
            megatron = {"params_dtype": "float32", **sizes, **own}
            found[f"adapters of {family}, {describe(layout)}"] = family, Case(world, megatron)
    return found


def trained(family: str, case: Case, families: Path) -> list[Check]:
    """One case in processes of its own."""
    root = families / directory_name(family)
    ranks = run_ranks(adapt, case.world, root / "checkpoint", case, root / "adapters.pt", deadline_s=400)
    return judge(ranks)


def judge(ranks: Sequence[Mapping[str, Any]]) -> list[Check]:
    """What the numbers of `lora_ranks.compare` say."""

    def worst(key: str) -> float:
        return float(np.max([float(rank[key]) for rank in ranks if rank[key] is not None]))  # NaN where one is

    trained, buffers = sum(rank["factors"] for rank in ranks), sum(rank["buffers"] for rank in ranks)
    of_base, moved = sum(len(rank["not_frozen"]) for rank in ranks), worst("moved")
    checks = [
        true("numbers in factors, as in the CPU trainer's", str(trained), trained > 0 and worst("begin") == 0),
        at_most("log-probs - the CPU trainer's", worst("log_probs"), 2e-5),
        at_most("loss - the CPU trainer's", worst("loss"), 1e-5),
        at_most("factors after three steps - the CPU trainer's", worst("after"), 1e-5),
        true("how far they moved", f"{moved:.0e}", moved > 1e-3),
        true("numbers with a gradient buffer", str(buffers), trained <= buffers <= 1.5 * trained + 512 * len(ranks)),
        true("tensors of the base that train", str(of_base), not of_base),
    ]
    if any(rank["gradients"] is not None for rank in ranks):  # a distributed optimizer's are in parts
        checks.append(at_most("gradients - the CPU trainer's", worst("gradients"), 1e-5))
    return checks


def main() -> int:
    """Run what has not been run, and print all of it."""
    given = options(__doc__).parse_args()
    work = {
        name: partial(trained, family, case, given.out / "families")
        for name, (family, case) in cases().items()
        if given.only in name
    }
    return finish(list(work), lambda name: attempt(name, work[name]), given.out / "outcomes", given.stamp)


if __name__ == "__main__":
    sys.exit(main())
