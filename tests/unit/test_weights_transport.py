"""The broadcast transport against an engine that obeys, refuses, stays silent or dies: a named error, never a hang."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from mslime.backends.sglang.port import SGLangPort
from mslime.config.errors import CheckpointError, ConfigError, WeightSyncError
from mslime.config.keys import Endpoint, EngineInfo, EngineKeys
from mslime.config.schema import DeadlineConfig
from mslime.config.transports import DeltaOver, transports
from mslime.config.weights import WeightsConfig
from mslime.convert.hf import ShardWriter
from mslime.engine_plugin import wire
from mslime.network import ephemeral_ports
from mslime.weights import broadcast
from mslime.weights.broadcast import BroadcastTransport, PendingBroadcast, open_store
from mslime.weights.buckets import convert, pack
from mslime.weights.sync import WeightSender
from mslime.weights.transport import ChangeCarrier, Link, find_transport, make_transport, transport_for
from mslime.weights.weight_plan import Bucket
from tests.fixtures.stand_in_engine import StandInEngine
from tests.fixtures.weight_engines import check_contract, deliver, engines, infos, link, obedient
from tests.unit.weights_world import LAYOUTS, local_params, moe_table, plan_of, whole_tensors

__all__ = ["engines", "link", "obedient"]

pytestmark = pytest.mark.timeout(120)

TABLE = moe_table()
WHOLE = whole_tensors(TABLE)
PLAN = plan_of(LAYOUTS["one rank"], 4000)
NUMBERS = itertools.count()


def filled(bucket: Bucket) -> torch.Tensor:
    return convert(bucket, [pack(bucket, local_params(TABLE, LAYOUTS["one rank"], 0, WHOLE), 0)], TABLE)


def port_within(deadline_s: float) -> SGLangPort:
    limits = {"weight_sync_s": deadline_s, "engine_control_s": deadline_s}
    OPENED.append(SGLangPort(DeadlineConfig.model_validate(limits)))
    return OPENED[-1]


OPENED: list[SGLangPort] = []


@pytest.fixture(autouse=True)
def close_ports() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def transport_within(deadline_s: float, name: str) -> BroadcastTransport:
    return BroadcastTransport(Link(name, "gloo", deadline_s, port_within(deadline_s)))


@pytest.fixture
def transport(engines: list[StandInEngine]) -> Iterator[BroadcastTransport]:
    """Connected to both engines, with a short deadline."""
    # A group whose broadcast was never met stays in torch's books, with its name.
    transport = transport_within(20, f"within-{next(NUMBERS)}")
    transport.connect(infos(engines))
    yield transport
    transport.disconnect()


def test_every_engine_receives_every_tensor(engines: list[StandInEngine], transport: BroadcastTransport) -> None:
    for bucket in PLAN.buckets:
        transport.start(bucket, filled(bucket)).wait()
    for engine in engines:
        sums = engine.checksums()
        assert sums == {name: float(tensor.double().sum()) for name, tensor in WHOLE.items()}


def test_a_refusal_ends_the_wait_at_once_with_the_engines_words(
    engines: list[StandInEngine], transport: BroadcastTransport
) -> None:
    engines[1].set_mode("refuse")
    with pytest.raises(WeightSyncError, match=rf"(?s)bucket 0.*{engines[1].url}.*no weights today"):
        transport.start(PLAN.buckets[0], filled(PLAN.buckets[0])).wait()


def test_a_refusal_ends_the_wait_also_while_the_communicator_is_still_being_made(
    engines: list[StandInEngine], transport: BroadcastTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL makes it inside the first broadcast, and waits there without a deadline for an engine that has refused."""
    never = threading.Event()
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, **__: never.wait())
    engines[0].set_mode("refuse")
    engines[1].set_mode("refuse")
    try:
        with pytest.raises(WeightSyncError, match="no weights today"):
            transport.start(PLAN.buckets[0], filled(PLAN.buckets[0])).wait()
        transport.disconnect()
    finally:
        never.set()


def test_a_silent_engine_is_given_up_at_the_deadline(engines: list[StandInEngine]) -> None:
    transport = transport_within(2, "silent")
    transport.connect(infos(engines))
    engines[0].set_mode("silent")
    with pytest.raises(WeightSyncError, match=r"bucket 1.*within 2 s"):
        transport.start(PLAN.buckets[1], filled(PLAN.buckets[1])).wait()
    transport.disconnect()


@pytest.mark.parametrize(("mode", "says"), [("refuse", "no joining today"), ("silent", "within 2 s")])
def test_an_engine_that_does_not_join_is_named(engines: list[StandInEngine], mode: str, says: str) -> None:
    engines[1].set_mode(mode)
    transport = transport_within(2, f"join-{mode}")
    with pytest.raises(WeightSyncError, match=rf"(?s)weights\.connect.*{says}"):
        transport.connect(infos(engines))
    transport.disconnect()


