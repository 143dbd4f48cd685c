"""Which sequences meet in an MoE layer, chosen by the experts that they will use.

Data-parallel ranks that share out the experts run their micro-batches of the same index together: in every MoE layer
all wait for the rank whose experts got the most tokens. With routes of the rollout that is known before the step. So
micro-batches, and then sequences, change places where that makes the busiest ranks less busy and no micro-batch larger.
Which micro-batches there are, and what a token weighs, stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mslime.config.layout import ParallelLayout
from mslime.data.routes import Routes

Plan = list[list[list[int]]]
"""[data-parallel ranks][micro-batches] lists of sequence indices."""

SLACK = 0.02
"""By how much more work than the heaviest one of its index a micro-batch may become."""

WINDOW = 64
"""How many sequences of about the same length are tried for each place."""

ROUTES_COUNTED = 2**26
"""Token-to-expert choices that are looked at; of more, every so many tokens are."""

WORK = 3 * 10**9
"""Additions of a search, at most: a few seconds."""

EVEN = 1.01
"""Micro-batches whose busiest ranks have so many times the mean are left alone."""


def loads_of(routes: Sequence[Routes | None], lengths: Sequence[int], num_experts: int, ep: int) -> NDArray[np.float32]:
    """What each sequence asks of each expert-parallel rank.

    Args:
        routes: of each sequence. Rows that are masked, or are not there, are taken to be like the others.
        num_experts: of a layer; expert-parallel ranks hold equal runs of them.

    Returns:
        [sequences, MoE layers, ep] float32: tokens times experts of each. A sequence without routes loads all equally.
    """
    known = [r for r in routes if r is not None and len(r)]
    layers, top_k = known[0].pieces[0].shape[1:] if known else (1, 1)
    stride = max(1, -(-sum(map(len, known)) * layers * top_k // ROUTES_COUNTED))
    loads = np.empty((len(routes), layers, ep), np.float32)
    rank_of = np.arange(num_experts) // (num_experts // ep)
    columns = np.arange(layers)[:, None] * ep
    for load, found, length in zip(loads, routes, lengths, strict=True):
        experts, mask = (None, None) if found is None else found.every(stride)
        counted = None if experts is None else experts[mask]
        if counted is None or not len(counted):
            load[...] = length * top_k / ep
            continue
        counts = np.bincount((rank_of[counted] + columns).ravel(), minlength=layers * ep)
        load[...] = counts.reshape(layers, ep) * (length / len(counted))
    return loads


def ranks_together(layout: ParallelLayout) -> int:
    """Data-parallel ranks whose micro-batches meet in an MoE layer: those within one copy of the experts."""
    dense = layout.tp * layout.cp
    return max(layout.expert_size // dense, 1) if layout.expert_size % dense == 0 else 1


def expert_imbalance(plan: Plan, loads: NDArray[np.float32], together: int) -> float:
    """Tokens of the busiest expert-parallel ranks over the mean, less 1: over all micro-batches and layers."""
    sums = np.stack([load.sum(axis=0) for load in _meetings(plan, loads, together)])
    return float(sums.max(axis=2).sum() / max(sums.mean(axis=2).sum(), 1e-9)) - 1


def least_imbalance(loads: NDArray[np.float32]) -> float:
    """What `expert_imbalance` is where every micro-batch is a mixture of all sequences: no packing gets below it."""
    total = loads.sum(axis=0)
    return float(total.max(axis=1).sum() / max(total.mean(axis=1).sum(), 1e-9)) - 1


def _meetings(plan: Plan, loads: NDArray[np.float32], together: int) -> list[NDArray[np.float32]]:
    """Loads of the sequences of each meeting, which is a micro-batch of each of some ranks."""
    return [
        loads[[i for rank in plan[first : first + together] for i in rank[index]]]
        for first in range(0, len(plan), together)
        for index in range(len(plan[0]))
    ]


def spread_experts(
    plan: Plan,
    loads: NDArray[np.float32],
    lengths: NDArray[np.int64],
    costs: NDArray[np.float64],
    budget: int,
    together: int,
) -> Plan:
    """The plan after exchanges of equally heavy micro-batches, then of sequences of about the same length.

    Args:
        loads: see `loads_of`. lengths, costs: of each sequence, in tokens, and work.
        budget: tokens of a micro-batch; one that has more keeps no more than it has.
        together: see `ranks_together`.
    """
    ranks, count = len(plan), len(plan[0])
    if ranks // together * count < 2:
        return plan
    bins = [plan[rank][index] for index in range(count) for rank in range(ranks)]  # neighbours are of one index
    meeting = np.asarray([i * (ranks // together) + r // together for i in range(count) for r in range(ranks)])
    work = np.asarray([costs[b].sum() for b in bins])
    limit = np.repeat(work.reshape(count, ranks).max(axis=1), ranks) * (1 + SLACK)

    whole = np.stack([loads[b].sum(axis=0) for b in bins])
    places = _Places(np.arange(len(bins)), meeting, limit, np.full(len(bins), np.iinfo(np.int64).max))
    tokens = np.asarray([lengths[b].sum() for b in bins])
    placed = _Search(places, whole, tokens, work).run()
    order: list[int] = np.argsort(placed).tolist()  # placed[b]: where micro-batch b went
    bins = [bins[b] for b in order]

    used = [i for b in bins for i in b]
    holder = np.repeat(np.arange(len(bins)), [len(b) for b in bins])
    room = np.maximum(budget, [lengths[b].sum() for b in bins])
    places = _Places(holder, meeting, limit, room)
    placed = _Search(places, loads[used], lengths[used], costs[used]).run()
    found: Plan = [[[] for _ in range(count)] for _ in range(ranks)]
    places_of: list[int] = placed.tolist()
    for item, place in zip(used, places_of, strict=True):
        found[place % ranks][place // ranks].append(item)
    better = expert_imbalance(found, loads, together) < expert_imbalance(plan, loads, together)
    return found if better else plan


@dataclass(frozen=True)
class _Places:
    """Where things lie, and how much may lie there.

    Attributes:
        holder: place of each thing. meeting: of each place, which of the meetings it is a part of.
        work, room: most work and most tokens of each place.
    """

    holder: NDArray[np.int64]
    meeting: NDArray[np.int64]
    work: NDArray[np.float64]
    room: NDArray[np.int64]


def _busiest(sums: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n], of [n, layers, ranks]: what the busiest rank of each layer has, in all layers."""
    return sums.max(axis=2).sum(axis=1)


