"""The submit gate: its arithmetic, and the staleness that it bounds by itself."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.rollout.group_tracker import SubmitGate
from tests.unit.rollout_fakes import run_config


def room_of(gate: SubmitGate, accepted: int, running: int, version: int) -> int:
    """Groups that may be begun beside those that are accepted or running."""
    return max(0, gate.limit(version) - accepted - running)


@pytest.mark.parametrize(
    ("staleness", "spare", "version", "accepted", "running", "room"),
    [
        (0, 0, 0, 0, 0, 8),
        (0, 0, 0, 3, 5, 0),
        (0, 4, 0, 0, 8, 4),
        (0, 0, 2, 16, 0, 8),
        (1, 0, 0, 8, 0, 8),
        (1, 0, 0, 8, 8, 0),
        (3, 0, 5, 40, 10, 22),
        (0, 0, 0, 12, 0, 0),
        (0, 1, 0, 0, 0, 9),
    ],
)
def test_room_is_what_the_formula_says(staleness, spare, version, accepted, running, room):
    assert room_of(SubmitGate(8, staleness, spare), accepted, running, version) == room


@pytest.mark.parametrize(
    ("rollout", "spare"),
    [
        ({"over_sampling": 1.5}, 4),
        ({"over_sampling": 1.5, "max_staleness": 1}, 0),
        ({"over_sampling": 1.5, "max_staleness": 2, "dynamic_filter": "zero_variance"}, 4),
        ({"over_sampling": 1.2}, 1),
    ],
)
def test_spare_groups_are_begun_only_where_a_group_can_be_refused_or_left_for_later(tmp_path, rollout, spare):
    assert run_config(tmp_path, groups_per_step=8, **rollout).spare_groups == spare


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.integers(0, 4), st.integers(0, 2**32))
def test_without_stragglers_nothing_trained_is_older_than_the_bound(per_step: int, staleness: int, seed: int):
    """Groups end in the order in which they began; the trainer takes as late as it likes. No age test is needed."""
    gate, chance = SubmitGate(per_step, staleness), random.Random(seed)
    version, running, accepted, taken = 0, [], [], 0
    for _ in range(300):
        running += [version] * room_of(gate, taken + len(accepted), len(running), version)
        for _ in range(chance.randint(0, len(running))):
            accepted.append(running.pop(0))
        if len(accepted) >= per_step and chance.random() < 0.5:
            ages = [version - begun for begun in accepted[:per_step]]
            assert min(ages) >= 0 and max(ages) <= staleness
            accepted, taken, version = accepted[per_step:], taken + per_step, version + 1
    assert version > 10, "the gate always leaves enough room for the next step"