def test_an_engine_that_dies_in_the_middle_is_named() -> None:
    engine = StandInEngine()
    transport = transport_within(20, "dies")
    transport.connect([EngineInfo(engine.url)])
    engine.set_mode("die")
    with pytest.raises(WeightSyncError, match=rf"(?s){engine.url}"):
        transport.start(PLAN.buckets[0], filled(PLAN.buckets[0])).wait()
    transport.disconnect()
    engine.stop()


@pytest.mark.parametrize("sizes", [{"dp_size": 2}, {"pp_size": 4}])
def test_an_engine_with_several_stages_or_replicas_is_refused(sizes: dict[str, int]) -> None:
    with answering({"tp_size": 2, "ep_size": 2, "pp_size": 1, "dp_size": 1, **sizes}) as (url, _):
        engine_port = port_within(5)
        (name, size), *_ = sizes.items()
        with pytest.raises(WeightSyncError, match=f"{name} = {size}"):
            engine_port.describe(Endpoint(url))
        engine_port.close()


@contextmanager
def answering(answer: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, str | None, int]]]]:
    """A server that answers everything with `answer`; and (path, authorization, client's port) of what it was asked."""
    asked: list[tuple[str, str | None, int]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append((self.path, self.headers.get("authorization"), self.client_address[1]))
            self.rfile.read(int(self.headers.get("content-length", 0)))
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_all_requests_of_a_sender_share_a_connection_and_carry_the_key_that_each_path_needs() -> None:
    with answering({"success": True}) as (url, asked):
        engine_port, keys = port_within(5), EngineKeys("the-api", "the-admin")
        bucket: Any = SimpleNamespace(names=["a"], dtypes=["float32"], shapes=[[2]])
        update = wire.update_request([bucket], "group")
        for _ in range(3):
            engine_port.load(EngineInfo(url, keys=keys), update).result()
        with pytest.raises(WeightSyncError, match="description is invalid"):
            engine_port.describe(Endpoint(url, keys))
        engine_port.close()
    assert len({port for _, _, port in asked}) == 1, asked
    assert {key for _, key, _ in asked[:3]} == {"Bearer the-admin"} and asked[3][1] == "Bearer the-api"


def test_connections_are_opened_again_after_they_were_closed() -> None:
    with answering({"success": True}) as (url, asked):
        engine_port = port_within(5)
        for _ in range(2):
            engine_port.ask(EngineInfo(url), wire.LeaveGroup("group")).result()
            engine_port.close()
            engine_port.close()
    assert len({port for _, _, port in asked}) == 2, asked


def test_a_store_listens_on_its_own_address_only() -> None:
    store = open_store("127.0.0.1", 1, timedelta(seconds=5))
    mine = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert {c.laddr.ip for c in mine if c.laddr.port == store.port} == {"127.0.0.1"}
    first, last = ephemeral_ports()
    assert not first <= store.port <= last


def test_the_rendezvous_of_this_process_uses_the_store_that_is_open_already() -> None:
    store = open_store("127.0.0.1", 1, timedelta(seconds=5), multi_tenant=True)
    store.set("said", "here")
    met = next(rendezvous(f"tcp://127.0.0.1:{store.port}", 0, 1))[0]
    assert met.get("said") == b"here"


def test_requests_name_an_engine_that_cannot_be_reached() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(WeightSyncError, match=rf"(?s)weights\.connect.*{closed}.*unreachable"):
        port_within(5).describe(Endpoint(closed))


def test_memory_that_torch_keeps_is_given_back_once_before_the_first_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's buffers, which the first sync makes, lie outside of torch's memory."""
    freed: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(len(freed)))

    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        raise RuntimeError(f"freed {len(freed)} times")

    sender = object.__new__(WeightSender)  # its plan would need the trainer's groups
    sender._params, sender._values, sender._sent = parameters, dict, False
    sender.engines = (EngineInfo("http://nowhere"),)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="freed 1 times"):
            sender.send(1)


def test_a_carried_tensor_that_cannot_be_written_fails_the_export_on_every_rank(tmp_path: Path) -> None:
    """It is returned, and raised after all ranks have said how theirs went."""
    sender: Any = object.__new__(WeightSender)
    sender._groups = SimpleNamespace(rank=0, stage=0, layout=LAYOUTS["one rank"])
    sender._export_dtype = "float32"
    plan, writer = SimpleNamespace(buckets_of=lambda rank: ()), ShardWriter(tmp_path / "gone", max_shard_bytes=1)
    carried = SimpleNamespace(tensors=lambda dtype: [(name, torch.zeros(2)) for name in ("first", "closes its shard")])
    assert isinstance(sender._write_stage(writer, plan, {}, carried), CheckpointError)


@pytest.fixture
def hurried(link: Link) -> Link:
    """With the deadline of what is to fail."""
    return replace(link, deadline_s=5, engine_port=port_within(5))


def test_the_broadcast_keeps_the_contract(engines: list[StandInEngine], hurried: Link) -> None:
    check_contract(find_transport("broadcast"), hurried, engines)


def test_the_example_of_the_docs_keeps_the_contract_and_logs_every_bucket(
    engines: list[StandInEngine], hurried: Link, capsys: pytest.CaptureFixture[str]
) -> None:
    check_contract(find_transport("examples.extending.transport:timed"), hurried, engines)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9 and "bucket 1 (stage 0, rank 0, 1 tensors" in lines[1] and ": 18 bytes in 0." in lines[1]


class Broken(BroadcastTransport):
    """Breaks one promise."""

    promise = ""

    def start(self, bucket: Bucket, flat: torch.Tensor) -> PendingBroadcast:
        wrong = flat.clone()
        if self.promise == "bits":
            wrong.view(torch.uint8)[0] ^= 1
        pending = super().start(bucket, wrong)
        if self.promise == "buffer":
            flat.neg_()
        return pending

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        try:
            super().connect(engines)
        except WeightSyncError:
            if self.promise != "errors":
                raise


@pytest.mark.parametrize(
    ("promise", "says"),
    [("bits", "received wrong values of a.weight"), ("buffer", "wrote to the buffer"), ("errors", "is unreachable")],
)
def test_a_transport_that_breaks_a_promise_is_found(
    engines: list[StandInEngine], hurried: Link, promise: str, says: str
) -> None:
    with pytest.raises(AssertionError, match=says):
        check_contract(type("Mine", (Broken,), {"promise": promise}), hurried, engines)


def test_every_transport_that_the_settings_offer_is_there() -> None:
    assert all(callable(find_transport(name)) for name in transports())
    assert find_transport("broadcast") is BroadcastTransport


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("pigeons", "must be a function, `module:function`"),
        ("no_such_module:connect", "cannot be imported"),
        ("tests.unit.user_transport:nothing", "no function 'nothing'"),
        ("tests.unit.user_transport:of_two", r"it is called with \(link\)"),
    ],
)
def test_a_transport_that_cannot_be_made_is_refused_by_name(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)weights\.transport.*{says}"):
        find_transport(spec)


def test_what_is_no_transport_is_refused_before_it_meets_an_engine() -> None:
    with pytest.raises(WeightSyncError, match="not a Transport") as caught:
        make_transport("tests.unit.user_transport:of_a_plain_class", cast(Any, None))
    assert caught.value.field == "weights.transport"


def test_the_table_of_transports_names_settings_and_carriers_that_are_there() -> None:
    assert {name for traits in transports().values() for name in traits.settings} <= set(WeightsConfig.model_fields)
    for name in get_args(DeltaOver):
        made: Any = find_transport(name)
        assert issubclass(made, ChangeCarrier) and not transports()[name].sends_changes


# ---------------------------------------------------------------------------------------------- weights.transport: auto


@pytest.mark.parametrize(
    ("modes", "more", "chosen"),
    [
        (("obey", "obey"), {}, "relay"),
        (("obey", "no plug-in"), {}, "broadcast"),  # one that somebody else has started
        (("obey", "obey"), {"ranks": 2}, "broadcast"),
        (("obey", "obey"), {"drafts": True}, "broadcast"),
    ],
)
def test_auto_is_relay_into_engines_of_one_rank_that_have_the_plug_in(
    modes: tuple[str, ...], more: dict[str, Any], chosen: str, engines: list[StandInEngine], link: Link
) -> None:
    for engine, mode in zip(engines, modes, strict=True):
        engine.set_mode(mode)
    first, second = (EngineInfo(engine.url) for engine in engines)
    assert transport_for([first, replace(second, **more)], link.engine_port, link.deadline_s) == chosen


def test_auto_asks_engines_what_they_are_and_takes_no_silence_for_an_answer(
    engines: list[StandInEngine], link: Link
) -> None:
    (told,) = {link.engine_port.describe(Endpoint(engine.url)).drafts for engine in engines}
    assert told is False
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        gone = EngineInfo(f"http://127.0.0.1:{probe.getsockname()[1]}")
    with pytest.raises(WeightSyncError, match=r"weights\.connect.*unreachable"):
        transport_for([EngineInfo(engines[0].url), gone], link.engine_port, link.deadline_s)


@pytest.mark.parametrize("name", ["broadcast", "relay"])
def test_groups_are_closed_after_a_broadcast_that_is_still_beginning(
    name: str, engines: list[StandInEngine], link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NCCL the first one creates the communicator, and holds the group's lock until every engine joins: to close
    the group before would wait for an engine that refused."""
    enter, destroy = broadcast.enter_broadcast, dist.destroy_process_group
    may_begin, closed = threading.Event(), threading.Event()

    def late(*args: Any) -> dist.Work:
        may_begin.wait()
        return enter(*args)

    def close(group: dist.ProcessGroup) -> None:
        closed.set()
        destroy(group)

    monkeypatch.setattr(broadcast, "enter_broadcast", late)
    monkeypatch.setattr(dist, "destroy_process_group", close)
    transport = find_transport(name)(link)
    transport.connect(infos(engines))
    engines[1].set_mode("refuse")
    with pytest.raises(WeightSyncError, match="no weights today"):
        deliver(transport, 1)
    transport.disconnect()
    assert not closed.is_set()
    may_begin.set()
    assert closed.wait(60)
