"""What an engine's ranks hold of each tensor that they were sent, compared with what the trainer sent. Pure; asks
nobody.

An engine shares a tensor out among its ranks, whole, in parts or several times, and only it knows how. Each rank gives
two sums: of what it holds, and of the places in the tensor that this is of. Ranks of the same places must have the same
sum; those of different places must together have the sums of the whole, of which none is missing then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mslime.config.errors import sync_error
from mslime.engine_plugin.wire import CANNOT, parse_sum

Sums = Mapping[str, str]
"""Sum and places (`wire.format_sum`) of tensors, by Hugging Face name."""

_HALF, _WHOLE = 1 << 63, 1 << 64


def why_not(reported: Sequence[Sums]) -> str:
    """Why ranks cannot say what they hold of some tensors, or of all; empty where they have told everything."""
    return next((why for rank in reported if (why := rank.get(CANNOT))), "")


def compare(where: str, reported: Sequence[Sums], expected: Sums) -> int:
    """Compare what one engine's ranks hold with what is expected of the whole tensors; the number of tensors.

    Args:
        where: the engine, for the message.
        reported: by rank of the engine. If a rank cannot report everything (`why_not`), tensors of which it reports
            nothing are left out.

    Raises:
        WeightSyncError: a tensor differs, or is not all there.
    """
    parts = [rank for rank in reported if CANNOT in rank]
    told = {name: want for name, want in expected.items() if all(name in part for part in parts)}
    wrong = {name: fault for name, want in told.items() if (fault := _fault(name, reported, want))}
    if wrong:
        name, fault = next(iter(wrong.items()))
        raise sync_error(
            "check", f"{where}: {name}",
            f"{fault}; so it is with {len(wrong)} of {len(told)} tensors",
            "if the run's first sync was equal and this is its second, set weights.loader: model; else send weights "
            "another way (weights.transport)",
        )  # fmt: skip
    return len(told)


def _fault(name: str, ranks: Sequence[Sums], want: str) -> str:
    """What is wrong with a tensor; empty when nothing is."""
    by_places = dict[int, tuple[int, int]]()
    for number, rank in enumerate(ranks):
        said = rank.get(name, "")
        numbers = parse_sum(said)
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


def _added(numbers: Iterable[int]) -> int:
    """Modulo 2^64, as int64 has it."""
    return (sum(numbers) + _HALF) % _WHOLE - _HALF
