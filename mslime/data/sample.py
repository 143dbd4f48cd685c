"""A sequence of a rollout: prompt and generated tokens, with the source and version of every token.

A `Sample` grows in one method only, `extend`, which validates every length. `check_invariants` states the invariants of
any sample; it runs in tests and before samples go to the trainer. This module imports no engine and no trainer.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mslime.data.routes import Routes, Supports


class SampleStatus(enum.Enum):
    """State of a sample."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def finished(self) -> bool:
        """Whether generation for this sample has ended."""
        return self in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.FAILED)


@dataclass(frozen=True)
class Segment:
    """Tokens [start, end) from one source: the prompt, an environment, or one weight version of one engine.

    Attributes:
        start, end: token positions, half open.
        version: weight version that sampled the tokens; None for tokens that no policy sampled.
        engine: name of the engine that sampled them; empty for the prompt.
        trainable: whether the tokens may enter the loss.
    """

    start: int
    end: int
    version: int | None
    engine: str
    trainable: bool


@dataclass(eq=False)
class _SampleBuffer:
    """Columns with spare capacity behind a sample's tokens, which avoids a copy at each turn of a rollout.

    Attributes:
        used: tokens in use. Only a sample that ends there may grow in place.
    """

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    log_probs: NDArray[np.float32]
    used: int = 0

    def holds(self, sample: Sample) -> bool:
        """Whether the sample's columns are these and end at `used`."""
        mine = (self.tokens, self.loss_mask, self.log_probs)
        theirs = (sample.tokens, sample.loss_mask, sample.log_probs)
        return self.used == len(sample) and all(a.base is b for a, b in zip(theirs, mine, strict=True))


