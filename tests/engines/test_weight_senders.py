"""Several trainer ranks send to several engines: every bit arrives, in one order, and a failure reaches every rank.

Real Megatron ranks; the engines are stand-ins, which accept one bucket at a time like SGLang and can refuse one.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.errors import WeightSyncError
from mslime.config.keys import Endpoint
from mslime.convert.hf import HFCheckpoint
from mslime.weights import sync as weight_sync
from mslime.weights.memory import MemoryTransport
from mslime.weights.weight_plan import BucketEntry
from tests.engines.test_weight_sync import change_weights, config_of, sender_of
from tests.engines.trainer_ranks import run_trainers
from tests.fixtures.stand_in_engine import StandInEngine
from tests.fixtures.weight_engines import engines, left_in_shared_memory, obedient

__all__ = ["engines", "obedient"]

pytestmark = pytest.mark.timeout(200)

SYNCS = 3


def sync_often(
    trainer: MegatronTrainer, urls: list[str], export: Path
) -> tuple[list[str], list[int], dict[int, Any], int]:
    """The first tensors of the plan's buckets, its senders, the timings of the last sync, and the number of buckets in
    parts."""
    sender = sender_of(trainer)
    if trainer.spec.weights.transport not in ("broadcast", "auto"):
        weight_sync.SendOrder = None  # its senders take none
    sender.connect([Endpoint(url) for url in urls])
    phases: dict[int, Any] = {}
    parts = sum(map(sender._comes_in_parts, sender.plan.buckets))
    for version in range(1, SYNCS + 1):
        change_weights(trainer, 0.01 * version)
        phases = dict(sender.send(version).phases)
    sender.disconnect()
    sender.export(export, trainer.spec.checkpoint)
    buckets = sender.plan.buckets
    return [bucket.entries[0].name for bucket in buckets], [bucket.sender for bucket in buckets], phases, parts


@pytest.mark.parametrize(
    ("sizes", "senders"),
    [
        ({"tp": 2, "ep": 2}, {0, 1}),
        ({"tp": 2, "ep": 2, "pp": 2}, {0, 1, 2, 3}),
        ({"dp": 4, "ep": 2}, {0, 1}),
        ({"tp": 2, "etp": 2}, {0}),
        ({"transport": "relay", "tp": 2, "ep": 2, "pp": 2}, {0, 1, 2, 3}),
        ({"transport": "handles", "tp": 2, "ep": 2, "pp": 2}, {0, 1, 2, 3}),
        ({"transport": "delta", "tp": 2, "ep": 2, "pp": 2}, {0, 1, 2, 3}),
    ],
    ids=lambda value: " ".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_two_engines_hold_what_all_senders_sent_and_each_senders_buckets_came_in_the_order_of_the_plan(
    sizes: dict[str, Any], senders: set[int], engines: list[StandInEngine], tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    seen = [len(engine.order()) for engine in engines]
    config, exported = config_of(tiny_qwen3_moe, tmp_path, **sizes), tmp_path / "exported"
    results = run_trainers(sync_often, config, [engine.url for engine in engines], exported)
    order, sent_by, phases, parts = results[0]
    assert (parts > 0) == (sizes.get("transport") == "relay"), "embeddings, which two ranks share"
    assert set(sent_by) == senders == set(phases) and len(order) > 8
    assert all(spent.fill > 0 and spent.send > 0 for spent in phases.values())
    source = HFCheckpoint(exported)
    for engine, before in zip(engines, seen, strict=True):
        came = engine.order()[before:]
        if sizes.get("transport") in ("handles", "delta"):
            sender_of_name = dict(zip(order, sent_by, strict=True))
            for sender in senders:
                mine = [name for name in order if sender_of_name[name] == sender]
                assert [name for name in came if sender_of_name[name] == sender] == mine * SYNCS
        else:
            assert came == order * SYNCS
        held = engine.held()
        assert held.keys() == source.info.keys()
        assert all(torch.equal(tensor, source.tensor(name)) for name, tensor in held.items())


def connect_and_send(trainer: MegatronTrainer, urls: list[str], modes: list[str], found: list[str]) -> str:
    """One sync to engines in these modes; returns its transport.

    Args:
        found: by rank, the result of `auto`; empty: the rank's own.
    """
    rank = trainer.parallel.rank
    if rank == 0:
        for url, mode in zip(urls, modes, strict=True):
            httpx.post(f"{url}/mode", json={"mode": mode})
    dist.barrier()
    if found:
        weight_sync.transport_for = lambda *_: found[rank]
    sender = sender_of(trainer)
    sender.connect([Endpoint(url) for url in urls])
    change_weights(trainer, 0.01)
    sender.send(1)
    used = type(sender._transport).__name__
    sender.disconnect()
    return used


@pytest.mark.parametrize(
    ("modes", "found", "used"),
    [
        (["obey", "obey"], [], "RelayTransport"),
        (["obey", "no plug-in"], [], "BroadcastTransport"),
        (["obey", "obey"], ["relay", "broadcast"], "BroadcastTransport"),  # an engine changed while it was asked
    ],
    ids=["able", "one without the plug-in", "senders that were told different things"],
)
def test_all_senders_use_the_same_transport_where_settings_leave_it_to_the_engines(
    modes: list[str], found: list[str], used: str, engines: list[StandInEngine], tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_qwen3_moe, tmp_path, "auto", dp=2, ep=2)
    urls = [engine.url for engine in engines]
    assert run_trainers(connect_and_send, config, urls, modes, found) == [used, used]
    first, second = (engine.held() for engine in engines)
    assert len(first) > 50 and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def lose_a_parameter(trainer: MegatronTrainer, urls: list[str], part: str) -> list[str]:
    """A sync in which one of two senders cannot fill a bucket, and one after it; returns their results."""
    sender, found = sender_of(trainer), list[str]()
    sender.connect([Endpoint(url) for url in urls])
    whole = sender._params
    for lost in (True, False):
        change_weights(trainer, 0.01)
        if lost and trainer.parallel.rank == 1:
            sender._params = lambda: [(name, param) for name, param in whole() if part not in name]
        try:
            found.append(f"version {sender.send(1).version}")
        except WeightSyncError as error:
            found.append(str(error))
        sender._params = whole
    sender.disconnect()
    return found


@pytest.mark.parametrize(
    ("sizes", "part"),
    [({"dp": 2, "ep": 2}, "layers.2.mlp.experts"), ({"tp": 2, "ep": 2}, "word_embeddings")],
    ids=["experts", "a part of what two ranks share"],
)
def test_engines_wait_for_no_bucket_that_cannot_be_filled_and_the_next_sync_is_whole(
    sizes: dict[str, int], part: str, engines: list[StandInEngine], tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_qwen3_moe, tmp_path, "relay", **sizes)
    for lost, sent in run_trainers(lose_a_parameter, config, [engine.url for engine in engines], part):
        assert "trainer rank 1" in lost and part in lost and sent == "version 1"


def refuse_one(trainer: MegatronTrainer, urls: list[str]) -> tuple[str, float]:
    sender = sender_of(trainer)
    sender.connect([Endpoint(url) for url in urls])
    if trainer.parallel.rank == 0:
        httpx.post(f"{urls[1]}/mode", json={"mode": "refuse"}).raise_for_status()
    dist.barrier()
    begin = time.monotonic()
    with pytest.raises(WeightSyncError) as caught:
        sender.send(1)
    seconds = time.monotonic() - begin
    sender.disconnect()
    return str(caught.value), seconds


def test_what_one_engine_refuses_is_raised_on_every_rank_and_no_sender_goes_on(
    engines: list[StandInEngine], tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_qwen3_moe, tmp_path, tp=2, ep=2)
    before = len(engines[0].order())
    try:
        for message, seconds in run_trainers(refuse_one, config, [engine.url for engine in engines]):
            assert "bucket 0 (stage 0, rank 0" in message and engines[1].url in message
            assert "no weights today" in message and seconds < 30
    finally:
        engines[1].set_mode("obey")
    assert len(engines[0].order()) == before + 1, "only the first bucket was announced"


def refuse_to_begin(trainer: MegatronTrainer, urls: list[str]) -> tuple[str, str]:
    """One of two senders lacks space in shared memory; returns the error and its hint."""
    sender = sender_of(trainer)
    sender.connect([Endpoint(url) for url in urls])
    assert isinstance(sender._transport, MemoryTransport)
    if trainer.parallel.rank == 1:
        plan, entry = sender.plan.buckets, BucketEntry("huge", (1 << 20, 1 << 20, 1 << 10), 0)
        whole = sender._transport.begin
        huge = replace(plan[1], sender=1, entries=(entry,))
        sender._transport.begin = lambda version, buckets: whole(version, [*buckets, huge])
    with pytest.raises(WeightSyncError) as caught:
        sender.send(1)
    sender.disconnect()
    return str(caught.value), caught.value.hint


def test_what_a_transport_refuses_before_a_sync_is_raised_on_every_rank_with_its_way_out(
    engines: list[StandInEngine], tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_qwen3_moe, tmp_path, "shm", dp=2, ep=2)
    for message, hint in run_trainers(refuse_to_begin, config, [engine.url for engine in engines]):
        assert "trainer rank 1" in message and "weights.transport = 'shm': /dev/shm has no room" in message
        assert "--shm-size" in hint and "broadcast" in hint
    assert not left_in_shared_memory()


def complete_once(trainer: MegatronTrainer, urls: list[str]) -> tuple[list[str], str]:
    """The calls of rank 0's transport in a whole sync, and every rank's error in one that it cannot complete."""
    sender = sender_of(trainer)
    sender.connect([Endpoint(url) for url in urls])
    transport: Any = sender._transport
    told: list[str] = []
    if trainer.parallel.rank == 0:
        start, complete = transport.start, transport.complete
        transport.start = lambda *args: (told.append("bucket"), start(*args))[1]
        transport.complete = lambda: (complete(), told.append("complete"))
    sender.send(1)
    of_the_first = list(told)
    if trainer.parallel.rank == 0:
        transport.complete = _full_disk
    with pytest.raises(WeightSyncError) as caught:
        sender.send(2)
    sender.disconnect()
    return of_the_first, str(caught.value)


def _full_disk() -> None:
    raise OSError("No space left on device")


def test_a_transport_is_told_when_all_have_sent_and_its_failure_is_raised_on_every_rank(
    engines: list[StandInEngine], tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_qwen3_moe, tmp_path, "disk", dp=2, ep=2)
    outcomes = run_trainers(complete_once, config, [engine.url for engine in engines])
    told = outcomes[0][0]
    assert told.count("complete") == 1 and told[-1] == "complete" and "bucket" in told
    for _, message in outcomes:
        assert "weights.complete" in message and "trainer rank 0" in message and "No space left" in message
