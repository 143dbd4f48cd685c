"""Columns that one trainer rank needs for one optimizer step; conversion of samples, and token weights.

Index t of a column belongs to token t: `loss_mask[t]`, `advantages[t]` and `behaviour_log_probs[t]` are about token t,
which the model predicts at position t - 1. Only the trainer shifts. Denominators are already inside `weights`, computed
over the whole step before the split, so that the loss is

    sum over all shards, micro-batches and tokens of weights[t] * token_loss[t]

for every (DP, CP, micro-batch) layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mslime.config.algorithm import LossAggregation
from mslime.data.routes import Routes, Supports
from mslime.data.sample import Sample, SequenceTime

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class TrainShard:
    """Columns over N tokens of B sequences laid end to end, for one data-parallel rank (and pipeline stage).

    Attributes:
        tokens: [N] int32.
        lengths: [B] int64, sum N.
        sequence_ids: [B] int64, unique within the step over all shards.
        loss_mask: [N] bool.
        weights: [N] float32, 0 outside the mask.
        advantages: [N] float32, of the token's rollout; the trainer completes them when they depend on log-probs.
        behaviour_log_probs: [N] float32.
        rewards: [N] float32: the rollout's on its sequence's last trained token, process rewards where a step ends;
            None in supervised training.
        pieces: [P, 3] int64, continuation of time between sequences of a rollout (`mslime.data.sample`): length,
            number, number of the next piece or -1. None: time ends with each sequence.
        num_pieces: of all shards of a rollout step.
        segment_index: [N] int32: index of the weight version that sampled the token among its sequence's versions, in
            order; 0 where none did. None: unknown.
        segment_ages: [N] int32: weight versions between the one that sampled the token and the one being trained; 0
            where none did. None: unknown.
        old_log_probs, reference_log_probs: [N] float32 once computed, else None.
        teacher_log_probs: [N] float32; from the rollouts if the teacher is served, else computed like the previous two.
        values, returns: [N] float32, the critic's values and targets once computed, else None.
        routes: N rows (rows without a route are masked), None when replay is off or recorded by the trainer.
        supports: N rows, the ids that each token within the mask was drawn from; None when all were drawn from the
            whole vocabulary, and for stages that have no logits.
        micro_batches: indices into the B sequences; every rank of the step has the same number of micro-batches. An
            empty tuple is a micro-batch that only keeps the ranks in step.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int64]
    sequence_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    weights: NDArray[np.float32]
    advantages: NDArray[np.float32]
    behaviour_log_probs: NDArray[np.float32]
    micro_batches: tuple[tuple[int, ...], ...]
    old_log_probs: NDArray[np.float32] | None = None
    reference_log_probs: NDArray[np.float32] | None = None
    teacher_log_probs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    rewards: NDArray[np.float32] | None = None
    pieces: NDArray[np.int64] | None = None
    num_pieces: int = 0
    segment_index: NDArray[np.int32] | None = None
    segment_ages: NDArray[np.int32] | None = None
    routes: Routes | None = None
    supports: Supports | None = None

    def __post_init__(self) -> None:
        n = int(self.lengths.sum())
        for name in ("tokens", "loss_mask", "weights", "advantages", "behaviour_log_probs"):
            assert getattr(self, name).shape == (n,), f"{name} has {getattr(self, name).shape}, expected ({n},)"
        assert self.routes is None or len(self.routes) == n, "routes must have one row per token"
        assert self.supports is None or len(self.supports) == n, "supports must have one row per token"
        used = sorted(i for mb in self.micro_batches for i in mb)
        assert used == list(range(len(self.lengths))), "every sequence belongs to exactly one micro-batch"

    def spans(self) -> list[tuple[int, int]]:
        """Token range [start, end) of every sequence."""
        ends = np.cumsum(self.lengths)
        return [(int(e - n), int(e)) for e, n in zip(ends, self.lengths, strict=True)]

    def stage_slice(self, layer_ids: Sequence[int], *, has_logits: bool = True) -> TrainShard:
        """This shard with the routes of the given layers only, and without supports if the stage has no logits."""
        routes = None if self.routes is None else self.routes.stage_slice(layer_ids)
        return replace(self, routes=routes, supports=self.supports if has_logits else None)


