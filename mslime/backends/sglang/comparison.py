"""What an engine's ranks hold of each tensor that they were sent, compared with what the trainer sent. Pure; asks
nobody.

An engine shares a tensor out among its ranks, whole, in parts or several times, and only it knows how. Each rank gives
two sums: of what it holds, and of the places in the tensor that this is of. Ranks of the same places must have the same
sum; those of different places must together have the sums of the whole, of which none is missing then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mslime.config.errors import sync_error
from mslime.engine_plugin.wire import CANNOT

Sums = Mapping[str, str]
"""Sum and places (`wire.as_text`) of tensors, by Hugging Face name."""

_HALF, _WHOLE = 1 << 63, 1 << 64


def why_not(reported: Sequence[Mapping[str, Any]]) -> str:
    """Why ranks cannot say what they hold of some tensors, or of all; empty where they have told everything."""
    return next((str(said) for rank in reported if (said := rank["checksums"].get(CANNOT))), "")


def compare(where: str, reported: Sequence[Mapping[str, Any]], expected: Sums) -> int:
    """Compare what one engine's ranks hold with what is expected of the whole tensors; the number of tensors.

    Args:
        where: the engine, for the message.
        reported: `ranks` of the engine's answer: `checksums` by tensor, and `parallelism_info`. Where a rank says that
            there is something that it cannot tell (`why_not`), tensors of which it tells nothing are left out.

    Raises:
        WeightSyncError: a tensor differs, or is not all there.
    """
    ranks = sorted(reported, key=_tp_rank)
    parts = [rank["checksums"] for rank in ranks if CANNOT in rank["checksums"]]
    told = {name: want for name, want in expected.items() if all(name in part for part in parts)}
    wrong = {name: fault for name, want in told.items() if (fault := _fault(name, ranks, want))}
    if wrong:
        name, fault = next(iter(wrong.items()))
        raise sync_error(
            "check", f"{where}: {name}",
            f"{fault}; so it is with {len(wrong)} of {len(told)} tensors",
            "if the run's first sync was equal and this is its second, set weights.loader: model; else send weights "
            "another way (weights.transport)",
        )  # fmt: skip
    return len(told)


def _fault(name: str, ranks: Sequence[Mapping[str, Any]], want: str) -> str:
    """What is wrong with a tensor; empty when nothing is."""
    by_places = dict[int, tuple[int, int]]()
    for rank in ranks:
        number, said = _tp_rank(rank), rank["checksums"].get(name)
        numbers = _numbers(said)
        if numbers is None:
            return f"of rank {number}, {said}" if said else f"rank {number} did not load it"
        total, places = numbers
        first, before = by_places.setdefault(places, (number, total))
        if total != before:
            return f"rank {number} holds something else than rank {first} in the same places"
    whole_total, whole_places = map(int, want.split())
    if _added(by_places) != whole_places:
        return "the engine does not hold all of it"
    return "" if _added(total for _, total in by_places.values()) == whole_total else "the engine holds something else"


def _numbers(said: str | None) -> tuple[int, int] | None:
    match (said or "").split():
        case [total, places] if total.lstrip("-").isdecimal() and places.lstrip("-").isdecimal():
            return int(total), int(places)
        case _:
            return None


def _added(numbers: Any) -> int:
    """Modulo 2^64, as int64 has it."""
    return (sum(numbers) + _HALF) % _WHOLE - _HALF


def _tp_rank(rank: Mapping[str, Any]) -> int:
    info = rank["parallelism_info"]  # a list: one entry for each model (target, drafts) of the rank
    return int(info[0]["tp_rank"])
