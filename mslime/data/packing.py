"""Samples to trainer shards: optimizer steps, micro-batches under a token budget, balance over data-parallel ranks.

Every rank gets the same number of micro-batches. Micro-batches of one index cost about the same on all ranks, which
wait for each other in every MoE layer with expert parallelism over data-parallel ranks. The schedule depends only on
the lengths and is deterministic. Denominators (`denominators`) are computed before the split, so the weight of a token
does not depend on the layout.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mslime.config.algorithm import LossAggregation
from mslime.config.layout import ParallelLayout
from mslime.data.expert_balance import Plan, expert_imbalance, least_imbalance, ranks_together, spread_experts
from mslime.data.sample import Sample, SequenceTime
from mslime.data.shard import PackedSequence, TrainShard, shards_of, token_weights


def build_shards(
    samples: Sequence[Sample],
    advantages: Sequence[float | NDArray[np.floating]] | NDArray[np.floating],
    layout: ParallelLayout,
    token_budget: int,
    *,
    loss_aggregation: LossAggregation = "token",
    max_response_tokens: int | None = None,
    packed: bool = True,
    steps: int = 1,
    multiple_of: int = 1,
    quadratic_tokens: float | None = None,
    version: int | None = None,
    times: Sequence[SequenceTime] | None = None,
    loads: NDArray[np.float32] | None = None,
) -> list[list[TrainShard]]:
    """Build one shard per optimizer step and data-parallel rank.

    Args:
        samples: the groups of a rollout; those of a group share `group_id` and stay in one optimizer step.
        advantages: one number per sample, or one [T] array per sample.
        token_budget: tokens of a micro-batch per context-parallel rank; a longer sequence gets its own micro-batch.
        loss_aggregation, max_response_tokens: see `denominators.token_weights`.
        packed: False puts one sequence into each micro-batch.
        steps: optimizer steps to spread the groups over.
        multiple_of: the number of micro-batches per rank is a multiple of it (interleaved pipelines need this).
        quadratic_tokens: sequence length at which attention costs as much as everything else, for balance; None
            balances by tokens.
        version: the weights to be trained, for the ages of tokens.
        times: of each sample, if the time of a rollout runs through all its sequences.
        loads: each sample's load on each expert-parallel rank (`expert_balance.loads_of`), to be spread evenly; None
            packs by lengths alone.

    Returns:
        [steps][dp] shards. `sequence_ids` are indices into `samples`.
    """
    assert len(advantages) == len(samples) > 0, (len(advantages), len(samples))
    assert token_budget > 0 and steps > 0 and multiple_of > 0
    packer = Packer(token_budget * layout.cp, layout.dp, multiple_of, quadratic_tokens)
    result: list[list[TrainShard]] = []
    for members in _split_steps(samples, steps):
        chosen = [samples[i] for i in members]
        weights = token_weights(chosen, loss_aggregation, max_response_tokens)
        lengths = np.asarray([len(s) for s in chosen], np.int64)
        plan = packer.pack(lengths) if packed else packer.one_each(lengths)
        if loads is not None:
            costs, together = packer.cost(lengths), ranks_together(layout)
            plan = spread_experts(plan, loads[members], lengths, costs, packer.budget, together)
        columns = [
            PackedSequence(
                i, samples[i], weights[j], np.asarray(advantages[i], np.float32), version, times[i] if times else None
            )
            for j, i in enumerate(members)
        ]
        result.append(shards_of(columns, plan))
    return result


def _split_steps(samples: Sequence[Sample], steps: int) -> list[list[int]]:
    """Sample indices of each optimizer step: whole groups, in order, split as evenly as possible."""
    groups: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(i)
    assert len(groups) >= steps, f"{len(groups)} groups cannot fill {steps} optimizer steps"
    members = list(groups.values())
    return [[i for g in part for i in members[int(g)]] for part in np.array_split(np.arange(len(members)), steps)]


@dataclass(frozen=True)
class Packer:
    """Packs sequences into micro-batches and assigns these to ranks.

    Attributes:
        budget: tokens of a micro-batch. dp: ranks. multiple_of: granularity of the number of micro-batches per rank.
        quadratic: see `build_shards`.
    """

    budget: int
    dp: int
    multiple_of: int = 1
    quadratic: float | None = None

    def one_each(self, lengths: NDArray[np.int64]) -> Plan:
        """One sequence per micro-batch; the result is like that of `pack`."""
        bins = [[int(i)] for i in np.argsort(-lengths, kind="stable")]
        return self._deal(self._filled_up(bins), lengths)

    def pack(self, lengths: NDArray[np.int64]) -> Plan:
        """Balanced micro-batches within the budget, as few as best-fit-decreasing needs.

        Returns:
            The same number of micro-batches on every rank; some are empty if there are too few sequences.
        """
        order = np.argsort(-lengths, kind="stable").tolist()
        tokens, costs = lengths.tolist(), self.cost(lengths).tolist()
        fitted = self._filled_up(_best_fit(order, tokens, self.budget))
        balanced = _balance(order, tokens, costs, len(fitted), self.budget)  # may fail although best-fit succeeded
        return self._deal(balanced or fitted, lengths)

    def cost(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Estimated work of each sequence, in tokens: n + n^2 / quadratic."""
        n = lengths.astype(np.float64)
        return n if self.quadratic is None else n * (1 + n / self.quadratic)

    def _filled_up(self, bins: list[list[int]]) -> list[list[int]]:
        """Add empty bins until ranks have equally many and the granularity is met."""
        return bins + [[] for _ in range(-len(bins) % (self.dp * self.multiple_of))]

    def _deal(self, bins: list[list[int]], lengths: NDArray[np.int64]) -> Plan:
        """Deal rows of equally heavy bins, one per rank; the heaviest goes to the rank with the least work so far."""
        costs = self.cost(lengths)
        loads = [float(costs[b].sum()) for b in bins]
        heaviest = sorted(range(len(bins)), key=lambda b: -loads[b])
        ranks: Plan = [[] for _ in range(self.dp)]
        done = [0.0] * self.dp
        for start in range(0, len(bins), self.dp):
            lightest = sorted(range(self.dp), key=lambda r: done[r])
            for rank, b in zip(lightest, heaviest[start : start + self.dp], strict=True):
                ranks[rank].append(bins[b])
                done[rank] += loads[b]
        return ranks


