"""What an engine says its weights are, compared with what the trainer expects. Pure; asks nobody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mslime.config.errors import sync_error

Digests = Sequence[Mapping[str, str]]
"""Digests by parameter, for every tensor-parallel rank of an engine."""


def compare(where: str, reported: Sequence[Mapping[str, Any]], expected: Digests) -> int:
    """Compare one engine's `/weights_checker` answer with the expected digests; the number of parameters compared.

    Args:
        where: the engine, for the message.
        reported: `ranks` of the answer: `checksums` by parameter, and `parallelism_info`.
        expected: digests by parameter for every tensor-parallel rank.

    Raises:
        WeightSyncError: a parameter differs, is missing, or is one that the trainer does not send.
    """
    answered = {_tp_rank(rank): rank["checksums"] for rank in reported}
    if set(answered) != set(range(len(expected))):
        raise sync_error("check", where, f"ranks {sorted(answered)} answered, {len(expected)} hold weights")
    for tp_rank, want in enumerate(expected):
        got = answered[tp_rank]
        wrong = [name for name in want if got.get(name) != want[name]]
        unknown = [name for name in got if name not in want]
        if wrong or unknown:
            name = (wrong or unknown)[0]
            raise sync_error(
                "check", f"{where} rank {tp_rank}: {name}",
                f"{len(wrong)} of {len(want)} parameters differ from the trainer's and {len(unknown)} are not the "
                f"trainer's: the engine reports {got.get(name)}, the trainer expects {want.get(name)}",
                "if the run's first sync was equal and this is its second, set weights.loader to model; else the rules "
                "of the family do not fit this engine (docs/add_a_model.md)",
            )  # fmt: skip
    return sum(len(want) for want in expected)


def _tp_rank(rank: Mapping[str, Any]) -> int:
    info = rank["parallelism_info"]  # a list: one entry for each model (target, drafts) of the rank
    return int(info[0]["tp_rank"])
