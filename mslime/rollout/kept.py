"""What books leave behind for a later service: the groups and the ledger of a state, and of an outline."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mslime.data.ledger import Ledger
from mslime.data.sample import Group, check_invariants
from mslime.data.source import Prompt
from mslime.rollout.state import Columns, PackedGroups, Stored, begun_anew, check_stored, unpack_groups

State = tuple[dict[str, Any], Columns]


@dataclass(frozen=True)
class Kept:
    """What a state holds of books.

    Attributes:
        accepted, resting: groups; those that were running rest.
        counters: totals since the start of the run.
        untrained: whether the groups that were taken last are among the accepted ones, and the ledger is as before.
    """

    accepted: PackedGroups
    resting: PackedGroups
    ledger: Ledger
    counters: dict[str, int]
    untrained: bool


@dataclass(frozen=True)
class Begun:
    """What an outline holds of books.

    Attributes:
        groups: as they were before anything was generated. ledger: without pending tokens.
    """

    groups: PackedGroups
    ledger: Ledger
    counters: dict[str, int]


def state_of(
    parts: Sequence[Kept], ledger: Ledger, counters: Mapping[str, int], version: int, next_group_id: int
) -> State:
    """(JSON-able header, columns) from which books continue without losing a token.

    Args:
        parts: of all managers. ledger, counters: of the run.
    """
    accepted, _ = PackedGroups.joined([part.accepted for part in parts])
    groups, columns = PackedGroups.joined([*(part.accepted for part in parts), *(part.resting for part in parts)])
    numbers = _numbers(version, next_group_id, ledger, counters)
    return {"accepted": len(accepted), "groups": groups, **numbers}, columns


def outline_of(
    parts: Sequence[Begun], ledger: Ledger, counters: Mapping[str, int], version: int, next_group_id: int
) -> State:
    """A small state for the case that the groups are lost: those that are not trained begin anew from their prompts,
    and their tokens are dropped. Holds for a checkpoint after the step taken last."""
    begun, columns = PackedGroups.joined([part.groups for part in parts])
    return {"accepted": 0, "groups": [], "begun": begun, **_numbers(version, next_group_id, ledger, counters)}, columns


@dataclass(frozen=True)
class Continued:
    """What a file of `state_of` or `outline_of` holds.

    Attributes:
        accepted, resting: groups. counters: totals since the start of the run.
    """

    accepted: list[Group]
    resting: list[Group]
    ledger: Ledger
    counters: dict[str, int]
    version: int
    next_group_id: int


def continued(header: Mapping[str, Any], columns: Columns | Stored, make: Callable[[int, Prompt, int], Group], *,
              taught: bool) -> Continued:  # fmt: skip
    """Read a state back.

    Args:
        make: makes a group anew from its id, prompt and size.
        taught: a served teacher scores responses, so that groups from a run without one are not complete.

    Raises:
        ValueError: the groups and the ledger do not agree.
    """
    groups = unpack_groups(header["groups"], columns)
    accepted, resting = groups[: header["accepted"]], groups[header["accepted"] :]
    check_stored(groups)
    resting += begun_anew(header.get("begun", []), columns, make)
    if taught:
        resting += [group for group in accepted if _untaught(group)]
        accepted = [group for group in accepted if not _untaught(group)]
    ledger = Ledger.from_state(header["ledger"])
    if (alive := trainable([*accepted, *resting])) != ledger.pending:
        raise ValueError(f"{ledger.pending} tokens are pending in the books, {alive} are held")
    numbers = (int(header["version"]), int(header["next_group_id"]))
    return Continued(accepted, resting, ledger, dict(header["counters"]), *numbers)


def _untaught(group: Group) -> bool:
    return any(sample.teacher_log_probs is None for sample in group.samples)


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