def _best_fit(order: Sequence[int], tokens: Sequence[int], budget: int) -> list[list[int]]:
    """Best-fit-decreasing: each sequence into the fullest bin with enough space; one over the budget gets its own bin.

    Needs at most 11/9 of the fewest bins, plus one. A two-level bitmap over free space finds the smallest sufficient
    space: 100,000 sequences take a fraction of a second.
    """
    free = _Bins(budget)
    bins: list[list[int]] = []
    for need, run in itertools.groupby(order, key=tokens.__getitem__):
        equal = list(run)
        start = 0
        while start < len(equal):
            space, chosen = free.take(need) or (budget, len(bins))
            if chosen == len(bins):
                bins.append([])
            count = max(min(space // need, len(equal) - start), 1)  # the next sequence has the same fullest bin
            bins[chosen] += equal[start : start + count]
            start += count
            if space > need * count:
                free.put(space - need * count, chosen)
    return bins


class _Bins:
    """Bins indexed by free space."""

    BITS = 10

    def __init__(self, budget: int) -> None:
        self._bins: dict[int, list[int]] = {}
        self._words = [0] * ((budget >> self.BITS) + 1)
        self._used = 0  # bitmap of the non-zero words

    def put(self, space: int, index: int) -> None:
        """Add a bin."""
        if space in self._bins:
            self._bins[space].append(index)
            return
        self._bins[space] = [index]
        word = space >> self.BITS
        self._words[word] |= 1 << (space & ((1 << self.BITS) - 1))
        self._used |= 1 << word

    def take(self, need: int) -> tuple[int, int] | None:
        """Remove and return (free space, bin) of the fullest bin with space for `need`; None if there is none."""
        word, bit = need >> self.BITS, need & ((1 << self.BITS) - 1)
        bits = self._words[word] >> bit << bit if word < len(self._words) else 0
        if not bits:
            above = self._used >> (word + 1) << (word + 1)
            if not above:
                return None
            word = _lowest_bit(above)
            bits = self._words[word]
        space = (word << self.BITS) + _lowest_bit(bits)
        indices = self._bins[space]
        index = indices.pop()
        if not indices:
            del self._bins[space]
            self._words[word] ^= bits & -bits
            if not self._words[word]:
                self._used ^= 1 << word
        return space, index


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _balance(
    order: Sequence[int], tokens: Sequence[int], costs: Sequence[float], count: int, budget: int
) -> list[list[int]] | None:
    """Longest first, each into the cheapest of `count` bins with enough space; None if one fits nowhere.

    A full bin waits aside until sequences are short enough for it, so each step takes O(log count).
    """
    cheapest = [(0.0, b) for b in range(count)]
    waiting: list[tuple[int, int, float]] = []  # (-room, bin, cost)
    bins: list[list[int]] = [[] for _ in range(count)]
    space = [budget] * count
    for index in order:
        need = tokens[index]
        while waiting and -waiting[0][0] >= need:
            _, b, load = heapq.heappop(waiting)
            heapq.heappush(cheapest, (load, b))
        while cheapest and space[cheapest[0][1]] < need and bins[cheapest[0][1]]:
            load, b = heapq.heappop(cheapest)
            heapq.heappush(waiting, (-space[b], b, load))
        if not cheapest:
            return None
        load, b = cheapest[0]
        bins[b].append(index)
        space[b] -= need
        heapq.heapreplace(cheapest, (load + costs[index], b))
    return bins


def packing_metrics(
    steps: Sequence[Sequence[TrainShard]], layout: ParallelLayout, token_budget: int, quadratic_tokens: float | None
) -> dict[str, float]:
    """`packing/*` metrics of a rollout's shards, over all optimizer steps."""
    packer = Packer(token_budget * layout.cp, layout.dp, quadratic=quadratic_tokens)
    tokens = rows = slots = empty = 0
    waited = worked = rank_excess = 0.0
    for shards in steps:
        loads = np.zeros((layout.dp, len(shards[0].micro_batches)))
        for rank, shard in enumerate(shards):
            costs = packer.cost(shard.lengths)
            for index, members in enumerate(shard.micro_batches):
                lengths = shard.lengths[list(members)]
                loads[rank, index] = costs[list(members)].sum()
                tokens += int(lengths.sum())
                rows += padded_rows(lengths, layout)
                empty += not members
        slots += loads.size
        waited += float(loads.max(axis=0).sum()) * layout.dp
        worked += float(loads.sum())
        rank_excess = max(rank_excess, float(loads.sum(axis=1).max() / max(loads.sum(axis=1).mean(), 1e-9)) - 1)
    return {
        "packing/micro_batches": slots / layout.dp / len(steps),
        "packing/empty_micro_batches": float(empty),
        "packing/fill": tokens / (slots * packer.budget),
        "packing/padding": 1 - tokens / rows,
        "packing/imbalance": waited / worked - 1,
        "packing/rank_imbalance": rank_excess,
    }


def expert_metrics(
    steps: Sequence[Sequence[TrainShard]], loads: NDArray[np.float32], layout: ParallelLayout
) -> dict[str, float]:
    """`packing/expert_*` metrics of a rollout's shards, for the worst step. Their sequence ids are rows of `loads`."""
    plans = [[[list(s.sequence_ids[list(m)]) for m in s.micro_batches] for s in shards] for shards in steps]
    members = [[i for rank in plan for m in rank for i in m] for plan in plans]
    return {
        "packing/expert_imbalance": max(expert_imbalance(plan, loads, ranks_together(layout)) for plan in plans),
        "packing/expert_imbalance_least": max(least_imbalance(loads[m]) for m in members),
    }


def padded_rows(lengths: NDArray[np.int64], layout: ParallelLayout) -> int:
    """Rows of a micro-batch of these sequences over its context-parallel ranks, with sequence parallelism."""
    return sum(padded_lengths(lengths.tolist(), layout.cp, layout.tp))


def padded_lengths(lengths: Sequence[int], cp: int, sp: int, multiple: int = 1) -> list[int]:
    """Padded lengths of a micro-batch's sequences on their ranks; an empty one gets a sequence of padding.

    Each length is padded to a multiple of 2 x CP. The last one absorbs the padding of the total to a multiple of that
    times the sequence-parallel size (at least two rows), and of each rank's rows to `multiple`.
    """
    each = 2 * cp if cp > 1 else 1
    padded = [-(-n // each) * each for n in lengths] or [0]
    total = max(sum(padded), 1)
    whole = math.lcm(each, cp * multiple) * sp
    padded[-1] += -(-total // whole) * whole - sum(padded)
    return padded


def chunks_per_group(layout: ParallelLayout) -> int:
    """Granularity of the number of micro-batches per rank: interleaved stages pass them on in groups."""
    return layout.pp if layout.vpp > 1 else 1
