"""The transport `relay` against engines of one rank that obey, refuse, load nothing, stay silent or die."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from mslime.backends.sglang.client import EngineClient
from mslime.config.base import NOT_ARRIVED
from mslime.config.errors import WeightSyncError, sync_error
from mslime.config.keys import EngineInfo
from mslime.engine_plugin import wire
from mslime.engine_plugin.wire import Answer, HostSlices, JoinRelayGroup, RelaySync, Slice, decode
from mslime.weights import relay as weights_relay
from mslime.weights import transport_contract
from mslime.weights.relay import RelayTransport
from mslime.weights.transport import Link, find_transport
from mslime.weights.weight_plan import Bucket
from tests.fixtures.stand_in_engine import StandInEngine, two_engines
from tests.fixtures.weight_engines import (
    BUCKETS,
    check_contract,
    deliver,
    engines,
    expect,
    infos,
    late_link,
    link,
    obedient,
    patient_link,
)

__all__ = ["engines", "late_link", "link", "obedient", "patient_link"]

pytestmark = pytest.mark.timeout(120)


def connected(link: Link, engines: list[StandInEngine]) -> RelayTransport:
    transport = RelayTransport(link)
    transport.connect(infos(engines))
    return transport


def deliver_anew(link: Link, engines: list[StandInEngine], version: int) -> None:
    """A whole sync over new lanes, after which the engines hold this version."""
    transport = connected(replace(link, name=f"{link.name}-2"), engines)
    deliver(transport, version)
    transport.complete()
    expect(engines, version)
    transport.disconnect()


def test_a_relay_keeps_the_contract(engines: list[StandInEngine], link: Link) -> None:
    check_contract(find_transport("relay"), link, engines)


def test_tensors_are_described_once_and_again_to_engines_that_are_met_anew(
    engines: list[StandInEngine], link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    encoded = wire.update_request

    def counting(buckets: Any, group: str = "", load: Any = None) -> bytes:
        told.append(len(buckets))
        return encoded(buckets, group, load)

    monkeypatch.setattr(wire, "update_request", counting)
    transport = connected(link, engines)
    for version in (1, 2):
        deliver(transport, version)
        transport.complete()
    deliver(transport, 3, BUCKETS[:2])
    transport.complete()
    transport.disconnect()
    deliver_anew(link, engines, 4)
    assert told == [len(BUCKETS), 0, 2, len(BUCKETS)]


def test_a_bucket_that_cannot_be_filled_is_skipped_and_engines_do_not_wait_for_it(
    engines: list[StandInEngine], link: Link
) -> None:
    transport = connected(link, engines)
    transport.begin(1, BUCKETS)
    transport.start(BUCKETS[0], transport_contract._filled(BUCKETS[0], 1)).wait()
    for bucket in BUCKETS[1:]:
        transport.skip(bucket)
    transport.complete()  # the sync has failed elsewhere; what engines were sent they have taken
    assert all(not engine.held()["d.weight"].any() for engine in engines)
    deliver(transport, 2)
    transport.complete()
    expect(engines, 2)
    transport.disconnect()


def test_a_bucket_that_an_engine_does_not_load_is_told_in_its_words_and_the_next_sync_works(
    engines: list[StandInEngine], patient_link: Link
) -> None:
    transport = connected(patient_link, engines)
    engines[1].set_mode("no loading")
    with pytest.raises(WeightSyncError, match="no loading today") as caught:
        deliver(transport, 1)
        transport.complete()
    assert engines[1].url in str(caught.value)
    transport.disconnect()
    engines[1].set_mode("obey")
    deliver_anew(patient_link, engines, 2)


def test_an_engine_that_refuses_ends_the_wait_of_a_sender_at_once(
    engines: list[StandInEngine], patient_link: Link
) -> None:
    """The other one waits for the bucket, which never comes, until the sender leaves."""
    transport = connected(patient_link, engines)
    engines[1].set_mode("refuse")
    with pytest.raises(WeightSyncError, match="no weights today") as caught:
        deliver(transport, 1)
    for bucket in BUCKETS:
        transport.skip(bucket)  # nobody takes it any more
    transport.disconnect()
    assert engines[1].url in str(caught.value)
    engines[1].set_mode("obey")
    deliver_anew(patient_link, engines, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["die", "silent"])
def test_an_engine_that_dies_or_says_nothing_is_named_within_the_deadline(
    mode: str, late_link: Link, patient_link: Link
) -> None:
    with two_engines() as pair:
        transport = connected(late_link, pair)
        pair[1].set_mode(mode)
        with pytest.raises(WeightSyncError, match="rank 0|engines") as caught:
            deliver(transport, 1)
            transport.complete()
        transport.disconnect()
        assert pair[1].url in str(caught.value)
        deliver_anew(patient_link, pair[:1], 2)


def test_all_engines_without_an_answer_are_named_and_none_that_only_lost_the_others() -> None:
    answers = [Future[Any]() for _ in range(4)]
    for answer, (url, rule) in zip(
        answers, [("http://a", "no answer"), ("http://b", NOT_ARRIVED), ("http://c", "no answer")], strict=False
    ):
        answer.set_exception(sync_error("send", url, rule))
    answers[3].set_result(None)
    message = str(weights_relay._cause("bucket 0", answers, "the connection broke"))
    assert "http://a" in message and "http://c" in message and "http://b" not in message


def test_a_server_without_the_plug_in_is_told_apart_before_anything_is_made(
    engines: list[StandInEngine], link: Link
) -> None:
    engines[0].set_mode("no plug-in")
    transport = RelayTransport(link)
    with pytest.raises(WeightSyncError, match="without mslime's plug-in") as caught:
        transport.connect(infos(engines))
    assert caught.value.field == "weights.transport" and "path_entry" in caught.value.hint
    transport.disconnect()


def test_one_rank_of_an_engine_is_asked_to_join_a_lane(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    async def join_group(self: EngineClient, *place: Any) -> None:
        asked.append(place)

    async def ask(self: EngineClient, request: object, reply: type) -> Answer:
        asked.append(request)
        return Answer()

    monkeypatch.setattr(EngineClient, "join_group", join_group)
    monkeypatch.setattr(EngineClient, "ask", ask)
    engine = EngineInfo("http://127.0.0.1:9")
    group = wire.JoinGroup("n", "h", 5, 2, 4, "gloo")
    lanes = [JoinRelayGroup(3, group, machine) for machine in (None, 1)]
    for request in (group, *lanes):
        link.engine_port.ask(engine, request).result()
    assert asked == [("h", 5, 2, 4, "n", "gloo"), *lanes]


def test_every_bucket_is_announced_with_the_lane_of_its_sender_and_its_tensors(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    engine_port: Any = link.engine_port
    monkeypatch.setattr(engine_port, "load", lambda engine, said: done(asked.append(json.loads(said))))
    transport = RelayTransport(replace(link, rank=4, senders={0: "job-rank0", 4: "job-rank4"}))
    monkeypatch.setattr(transport, "_engines", (EngineInfo("http://127.0.0.1:8"),))
    buckets = [replace(bucket, sender=sender) for bucket, sender in zip(BUCKETS, (4, 0, 0), strict=True)]
    transport.begin(1, buckets)
    (said,) = asked
    order = decode(said["load_format"])
    assert (
        isinstance(order, RelaySync)
        and order.lanes == ("job-rank0", "job-rank4")
        and order.senders == ((1,), (0,), (0,))
    )
    assert order.tensors == tuple(len(bucket.names) for bucket in buckets)
    assert said["names"] == [name for bucket in buckets for name in bucket.names]
    assert said["shapes"] == [list(shape) for bucket in buckets for shape in bucket.shapes]
    assert said["dtypes"] == [dtype for bucket in buckets for dtype in bucket.dtypes]


PARTS = replace(BUCKETS[0], index=3, sender=4, members=(4, 0), in_order=True)
"""A bucket of which two ranks pack a part each."""


@pytest.mark.parametrize(
    ("bucket", "ranks", "in_parts"),
    [
        (PARTS, (1, 1), True),
        (PARTS, (1, 2), False),  # an engine whose ranks pass buckets on
        (replace(PARTS, members=(4, 5)), (1,), False),  # a member that has no lane
        (replace(PARTS, members=(4,)), (1,), False),
        (replace(PARTS, in_order=False), (1,), False),
        (replace(PARTS, packed_dtype="bfloat16"), (1,), False),  # it is quantised between
    ],
)
def test_members_send_their_parts_where_all_have_a_lane_and_engines_have_one_rank(
    bucket: Bucket, ranks: tuple[int, ...], in_parts: bool, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, sent, engine_port = list[dict[str, Any]](), list[int](), cast(Any, link.engine_port)
    monkeypatch.setattr(engine_port, "load", lambda engine, said: done(asked.append(json.loads(said))))
    monkeypatch.setattr(weights_relay, "broadcast_each", lambda parcels, *_: sent.append(len(parcels[0][0])) or "")
    transport = RelayTransport(replace(link, rank=4, senders={0: "job-rank0", 4: "job-rank4"}))
    infos = tuple(EngineInfo(f"http://127.0.0.1:{port}", count) for port, count in enumerate(ranks))
    monkeypatch.setattr(transport, "_engines", infos)
    monkeypatch.setattr(transport, "_group", "a group")
    assert transport.comes_in_parts(bucket) == in_parts
    transport.begin(1, [bucket])
    order = decode(asked[0]["load_format"])
    assert isinstance(order, RelaySync) and order.senders == (((1, 0) if in_parts else (1,)),)
    transport.skip(bucket)
    assert sent == [bucket.hf_numel // (2 if in_parts else 1)]


class TwoMachines:
    """Fake engines over two machines, which reply what a test lets them reply, and a record of what is sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, link: Link) -> None:
        self.says: dict[str, HostSlices | None] = {}
        self.named: list[str] = []
        self.left: list[str] = []
        self.sent: list[list[tuple[str, torch.Tensor]]] = []
        self.infos = [EngineInfo(f"http://127.0.0.1:{port}", 4, machines=2) for port in (8, 9)]
        monkeypatch.setattr(link.engine_port, "ask", self.ask)
        monkeypatch.setattr(link.engine_port, "load", self.load)
        monkeypatch.setattr(weights_relay, "connect_group", self.connect_group)
        monkeypatch.setattr(weights_relay, "broadcast_each", lambda parcels, *_: self.note(parcels))
        monkeypatch.setattr(weights_relay.dist, "destroy_process_group", lambda group: None)

    def ask(self, engine: EngineInfo, request: Any, hint: str = "") -> Future[wire.Answer]:
        if isinstance(request, wire.LeaveGroup):
            self.left.append(request.name)
        return done(wire.Answer())

    def load(self, engine: EngineInfo, update: bytes) -> Future[wire.Loaded]:
        sync = decode(json.loads(update)["load_format"])
        assert isinstance(sync, RelaySync)
        if engine == self.infos[0]:
            self.named.append(sync.cuts)
        return done(wire.Loaded("loaded", self.says.get(engine.url)))

    def connect_group(
        self, link: Link, engines: Any, joining: list[int], sender: int, machine: int | None = None
    ) -> Any:
        assert joining == [2 if machine is None else 1] * 2 and sender == 0
        return ("all" if machine is None else f"machine {machine}"), None

    def note(self, parcels: list[tuple[torch.Tensor, str]]) -> str:
        self.sent.append([(group, flat.clone()) for flat, group in parcels])
        return ""

    def sync(self, transport: RelayTransport, version: int) -> list[list[str]]:
        """The groups that each bucket was sent to."""
        self.sent.clear()
        deliver(transport, version)
        transport.complete()
        return [[group for group, _ in parcels] for parcels in self.sent]


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def test_a_sender_sends_to_machines_what_all_engines_say_that_they_keep(
    monkeypatch: pytest.MonkeyPatch, link: Link
) -> None:
    fleet, transport = TwoMachines(monkeypatch, link), RelayTransport(link)
    transport.connect(fleet.infos)
    kept = HostSlices.of([((Slice(0, 9),), (Slice(5, 22),)), None, ((), (Slice(1, 2, (3,), (2,)),))])
    whole, parts = [["all"]] * 3, [["machine 0", "machine 1"], ["all"], ["machine 1"]]
    fleet.says = {fleet.infos[0].url: kept}
    assert fleet.sync(transport, 1) == whole
    assert fleet.sync(transport, 2) == whole, "the other one has said nothing"
    fleet.says = {fleet.infos[1].url: kept}
    assert fleet.sync(transport, 3) == whole, "it says so in this sync"
    fleet.says = {}
    assert fleet.sync(transport, 4) == parts and fleet.named == ["", "", "", kept.name]
    first, last = transport_contract._filled(BUCKETS[0], 4), transport_contract._filled(BUCKETS[2], 4)
    assert [flat.tolist() for _, flat in fleet.sent[0]] == [first[:9].tolist(), first[5:27].tolist()]
    assert fleet.sent[2][0][1].tolist() == last[[1, 2, 3, 4, 5, 6]].tolist()
    fleet.says = {fleet.infos[1].url: HostSlices.of([None, None, kept.buckets[2]])}
    assert fleet.sync(transport, 5) == parts
    assert fleet.sync(transport, 6) == whole, "they keep different things now"
    fleet.says = dict.fromkeys((each.url for each in fleet.infos), kept)
    fleet.sync(transport, 7)
    transport.begin(8, BUCKETS[:2])
    transport.complete()
    assert fleet.named[-1] == "", "other buckets"
    transport.disconnect()
    assert set(fleet.left) == {link.name, f"{link.name}-machine0", f"{link.name}-machine1"} and len(fleet.left) == 6
    fleet.says = {}
    again = RelayTransport(link)
    again.connect(fleet.infos)
    assert fleet.sync(again, 8) == whole
