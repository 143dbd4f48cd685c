"""A sender's courier: what a transport can do before the turn is done before it, and a failure sends nothing."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest
import torch

from mslime.config.errors import WeightSyncError
from mslime.weights import contract
from mslime.weights.courier import Courier, Seconds, Turns
from mslime.weights.plan import Bucket

pytestmark = pytest.mark.timeout(60)

BUCKETS = contract._buckets()


class LateTurns:
    """A fake of turns: the first comes when the test says so."""

    def __init__(self) -> None:
        self.come, self.passed_on = threading.Event(), list[bool]()

    def take(self, bucket: Bucket) -> bool:
        assert self.come.wait(30)
        return True

    def pass_on(self, bucket: Bucket, went_well: bool) -> None:
        self.passed_on.append(went_well)


class Noting:
    """A fake transport that notes what it is asked for, and fails to prepare one bucket."""

    def __init__(self, fails: int = -1) -> None:
        self.fails, self.prepared, self.calls = fails, threading.Event(), list[tuple[str, int]]()

    def prepare_bucket(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self.calls.append(("prepare", bucket.index))
        self.prepared.set()
        if bucket.index == self.fails:
            raise WeightSyncError("weights.transport", "noting", "no", "say yes")

    def start(self, bucket: Bucket, flat: torch.Tensor) -> Any:
        self.calls.append(("start", bucket.index))
        return self

    def wait(self) -> None:
        pass


def courier_of(transport: Noting, turns: LateTurns) -> Courier:
    ends = time.monotonic() + 30
    return Courier(cast(Any, transport), cast(Turns, turns), ends, 30, Seconds())


def test_a_bucket_is_prepared_while_others_have_their_turn() -> None:
    transport, turns = Noting(), LateTurns()
    courier = courier_of(transport, turns)
    courier.put(BUCKETS[0], contract._filled(BUCKETS[0], 1))
    assert transport.prepared.wait(30) and transport.calls == [("prepare", 0)]
    turns.come.set()
    courier.put(BUCKETS[1], contract._filled(BUCKETS[1], 1))
    assert courier.close() is None and turns.passed_on == [True, True]
    assert transport.calls == [("prepare", 0), ("start", 0), ("prepare", 1), ("start", 1)]
    assert courier.seconds.turn > 0 and courier.seconds.send > 0


@pytest.mark.parametrize("lost", [True, False], ids=["not filled", "not prepared"])
def test_after_a_bucket_that_cannot_be_prepared_none_is_and_the_turn_is_passed_on(lost: bool) -> None:
    transport, turns = Noting(fails=-1 if lost else 0), LateTurns()
    turns.come.set()
    courier = courier_of(transport, turns)
    courier.put(BUCKETS[0], None if lost else contract._filled(BUCKETS[0], 1))
    courier.put(BUCKETS[1], contract._filled(BUCKETS[1], 1))
    failure = courier.close()
    if lost:  # told by whoever could not fill it
        assert failure is None and transport.calls == [("prepare", 1), ("start", 1)]
        assert turns.passed_on == [False, True]
    else:
        assert isinstance(failure, WeightSyncError) and transport.calls == [("prepare", 0)]
        assert turns.passed_on == [False, False]
