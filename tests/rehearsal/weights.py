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

from mslime.config.transports import TRAITS
from mslime.convert.hf import HFCheckpoint
from tests.engines.megatron_ranks import run_ranks
from tests.fixtures.stand_in_engine import two_engines
from tests.rehearsal.cases import Case
from tests.rehearsal.outcomes import Check, attempt, directory_name, finish, options, true
from tests.rehearsal.worker import send

CASE = Case("weights", "qwen3-moe", {"tp": 2, "ep": 2}, {"params_dtype": "bfloat16"})
IN_FP8 = Case("weights of a trainer in FP8", "qwen3-moe", {"tp": 2, "ep": 2}, {}, "blockwise")
"""Each sync follows a step: what is sent are the parameters, not the copies in FP8 that were multiplied with."""


def arrived(case: Case, transport: str, families: Path) -> list[Check]:
    """Two syncs by this transport."""
    with tempfile.TemporaryDirectory() as directory, two_engines() as engines:
        out, family = Path(directory), families / directory_name(case.family)
        urls = [engine.url for engine in engines]
        buckets = run_ranks(send, case.ranks, case, family, out, transport, urls, deadline_s=400)[0]
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
    # The stand-in engines have no GPU whose memory they could open by a handle, and Mooncake's package is not there.
    left_out = ("handles", "checkpoint_engine", "mooncake")
    transports = (transport for transport in TRAITS if transport not in left_out)
    tried = {f"weights by {transport}": (CASE, transport) for transport in transports}
    tried["weights by shm, of a trainer in FP8"] = IN_FP8, "shm"
    work = {name: partial(arrived, *what, given.out / "families") for name, what in tried.items() if given.only in name}
    return finish(list(work), lambda name: attempt(name, work[name]), given.out / "outcomes", given.stamp)


if __name__ == "__main__":
    sys.exit(main())