@dataclass
class Sample:
    """A rollout, or one sequence of it.

    Attributes:
        group_id: the prompt's group; the samples of a GRPO group share it.
        index: of this sample within its group; see `Group`.
        rollout_id: the rollout within the group that this sample is a part of, when one rollout became several training
            samples (turns, branches); None: the sample is a rollout of its own.
        tokens: [T] int32, prompt first.
        loss_mask: [T] bool, True where the token may enter the loss.
        log_probs: [T] float32, behaviour log-probability (natural log) of each token; 0 where not sampled.
        segments: contiguous spans that cover [0, T) exactly.
        routes: experts per position, at most T - 1 rows; None if the engine was not asked for them.
        supports: kept token ids per position, T rows; None when sampling was unrestricted.
        reward: of the whole rollout; None until scored.
        process_rewards: (position of the token that ends a step, reward), beside `reward`.
        turns: (start position, number within the rollout) of each turn that was generated in this sequence. Numbers
            follow the order in which turns ended, over all sequences of the rollout.
        scores: further results of the reward, by metric: `reward/<part>/mean`, `user/<name>`.
        teacher_log_probs: [T] float32, a served teacher's log-probability of each trained token, 0 elsewhere; None
            until a finished sample is scored, and if no server holds the teacher.
        label, metadata: from the prompt's row, passed to the reward unchanged.
    """

    group_id: int
    index: int
    prompt_length: int
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    log_probs: NDArray[np.float32]
    segments: list[Segment]
    routes: Routes | None = None
    supports: Supports | None = None
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    reward: float | None = None
    process_rewards: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    turns: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    scores: dict[str, float] = field(default_factory=dict[str, float])
    teacher_log_probs: NDArray[np.float32] | None = None
    rollout_id: int | None = None
    status: SampleStatus = SampleStatus.PENDING
    response: str = ""
    aborts: int = 0
    error: str = ""
    _buffer: _SampleBuffer | None = field(default=None, repr=False, compare=False)
    _counted: tuple[list[Segment], int, int] | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold only the tokens in use."""
        return {**self.__dict__, "_buffer": None, "_counted": None}

    @classmethod
    def from_prompt(
        cls,
        group_id: int,
        index: int,
        prompt_tokens: Sequence[int] | NDArray[np.int32],
        label: Any = None,
        **metadata: Any,
    ) -> Sample:
        """A fresh sample that holds its prompt only."""
        n = len(prompt_tokens)
        assert n > 0, "a prompt needs at least one token"
        return cls(
            group_id,
            index,
            n,
            np.asarray(prompt_tokens, np.int32),
            np.zeros(n, np.bool_),
            np.zeros(n, np.float32),
            [Segment(0, n, None, "", False)],
            label=label,
            metadata=metadata,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def rollout(self) -> tuple[int, int, bool]:
        """Key that the parts of one rollout share and that no other sample has."""
        return self.group_id, self.number, self.rollout_id is None

    @property
    def number(self) -> int:
        """Number of the rollout within its group."""
        return self.index if self.rollout_id is None else self.rollout_id

    @property
    def response_length(self) -> int:
        """Tokens after the prompt, sampled or not."""
        return len(self.tokens) - self.prompt_length

    @property
    def response_tokens(self) -> NDArray[np.int32]:
        """[response_length] a view of the tokens after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def sampled_tokens(self) -> int:
        """Tokens that a policy sampled, trained or not. Called at each turn, so only new segments are counted."""
        known, counted, total = self._counted or (self.segments, 0, 0)
        if known is not self.segments or counted >= len(known):
            counted = total = 0
        *before, last = self.segments[counted:]
        total += sum(s.end - s.start for s in before if s.version is not None)
        self._counted = self.segments, len(self.segments) - 1, total  # the last one may still grow
        return total + (0 if last.version is None else last.end - last.start)

    @property
    def trainable_tokens(self) -> int:
        """Tokens that may enter the loss."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def oldest_version(self) -> int | None:
        """Smallest weight version among trainable segments; None before anything was sampled."""
        return min((s.version for s in self.segments if s.trainable and s.version is not None), default=None)

    def extend(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        *,
        log_probs: Sequence[float] | NDArray[np.float32] | None = None,
        versions: Sequence[tuple[int, int, int]] = (),
        engine: str = "",
        routes: NDArray[np.integer] | None = None,
        supports: Supports | None = None,
    ) -> None:
        """Append tokens with all their data. No other method lets a sample grow.

        Args:
            tokens: [n] new token ids.
            log_probs: [n] behaviour log-probabilities; None for tokens of an environment, which are never trained.
            versions: (weight version, start, end) spans that cover [0, n) of the new tokens exactly.
            engine: name of the engine that sampled them.
            routes: [rows, MoE layers, top-k] for the positions from `len(self.routes)` on. After the call routes
                cover every token but the newest. `self.routes` must have been set (for example `Routes.empty`).
            supports: of the n new tokens; an empty row for an unrestricted draw.
        """
        assert self.teacher_log_probs is None, "a sample that the teacher has scored is finished"
        n, old = len(tokens), len(self.tokens)
        sampled = log_probs is not None
        if sampled:
            assert len(log_probs) == n, f"{len(log_probs)} log-probs for {n} tokens"
            assert [s for _, s, _ in versions] == [0, *(e for _, _, e in versions)][: len(versions)], versions
            assert n == 0 or versions[-1][2] == n, f"version spans {versions} must cover {n} tokens"
        else:
            assert not versions and supports is None, "environment tokens have neither versions nor supports"
        if routes is not None:
            assert self.routes is not None, "set sample.routes before extending with routes"
            have = len(self.routes) + len(routes)
            assert have == old + n - 1, f"routes would cover {have} of {old + n} tokens; expected all but the newest"
            self.routes = self.routes.append(routes)
        if supports is not None:
            assert len(supports) == n, f"{len(supports)} supports for {n} tokens"
            self.supports = (Supports.empty(old) if self.supports is None else self.supports).append(supports)
        elif self.supports is not None:
            self.supports = self.supports.append(Supports.empty(n))
        buffer = self._grow(old + n)
        buffer.tokens[old : old + n] = tokens
        buffer.loss_mask[old : old + n] = sampled
        buffer.log_probs[old : old + n] = 0.0 if log_probs is None else log_probs
        end = buffer.used = old + n
        self.tokens, self.loss_mask, self.log_probs = (
            buffer.tokens[:end],
            buffer.loss_mask[:end],
            buffer.log_probs[:end],
        )
        spans = versions if sampled else ([(None, 0, n)] if n else [])
        for version, start, end in spans:
            self._add_segment(Segment(old + start, old + end, version, engine, sampled))

    def _grow(self, length: int) -> _SampleBuffer:
        """Columns with capacity for `length` tokens that begin with this sample's. A sample that has grown before gets
        spare capacity; most responses arrive whole.
        """
        buffer = self._buffer
        if buffer is None or length > len(buffer.tokens) or not buffer.holds(self):
            size = length if len(self) == self.prompt_length else length + length // 2
            self._buffer = buffer = _SampleBuffer(
                np.empty(size, np.int32), np.empty(size, np.bool_), np.empty(size, np.float32)
            )
            old = len(self)
            buffer.tokens[:old], buffer.loss_mask[:old], buffer.log_probs[:old] = (
                self.tokens,
                self.loss_mask,
                self.log_probs,
            )
        return buffer

    def _add_segment(self, segment: Segment) -> None:
        """Append a segment, or extend the last one if the source is the same."""
        if segment.start == segment.end:
            return
        last = self.segments[-1]
        if (last.version, last.engine, last.trainable) == (segment.version, segment.engine, segment.trainable):
            self.segments[-1] = Segment(last.start, segment.end, last.version, last.engine, last.trainable)
        else:
            self.segments.append(segment)

    def mask_before(self, version: int) -> int:
        """Take tokens sampled by weights older than `version` out of the loss; return how many."""
        masked, mask = 0, self.loss_mask.copy()
        for i, s in enumerate(self.segments):
            if s.trainable and s.version is not None and s.version < version:
                masked += int(mask[s.start : s.end].sum())
                mask[s.start : s.end] = False
                self._forget_teacher(s.start, s.end)
                self.segments[i] = Segment(s.start, s.end, s.version, s.engine, False)
        self.loss_mask = mask
        return masked

    def mask_span(self, start: int, end: int) -> int:
        """Take tokens [start, end) out of the loss; return how many. They stay in the sequence as context."""
        masked = int(self.loss_mask[start:end].sum())
        self._set_mask(start, end, False)
        self._forget_teacher(start, end)
        parts = [part for s in self.segments for part in _split(s, start, end)]
        self.segments = [replace(s, trainable=False) if start <= s.start and s.end <= end else s for s in parts]
        return masked

    def train_span(self, start: int, end: int) -> None:
        """Let tokens [start, end) enter the loss, all of which a policy sampled."""
        parts = [part for s in self.segments for part in _split(s, start, end)]
        inside = [start <= s.start and s.end <= end for s in parts]
        assert all(s.version is not None for s, i in zip(parts, inside, strict=True) if i), "a token without a sampler"
        self.segments = [replace(s, trainable=True) if i else s for s, i in zip(parts, inside, strict=True)]
        self._set_mask(start, end, True)

    def _forget_teacher(self, start: int, end: int) -> None:
        """Zero the teacher's log-probs outside the loss, in a copy: a writer may still use the column."""
        if self.teacher_log_probs is not None:
            self.teacher_log_probs = self.teacher_log_probs.copy()
            self.teacher_log_probs[start:end] = 0.0

    def _set_mask(self, start: int, end: int, mask: bool | NDArray[np.bool_]) -> None:
        """Set the mask in a copy: a running rollout keeps the column that it has returned (`rollout.returned`)."""
        self.loss_mask = self.loss_mask.copy()
        self.loss_mask[start:end] = mask

    def mask_all(self) -> int:
        """Take every token out of the loss; return how many."""
        newest = max((s.version for s in self.segments if s.version is not None), default=-1)
        return self.mask_before(newest + 1)

    def cut(self, at: int) -> int:
        """Discard the tokens from `at` on, none of the prompt; return how many of them were in the loss."""
        assert self.prompt_length <= at <= len(self), f"cut at {at} of {self.prompt_length}..{len(self)} tokens"
        lost = int(self.loss_mask[at:].sum())
        self.tokens, self.loss_mask, self.log_probs = self.tokens[:at], self.loss_mask[:at], self.log_probs[:at]
        self.segments = [part for s in self.segments for part in _split(s, at) if part.end <= at]
        if self.routes is not None:  # rows cover every token but the newest
            self.routes = self.routes.first(min(len(self.routes), at - 1 if at > self.prompt_length else 0))
        self.supports = None if self.supports is None else self.supports.first(at)
        self.turns = [turn for turn in self.turns if turn[0] < at]
        return lost

    def branch(self, index: int, at: int) -> Sample:
        """A new sample that begins with the first `at` tokens of this one and does not train them: they are trained
        here.

        Its routes, supports, log-probs and versions are copies. `at` is not within the prompt.
        """
        assert self.prompt_length <= at <= len(self), f"branch at {at} of {self.prompt_length}..{len(self)} tokens"
        parts = [replace(part, trainable=False) for s in self.segments for part in _split(s, at)]
        return Sample(
            self.group_id,
            index,
            self.prompt_length,
            self.tokens[:at].copy(),
            np.zeros(at, np.bool_),
            self.log_probs[:at].copy(),
            [part for part in parts if part.end <= at],
            routes=None if self.routes is None else self.routes.first(min(len(self.routes), at - 1)),
            supports=None if self.supports is None else self.supports.first(at),
            label=self.label,
            metadata=copy.deepcopy(self.metadata),
            rollout_id=self.rollout_id,
        )

    def adopt(self, source: Sample, at: int, start: int = 0) -> int:
        """Take over the training of tokens [start, at) from `source`, which begins with the same `at` tokens. The turns
        and process rewards of these tokens move too.

        Returns:
            How many of them are in the loss.
        """
        assert (self.tokens[:at] == source.tokens[:at]).all(), "the sequences do not share their beginning"
        mask = source.loss_mask[start:at]
        parts = [part for s in self.segments for part in _split(s, start, at)]
        theirs = [part for s in source.segments for part in _split(s, start, at) if start <= part.start < at]
        before, after = [p for p in parts if p.end <= start], [p for p in parts if p.start >= at]
        self.segments = [*before, *theirs, *after]
        ends = [*(begin for begin, _ in source.turns[1:]), len(source)]
        self.turns = sorted(self.turns + [
            (max(begin, start), number) for (begin, number), end in zip(source.turns, ends, strict=True)
            if begin < at and (begin >= start or source.loss_mask[start:end].any())
        ])  # fmt: skip
        self.process_rewards = [s for s in source.process_rewards if start <= s[0] < at] + self.process_rewards
        self._set_mask(start, at, mask)
        return int(mask.sum())

    def restart(self) -> int:
        """Discard the response and return to the prompt (re-roll); return how many tokens were lost."""
        lost = self.cut(self.prompt_length)
        self.supports, self.reward, self.process_rewards, self.response = None, None, [], ""
        self.scores, self.error = {}, ""
        self.teacher_log_probs = None
        self.status = SampleStatus.PENDING
        return lost


