"""The submit gate: its arithmetic, and the staleness that it bounds by itself."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.rollout.gate import SubmitGate


@pytest.mark.parametrize(
    ("staleness", "over", "version", "accepted", "running", "room"),
    [
        (0, 1.0, 0, 0, 0, 8),
        (0, 1.0, 0, 3, 5, 0),
        (0, 1.5, 0, 0, 8, 4),
        (0, 1.0, 2, 16, 0, 8),
        (1, 1.0, 0, 8, 0, 8),
        (1, 1.0, 0, 8, 8, 0),
        (3, 1.0, 5, 40, 10, 22),
        (0, 1.0, 0, 12, 0, 0),
        (0, 1.2, 0, 0, 0, 9),
    ],
)
def test_room_is_what_the_formula_says(staleness, over, version, accepted, running, room):
    assert SubmitGate(8, staleness, over).room(accepted, running, version) == room


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.integers(0, 4), st.integers(0, 2**32))
def test_without_stragglers_nothing_trained_is_older_than_the_bound(per_step: int, staleness: int, seed: int):
    """Groups end in the order in which they began; the trainer takes as late as it likes. No age test is needed."""
    gate, chance = SubmitGate(per_step, staleness), random.Random(seed)
    version, running, accepted, taken = 0, [], [], 0
    for _ in range(300):
        running += [version] * gate.room(taken + len(accepted), len(running), version)
        for _ in range(chance.randint(0, len(running))):
            accepted.append(running.pop(0))
        if len(accepted) >= per_step and chance.random() < 0.5:
            ages = [version - begun for begun in accepted[:per_step]]
            assert min(ages) >= 0 and max(ages) <= staleness
            accepted, taken, version = accepted[per_step:], taken + per_step, version + 1
    assert version > 10, "the gate always leaves enough room for the next step"
