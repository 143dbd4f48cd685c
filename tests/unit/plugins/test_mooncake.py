"""The transport mooncake: whole syncs over TCP with the real package, and what it says where something is missing."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mslime.config.errors import WeightSyncError
from mslime.config.keys import EngineInfo
from mslime.engine_plugin import bucket_files, wire
from mslime.engine_plugin.bucket_files import RdmaReader, SenderFiles, parts_of
from mslime.engine_plugin.engine_ranks import EngineRankGroup
from mslime.engine_plugin.wire import Answer, ReadMemory
from mslime.remote_memory import MemoryEndpoint, RemoteMemory
from mslime.weights import transport_contract
from mslime.weights.transport import Link
from mslime_plugins.transports import mooncake
from mslime_plugins.transports.mooncake import MooncakeTransport
from tests.fixtures.stand_in_engine import StandInEngine, two_engines
from tests.fixtures.weight_engines import BUCKETS, check_contract, engines, expect, infos, link, obedient

__all__ = ["engines", "link", "obedient"]

with_package = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None, reason="needs mooncake-transfer-engine-non-cuda and libibverbs1"
)
pytestmark = pytest.mark.timeout(120)


def over_tcp(link: Link) -> MooncakeTransport:
    return MooncakeTransport(replace(link, settings={"mooncake_over": "tcp"}))


@with_package
def test_buckets_in_a_senders_memory_keep_the_contract(engines: list[StandInEngine], link: Link) -> None:
    check_contract(over_tcp, link, engines)


@with_package
def test_one_piece_of_memory_serves_all_syncs_and_grows_with_the_buckets(
    engines: list[StandInEngine], link: Link
) -> None:
    transport = over_tcp(link)
    transport.connect(infos(engines))
    smallest = min(BUCKETS, key=lambda bucket: bucket.hf_bytes)
    for version, buckets in ((1, [smallest]), (2, BUCKETS), (3, BUCKETS)):
        transport.begin(version, buckets)
        places = set[Path]()
        for bucket in buckets:
            transport.start(bucket, transport_contract._filled(bucket, version)).wait()
            places.add(transport._place)
        transport.complete()
        assert len(places) == 1 and transport._room.numel() == max(bucket.hf_bytes for bucket in buckets)
        expect(engines, version, buckets)
    transport.disconnect()
    transport.disconnect()


@with_package
def test_an_engine_reads_no_memory_of_a_sender_that_left(engines: list[StandInEngine], link: Link) -> None:
    first, second = over_tcp(link), over_tcp(link)
    for transport in (first, second):
        transport.connect(infos(engines))
        transport.begin(1, BUCKETS)
        transport.start(BUCKETS[0], transport_contract._filled(BUCKETS[0], 1)).wait()
    place = first._place
    first.disconnect()
    late = wire.update_request([BUCKETS[0]], load=wire.FromFile("remote", place))
    with pytest.raises(WeightSyncError, match="cannot read .* bytes"):
        link.engine_port.load(infos(engines)[0], late).result()
    second.start(BUCKETS[1], transport_contract._filled(BUCKETS[1], 1)).wait()
    second.disconnect()


@with_package
def test_an_engine_that_is_dead_or_has_no_plug_in_is_named_before_the_first_bucket(link: Link) -> None:
    with two_engines() as started:
        started[1].set_mode("no plug-in")
        with pytest.raises(WeightSyncError, match="started without mslime's plug-in") as caught:
            over_tcp(link).connect(infos(started))
        assert started[1].url in str(caught.value)
        started[1].set_mode("obey")
        transport = over_tcp(link)
        transport.connect(infos(started))
        os.kill(started[0].pid, signal.SIGKILL)
        transport.begin(1, BUCKETS)
        with pytest.raises(WeightSyncError, match="dead or unreachable") as caught:
            transport.start(BUCKETS[0], transport_contract._filled(BUCKETS[0], 1)).wait()
        assert started[0].url in str(caught.value)
        transport.disconnect()


@with_package
def test_a_sender_is_told_when_an_engine_reads_something_else_than_it_wrote() -> None:
    end, room = MemoryEndpoint("127.0.0.1", "tcp"), torch.arange(16, dtype=torch.uint8)
    place, files = end.share(room.data_ptr(), 16).as_path(), SenderFiles()
    assert files.remote.reach(ReadMemory(place, bytes(range(16)).hex())) == Answer()
    why_not = files.remote.reach(ReadMemory(place, bytes(16).hex())).why_not
    assert "the memory of 127.0.0.1" in why_not and "has other contents than expected" in why_not
    end.unregister(room.data_ptr())
    why_not = files.remote.reach(ReadMemory(place, bytes(range(16)).hex())).why_not
    assert "cannot read the sender's memory" in why_not


@with_package
def test_tcp_is_forced_for_this_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang makes ends of its own in the same process."""
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    MemoryEndpoint("127.0.0.1", "tcp")
    assert "MC_FORCE_TCP" not in os.environ
    monkeypatch.setenv("MC_FORCE_TCP", "0")
    MemoryEndpoint("127.0.0.1", "tcp")
    assert os.environ["MC_FORCE_TCP"] == "0"


class FakeEnd:
    """For what Mooncake refuses, and for counting what is asked of it: it copies within this process."""

    def __init__(self, refuses: str = "") -> None:
        self.calls, self.refuses = list[tuple[Any, ...]](), refuses

    def register(self, address: int, size: int) -> None:
        self.calls.append(("register", address, size))

    def unregister(self, address: int) -> None:
        self.calls.append(("unregister", address))

    def read(self, memory: RemoteMemory, offset: int, into: int, size: int) -> None:
        if self.refuses:
            raise OSError(self.refuses)
        self.calls.append(("read", offset, size))
        ctypes.memmove(into, memory.address + offset, size)


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch) -> FakeEnd:
    """The end that a reader in this process gets."""
    made = FakeEnd()
    monkeypatch.setattr(bucket_files, "MemoryEndpoint", lambda host, over: made)
    monkeypatch.setattr(bucket_files, "own_address", lambda url: "here")
    return made