def _split(segment: Segment, *positions: int) -> list[Segment]:
    """The segment split at these ascending positions, as far as they lie within it."""
    inner = [at for at in positions if segment.start < at < segment.end]
    edges = [segment.start, *inner, segment.end]
    return [replace(segment, start=a, end=b) for a, b in pairwise(edges)]


@dataclass
class Group:
    """The samples of one prompt; advantages are computed within a group.

    It consists of `size` rollouts. Each is one sample at first, with the prompt and the rollout's number as its index.
    Sample k of rollout i has the index i + k * size. All samples of a rollout of several have its number as their
    `rollout_id`.

    Attributes:
        source: `file:line` of the prompt.
        metadata: of the prompt; each sample has its own copy, to which a rollout function may add.
        failures: how often it ended a run because it could not be sent, scored or trained; dropped at the second.
        prompt: [P] int32 token ids; a sample of a rollout function may begin with others.
        size: rollouts that were begun; failed ones may have been removed since.
        messages, tools: the prompt as chat messages, and the tools of its row, for rollout functions; None if the row
            has none.
    """

    group_id: int
    samples: list[Sample]
    source: str = ""
    failures: int = 0
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    prompt: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    size: int = 0
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        if not len(self.prompt) and self.samples:
            self.prompt = self.samples[0].tokens[: self.samples[0].prompt_length]
        self.size = self.size or max((s.index + 1 for s in self.samples), default=0)

    @property
    def numbers(self) -> list[int]:
        """Numbers of its rollouts, in the order of their samples."""
        return list(dict.fromkeys(s.number for s in self.samples))

    def rollouts(self) -> list[list[Sample]]:
        """The samples of each rollout, in the order of the samples."""
        return [self.parts(number) for number in self.numbers]

    def parts(self, number: int) -> list[Sample]:
        """The samples of rollout `number`."""
        return [s for s in self.samples if s.number == number]

    def next_index(self, number: int) -> int:
        """Index of a further sample of rollout `number`."""
        return max((s.index for s in self.parts(number)), default=number - self.size) + self.size

    def restart_rollout(self, number: int) -> int:
        """Discard the tokens that rollout `number` generated; one sample with the prompt remains.

        Returns:
            How many tokens were to be trained.
        """
        parts = self.parts(number)
        lost = sum(s.trainable_tokens for s in parts)
        fresh = Sample.from_prompt(self.group_id, number, self.prompt, parts[0].label)
        first = next((s for s in parts if s.index == number), fresh)
        first.restart()
        first.metadata = copy.deepcopy(self.metadata)
        self.set_parts(number, [first])
        return lost

    def set_parts(self, number: int, parts: Sequence[Sample]) -> None:
        """Replace the samples of rollout `number` by these, in this order and at the same place."""
        at = next(i for i, s in enumerate(self.samples) if s.number == number)
        rest = [s for s in self.samples if s.number != number]
        for part in parts:
            part.rollout_id = None if len(parts) == 1 and part.index == number else number
        self.samples[:] = [*rest[:at], *parts, *rest[at:]]

    @property
    def finished(self) -> bool:
        """Whether all samples are finished."""
        return all(s.status.finished for s in self.samples)

    @property
    def oldest_version(self) -> int | None:
        """Smallest weight version among the trainable segments of all samples."""
        return min((v for s in self.samples if (v := s.oldest_version) is not None), default=None)


