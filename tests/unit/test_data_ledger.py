"""The ledger balances, whatever happens to tokens, and finds the step in which they were lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.data.ledger import Ledger

events = st.lists(
    st.tuples(st.sampled_from(["generate", "train", "mask", "drop", "settle", "reload"]), st.integers(0, 50)),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(events)
def test_generated_equals_trained_masked_dropped_and_pending_per_step_and_in_all(moves: list[tuple[str, int]]):
    ledger, alive = Ledger(), 0
    sums = dict.fromkeys(("generated", "trained", "masked", "dropped"), 0)
    for kind, wanted in moves:
        n = wanted if kind == "generate" else min(wanted, alive)
        if kind == "generate":
            ledger.generate(n)
            alive += n
        elif kind in ("train", "mask", "drop"):
            ledger.drop(n, "stale") if kind == "drop" else ledger.train(n) if kind == "train" else ledger.mask(n)
            alive -= n
        elif kind == "reload":
            ledger = Ledger.from_state(json.loads(json.dumps(ledger.state_dict())))
        else:
            step = ledger.settle(alive)
            for key in sums:
                sums[key] += step[f"{key}_tokens"]
            assert step["pending_tokens"] == alive
    last = ledger.settle(alive)
    for key in sums:
        sums[key] += last[f"{key}_tokens"]
    assert sums["generated"] == ledger.generated == sums["trained"] + sums["masked"] + sums["dropped"] + alive
    assert ledger.masked.total() == sums["masked"] and ledger.dropped["stale"] == sums["dropped"]


def test_a_lost_token_is_found_at_the_settlement():
    ledger = Ledger()
    ledger.generate(10)
    ledger.train(4)
    with pytest.raises(AssertionError, match="6 tokens are pending in the books, 5 are really held"):
        ledger.settle(5)


def test_more_cannot_be_spent_than_is_pending():
    ledger = Ledger()
    ledger.generate(3)
    with pytest.raises(AssertionError, match="4 tokens to settle, but 3 are pending"):
        ledger.drop(4, "stale")


def test_reasons_are_kept_apart():
    ledger = Ledger()
    ledger.generate(10)
    ledger.drop(1, "stale")
    ledger.drop(2, "zero_variance")
    ledger.mask(3)
    step = ledger.settle(4)
    assert step["dropped/stale_tokens"] == 1 and step["dropped/zero_variance_tokens"] == 2
    assert step["masked/stale_tokens"] == 3 and step["dropped_tokens"] == 3
    ledger.drop(1, "reward")
    assert ledger.settle(3)["dropped/stale_tokens"] == 0, "a settlement reports movements, not totals"
