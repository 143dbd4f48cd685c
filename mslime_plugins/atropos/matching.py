"""Match a submitted group with recorded tokens.

A sequence is recognised by its tokens: they must begin with all tokens up to the end of one of the model's turns. The
model did not sample later tokens, nor those between turns, so these are not trained. Each turn is trained once, in the
first group that contains it. Pure data, no waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mslime.data.sample import Sample
from mslime.rollout.agents.session import ReplyTurn
from mslime.rollout.returned import TakenTurn
from mslime_plugins.atropos.pushed import GroupRefusedError, PushedSequence

WHITE = 16
"""Longest run of special tokens and white space that a chat template may have added, and an environment counts as
sampled."""


@dataclass(frozen=True)
class MatchedSequence:
    """A submitted sequence with its recording.

    Attributes:
        source, end: its tokens are the first `end` ones of `source`.
        turns: trained in it. new: the same, as recorded.
        steps: (position of a turn's last token, its advantage), if the environment gives advantages.
        unsampled: tokens that the environment marked for training, and the model did not sample: white space.
        repeated: sampled tokens that the environment marked for training, and another sequence trains.
    """

    source: Sample
    end: int
    turns: tuple[TakenTurn, ...]
    new: tuple[ReplyTurn, ...]
    score: float
    steps: tuple[tuple[int, float], ...]
    unsampled: int
    repeated: int


def recognise(
    number: int, pushed: PushedSequence, recorded: Iterable[ReplyTurn], taken: Collection[ReplyTurn],
    text: Callable[[list[int]], str],
) -> MatchedSequence:  # fmt: skip
    """Match a submitted sequence with a recorded one.

    Args:
        number: of the sequence in its group, for messages.
        recorded: turns, including all that can have led to it.
        taken: turns that other sequences already train.
        text: of token ids.

    Raises:
        GroupRefusedError: it was not recorded, or marks tokens for training that the model did not sample.
    """
    last = _longest(number, pushed.tokens, recorded, taken, text)
    path, end = last.path(), last.end
    sampled = np.zeros(len(pushed.tokens), np.bool_)
    for turn in path:
        sampled[turn.start : turn.end] = True
    _check_unsampled(number, pushed, sampled, text)
    turns, new, steps, repeated = list[TakenTurn](), list[ReplyTurn](), list[tuple[int, float]](), 0
    for turn in path:
        wanted = pushed.wanted[turn.start : turn.end]
        if not wanted.any():
            continue
        if turn in taken:
            repeated += int(wanted.sum())
            continue
        masked = ((turn.start, turn.end),) if pushed.zero else _runs(~wanted, turn.start)
        turns.append(TakenTurn(turn.start, turn.end, "stop" if turn.finish == "stop" else "length", masked))
        new.append(turn)
        if pushed.advantages is not None:
            steps.append((turn.end - 1, _one_advantage(number, pushed, turn)))
    return MatchedSequence(
        last.sample, end, tuple(turns), tuple(new), pushed.score, tuple(steps), int((pushed.wanted & ~sampled).sum()),
        repeated,
    )  # fmt: skip


def _longest(
    number: int, tokens: NDArray[np.int32], recorded: Iterable[ReplyTurn], taken: Collection[ReplyTurn],
    text: Callable[[list[int]], str],
) -> ReplyTurn:  # fmt: skip
    """The turn with the longest whole sequence that begins these tokens. The model may produce equal sequences: of
    these, the one with the fewest taken turns."""
    whole, nearest, common = list[ReplyTurn](), None, 0
    for turn in recorded:
        shared = shared_length(tokens, turn.sample.tokens[: turn.end])
        if shared == turn.end:
            whole.append(turn)
        elif shared > common:
            nearest, common = turn, shared
    if whole:
        return max(whole, key=lambda turn: (turn.end, sum(t not in taken for t in turn.path())))
    if nearest is None:
        rule = f"no recorded request begins with its {len(tokens)} tokens, {_shown(tokens, 0, text)}"
        raise GroupRefusedError("unknown_sequence", f"sequence {number}: {rule}, or its record has expired", HINT)
    theirs = _shown(tokens, common, text) if common < len(tokens) else "its end"
    ours = _shown(nearest.sample.tokens[: nearest.end], common, text)
    raise GroupRefusedError("unknown_sequence", f"sequence {number}: it differs from the recorded tokens: at token "
                            f"{common} of {len(tokens)} it has {theirs}, but the record has {ours}", HINT)  # fmt: skip


HINT = (
    "send the tokens that the server returned (server_type: sglang or vllm with managed_server), not a text that was "
    "tokenised again; or raise rollout.atropos.keep_s"
)


def shared_length(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Length of the common prefix of two sequences."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n


def _check_unsampled(
    number: int, pushed: PushedSequence, sampled: NDArray[np.bool_], text: Callable[[list[int]], str]
) -> None:
    """Check that tokens marked for training but not sampled are white space of a template."""
    for start, stop in _runs(pushed.wanted & ~sampled, 0):
        ids = pushed.tokens[start:stop].tolist()
        if len(ids) > WHITE or text(ids).strip():
            raise GroupRefusedError(
                "not_sampled",
                f"sequence {number}: tokens {start} to {stop} are unmasked, but the "
                f"model did not sample {text(ids)!r:.60}",
                "mask with -100 the tokens that the model did not sample",
            )


def _one_advantage(number: int, pushed: PushedSequence, turn: ReplyTurn) -> float:
    """Advantage of a turn, which is one decision here."""
    assert pushed.advantages is not None
    wanted = pushed.wanted[turn.start : turn.end]
    found = np.unique(pushed.advantages[turn.start : turn.end][wanted])
    if len(found) > 1:
        rule = f"the advantages of tokens {turn.start} to {turn.end}, one reply of the model, differ"
        raise GroupRefusedError(
            "advantages", f"sequence {number}: {rule}: {found[:3].tolist()}", "send one advantage for the reply"
        )
    return float(found[0])


def _runs(flags: NDArray[np.bool_], offset: int) -> tuple[tuple[int, int], ...]:
    """(start, end) of the runs of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return tuple((int(a) + offset, int(b) + offset) for a, b in zip(edges[::2], edges[1::2], strict=True))


def _shown(tokens: Sequence[int] | NDArray[np.int32], at: int, text: Callable[[list[int]], str]) -> str:
    ids = np.asarray(tokens)[at : at + 8].tolist()
    return f"{ids} ({text(ids)!r:.40})"