def check_invariants(sample: Sample) -> None:
    """Assert the invariants of a sample.

    Every token lies in exactly one segment; a trainable token's segment has a version and is trainable; untrained
    positions carry no surprise; routes never cover the newest token; a support contains the token drawn from it.
    """
    n = len(sample.tokens)
    assert sample.loss_mask.shape == sample.log_probs.shape == (n,), "columns differ in length"
    assert 0 < sample.prompt_length <= n and not sample.loss_mask[: sample.prompt_length].any(), "prompt is trained"
    edges = [sample.segments[0].start, *(s.end for s in sample.segments)]
    assert edges[0] == 0 and edges[-1] == n, f"segments cover {edges[0]}..{edges[-1]} of {n} tokens"
    for left, right in zip(sample.segments, sample.segments[1:], strict=False):
        assert left.end == right.start, f"segments {left} and {right} do not touch"
    for s in sample.segments:
        assert not s.trainable or s.version is not None, f"trainable segment without a version: {s}"
        assert s.trainable or not sample.loss_mask[s.start : s.end].any(), f"trained token in {s}"
    assert np.isfinite(sample.log_probs).all() and (sample.log_probs <= 1e-6).all(), "log-probs must be finite and <= 0"
    if sample.teacher_log_probs is not None:
        check_teacher_log_probs(sample.teacher_log_probs, sample.loss_mask)
    assert all(0 <= at < n for at, _ in sample.process_rewards), f"process rewards beyond {n} tokens"
    if sample.routes is not None:
        assert len(sample.routes) <= n - 1, f"{len(sample.routes)} route rows for {n} tokens"
    if sample.supports is not None:
        assert len(sample.supports) == n, f"{len(sample.supports)} supports for {n} tokens"
        outside = np.flatnonzero(~sample.supports.hold(sample.tokens))
        assert not len(outside), f"token {outside[0]} is not, or not once, in the support it was drawn from"
        assert not sample.supports.sizes[: sample.prompt_length].any(), "a token of the prompt has a support"