@dataclass(frozen=True)
class PackedSequence:
    """One sequence to be packed into a shard.

    Attributes:
        sequence_id: unique within the step. weights: [T] float32.
        advantage: 0-d or [T] float32. version: of the weights to be trained; None: ages are unknown.
        time: its part of the rollout's time; None: time ends with the sequence.
    """

    sequence_id: int
    sample: Sample
    weights: NDArray[np.float32]
    advantage: NDArray[np.float32]
    version: int | None = None
    time: SequenceTime | None = None

    def advantages(self) -> NDArray[np.float32]:
        """[T] float32, 0 where the token is not trained."""
        assert self.advantage.shape in ((), (len(self.sample),)), (self.advantage.shape, len(self.sample))
        return np.where(self.sample.loss_mask, self.advantage, np.float32(0))

    def rewards(self) -> NDArray[np.float32]:
        """[T] float32: the rollout's reward on the last trained token, process rewards where their steps end; or the
        rewards from `time`.
        """
        if self.time is not None and self.time.rewards is not None:
            return self.time.rewards
        out = np.zeros(len(self.sample), np.float32)
        for position, reward in self.sample.process_rewards:
            out[position] += reward
        trained = np.flatnonzero(self.sample.loss_mask)
        if len(trained) and self.sample.reward is not None:
            out[trained[-1]] += self.sample.reward
        return out

    def segment_index(self) -> NDArray[np.int32]:
        """[T] int32, 0, 1, ... for each weight version in order; 0 where no policy sampled the token."""
        out = np.zeros(len(self.sample), np.int32)
        seen: dict[int, int] = {}
        for s in self.sample.segments:
            if s.version is not None:
                out[s.start : s.end] = seen.setdefault(s.version, len(seen))
        return out

    def segment_ages(self) -> NDArray[np.int32]:
        """[T] int32, versions since the token was sampled; 0 where no policy did."""
        assert self.version is not None
        out = np.zeros(len(self.sample), np.int32)
        for s in self.sample.segments:
            if s.version is not None:
                out[s.start : s.end] = self.version - s.version
        return out


def shards_of(columns: Sequence[PackedSequence], plan: Sequence[Sequence[Sequence[int]]]) -> list[TrainShard]:
    """Shards of all ranks: `plan[rank]` holds micro-batches of indices into the `columns` of the whole step.

    Columns that only some samples have (rewards, ages, a teacher's scores) are left out; either all samples have routes
    or none. A sample without supports was drawn from the whole vocabulary: its rows are empty.
    """
    template = columns[0].sample.routes
    assert all((c.sample.routes is None) == (template is None) for c in columns), "some samples carry routes"
    has_rewards = all(c.sample.reward is not None for c in columns)
    has_ages = all(c.version is not None for c in columns)
    has_teacher = all(c.sample.teacher_log_probs is not None for c in columns)
    time = columns[0].time

    def shard(micro_batches: Sequence[Sequence[int]]) -> TrainShard:
        mine = [columns[i] for micro_batch in micro_batches for i in micro_batch]
        samples = [c.sample for c in mine]
        teacher = [s.teacher_log_probs for s in samples if s.teacher_log_probs is not None]
        pieces = [(p.length, p.number, p.following) for c in mine if c.time is not None for p in c.time.pieces]
        return TrainShard(
            tokens=joined([s.tokens for s in samples], np.int32),
            lengths=np.asarray([len(s) for s in samples], np.int64),
            sequence_ids=np.asarray([c.sequence_id for c in mine], np.int64),
            loss_mask=joined([s.loss_mask for s in samples], np.bool_),
            weights=joined([c.weights for c in mine], np.float32),
            advantages=joined([c.advantages() for c in mine], np.float32),
            behaviour_log_probs=joined([s.log_probs for s in samples], np.float32),
            micro_batches=renumbered(micro_batches),
            teacher_log_probs=joined(teacher, np.float32) if has_teacher else None,
            rewards=joined([c.rewards() for c in mine], np.float32) if has_rewards else None,
            pieces=None if time is None else np.asarray(pieces, np.int64).reshape(-1, 3),
            num_pieces=0 if time is None else time.num_pieces,
            segment_index=joined([c.segment_index() for c in mine], np.int32),
            segment_ages=joined([c.segment_ages() for c in mine], np.int32) if has_ages else None,
            routes=None if template is None else _joined_routes(template, samples),
            supports=_joined_supports(samples),
        )

    return [shard(micro_batches) for micro_batches in plan]


