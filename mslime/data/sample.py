"""A rollout: one prompt, what was generated after it, and where every token came from.

A `Sample` grows in one method only, `extend`, which validates every length. `check_invariants` states what must
hold of any sample; it runs in tests and at the seam to the trainer. Nothing here knows an engine or a trainer.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mslime.data.routes import Routes
from mslime.data.supports import Supports


class SampleStatus(enum.Enum):
    """Where a sample is in its life."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def finished(self) -> bool:
        """No more tokens will be generated for this sample."""
        return self in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.FAILED)


@dataclass(frozen=True)
class Segment:
    """Tokens [start, end) that came from one source: the prompt, an environment, or one weight version of one engine.

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


@dataclass
class Sample:
    """One rollout.

    Attributes:
        group_id: the prompt's group; the samples of a GRPO group share it.
        index: position of this sample within its group.
        rollout_id: the rollout within the group that this sample is a part of, when one rollout became several training
            samples (turns, branches); None: the sample is a rollout of its own.
        tokens: [T] int32, prompt first.
        loss_mask: [T] bool, True where the token may enter the loss.
        log_probs: [T] float32, behaviour log-probability (natural log) of each token; 0 where not sampled.
        segments: contiguous spans that cover [0, T) exactly.
        routes: experts per position, at most T - 1 rows; None when the engine was not asked for them.
        supports: kept token ids per position, T rows; None when sampling was unrestricted.
        reward: None until scored; of the whole rollout.
        process_rewards: (position of the token that ends a step, reward), beside `reward`.
        scores: what the reward told beside its number, by metric: `reward/<part>/mean`, `user/<name>`.
        teacher_log_probs: [T] float32, a served teacher's log-probability of each trained token, 0 elsewhere; None
            until a finished sample is scored, and when no server holds the teacher.
        label, metadata: from the prompt's row, handed to the reward unchanged.
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
    scores: dict[str, float] = field(default_factory=dict[str, float])
    teacher_log_probs: NDArray[np.float32] | None = None
    rollout_id: int | None = None
    status: SampleStatus = SampleStatus.PENDING
    response: str = ""
    aborts: int = 0
    error: str = ""

    @classmethod
    def from_prompt(
        cls, group_id: int, index: int, prompt_tokens: Sequence[int], label: Any = None, **metadata: Any
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
        """What the parts of one rollout share, and no other sample has."""
        alone = self.rollout_id is None
        return self.group_id, self.index if self.rollout_id is None else self.rollout_id, alone

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
        """Tokens that a policy sampled, trained or not."""
        return sum(s.end - s.start for s in self.segments if s.version is not None)

    @property
    def trainable_tokens(self) -> int:
        """Tokens that may enter the loss."""
        return int(self.loss_mask.sum())

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
        """Append tokens, with everything that is known about them. The only way a sample grows.

        Args:
            tokens: [n] new token ids.
            log_probs: [n] behaviour log-probabilities; None for tokens of an environment, which are never trained.
            versions: (weight version, start, end) spans that cover [0, n) of the new tokens exactly.
            engine: who sampled them.
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
        self.tokens = np.concatenate([self.tokens, np.asarray(tokens, np.int32)])
        self.loss_mask = np.concatenate([self.loss_mask, np.full(n, sampled)])
        new = np.asarray(log_probs, np.float32) if log_probs is not None else np.zeros(n, np.float32)
        self.log_probs = np.concatenate([self.log_probs, new])
        spans = versions if sampled else ([(None, 0, n)] if n else [])
        for version, start, end in spans:
            self._add_segment(Segment(old + start, old + end, version, engine, sampled))

    def _add_segment(self, segment: Segment) -> None:
        """Append a segment, or lengthen the last one when the source is the same."""
        if segment.start == segment.end:
            return
        last = self.segments[-1]
        if (last.version, last.engine, last.trainable) == (segment.version, segment.engine, segment.trainable):
            self.segments[-1] = Segment(last.start, segment.end, last.version, last.engine, last.trainable)
        else:
            self.segments.append(segment)

    def mask_before(self, version: int) -> int:
        """Take tokens sampled by weights older than `version` out of the loss; return how many."""
        masked = 0
        for i, s in enumerate(self.segments):
            if s.trainable and s.version is not None and s.version < version:
                masked += int(self.loss_mask[s.start : s.end].sum())
                self.loss_mask[s.start : s.end] = False
                if self.teacher_log_probs is not None:
                    self.teacher_log_probs[s.start : s.end] = 0.0
                self.segments[i] = Segment(s.start, s.end, s.version, s.engine, False)
        return masked

    def mask_all(self) -> int:
        """Take every token out of the loss; return how many."""
        newest = max((s.version for s in self.segments if s.version is not None), default=-1)
        return self.mask_before(newest + 1)

    def restart(self) -> int:
        """Throw the response away and go back to the prompt (re-roll); return how many tokens were lost."""
        lost, n = self.trainable_tokens, self.prompt_length
        self.tokens, self.loss_mask, self.log_probs = self.tokens[:n], self.loss_mask[:n], self.log_probs[:n]
        self.segments = [Segment(0, n, None, "", False)]
        if self.routes is not None:
            self.routes = Routes(self.routes.experts[:0], self.routes.mask[:0], self.routes.layer_ids)
        self.supports, self.reward, self.process_rewards, self.response = None, None, [], ""
        self.scores, self.error = {}, ""
        self.teacher_log_probs = None
        self.status = SampleStatus.PENDING
        return lost


@dataclass
class Group:
    """The samples of one prompt; advantages are computed within a group.

    Attributes:
        source: `file:line` of the prompt.
        metadata: of the prompt; each sample has a copy of its own, to which a rollout function may add.
        failures: how often it ended a run because it could not be sent, scored or trained; a second time it is dropped.
    """

    group_id: int
    samples: list[Sample]
    source: str = ""
    failures: int = 0
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def finished(self) -> bool:
        """Every sample has come to its end."""
        return all(s.status.finished for s in self.samples)

    @property
    def oldest_version(self) -> int | None:
        """Smallest weight version among the trainable segments of all samples."""
        return min((v for s in self.samples if (v := s.oldest_version) is not None), default=None)


def check_invariants(sample: Sample) -> None:
    """Assert everything that must hold of a sample, whatever its history.

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
    """Assert that a teacher's log-probs [T] float32 may be those of a sample with this mask."""
    assert scores.shape == loss_mask.shape and scores.dtype == np.float32, "one float32 score for each token"
    assert np.isfinite(scores).all() and (scores <= 1e-6).all(), "the teacher's log-probs must be finite and <= 0"
    assert not scores[~loss_mask].any(), "the teacher scored a token that is not trained"