@pytest.mark.parametrize(("size", "count"), [(12, 1), (12, 4), (13, 4), (3, 4), (1, 2), (0, 2)])
def test_ranks_read_a_part_each(size: int, count: int, end: FakeEnd) -> None:
    """They pass it on to each other: tests/engines/test_bucket_parts.py."""
    source = torch.arange(1, size + 1, dtype=torch.uint8)
    place = RemoteMemory("tcp", "somewhere:1", source.data_ptr()).as_path()
    for rank in range(count):
        flat, near = torch.zeros(size, dtype=torch.uint8), EngineRankGroup(rank, count)
        SenderFiles().read("remote", place, [], flat, near)
        parts = list(parts_of("remote", flat, near)) or [flat]
        assert torch.equal(torch.cat(parts), flat) and len(parts) <= count
        own = sum(len(part) for part in parts[:rank]), sum(len(part) for part in parts[: rank + 1])
        expected = torch.zeros(size, dtype=torch.uint8)
        expected[slice(*own)] = source[slice(*own)]
        assert torch.equal(flat, expected)
    read = sum(call[2] for call in end.calls if call[0] == "read")
    assert read == size, "every byte crosses the network once for an engine"


def test_memory_is_registered_once_for_a_sync_and_let_go_at_its_end(end: FakeEnd) -> None:
    source, buffer = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    place, reader = RemoteMemory("rdma", "there:1", source.data_ptr()).as_path(), RdmaReader()
    for size in (8, 4, 6):
        reader.read(place, buffer[:size], buffer[:size])
    reader.forget()
    reader.forget()
    reader.read(place, buffer[:2], buffer[:2])
    larger = torch.zeros(9, dtype=torch.uint8)
    reader.read(place, larger[:2], larger[:2])
    kinds = [(call[0], call[2] if call[0] == "register" else 0) for call in end.calls if call[0] != "read"]
    assert kinds == [("register", 8), ("unregister", 0), ("register", 8), ("unregister", 0), ("register", 9)]


def test_an_adapter_writes_a_bucket_when_the_gpu_has_loaded_the_one_before(
    end: FakeEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes past all streams, into a buffer out of which copies may still run."""
    source, flat = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    fake_stream = SimpleNamespace(synchronize=lambda: end.calls.append(("synchronize",)))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake_stream)
    RdmaReader().read(RemoteMemory("rdma", "there:1", source.data_ptr()).as_path(), flat, flat)
    assert [call[0] for call in end.calls if call[0] != "register"] == ["synchronize", "read"]


def test_a_part_that_could_not_be_read_is_an_error(end: FakeEnd) -> None:
    end.refuses = "the cable is cut"
    flat, place = torch.zeros(4, dtype=torch.uint8), RemoteMemory("rdma", "there:1", 1).as_path()
    with pytest.raises(OSError, match="the cable is cut"):
        RdmaReader().read(place, flat, flat[2:])


def test_memory_has_one_name() -> None:
    memory = RemoteMemory("rdma", "[fe80::1]:15000", 0x7F00DEADBEEF)
    assert RemoteMemory.of_path(memory.as_path()) == memory
    for wrong in ("rdma/host:1", "udp/host:1/5", "rdma/host:1/-5", "rdma/host:1/5/6", "/etc/passwd"):
        with pytest.raises(ValueError, match="not an address"):
            RemoteMemory.of_path(Path(wrong))


@pytest.mark.parametrize(
    ("broken", "rule", "hint"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), "No module named", r"mslime\[mooncake\]"),
        (ImportError("libibverbs.so.1: cannot open"), "libibverbs.so.1", "system package libibverbs1"),
        (OSError("it answered -1"), "it answered -1", "transport: broadcast"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_with_a_way_out(
    broken: Exception, rule: str, hint: str, link: Link, engines: list[StandInEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fails(host: str, over: str) -> MemoryEndpoint:
        raise broken

    monkeypatch.setattr(mooncake, "MemoryEndpoint", fails)
    with pytest.raises(WeightSyncError, match=rule) as caught:
        over_tcp(link).connect([EngineInfo(engines[0].url)])
    assert caught.value.field == "weights.transport" and caught.value.value == "mooncake"
    assert re.search(hint, caught.value.hint)
    why_not = RdmaReader().reach(ReadMemory(Path("rdma/127.0.0.1:1/1"), b"1".hex())).why_not
    assert "cannot read the sender's memory" in why_not


@with_package
def test_the_package_takes_the_calls_that_are_made() -> None:
    """Names, order and number of arguments, as the package's own binding describes them."""
    from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]

    called = ("initialize", "get_rpc_port", "register_memory", "unregister_memory", "transfer_sync_read")
    said = {name: " ".join(vars(TransferEngine)[name].__doc__.split()) for name in called}
    assert "arg0: str, arg1: str, arg2: str, arg3: str) -> int" in said["initialize"]
    assert "target_hostname: str, buffer: int, peer_buffer_address: int, length: int" in said["transfer_sync_read"]
    assert "buffer_addr: int, capacity: int" in said["register_memory"] and "-> int" in said["get_rpc_port"]
    assert "arg0: int) -> int" in said["unregister_memory"]
