"""Which sequences meet in an MoE layer: loads counted by hand, limits kept, and how near the best it comes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mslime.config.layout import ParallelLayout
from mslime.data import expert_balance
from mslime.data.expert_balance import Plan, expert_imbalance, least_imbalance, loads_of, ranks_together, spread_experts
from mslime.data.packing import Packer
from mslime.data.routes import Routes


def routes(experts: list[list[list[int]]], mask: list[bool] | None = None) -> Routes:
    rows = np.asarray(experts, np.uint8)
    return Routes(rows, np.ones(len(rows), np.bool_) if mask is None else np.asarray(mask), tuple(range(rows.shape[1])))


def test_a_load_is_what_a_rank_is_given_counted_by_hand() -> None:
    """Two layers, top-2 of 4 experts over two ranks; a sequence of 4 tokens has routes of 3, of which one is masked."""
    known = routes([[[0, 1], [0, 2]], [[0, 3], [2, 3]], [[3, 3], [3, 3]]], [True, True, False])
    (load,) = loads_of([known], [4], 4, 2)
    assert load.tolist() == [[3 * 2, 1 * 2], [1 * 2, 3 * 2]]  # two rows stand for four


def test_a_sequence_of_which_nothing_is_known_loads_all_ranks_equally() -> None:
    known = routes([[[0, 1]], [[0, 1]]])
    masked = routes([[[0, 1]]], [False])
    loads = loads_of([known, masked, None], [2, 8, 4], 4, 2)
    assert loads[:, 0].tolist() == [[4, 0], [8, 8], [4, 4]]


def test_of_many_routes_every_so_many_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    many = Routes(rng.integers(0, 8, (4000, 2, 2)).astype(np.uint8), np.ones(4000, np.bool_), (0, 1))
    whole = loads_of([many], [4000], 8, 4)
    monkeypatch.setattr(expert_balance, "ROUTES_COUNTED", 4000)
    counted = loads_of([many], [4000], 8, 4)
    assert not np.array_equal(whole, counted) and counted.sum() == whole.sum()
    np.testing.assert_allclose(counted, whole, rtol=0.1)


@pytest.mark.parametrize(("layout", "together"), [
    (ParallelLayout(dp=4, ep=4), 4), (ParallelLayout(dp=4, ep=2), 2), (ParallelLayout(tp=2, dp=4, ep=4), 2),
    (ParallelLayout(tp=2, dp=2, ep=2), 1), (ParallelLayout(tp=4, dp=2, ep=2), 1),
    (ParallelLayout(cp=2, dp=2, ep=2, etp=2), 2), (ParallelLayout(tp=2, pp=2, dp=4, ep=8), 4),
])  # fmt: skip
def test_ranks_that_share_out_experts_meet(layout: ParallelLayout, together: int) -> None:
    assert ranks_together(layout) == together
    copies = {layout.place(rank).edp for rank in range(layout.stage_size) if layout.place(rank).dp < together}
    assert len(copies) == max(layout.tp * layout.cp // layout.expert_size, 1)


def skewed(
    rng: np.random.Generator, count: int, ep: int, layers: int = 3
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Lengths and loads of sequences of as many kinds as there are ranks; one kind uses mostly one rank's experts."""
    lengths, kinds = rng.integers(20, 60, count), rng.permutation(np.arange(count) % ep)
    share = np.full((ep, layers, ep), 0.4 / ep)
    for kind, layer in itertools.product(range(ep), range(layers)):
        share[kind, layer, (kind + layer) % ep] += 0.6
    return lengths, (share[kinds] * lengths[:, None, None] * 2).astype(np.float32)


def row_work(plan: Plan, costs: NDArray[np.float64]) -> list[float]:
    """Of each index, the work of the heaviest micro-batch."""
    return [max(costs[rank[index]].sum() for rank in plan) for index in range(len(plan[0]))]