def check_teacher_log_probs(scores: NDArray[np.float32], loss_mask: NDArray[np.bool_]) -> None:
    """Assert that a teacher's log-probs [T] float32 are valid for a sample with this mask."""
    assert scores.shape == loss_mask.shape and scores.dtype == np.float32, "one float32 score for each token"
    assert np.isfinite(scores).all() and (scores <= 1e-6).all(), "the teacher's log-probs must be finite and <= 0"
    assert not scores[~loss_mask].any(), "the teacher scored a token that is not trained"


# Time within a rollout: its turns in the order in which they were generated, over all its sequences.
#
# A turn is trained in the sequence in which it was generated. It spans the tokens of that sequence from its beginning
# to the next turn's there: an environment's reply belongs to the turn before it. A sequence without turns of its own
# counts as one turn.


@dataclass(frozen=True)
class TurnSpan:
    """Tokens [start, stop) of one sample, including the prompt for its first turn.

    Attributes:
        sample: its index.
        trained: positions that are trained, ascending.
    """

    sample: int
    start: int
    stop: int
    trained: NDArray[np.int64]


@dataclass(frozen=True)
class TurnChunk:
    """Consecutive turns of a sequence that are also consecutive in their rollout's time.

    Attributes:
        length: tokens of the sequence. Its pieces cover it in order.
        number: unique among all pieces of the step.
        following: number of the next piece in the rollout's time; -1 for the last one.
    """

    length: int
    number: int
    following: int


