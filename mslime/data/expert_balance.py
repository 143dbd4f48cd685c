"""Placement of sequences in micro-batches by the experts that they will use.

Data-parallel ranks within one expert-parallel group run micro-batches of the same index together. In every MoE layer
all wait for the rank whose experts got the most tokens. Routes of the rollout predict this before the step.
Micro-batches, and then sequences, are therefore exchanged if this unloads the busiest ranks and makes no micro-batch
larger. The number of micro-batches and the weights of tokens do not change.
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
"""Share of extra work that a micro-batch may get beyond the heaviest one of its index."""

WINDOW = 64
"""Number of sequences of similar length that are tried for each place."""

ROUTES_COUNTED = 2**26
"""Most token-to-expert choices that are examined; larger inputs are subsampled with a fixed stride."""

WORK = 3 * 10**9
"""Most additions of a search: a few seconds."""

EVEN = 1.01
"""Micro-batches whose busiest ranks have at most this multiple of the mean are left alone."""


def loads_of(routes: Sequence[Routes | None], lengths: Sequence[int], num_experts: int, ep: int) -> NDArray[np.float32]:
    """Load of each sequence on each expert-parallel rank.

    Args:
        routes: of each sequence. Masked or missing rows are estimated from the others.
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
    """Number of data-parallel ranks whose micro-batches share MoE layers: the ranks of one copy of the experts."""
    dense = layout.tp * layout.cp
    return max(layout.expert_size // dense, 1) if layout.expert_size % dense == 0 else 1


def expert_imbalance(plan: Plan, loads: NDArray[np.float32], together: int) -> float:
    """Tokens of the busiest expert-parallel ranks over the mean, less 1: over all micro-batches and layers."""
    sums = np.stack([load.sum(axis=0) for load in _lockstep_loads(plan, loads, together)])
    return float(sums.max(axis=2).sum() / max(sums.mean(axis=2).sum(), 1e-9)) - 1


def least_imbalance(loads: NDArray[np.float32]) -> float:
    """Lower bound of `expert_imbalance` for any packing: every micro-batch is a mixture of all sequences."""
    total = loads.sum(axis=0)
    return float(total.max(axis=1).sum() / max(total.mean(axis=1).sum(), 1e-9)) - 1


def _lockstep_loads(plan: Plan, loads: NDArray[np.float32], together: int) -> list[NDArray[np.float32]]:
    """Loads of each lockstep set: the sequences of micro-batches of one index, on ranks that share experts."""
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
    """The plan after exchanges of equally heavy micro-batches, then of sequences of similar length.

    Args:
        loads: see `loads_of`. lengths, costs: of each sequence, in tokens and in work.
        budget: tokens of a micro-batch; a larger one does not grow.
        together: see `ranks_together`.
    """
    ranks, count = len(plan), len(plan[0])
    if ranks // together * count < 2:
        return plan
    bins = [plan[rank][index] for index in range(count) for rank in range(ranks)]  # neighbours have the same index
    lockstep = np.asarray([i * (ranks // together) + r // together for i in range(count) for r in range(ranks)])
    work = np.asarray([costs[b].sum() for b in bins])
    limit = np.repeat(work.reshape(count, ranks).max(axis=1), ranks) * (1 + SLACK)

    whole = np.stack([loads[b].sum(axis=0) for b in bins])
    places = _Places(np.arange(len(bins)), lockstep, limit, np.full(len(bins), np.iinfo(np.int64).max))
    tokens = np.asarray([lengths[b].sum() for b in bins])
    placed = _Search(places, whole, tokens, work).run()
    order: list[int] = np.argsort(placed).tolist()  # placed[b]: new place of micro-batch b
    bins = [bins[b] for b in order]

    used = [i for b in bins for i in b]
    holder = np.repeat(np.arange(len(bins)), [len(b) for b in bins])
    room = np.maximum(budget, [lengths[b].sum() for b in bins])
    places = _Places(holder, lockstep, limit, room)
    placed = _Search(places, loads[used], lengths[used], costs[used]).run()
    found: Plan = [[[] for _ in range(count)] for _ in range(ranks)]
    places_of: list[int] = placed.tolist()
    for item, place in zip(used, places_of, strict=True):
        found[place % ranks][place // ranks].append(item)
    better = expert_imbalance(found, loads, together) < expert_imbalance(plan, loads, together)
    return found if better else plan


@dataclass(frozen=True)
class _Places:
    """Assignment of items to places, and the limits of places.

    Attributes:
        holder: place of each item. lockstep: index of each place's lockstep set.
        work, room: most work and most tokens of each place.
    """

    holder: NDArray[np.int64]
    lockstep: NDArray[np.int64]
    work: NDArray[np.float64]
    room: NDArray[np.int64]


def _busiest(sums: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n] from [n, layers, ranks]: loads of the busiest rank, summed over layers."""
    return sums.max(axis=2).sum(axis=1)


def _squares(sums: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n] from [n, layers, ranks]: sum of squares; also falls if one of several busiest ranks of a layer gets less."""
    return np.einsum("nlr,nlr->n", sums, sums)


class _Search:
    """Local search that exchanges two items at a time, each the best of a few. It first lowers the squares of all
    ranks' loads, then the busiest ranks' loads, which alone may offer no improving first exchange.
    """

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
        self._sums = np.zeros((places.lockstep.max() + 1, *loads.shape[1:]), np.float32)
        np.add.at(self._sums, places.lockstep[self._holder], loads)
        self._height, self._heights = _squares, _squares(self._sums)
        self._order = np.argsort(costs, kind="stable")
        self._rank = np.empty_like(self._order)
        self._rank[self._order] = np.arange(len(self._order))

    def run(self) -> NDArray[np.int64]:
        """Place of each item after the search."""
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
        """Items of lockstep sets whose busiest ranks are overloaded, the worst set first."""
        excess = _busiest(self._sums) / np.maximum(self._sums.mean(axis=2).sum(axis=1), 1e-9)
        mine = excess[self._places.lockstep[self._holder]]
        order = np.argsort(-mine, kind="stable")
        return order[mine[order] > EVEN].tolist()

    def _exchange(self, item: int) -> None:
        """Exchange the item with the similar one that helps most, if any does."""
        others = self._like(item)  # at least the item itself
        lockstep = self._places.lockstep
        here, there = lockstep[self._holder[item]], lockstep[self._holder[others]]
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
        """Items of similar work to exchange with this one; an exchange within a lockstep set gains nothing."""
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
