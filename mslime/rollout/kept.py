"""What books leave behind for a later service: the groups and the ledger of a state, and of an outline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from mslime.data.ledger import Ledger
from mslime.data.sample import Group, check_invariants
from mslime.rollout.state import Columns, pack_groups


@dataclass(frozen=True)
class Kept:
    """What a state holds of books.

    Attributes:
        resting: interrupted groups, and those that were running.
        counters: totals since the start of the run.
        untrained: whether the groups that were taken last are among the accepted ones, and the ledger is as before.
    """

    accepted: list[Group]
    resting: list[Group]
    ledger: Ledger
    counters: dict[str, int]
    untrained: bool

    def state(self, version: int, next_group_id: int) -> tuple[dict[str, Any], Columns]:
        """See `Books.state_dict`."""
        headers, columns = pack_groups([*self.accepted, *self.resting])
        numbers = _numbers(version, next_group_id, self.ledger, self.counters)
        return {"accepted": len(self.accepted), "groups": headers, **numbers}, columns


@dataclass(frozen=True)
class Begun:
    """What an outline holds of books.

    Attributes:
        headers, prompts: of every group, in order of their ids. ledger: without pending tokens.
    """

    headers: list[dict[str, Any]]
    prompts: list[NDArray[Any]]
    ledger: Ledger
    counters: dict[str, int]

    def state(self, version: int, next_group_id: int) -> tuple[dict[str, Any], Columns]:
        """See `Books.outline`."""
        numbers = _numbers(version, next_group_id, self.ledger, self.counters)
        return {"accepted": 0, "groups": [], "begun": self.headers, **numbers}, {"prompts": self.prompts}


def _numbers(version: int, next_group_id: int, ledger: Ledger, counters: Mapping[str, int]) -> dict[str, Any]:
    """What a state holds beside groups."""
    return {
        "version": version,
        "next_group_id": next_group_id,
        "ledger": ledger.state_dict(),
        "counters": dict(counters),
    }


def trainable(groups: Sequence[Group]) -> int:
    """Tokens of `groups` that may enter the loss."""
    return sum(s.trainable_tokens for g in groups for s in g.samples)


def sound(groups: Sequence[Group], ledger: Ledger) -> list[Group]:
    """The groups that may be saved: one that breaks an invariant would be refused at every resume, and what is no JSON
    cannot be written. It is booked as dropped."""
    kept: list[Group] = []
    for group in groups:
        try:
            for sample in group.samples:
                check_invariants(sample)
                json.dumps([sample.label, sample.metadata])
            kept.append(group)
        except (AssertionError, TypeError, ValueError) as error:
            print(f"group {group.group_id} of {group.source} is left out of the checkpoint: {error}", flush=True)
            ledger.drop(trainable([group]), "failed")
    return kept
