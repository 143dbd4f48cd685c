"""Rehearses the way of weights from a trainer on a GPU to engines, on a machine without one:

    python -m tests.rehearsal.weights OUT [--only TEXT] [--stamp STAMP]

Each transport of mslime's own, from the ranks of a layout to two stand-in engines (`tests.fixtures.stand_in_engine`),
with gloo for NCCL: what the engines hold must be, bit for bit, what the trainer exports.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from mslime.convert.hf import HFCheckpoint
from mslime.weights.transport import TRANSPORTS
from tests.engines.megatron_ranks import run_ranks
from tests.fixtures.stand_in_engine import two_engines
from tests.rehearsal.cases import Case
from tests.rehearsal.outcomes import Check, attempt, directory_name, finish, options, true
from tests.rehearsal.worker import send

CASE = Case("weights", "qwen3-moe", {"tp": 2, "ep": 2}, {"params_dtype": "bfloat16"})


def arrived(transport: str, families: Path) -> list[Check]:
    """Two syncs by this transport."""
    with tempfile.TemporaryDirectory() as directory, two_engines() as engines:
        out, family = Path(directory), families / directory_name(CASE.family)
        urls = [engine.url for engine in engines]
        buckets = run_ranks(send, CASE.ranks, CASE, family, out, transport, urls, deadline_s=200)[0]
        source = HFCheckpoint(out / "exported")
        different: list[str] = []
        compared = 0
        for engine in engines:
            held = engine.held()
            different += sorted(held.keys() ^ source.info.keys())
            for name in held.keys() & source.info.keys():
                compared += 1
                if not torch.equal(held[name], source.tensor(name).to(held[name].dtype)):
                    different.append(name)
    return [
        true("tensors in two engines, sent twice", f"{compared} in {buckets} buckets", compared > 50 and buckets > 2),
        true("that are not the trainer's, bit for bit", str(len(different)), not different),
    ]


def main() -> int:
    """Run what has not been run, and print all of it."""
    given = options(__doc__).parse_args()
    names = [name for name in (f"weights by {transport}" for transport in TRANSPORTS) if given.only in name]
    families = given.out / "families"
    work = {name: partial(arrived, name.split()[-1], families) for name in names}
    return finish(names, lambda name: attempt(name, work[name]), given.out / "outcomes", given.stamp)


if __name__ == "__main__":
    sys.exit(main())