def joined(parts: Sequence[NDArray[Scalar]], dtype: type[Scalar]) -> NDArray[Scalar]:
    """Columns of sequences end to end; the empty column of no sequence has the dtype too."""
    return np.concatenate([np.empty(0, dtype), *parts])


def renumbered(micro_batches: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Micro-batches of the same sizes, whose sequences are numbered from 0 in order."""
    ends = itertools.accumulate(map(len, micro_batches), initial=0)
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))


def _joined_routes(template: Routes, mine: Sequence[Sample]) -> Routes:
    """Routes of `mine`, one row per token, for the layers and in the dtype of `template`. Rows are copied once, because
    routes are most of a shard's bytes. Tokens without a row are not replayed.
    """
    known = [(len(s), s.routes) for s in mine if s.routes is not None]
    tokens = sum(length for length, _ in known)
    piece = template.pieces[0]
    experts = np.empty((tokens, *piece.shape[1:]), piece.dtype)
    mask, at = np.zeros(tokens, np.bool_), 0
    for length, routes in known:
        end = at + len(routes)
        for start, piece in routes.placed():
            assert piece.dtype == experts.dtype, (piece.dtype, experts.dtype)
            experts[at + start : at + start + len(piece)] = piece
        mask[at:end] = routes.mask
        experts[end : at + length] = 0
        at += length
    return Routes(experts, mask, template.layer_ids)


def _joined_supports(mine: Sequence[Sample]) -> Supports | None:
    """Supports of `mine`, one row per token, empty outside the mask; None when no sample has any."""
    if all(s.supports is None for s in mine):
        return None
    return Supports.joined([_trained_supports(s) for s in mine])


def _trained_supports(sample: Sample) -> Supports:
    if sample.supports is None:
        return Supports.empty(len(sample))
    return sample.supports.take(np.where(sample.loss_mask, np.arange(len(sample)), -1))


def token_weights(
    samples: Sequence[Sample], aggregation: LossAggregation, max_response_tokens: int | None = None
) -> list[NDArray[np.float32]]:
    """Weight of every token in the loss of one optimizer step, [T] float32 per sample, 0 outside the mask.

    With n trained tokens in a sequence (rollout, group, step), and counting only those with n > 0:

        token: 1 / n of the step. sequence: 1 / (sequences x n of the sequence). rollout: 1 / (rollouts x n of the
        rollout), however many sequences it became. group: 1 / (groups x n of the group).
        constant: 1 / (rollouts x max_response_tokens) (Dr. GRPO, arXiv 2503.20783).

    All but the last sum to 1, or to 0 when nothing is trained.
    """
    counts = np.asarray([s.trainable_tokens for s in samples], np.float64)
    if aggregation == "token":
        denominators = np.full(len(samples), counts.sum())
    elif aggregation == "sequence":
        denominators = counts * np.count_nonzero(counts)
    else:
        units = [s.group_id for s in samples] if aggregation == "group" else [s.rollout for s in samples]
        unit = _numbered(units)
        per_unit = np.bincount(unit, weights=counts)
        live = np.count_nonzero(per_unit)
        if aggregation == "constant":
            assert max_response_tokens is not None, "a constant denominator needs max_response_tokens"
            denominators = np.full(len(samples), float(live * max_response_tokens))
        else:
            denominators = per_unit[unit] * live
    return [(s.loss_mask / max(d, 1.0)).astype(np.float32) for s, d in zip(samples, denominators, strict=True)]


def _numbered(keys: Sequence[Hashable]) -> NDArray[np.int64]:
    """Keys as 0, 1, ... in the order of their first appearance."""
    numbers: dict[Hashable, int] = {}
    return np.asarray([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
