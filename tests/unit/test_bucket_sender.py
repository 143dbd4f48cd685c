"""A sender's bucket_sender: what a transport can do before the turn is done before it, and a failure sends nothing."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from mslime.config.errors import WeightSyncError
from mslime.config.layout import ParallelLayout
from mslime.threads import in_thread
from mslime.weights import groups, transport_contract
from mslime.weights.bucket_sender import BucketSender, PhaseSeconds, SendOrder
from mslime.weights.transport import Transport
from mslime.weights.weight_plan import Bucket, Senders, WeightPlan
from tests.fixtures.forked import forking, preload

pytestmark = pytest.mark.timeout(60)

BUCKETS = transport_contract._buckets()
preload(__name__)


class LateTurns:
    """A fake of turns: the first comes when the test says so."""

    def __init__(self) -> None:
        self.come, self.passed_on = threading.Event(), list[bool]()

    def take(self, bucket: Bucket) -> bool:
        assert self.come.wait(30)
        return True

    def pass_on(self, bucket: Bucket, went_well: bool) -> None:
        self.passed_on.append(went_well)


class Noting(Transport):
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

    def connect(self, engines: Any) -> None:
        pass

    def disconnect(self) -> None:
        pass


def bucket_sender_of(transport: Noting, turns: LateTurns) -> BucketSender:
    ends = time.monotonic() + 30
    return BucketSender(transport, cast(SendOrder, turns), ends, 30, PhaseSeconds(), None)


def test_a_bucket_is_prepared_while_others_have_their_turn() -> None:
    transport, turns = Noting(), LateTurns()
    bucket_sender = bucket_sender_of(transport, turns)
    bucket_sender.put(BUCKETS[0], transport_contract._filled(BUCKETS[0], 1))
    assert transport.prepared.wait(30) and transport.calls == [("prepare", 0)]
    turns.come.set()
    bucket_sender.put(BUCKETS[1], transport_contract._filled(BUCKETS[1], 1))
    assert bucket_sender.close() is None and turns.passed_on == [True, True]
    assert transport.calls == [("prepare", 0), ("start", 0), ("prepare", 1), ("start", 1)]
    assert bucket_sender.seconds.turn > 0 and bucket_sender.seconds.send > 0


def test_a_sender_is_not_held_up_before_it_fills_a_third_bucket() -> None:
    """It takes part in gathers of others' buckets while its first is on its way and its second waits."""
    transport, turns = Noting(), LateTurns()
    bucket_sender = bucket_sender_of(transport, turns)
    bucket_sender.put(BUCKETS[0], transport_contract._filled(BUCKETS[0], 1))
    bucket_sender.wait_for_buffer()
    bucket_sender.put(BUCKETS[1], transport_contract._filled(BUCKETS[1], 1))  # returns, though the first has not gone
    assert transport.calls in ([], [("prepare", 0)]) and turns.passed_on == []
    room = in_thread(bucket_sender.wait_for_buffer)
    with pytest.raises(TimeoutError):
        room.result(0.2)
    turns.come.set()
    room.result(30)
    assert turns.passed_on[:1] == [True] and bucket_sender.close() is None


@pytest.mark.parametrize("lost", [True, False], ids=["not filled", "not prepared"])
def test_after_a_bucket_that_cannot_be_prepared_none_is_and_the_turn_is_passed_on(lost: bool) -> None:
    transport, turns = Noting(fails=-1 if lost else 0), LateTurns()
    turns.come.set()
    bucket_sender = bucket_sender_of(transport, turns)
    bucket_sender.put(BUCKETS[0], None if lost else transport_contract._filled(BUCKETS[0], 1))
    bucket_sender.put(BUCKETS[1], transport_contract._filled(BUCKETS[1], 1))
    failure = bucket_sender.close()
    if lost:  # told by whoever could not fill it
        assert failure is None and transport.calls == [("prepare", 1), ("start", 1)]
        assert turns.passed_on == [False, True]
    else:
        assert isinstance(failure, WeightSyncError) and transport.calls == [("prepare", 0)]
        assert turns.passed_on == [False, False]


def turns_of(rank: int, store: str, passed_on: Event) -> None:
    """One of two senders, of four buckets in turn. The second is not ready before the first has passed its turn on."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    layout = ParallelLayout(dp=2, ep=2)
    buckets = tuple(replace(BUCKETS[0], index=index, sender=index % 2) for index in range(4))
    turns = SendOrder(WeightPlan(Senders(layout, 2), buckets), cast(Any, dist.group.WORLD))
    for number, bucket in enumerate(buckets[rank::2]):
        assert rank == 0 or number or passed_on.wait(30)
        assert turns.take(bucket)
        turns.pass_on(bucket, True)
        passed_on.set()
    dist.destroy_process_group()


def test_a_sender_that_passes_its_turn_on_does_not_wait_until_the_next_is_ready(tmp_path: Path) -> None:
    context = forking()
    passed_on = context.Event()
    ranks = [context.Process(target=turns_of, args=(rank, str(tmp_path / "store"), passed_on)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("senders", [1, 2])
def test_several_senders_have_a_group_for_their_turns_and_ranks_groups_for_what_they_gather(
    senders: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_new_group", lambda members, backend, timeout: (members, backend))
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    chosen = Senders.at_most(ParallelLayout(dp=4, ep=4), senders)
    made: Any = groups.make_groups(chosen, "nccl", 1.0)
    assert made.turns == (None if senders == 1 else (chosen.everyone(), "gloo")) and len(chosen.everyone()) == senders
    assert made.control == ((0, 1, 2, 3), "gloo")
    gathered = {chosen.all_expert_ranks(0), *(chosen.expert_ranks(sender) for sender in chosen.ranks(0))}
    assert made.gathers == {members: (members, "nccl") for members in gathered if rank in members}