def _squares(sums: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n], of [n, layers, ranks]: falls also where a layer has several busiest ranks and one of them gets less."""
    return np.einsum("nlr,nlr->n", sums, sums)


class _Search:
    """Exchanges of two things at a time, each the best of a few, for as long as they help: first towards the same load
    for all ranks, then towards less for the busiest ones, which alone may have nowhere to go that helps at once."""

    def __init__(
        self,
        places: _Places,
        loads: NDArray[np.float32],
        tokens: NDArray[np.int64],
        costs: NDArray[np.float64],
    ) -> None:
        self._places, self._loads, self._tokens, self._costs = places, loads, tokens, costs
        self._holder = places.holder.copy()
        self._held_tokens = np.bincount(self._holder, weights=tokens, minlength=len(places.room))
        self._held_costs = np.bincount(self._holder, weights=costs, minlength=len(places.room))
        self._sums = np.zeros((places.meeting.max() + 1, *loads.shape[1:]), np.float32)
        np.add.at(self._sums, places.meeting[self._holder], loads)
        self._height, self._heights = _squares, _squares(self._sums)
        self._order = np.argsort(costs, kind="stable")
        self._rank = np.empty_like(self._order)
        self._rank[self._order] = np.arange(len(self._order))

    def run(self) -> NDArray[np.int64]:
        """The place of each thing afterwards."""
        tries = WORK // max(2 * WINDOW * int(np.prod(self._loads.shape[1:])), 1)
        for self._height in (_squares, _busiest):
            self._heights, before = self._height(self._sums), np.inf
            while self._heights.sum() < before * (1 - 1e-3):
                before = self._heights.sum()
                for item in self._uneven():
                    if tries == 0:
                        return self._holder
                    tries -= 1
                    self._exchange(item)
        return self._holder

    def _uneven(self) -> list[int]:
        """Things of meetings whose busiest ranks have too much, the worst meeting first."""
        excess = _busiest(self._sums) / np.maximum(self._sums.mean(axis=2).sum(axis=1), 1e-9)
        mine = excess[self._places.meeting[self._holder]]
        order = np.argsort(-mine, kind="stable")
        return order[mine[order] > EVEN].tolist()

    def _exchange(self, item: int) -> None:
        """Put the thing in the place of the one of its size with which that helps most, if any does."""
        others = self._like(item)  # itself, at least
        meeting = self._places.meeting
        here, there = meeting[self._holder[item]], meeting[self._holder[others]]
        moved = self._loads[others] - self._loads[item]
        ours, theirs = self._height(self._sums[here] + moved), self._height(self._sums[there] - moved)
        gains = self._heights[here] + self._heights[there] - ours - theirs
        best = int(np.argmax(gains))
        if gains[best] <= 1e-4 * self._heights[here]:
            return
        other = int(others[best])
        self._sums[here] += moved[best]
        self._sums[there[best]] -= moved[best]
        self._heights[here], self._heights[there[best]] = ours[best], theirs[best]
        a, b = self._holder[item], self._holder[other]
        for held, each in ((self._held_tokens, self._tokens), (self._held_costs, self._costs)):
            held[a] += each[other] - each[item]
            held[b] += each[item] - each[other]
        self._holder[item], self._holder[other] = b, a

    def _like(self, item: int) -> NDArray[np.int64]:
        """Things of about the same work with which this one may change places; within a meeting that gains nothing."""
        at = int(self._rank[item])
        near = self._order[max(at - WINDOW // 2, 0) : at + WINDOW // 2 + 1]
        mine, theirs = self._holder[item], self._holder[near]
        places = self._places
        tokens, costs = self._tokens[near] - self._tokens[item], self._costs[near] - self._costs[item]
        fits = (
            (self._held_tokens[mine] + tokens <= places.room[mine])
            & (self._held_tokens[theirs] - tokens <= places.room[theirs])
            & (self._held_costs[mine] + costs <= places.work[mine])
            & (self._held_costs[theirs] - costs <= places.work[theirs])
        )
        return near[fits]
