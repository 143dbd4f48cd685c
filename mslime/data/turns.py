"""Time within a rollout: its turns in the order in which they were generated, whichever sequence they are in.

A turn is trained in one sequence, the one in which it was generated. Its stretch are the tokens of that sequence from
the turn's beginning to that of the next one there, so that what an environment answered belongs to the turn before it.
A sequence of which no turns are known, or none is its own, is one turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mslime.data.sample import Sample


@dataclass(frozen=True)
class TurnSpan:
    """Tokens [start, stop) of one sample, the prompt included where the turn is its first.

    Attributes:
        sample: index of it.
        trained: positions that are trained, ascending.
    """

    sample: int
    start: int
    stop: int
    trained: NDArray[np.int64]


@dataclass(frozen=True)
class TurnChunk:
    """Turns that follow each other both in a sequence and in their rollout's time.

    Attributes:
        length: tokens of the sequence. Its pieces cover it in order.
        number: unique among all pieces of the step.
        following: number of the piece that comes next in the rollout's time; -1 where none does.
    """

    length: int
    number: int
    following: int


@dataclass(frozen=True)
class SequenceTime:
    """What a sequence needs to know of its rollout's time.

    Attributes:
        rewards: [T] float32, each on the trained token that earned it; None where the rollout is this sequence alone,
            whose own rewards are all there is.
        pieces: of the sequence, in order.
        num_pieces: of all sequences.
    """

    rewards: NDArray[np.float32] | None
    pieces: tuple[TurnChunk, ...]
    num_pieces: int


def rollouts_in_time(samples: Sequence[Sample]) -> list[list[TurnSpan]]:
    """The turns of each rollout in the order in which they were generated; rollouts in the order of their samples."""
    found: dict[tuple[int, int, bool], list[tuple[tuple[int, int], TurnSpan]]] = {}
    for index, sample in enumerate(samples):
        found.setdefault(sample.rollout, []).extend(_turns(index, sample))
    return [[turn for _, turn in sorted(turns, key=lambda t: t[0])] for turns in found.values()]


def _turns(index: int, sample: Sample) -> list[tuple[tuple[int, int], TurnSpan]]:
    """(what it is ordered by, turn) of a sample. Turns without a number come first, in the order of their samples."""
    numbers = [number for _, number in sample.turns] or [0]
    edges = [0, *(start for start, _ in sample.turns[1:]), len(sample)]
    trained = np.flatnonzero(sample.loss_mask)
    return [
        ((number, sample.index), TurnSpan(index, start, stop, trained[(trained >= start) & (trained < stop)]))
        for number, (start, stop) in zip(numbers, pairwise(edges), strict=True)
    ]


def sequence_times(samples: Sequence[Sample]) -> list[SequenceTime]:
    """For each sample, how time runs through it and on into the other samples of its rollout.

    The rollout's reward is on the last trained token of its last turn that has one. A process reward that does not lie
    on a trained token goes to the last one before it in time; nothing that was trained has earned what lies before the
    first.
    """
    rewards: list[NDArray[np.float32] | None] = [None] * len(samples)
    pieces: list[list[TurnChunk]] = [[] for _ in samples]
    first = 0
    for turns in rollouts_in_time(samples):
        if len({turn.sample for turn in turns}) > 1:
            for index, placed in _placed_rewards(samples, turns).items():
                rewards[index] = placed
        first += _place_pieces(turns, first, pieces)
    return [SequenceTime(r, tuple(p), first) for r, p in zip(rewards, pieces, strict=True)]


def _placed_rewards(samples: Sequence[Sample], turns: Sequence[TurnSpan]) -> dict[int, NDArray[np.float32]]:
    """The rewards of a rollout on the tokens that earned them, by sample."""
    rewards = {turn.sample: np.zeros(len(samples[turn.sample]), np.float32) for turn in turns}
    newest: tuple[int, int] | None = None  # the last trained token before the turn
    for turn in turns:
        for at, reward in samples[turn.sample].process_rewards:
            if turn.start <= at < turn.stop:
                before = turn.trained[turn.trained <= at]
                earner = (turn.sample, int(before[-1])) if len(before) else newest
                if earner is not None:
                    rewards[earner[0]][earner[1]] += reward
        newest = (turn.sample, int(turn.trained[-1])) if len(turn.trained) else newest
    outcome = samples[turns[0].sample].reward
    if newest is not None and outcome is not None:
        rewards[newest[0]][newest[1]] += outcome
    return rewards


def _place_pieces(turns: Sequence[TurnSpan], first: int, pieces: Sequence[list[TurnChunk]]) -> int:
    """Add the pieces of a rollout, numbered from `first`, to those of its samples, in place; return how many.

    Turns without a trained token are no time: they belong to a neighbour in their sequence.
    """
    runs: list[tuple[int, int]] = []  # (sample, where it begins) of each piece, in time
    for turn in (t for t in turns if len(t.trained)):
        if not runs or runs[-1][0] != turn.sample:
            runs.append((turn.sample, turn.start))
    ends = {turn.sample: 0 for turn in turns}
    for turn in turns:
        ends[turn.sample] = max(ends[turn.sample], turn.stop)
    for index, (sample, _) in enumerate(runs):
        later = [start for other, start in runs[index + 1 :] if other == sample]
        start = sum(piece.length for piece in pieces[sample])
        stop = later[0] if later else ends[sample]
        following = first + index + 1 if index + 1 < len(runs) else -1
        pieces[sample].append(TurnChunk(stop - start, first + index, following))
    return len(runs)