@given(st.integers(0, 2**32 - 1), st.integers(4, 60), st.sampled_from([(2, 2), (4, 4), (4, 2)]), st.integers(60, 200))
def test_an_exchange_keeps_every_limit_and_never_makes_it_worse(
    seed: int, count: int, sizes: tuple[int, int], budget: int
) -> None:
    dp, together = sizes
    rng = np.random.default_rng(seed)
    lengths, loads = skewed(rng, count, dp)
    packer = Packer(budget, dp, quadratic=50.0)
    plan, costs = packer.pack(lengths), packer.cost(lengths)
    found = spread_experts(plan, loads, lengths, costs, budget, together)
    assert [len(rank) for rank in found] == [len(rank) for rank in plan]
    assert sorted(i for rank in found for m in rank for i in m) == list(range(count))
    assert all(lengths[m].sum() <= budget for rank in found for m in rank)
    assert all(a <= b * 1.021 for a, b in zip(row_work(found, costs), row_work(plan, costs), strict=True))
    before, after = (expert_imbalance(p, loads, together) for p in (plan, found))
    assert least_imbalance(loads) - 1e-5 <= after <= before + 1e-5
    assert found == spread_experts(plan, loads, lengths, costs, budget, together)


@pytest.mark.parametrize(("ep", "count", "budget"), [(2, 64, 240), (4, 256, 240), (8, 512, 120), (8, 2048, 120)])
def test_busiest_ranks_of_a_skewed_task_have_at_most_a_tenth_more_than_the_mean(
    ep: int, count: int, budget: int
) -> None:
    lengths, loads = skewed(np.random.default_rng(1), count, ep)
    packer = Packer(budget, ep)
    plan = packer.pack(lengths)
    found = spread_experts(plan, loads, lengths, packer.cost(lengths), budget, ep)
    assert expert_imbalance(plan, loads, ep) > 0.13 and least_imbalance(loads) < 0.08
    assert expert_imbalance(found, loads, ep) < 0.1


def test_it_comes_near_the_best_of_all_ways_to_deal_out_equal_sequences() -> None:
    """Eight sequences of one length, two a micro-batch, two ranks: 35 ways to choose which four meet."""
    rng = np.random.default_rng(2)
    ratios = list[float]()
    for _ in range(50):
        lengths, loads = np.full(8, 10), rng.gamma(1.0, 1.0, (8, 2, 2)).astype(np.float32)
        plan = Packer(20, 2).pack(lengths)
        found = spread_experts(plan, loads, lengths, lengths.astype(np.float64), 20, 2)
        best = min(
            loads[list(half)].sum(axis=0).max(axis=1).sum()
            + loads[[i for i in range(8) if i not in half]].sum(axis=0).max(axis=1).sum()
            for half in itertools.combinations(range(8), 4)
        )
        mean = loads.sum(axis=0).mean(axis=1).sum()
        ratios.append((expert_imbalance(found, loads, 2) + 1) * mean / best)
    assert np.mean(ratios) < 1.01 and max(ratios) < 1.1 and min(ratios) > 1 - 1e-5


def test_a_search_ends_when_its_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, loads = skewed(np.random.default_rng(3), 200, 4)
    packer = Packer(240, 4)
    plan, costs = packer.pack(lengths), packer.cost(lengths)
    whole, tries = spread_experts(plan, loads, lengths, costs, 240, 4), 2 * expert_balance.WINDOW * 12
    monkeypatch.setattr(expert_balance, "WORK", 0)
    assert spread_experts(plan, loads, lengths, costs, 240, 4) is plan
    monkeypatch.setattr(expert_balance, "WORK", 30 * tries)
    some = spread_experts(plan, loads, lengths, costs, 240, 4)
    assert expert_imbalance(whole, loads, 4) < expert_imbalance(some, loads, 4) < expert_imbalance(plan, loads, 4)


def test_one_meeting_is_left_as_it_is() -> None:
    plan: Plan = [[[0, 1]], [[2]]]
    loads = np.ones((3, 1, 2), np.float32)
    assert spread_experts(plan, loads, np.asarray([1, 1, 2]), np.asarray([1.0, 1.0, 2.0]), 4, 2) is plan
