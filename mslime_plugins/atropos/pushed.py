"""A submitted group: Atropos' ScoredData, read from JSON and checked."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

REASONS = (
    "malformed", "unsupported", "too_large", "too_small", "unknown_environment", "unknown_sequence", "not_sampled",
    "nothing_new", "advantages", "no_room", "repeated",
)  # fmt: skip
"""Why a group is not trained; docs/environments.md explains each."""
COUNTED = ("groups", *REASONS, "unsampled_tokens", "repeated_tokens")
"""Names of counters, logged as rollout/atropos/<name>."""
UNTRAINED = -100
"""Mask value of a context token."""


class GroupRefusedError(Exception):
    """A group that is not trained.

    Attributes:
        reason: one of `REASONS`.
    """

    def __init__(self, reason: str, rule: str, hint: str) -> None:
        assert reason in REASONS, reason
        self.reason = reason
        super().__init__(f"{rule}\n  hint: {hint}")


@dataclass(frozen=True)
class PushedSequence:
    """One rollout of a group.

    Attributes:
        tokens: [T] int32. wanted: [T] bool, tokens that the environment marks for training.
        score: of the rollout.
        advantages: [T] of each token, if the environment gives any.
        zero: its advantage is set to zero: it counts in the group, but is not trained.
    """

    tokens: NDArray[np.int32]
    wanted: NDArray[np.bool_]
    score: float
    advantages: NDArray[np.float64] | None
    zero: bool


@dataclass(frozen=True)
class PushedGroup:
    """A group.

    Attributes:
        env_id: of the environment, if given.
        digest: equal for equal groups.
    """

    sequences: tuple[PushedSequence, ...]
    env_id: int | None
    digest: bytes


def read_group(given: object) -> PushedGroup:
    """Read a group from its JSON. Raises GroupRefusedError if it is malformed or asks for unsupported training."""
    if not isinstance(given, Mapping):
        raise _malformed("group", given, "must be an object")
    data = cast("Mapping[str, Any]", given)
    _refuse_unsupported(data)
    tokens = _rows(data, "tokens")
    count = len(tokens)
    masks, scores = _rows(data, "masks", count), _list(data, "scores", count)
    advantages = _list(data, "advantages", count) if data.get("advantages") else [None] * count
    overrides = _list(data, "overrides", count) if data.get("overrides") else [None] * count
    env_id = data.get("env_id")
    if env_id is not None and (isinstance(env_id, bool) or not isinstance(env_id, int)):
        raise _malformed("env_id", env_id, "must be a number or null")
    sequences = tuple(
        _sequence(i, *parts) for i, parts in enumerate(zip(tokens, masks, scores, advantages, overrides, strict=True))
    )
    return PushedGroup(sequences, env_id, _digest(sequences))


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    """Reject training by anything other than scores or advantages."""
    for name, feature in (
        ("images", "image input"),
        ("distill_token_ids", "distillation"),
        ("distill_logprobs", "distillation"),
    ):
        given = data.get(name)
        if given and any(part is not None for part in (given if isinstance(given, list) else [given])):
            raise GroupRefusedError("unsupported", f"{name}: {feature} from environments is not supported",
                                    "remove it; see teacher for distillation")  # fmt: skip
    many: list[Any] = data.get("overrides") if isinstance(data.get("overrides"), list) else []  # type: ignore[assignment]
    for given in (data.get("group_overrides"), *many):
        if isinstance(given, Mapping) and given.get("sft"):
            raise GroupRefusedError("unsupported", "sft: tokens that the model did not sample are not a rollout",
                                    "train them in a separate run (train.task: sft)")  # fmt: skip


def _sequence(
    index: int, tokens: Sequence[Any], mask: Sequence[Any], score: object, advantages: object, override: object
) -> PushedSequence:
    ids = _ids(tokens, f"tokens[{index}]")
    marks = _ids(mask, f"masks[{index}]", least=UNTRAINED)
    if len(marks) != len(ids):
        raise _malformed(f"masks[{index}]", f"{len(marks)} entries", f"must be as long as its {len(ids)} tokens")
    wanted = marks != UNTRAINED
    if (marks[wanted] != ids[wanted]).any():
        at = int(np.flatnonzero(wanted & (marks != ids))[0])
        raise _malformed(f"masks[{index}][{at}]", int(marks[at]), f"must be -100 or the token, {int(ids[at])}")
    if not _is_number(score):
        raise _malformed(f"scores[{index}]", score, "must be a finite number")
    zero = isinstance(override, Mapping) and bool(cast("Mapping[str, Any]", override).get("set_advantage_to_zero"))
    return PushedSequence(ids, wanted, float(cast("float", score)), _advantages(index, advantages, len(ids)), zero)


def _advantages(index: int, given: object, length: int) -> NDArray[np.float64] | None:
    """[length] of each token, from a number for each, or one for all."""
    if given is None:
        return None
    numbers = [given] * length if _is_number(given) else given
    if not isinstance(numbers, list) or len(cast("list[Any]", numbers)) != length:
        raise _malformed(f"advantages[{index}]", given, f"must be {length} numbers, one for each token, or one for all")
    if not all(_is_number(number) for number in cast("list[Any]", numbers)):
        raise _malformed(f"advantages[{index}]", given, "must be finite numbers")
    return np.asarray(numbers, np.float64)


def _list(data: Mapping[str, Any], name: str, count: int | None = None) -> list[Any]:
    given = data.get(name)
    if not isinstance(given, list) or not given:
        raise _malformed(name, given, "must be a list with an entry for each rollout")
    if count is not None and len(cast("list[Any]", given)) != count:
        raise _malformed(name, f"{len(cast('list[Any]', given))} entries", f"must have {count}, as tokens has")
    return cast("list[Any]", given)


def _rows(data: Mapping[str, Any], name: str, count: int | None = None) -> list[list[Any]]:
    rows = _list(data, name, count)
    for i, row in enumerate(rows):
        if not isinstance(row, list) or not row:
            raise _malformed(f"{name}[{i}]", row, "must be a list of token ids, and not empty")
    return rows


def _ids(row: Sequence[Any], where: str, least: int = 0) -> NDArray[np.int32]:
    if not all(type(i) is int and least <= i < 2**31 for i in row):
        wrong = next(i for i in row if type(i) is not int or not least <= i < 2**31)
        raise _malformed(where, wrong, "must be token ids")
    return np.asarray(row, np.int32)


def _is_number(found: object) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)


def _malformed(field: str, value: object, rule: str) -> GroupRefusedError:
    return GroupRefusedError("malformed", f"{field} = {value!r:.60} {rule}", "fix the group that the environment sends")


def _digest(sequences: Sequence[PushedSequence]) -> bytes:
    total = hashlib.blake2b(digest_size=16)
    for one in sequences:
        advantages = b"" if one.advantages is None else one.advantages.tobytes()
        for part in (one.tokens.tobytes(), one.wanted.tobytes(), repr((one.score, one.zero)).encode(), advantages):
            total.update(len(part).to_bytes(8) + part)
    return total.digest()