@dataclass(frozen=True)
class SequenceTime:
    """A sequence's part of its rollout's time.

    Attributes:
        rewards: [T] float32, each on the trained token that earned it; None if the rollout is this sequence alone,
            which has its own rewards.
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
    """(sort key, turn) for each turn of a sample. Turns without a number come first, in the order of their samples."""
    numbers = [number for _, number in sample.turns] or [0]
    edges = [0, *(start for start, _ in sample.turns[1:]), len(sample)]
    trained = np.flatnonzero(sample.loss_mask)
    return [
        ((number, sample.index), TurnSpan(index, start, stop, trained[(trained >= start) & (trained < stop)]))
        for number, (start, stop) in zip(numbers, pairwise(edges), strict=True)
    ]


def sequence_times(samples: Sequence[Sample]) -> list[SequenceTime]:
    """Path of time through each sample and into the other samples of its rollout.

    The rollout's reward is on the last trained token of its last turn with one. A process reward on an untrained token
    moves to the last trained one before it in time. Without such a token it is left out.
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
    """Rewards of a rollout on the tokens that earned them, by sample."""
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
    """Append the pieces of a rollout, numbered from `first`, to those of its samples, in place; return how many.

    Turns without a trained token get no piece of their own: they belong to a neighbour in their sequence.
    """
    runs: list[tuple[int, int]] = []  # (sample, start) of each piece, in time
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
