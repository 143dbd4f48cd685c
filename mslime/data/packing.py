"""Samples to trainer shards: denominators, micro-batches under a token budget, and balance over data-parallel ranks.

Denominators are computed over a whole optimizer step before anything is split, so a token's weight does not depend on
the layout. Every rank gets the same number of micro-batches, and those of the same index cost about the same on all
ranks: with experts spread over data-parallel ranks they wait for each other in every MoE layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mslime.config.layout import ParallelLayout
from mslime.data.routes import Routes
from mslime.data.sample import Sample
from mslime.data.shard import TrainShard

Aggregation = Literal["token", "sequence", "group"]


def build_shards(
    samples: Sequence[Sample],
    advantages: Sequence[float | NDArray[np.floating]] | NDArray[np.floating],
    layout: ParallelLayout,
    token_budget: int,
    *,
    loss_aggregation: Aggregation = "token",
    packed: bool = True,
    steps: int = 1,
    multiple_of: int = 1,
    quadratic_tokens: float | None = None,
) -> list[list[TrainShard]]:
    """One shard per optimizer step and data-parallel rank.

    Args:
        samples: the groups of a rollout; those of a group share `group_id` and stay in one optimizer step.
        advantages: one number per sample, or one [T] array per sample.
        token_budget: tokens of a micro-batch per context-parallel rank; a longer sequence gets one of its own.
        loss_aggregation: token: mean over all trainable tokens of the step. sequence: mean of per-response means.
            group: mean of per-group token means. Sequences and groups without a trainable token do not count.
        packed: False puts one sequence into each micro-batch.
        steps: optimizer steps to spread the groups over.
        multiple_of: the number of micro-batches per rank is a multiple of it (interleaved pipelines need this).
        quadratic_tokens: sequence length at which attention costs as much as everything else, for balance; None
            balances by tokens.

    Returns:
        [steps][dp] shards. `sequence_ids` are indices into `samples`.
    """
    assert len(advantages) == len(samples) > 0, (len(advantages), len(samples))
    assert token_budget > 0 and steps > 0 and multiple_of > 0
    packer = _Packer(token_budget * layout.cp, layout.dp, multiple_of, quadratic_tokens)
    result: list[list[TrainShard]] = []
    for members in _split_steps(samples, steps):
        chosen = [samples[i] for i in members]
        weights = token_weights(chosen, loss_aggregation)
        lengths = np.asarray([len(s) for s in chosen], np.int64)
        plan = packer.pack(lengths) if packed else packer.one_each(lengths)
        columns = [
            _Columns(members[j], chosen[j], weights[j], np.asarray(advantages[members[j]], np.float32))
            for j in range(len(chosen))
        ]
        result.append([_shard(columns, rank) for rank in plan])
    return result


def token_weights(samples: Sequence[Sample], aggregation: Aggregation) -> list[NDArray[np.float32]]:
    """Weight of every token in the loss of one optimizer step, [T] float32 per sample; they sum to 1 (or to 0 when
    nothing is trainable)."""
    counts = np.asarray([s.trainable_tokens for s in samples], np.float64)
    if aggregation == "token":
        denominators = np.full(len(samples), counts.sum())
    elif aggregation == "sequence":
        denominators = counts * np.count_nonzero(counts)
    else:
        _, group = np.unique([s.group_id for s in samples], return_inverse=True)
        per_group = np.bincount(group, weights=counts)
        denominators = per_group[group] * np.count_nonzero(per_group)
    return [(s.loss_mask / max(d, 1.0)).astype(np.float32) for s, d in zip(samples, denominators, strict=True)]


def _split_steps(samples: Sequence[Sample], steps: int) -> list[list[int]]:
    """Sample indices of each optimizer step: whole groups, in order, as evenly as they divide."""
    groups: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(i)
    assert len(groups) >= steps, f"{len(groups)} groups cannot fill {steps} optimizer steps"
    members = list(groups.values())
    return [[i for g in part for i in members[int(g)]] for part in np.array_split(np.arange(len(members)), steps)]


@dataclass(frozen=True)
class _Packer:
    """Sequences to micro-batches to ranks.

    Attributes:
        budget: tokens of a micro-batch. dp: ranks. multiple_of: granularity of the number of micro-batches per rank.
        quadratic: see `build_shards`.
    """

    budget: int
    dp: int
    multiple_of: int
    quadratic: float | None

    def one_each(self, lengths: NDArray[np.int64]) -> list[list[list[int]]]:
        """One sequence a micro-batch; see `pack` for the result."""
        bins = [[int(i)] for i in np.argsort(-lengths, kind="stable")]
        return self._deal(bins + [[] for _ in range(self._rounded(len(bins)) - len(bins))], lengths)

    def pack(self, lengths: NDArray[np.int64]) -> list[list[list[int]]]:
        """Balanced micro-batches within the budget, as few as first-fit-decreasing needs.

        Returns:
            [dp][micro-batches] lists of sequence indices; the same number of micro-batches on every rank, some empty
            when there are fewer sequences than micro-batches.
        """
        order = np.argsort(-lengths, kind="stable")
        fitted = self._first_fit(order, lengths)
        count = self._rounded(len(fitted))
        balanced = self._balance(order, lengths, count)  # greedy: may find no room where first-fit-decreasing did
        return self._deal(balanced or fitted + [[] for _ in range(count - len(fitted))], lengths)

    def _cost(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Estimated work of a sequence, in tokens."""
        n = lengths.astype(np.float64)
        return n if self.quadratic is None else n * (1 + n / self.quadratic)

    def _rounded(self, bins: int) -> int:
        """Micro-batches over all ranks, so that each rank has the same number and the granularity is kept."""
        step = self.dp * self.multiple_of
        return -(-bins // step) * step

    def _first_fit(self, order: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[list[int]]:
        """First-fit-decreasing: each sequence into the first bin with room; one over the budget fills a bin alone."""
        room = np.zeros(len(order), np.int64)
        bins: list[list[int]] = []
        for index in order:
            fits = np.flatnonzero(room[: len(bins)] >= lengths[index])
            if not len(fits):
                room[len(bins)] = self.budget
                bins.append([])
            chosen = int(fits[0]) if len(fits) else len(bins) - 1
            bins[chosen].append(int(index))
            room[chosen] -= lengths[index]
        return bins

    def _balance(self, order: NDArray[np.int64], lengths: NDArray[np.int64], count: int) -> list[list[int]] | None:
        """Longest first, each into the least loaded of `count` bins that has room; None when one finds no room."""
        costs = self._cost(lengths)
        load, tokens = np.zeros(count), np.zeros(count, np.int64)
        bins: list[list[int]] = [[] for _ in range(count)]
        for index in order:
            open_bins = np.flatnonzero((tokens + lengths[index] <= self.budget) | (tokens == 0))
            if not len(open_bins):
                return None
            best = int(open_bins[np.argmin(load[open_bins])])
            bins[best].append(int(index))
            load[best] += costs[index]
            tokens[best] += lengths[index]
        return bins

    def _deal(self, bins: list[list[int]], lengths: NDArray[np.int64]) -> list[list[list[int]]]:
        """Deal bins to ranks, heaviest first and back and forth, so that equal indices cost about the same."""
        costs = self._cost(lengths)
        heaviest = sorted(bins, key=lambda b: -float(costs[b].sum()))
        ranks: list[list[list[int]]] = [[] for _ in range(self.dp)]
        for turn in range(len(bins) // self.dp):
            row = heaviest[turn * self.dp : (turn + 1) * self.dp]
            for rank, items in zip(ranks, row if turn % 2 == 0 else reversed(row), strict=True):
                rank.append(items)
        return ranks


@dataclass(frozen=True)
class _Columns:
    """One sequence on its way into a shard."""

    sequence_id: int
    sample: Sample
    weights: NDArray[np.float32]
    advantage: NDArray[np.float32]

    def advantages(self) -> NDArray[np.float32]:
        """[T] float32, 0 where the token is not trained."""
        assert self.advantage.shape in ((), (len(self.sample),)), (self.advantage.shape, len(self.sample))
        return np.where(self.sample.loss_mask, self.advantage, np.float32(0))


def _shard(columns: Sequence[_Columns], micro_batches: Sequence[Sequence[int]]) -> TrainShard:
    """Lay the sequences of one rank end to end, in the order of its micro-batches."""
    mine = [columns[i] for micro_batch in micro_batches for i in micro_batch]
    ends = np.cumsum([0, *(len(m) for m in micro_batches)])
    local = tuple(tuple(range(int(a), int(b))) for a, b in itertools.pairwise(ends))
    empty_f32 = np.empty(0, np.float32)
    return TrainShard(
        tokens=np.concatenate([np.empty(0, np.int32), *(c.sample.tokens for c in mine)]),
        lengths=np.asarray([len(c.sample) for c in mine], np.int64),
        sequence_ids=np.asarray([c.sequence_id for c in mine], np.int64),
        loss_mask=np.concatenate([np.empty(0, np.bool_), *(c.sample.loss_mask for c in mine)]),
        weights=np.concatenate([empty_f32, *(c.weights for c in mine)]),
        advantages=np.concatenate([empty_f32, *(c.advantages() for c in mine)]),
        behaviour_log_probs=np.concatenate([empty_f32, *(c.sample.log_probs for c in mine)]),
        micro_batches=local,
        routes=_joined_routes([c.sample for c in columns], [c.sample for c in mine]),
    )


def _joined_routes(all_samples: Sequence[Sample], mine: Sequence[Sample]) -> Routes | None:
    """Routes of `mine`, one row per token; None when the rollout carried none."""
    if all_samples[0].routes is None:
        assert all(s.routes is None for s in all_samples), "some samples carry routes and others do not"
        return None
    template = all_samples[0].routes
    assert all(s.routes is not None for s in all_samples), "some samples carry routes and others do not"
    padded = [s.routes.padded(len(s)) for s in mine if s.routes is not None]
    experts = np.concatenate([template.experts[:0], *(r.experts for r in padded)])
    return Routes(experts, np.concatenate([template.mask[:0], *(r.mask for r in padded)]), template.layer_ids)
