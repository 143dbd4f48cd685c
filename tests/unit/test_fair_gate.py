"""The gate that adapters share: nobody is held up by another, and what is free is divided by weight."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.rollout.request_slots import AdapterQueue, FairGate


def fill(gate: FairGate, running: dict[str, int], waiting: dict[str, int]) -> list[str]:
    """Begin groups until the gate says no; returns who began, in order."""
    begun: list[str] = []
    while (name := gate.next_adapter({n: AdapterQueue(running[n], waiting[n]) for n in running})) is not None:
        running[name], waiting[name] = running[name] + 1, waiting[name] - 1
        begun.append(name)
    return begun


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 90), min_size=2, max_size=9), st.integers(0, 60), st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    st.integers(0, 2**32),
)  # fmt: skip
def test_groups_that_never_end_leave_every_other_adapter_its_share(
    weights: list[int], more: int, guaranteed: float, seed: int
) -> None:
    chance, names = random.Random(seed), [f"a{i}" for i in range(len(weights))]
    gate = FairGate(len(weights) + more, dict(zip(names, map(float, weights), strict=True)), guaranteed)
    running = dict.fromkeys(names, 0)
    late = chance.choice(names)
    for _ in range(20):  # the others fill whatever they are given, and never end
        fill(gate, running, {n: 0 if n == late else chance.randint(0, 20) for n in names})
    assert running[late] == 0
    fill(gate, running, {n: 10**3 if n == late else 0 for n in names})
    assert running[late] >= gate.share(late) >= 1
    assert sum(running.values()) <= gate.capacity
    assert gate.next_adapter({n: AdapterQueue(running[n], 10**3 * (n == late)) for n in names}) is None


def test_all_that_is_free_is_used_while_one_adapter_alone_has_work() -> None:
    gate, running = FairGate(32, {"fast": 1, "slow": 1, "other": 2}), {"fast": 0, "slow": 0, "other": 0}
    fill(gate, running, {"fast": 99, "slow": 0, "other": 0})
    assert running["fast"] == 32 - gate.share("slow") - gate.share("other") == 32 - 4 - 8


def test_with_work_for_all_running_groups_follow_the_weights() -> None:
    gate, running = FairGate(40, {"a": 1, "b": 1, "c": 2}), {"a": 0, "b": 0, "c": 0}
    order = fill(gate, running, dict.fromkeys(running, 99))
    assert running == {"a": 10, "b": 10, "c": 20}
    assert order[:4] == ["a", "b", "c", "c"]


def test_who_had_much_waits_until_the_others_have_caught_up() -> None:
    gate, running = FairGate(20, {"a": 1, "b": 1}), {"a": 0, "b": 0}
    fill(gate, running, {"a": 99, "b": 0})
    assert running == {"a": 15, "b": 0}
    fill(gate, running, {"a": 99, "b": 99})
    assert running == {"a": 15, "b": 5}
    for _ in range(5):
        running["a"] -= 1
        assert fill(gate, running, {"a": 99, "b": 99}) == ["b"]
    assert running == {"a": 10, "b": 10}


@pytest.mark.parametrize(("capacity", "guaranteed", "weights", "shares"), [
    (3, 0.0, (1, 1, 1), [1, 1, 1]), (3, 1.0, (100, 1, 1), [1, 1, 1]), (9, 1.0, (1, 1, 1), [3, 3, 3]),
    (13, 0.5, (2, 2, 1), [3, 3, 2]),
])  # fmt: skip
def test_every_adapter_is_kept_one_group_and_its_part_of_the_rest(
    capacity: int, guaranteed: float, weights: tuple[float, ...], shares: list[int]
) -> None:
    gate = FairGate(capacity, dict(zip("abc", weights, strict=True)), guaranteed)
    assert [gate.share(n) for n in gate.weights] == shares


def test_an_adapter_that_its_own_gate_stops_begins_nothing() -> None:
    gate = FairGate(8, {"a": 1, "b": 1})
    assert gate.next_adapter({"a": AdapterQueue(0, 0), "b": AdapterQueue(1, 0)}) is None
    assert gate.next_adapter({"a": AdapterQueue(0, 0), "b": AdapterQueue(1, 1)}) == "b"


def test_fewer_places_than_adapters_are_refused() -> None:
    with pytest.raises(AssertionError, match="one request for each"):
        FairGate(2, {"a": 1, "b": 1, "c": 1})
