"""One sample as columns, and the columns of one rank's samples laid end to end as its shard."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mslime.data.routes import Routes
from mslime.data.sample import Sample
from mslime.data.shard import TrainShard

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class Column:
    """One sequence on its way into a shard.

    Attributes:
        sequence_id: of the shard's column. weights: [T] float32.
        advantage: 0-d or [T] float32. version: of the weights that are about to be trained; None: ages are not known.
    """

    sequence_id: int
    sample: Sample
    weights: NDArray[np.float32]
    advantage: NDArray[np.float32]
    version: int | None = None

    def advantages(self) -> NDArray[np.float32]:
        """[T] float32, 0 where the token is not trained."""
        assert self.advantage.shape in ((), (len(self.sample),)), (self.advantage.shape, len(self.sample))
        return np.where(self.sample.loss_mask, self.advantage, np.float32(0))

    def rewards(self) -> NDArray[np.float32]:
        """[T] float32: the rollout's reward on the last trained token, process rewards where their steps end."""
        out = np.zeros(len(self.sample), np.float32)
        for position, reward in self.sample.process_rewards:
            out[position] += reward
        trained = np.flatnonzero(self.sample.loss_mask)
        if len(trained) and self.sample.reward is not None:
            out[trained[-1]] += self.sample.reward
        return out

    def teacher(self) -> NDArray[np.float32]:
        """[T] float32, the served teacher's log-prob of each trained token; 0 elsewhere."""
        assert self.sample.teacher_log_probs is not None
        return self.sample.teacher_log_probs

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


def shards_of(columns: Sequence[Column], plan: Sequence[Sequence[Sequence[int]]]) -> list[TrainShard]:
    """The shards of all ranks: `plan[rank]` holds micro-batches of indices into the `columns` of the whole step.

    A column that only some samples have (rewards, ages, a teacher's scores) is left out everywhere; routes are all
    samples' or none's.
    """
    template = columns[0].sample.routes
    assert all((c.sample.routes is None) == (template is None) for c in columns), "some samples carry routes"
    scored = all(c.sample.reward is not None for c in columns)
    dated = all(c.version is not None for c in columns)
    taught = all(c.sample.teacher_log_probs is not None for c in columns)
    return [_shard(columns, rank, template, scored=scored, dated=dated, taught=taught) for rank in plan]


def _shard(
    columns: Sequence[Column],
    micro_batches: Sequence[Sequence[int]],
    template: Routes | None,
    *,
    scored: bool,
    dated: bool,
    taught: bool,
) -> TrainShard:
    mine = [columns[i] for micro_batch in micro_batches for i in micro_batch]
    ends = np.cumsum([0, *(len(m) for m in micro_batches)]).tolist()
    return TrainShard(
        tokens=_joined([c.sample.tokens for c in mine], np.int32),
        lengths=np.asarray([len(c.sample) for c in mine], np.int64),
        sequence_ids=np.asarray([c.sequence_id for c in mine], np.int64),
        loss_mask=_joined([c.sample.loss_mask for c in mine], np.bool_),
        weights=_joined([c.weights for c in mine], np.float32),
        advantages=_joined([c.advantages() for c in mine], np.float32),
        behaviour_log_probs=_joined([c.sample.log_probs for c in mine], np.float32),
        micro_batches=tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends)),
        teacher_log_probs=_joined([c.teacher() for c in mine], np.float32) if taught else None,
        rewards=_joined([c.rewards() for c in mine], np.float32) if scored else None,
        segment_index=_joined([c.segment_index() for c in mine], np.int32),
        segment_ages=_joined([c.segment_ages() for c in mine], np.int32) if dated else None,
        routes=None if template is None else _joined_routes(template, [c.sample for c in mine]),
    )


def _joined(parts: Sequence[NDArray[Scalar]], dtype: type[Scalar]) -> NDArray[Scalar]:
    return np.concatenate([np.empty(0, dtype), *parts])


def _joined_routes(template: Routes, mine: Sequence[Sample]) -> Routes:
    """Routes of `mine`, one row per token, for the layers and in the dtype of `template`."""
    padded = [s.routes.padded(len(s)) for s in mine if s.routes is not None]
    experts = np.concatenate([template.experts[:0], *(r.experts for r in padded)])
    return Routes(experts, np.concatenate([template.mask[:0], *(r.mask for r in padded)]), template.layer_ids)
