"""The transports shm, handles and disk: they keep the contract, remove their files, and say what they cannot do."""

from __future__ import annotations

import fcntl
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing import reductions

from mslime.config.errors import WeightSyncError
from mslime.convert.hf import INDEX_NAME
from mslime.engine_plugin.bucket_files import SenderFiles, open_handle
from mslime.engine_plugin.copy_plan import SyncBuckets
from mslime.engine_plugin.wire import MANAGER_ATTEMPTS, Answer, take_handle, with_manager, write_handle
from mslime.weights import memory, transport_contract
from mslime.weights.buckets import named_tensors
from mslime.weights.files import DiskTransport
from mslime.weights.memory import MemoryTransport, device_memory, handle_of
from mslime.weights.transport import Link, find_transport
from mslime.weights.weight_plan import Bucket, BucketEntry
from tests.fixtures.stand_in_engine import StandInEngine
from tests.fixtures.weight_engines import BUCKETS, check_contract, deliver, engines, expect, infos, link, obedient

__all__ = ["engines", "link", "obedient"]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in /dev/shm that stands for all of it: other runs have theirs there."""
    place = Path("/dev/shm") / f"test-{os.getpid()}-{tmp_path.name}"
    place.mkdir()
    monkeypatch.setattr(memory, "SHARED_MEMORY", place)
    yield place
    assert not list(place.iterdir()), "something is left in shared memory"
    place.rmdir()


@pytest.mark.parametrize("name", ["shm", "handles", "disk"])
def test_buckets_in_files_keep_the_contract(
    name: str, engines: list[StandInEngine], link: Link, shared_memory: Path
) -> None:
    check_contract(find_transport(name), link, engines)


# ------------------------------------------------------------------------------------------------- shared memory


def mapped_by(engine: StandInEngine, place: Path) -> int:
    maps = Path(f"/proc/{engine.pid}/maps").read_text().splitlines()
    return sum(str(place) in line for line in maps)


def test_shared_memory_is_private_and_has_a_name_only_until_all_engines_have_mapped_it(
    engines: list[StandInEngine], link: Link, shared_memory: Path
) -> None:
    transport = MemoryTransport(link)
    transport.connect(infos(engines))
    transport.begin(1, BUCKETS)
    (directory,) = shared_memory.iterdir()
    (file,) = directory.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600
    assert file.stat().st_size == max(bucket.hf_bytes for bucket in BUCKETS) and len(file.name) == 32
    transport.start(BUCKETS[0], transport_contract._filled(BUCKETS[0], 1)).wait()
    assert not list(shared_memory.iterdir()) and [mapped_by(engine, shared_memory) for engine in engines] == [1, 1]
    for version in (2, 3):
        deliver(transport, version)
        expect(engines, version)
    assert [mapped_by(engine, shared_memory) for engine in engines] == [1, 1], "one mapping for all syncs"
    transport.disconnect()
    assert [mapped_by(engine, shared_memory) for engine in engines] == [0, 0]


def shared_by_torch(process: int | str) -> int:
    """Mappings of memory that torch shares by name."""
    return Path(f"/proc/{process}/maps").read_text().count("/torch_")


def test_memory_behind_handles_is_opened_once_by_each_engine_and_free_after_each_sync(
    engines: list[StandInEngine], link: Link, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, before = device_memory(link), shared_by_torch("self")
    transport.connect(infos(engines))
    rooms, new_buffer = list[int](), transport.new_buffer
    monkeypatch.setattr(transport, "new_buffer", lambda path, size: (rooms.append(size), new_buffer(path, size))[1])
    growing = sorted(BUCKETS, key=lambda bucket: bucket.hf_bytes)
    for version in (1, 2, 3):
        transport.begin(version, BUCKETS)
        for number, bucket in enumerate(growing):
            transport.start(bucket, transport_contract._filled(bucket, version)).wait()
            assert [shared_by_torch(engine.pid) for engine in engines] == [1, 1], "one mapping for all buckets"
            assert not list(shared_memory.iterdir()) and shared_by_torch("self") == before + 1, number
            another = device_memory(replace(link, name="another", group="another", rank=1))
            another.connect(infos(engines))  # engines forget senders that are gone, which this one is not
            another.disconnect()
        transport.complete()
        assert [shared_by_torch(engine.pid) for engine in engines] == [0, 0]
        assert shared_by_torch("self") == before, "colocated engines need it now"
        expect(engines, version)
    assert rooms == [growing[-1].hf_bytes] * 3, "as large as the largest from the start of a sync"
    transport.disconnect()
    transport.disconnect()


def test_a_handle_is_for_one_process(tmp_path: Path) -> None:
    path, flat = tmp_path / "memory", torch.arange(5, dtype=torch.uint8)
    for number in range(2):
        write_handle(path, number, handle_of(flat))
    opened = [open_handle(take_handle(path), torch.device("cpu")) for _ in range(2)]
    opened[0][3] = 77
    assert [tensor.tolist() for tensor in (opened[1], flat)] == [[0, 1, 2, 77, 4]] * 2
    with pytest.raises(FileNotFoundError):
        take_handle(path)
    with pytest.raises(FileNotFoundError):
        take_handle(tmp_path / "never written")


def test_a_busy_manager_of_shared_memory_is_waited_for_and_a_dead_one_not_for_ever() -> None:
    """Torch waits one second for its manager: on a machine with a load of 30 that ended a sync."""
    attempts: list[tuple[object, ...]] = []

    def share(*fields: object) -> str:
        attempts.append(fields)
        if len(attempts) < 3:
            raise RuntimeError("Shared memory manager connection has timed out")
        return "shared"

    assert with_manager(share, b"manager", 8) == "shared" and attempts == [(b"manager", 8)] * 3

    def refuse(error: str) -> None:
        attempts.append(())
        raise RuntimeError(error)

    attempts.clear()
    with pytest.raises(RuntimeError, match="timed out"):
        with_manager(refuse, "timed out")
    assert len(attempts) == MANAGER_ATTEMPTS
    with pytest.raises(RuntimeError, match="no space"):
        with_manager(refuse, "no space")
    assert len(attempts) == MANAGER_ATTEMPTS + 1


def test_memory_on_another_kind_of_device_is_refused() -> None:
    with pytest.raises(ValueError, match="memory on a GPU, and this engine runs on cpu"):
        open_handle((1, b"handle", 8, 0, b"counter", 0, b"event", 1), torch.device("cpu"))
    with pytest.raises(ValueError, match="memory on a CPU, and this engine runs on cuda:1"):
        open_handle((0, b"manager", b"handle", 8), torch.device("cuda:1"))


class FakeCudaStorage:
    """What torch says of memory on a GPU, as `torch.multiprocessing.reductions` takes it apart."""

    device, is_cuda = 3, True

    def untyped_storage(self) -> FakeCudaStorage:
        return self

    def _share_cuda_(self) -> tuple[Any, ...]:
        return (self.device, b"\x00handle", 8, 16, b"counter", 2, b"event", True)


def test_cudas_handles_are_what_torch_itself_sends_but_for_the_number_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of CUDA runs here: this is the order of torch's fields, which another torch may change."""
    write_handle(tmp_path / "x", 0, handle_of(cast("Any", FakeCudaStorage())))
    opened: list[tuple[Any, ...]] = []

    def open_it(*fields: Any) -> torch.UntypedStorage:
        opened.append(fields)
        raise RuntimeError("no CUDA here")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_it)
    with pytest.raises(RuntimeError, match="no CUDA"):
        open_handle(take_handle(tmp_path / "x"), torch.device("cuda:1"))
    assert opened == [(1, b"\x00handle", 8, 16, b"counter", 2, b"event", True)]
    fields = ["handle", "storage_size_bytes", "storage_offset_bytes", "ref_counter_handle", "ref_counter_offset",
              "event_handle", "event_sync_required"]  # fmt: skip
    source = "".join(inspect.getsource(reductions).split())
    listed = ",".join(fields)
    assert f"(device,{listed},)=storage._share_cuda_()" in source
    assert f"storage=storage_cls._new_shared_cuda(storage_device,storage_{listed},)" in source


def test_a_bucket_that_is_larger_than_those_before_gets_more_memory(
    engines: list[StandInEngine], link: Link, shared_memory: Path
) -> None:
    transport = MemoryTransport(link)
    transport.connect(infos(engines))
    deliver(transport, 1, BUCKETS[1:2])
    deliver(transport, 2)
    expect(engines, 2)
    assert [mapped_by(engine, shared_memory) for engine in engines] == [1, 1], "the smaller one is forgotten"
    transport.disconnect()


KILLED = """
import sys, time
from pathlib import Path
from mslime.backends.sglang.port import SGLangPort
from mslime.config.keys import EngineInfo
from mslime.config.schema import DeadlineConfig
from mslime.weights import transport_contract, memory
from mslime.weights.transport import Link

memory.SHARED_MEMORY = Path(sys.argv[1])
transport = memory.MemoryTransport(Link("killed", "gloo", 5, SGLangPort(DeadlineConfig())))
transport.connect([EngineInfo(sys.argv[2])])
buckets = transport_contract._buckets()
transport.begin(1, buckets)
if sys.argv[3] == "after":
    transport.start(buckets[0], transport_contract._filled(buckets[0], 1)).wait()
print("there", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.slow
def test_what_a_killed_sender_left_is_removed_by_the_next_one_but_not_what_a_living_one_has(
    when: str, engines: list[StandInEngine], link: Link, shared_memory: Path
) -> None:
    living = MemoryTransport(replace(link, name="living"))
    living.connect(infos(engines))
    living.begin(1, BUCKETS)
    command = [sys.executable, "-c", KILLED, str(shared_memory), engines[0].url, when]
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None and killed.stdout.readline() == "there\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert len(list(shared_memory.iterdir())) == (2 if when == "before" else 1)
    assert mapped_by(engines[0], shared_memory) == (when == "after")
    transport = MemoryTransport(link)
    transport.connect(infos(engines))
    assert len(list(shared_memory.iterdir())) == 2, "the living one's and its own"
    assert mapped_by(engines[0], shared_memory) == 0, "an engine forgets it too"
    deliver(living, 1)
    deliver(transport, 2)
    expect(engines, 2)
    living.disconnect()
    transport.disconnect()


def test_too_little_shared_memory_is_an_error_before_anything_is_sent(
    engines: list[StandInEngine], link: Link, shared_memory: Path
) -> None:
    entry = BucketEntry("huge", (1 << 20, 1 << 20, 1 << 10), 0)
    bucket = Bucket(0, 0, 0, (0,), "float32", (), (entry,), (entry,), in_order=True)
    transport = MemoryTransport(link)
    transport.connect(infos(engines))
    with pytest.raises(WeightSyncError, match=r"weights\.transport = 'shm'.*4,294,967,296\.0 MiB.* free") as caught:
        transport.begin(1, [bucket])
    assert all(way in caught.value.hint for way in ("--shm-size", "weights.bucket_mib", "broadcast"))
    transport.begin(1, [replace(bucket, sender=1), *BUCKETS])  # another sender's is none of its business
    transport.disconnect()


def test_a_file_of_another_user_or_size_is_not_mapped(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = shared_memory / "x"
    file.write_bytes(b"1234")
    target, files = torch.empty(8, dtype=torch.uint8), SenderFiles()
    with pytest.raises(ValueError, match="4 bytes, and the bucket has 8"):
        files.read("mapped", file, [], target)
    (shared_memory / "link").symlink_to(file)
    with pytest.raises(OSError, match="link"):
        files.read("mapped", shared_memory / "link", [], target)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ValueError, match="does not belong to user 12345"):
        SenderFiles().read("mapped", file, [], target)
    for path in shared_memory.iterdir():
        path.unlink()


def test_memory_of_a_sender_that_lives_is_kept_when_another_one_comes(shared_memory: Path) -> None:
    file, files, target = shared_memory / "x", SenderFiles(), torch.empty(4, dtype=torch.uint8)
    file.write_bytes(b"1234")
    lock = os.open(file, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    files.read("mapped", file, [], target)
    file.unlink()
    files.see(shared_memory)
    files.read("mapped", file, [], target)
    assert bytes(target.tolist()) == b"1234"
    os.close(lock)
    files.see(shared_memory)
    with pytest.raises(FileNotFoundError):
        files.read("mapped", file, [], target)


# --------------------------------------------------------------------------------------------------------- files


def versions(link: Link) -> list[str]:
    assert link.directory is not None
    return sorted(path.name for path in link.directory.glob("*/version_*"))


def test_a_version_on_disk_is_whole_when_it_has_an_index_and_removes_those_before_it(
    engines: list[StandInEngine], link: Link
) -> None:
    assert link.directory is not None
    transport = DiskTransport(link)
    transport.connect(infos(engines))
    deliver(transport, 1)
    (first,) = link.directory.glob("*/version_*")
    assert not (first / INDEX_NAME).exists()
    transport.complete()
    index = json.loads((first / INDEX_NAME).read_text())["weight_map"]
    for bucket in BUCKETS:
        for name, tensor in named_tensors(bucket, transport_contract._filled(bucket, 1)):
            assert torch.equal(load_file(first / index[name])[name], tensor)
    deliver(transport, 2)
    assert versions(link) == ["version_000001", "version_000002"]
    transport.complete()
    assert versions(link) == ["version_000002"]
    transport.disconnect()
    assert versions(link) == ["version_000002"], "the last one stays"
    expect(engines, 2)


def test_a_version_that_broke_off_leaves_nothing_and_that_of_a_killed_run_goes_with_the_next_whole_one(
    engines: list[StandInEngine], link: Link
) -> None:
    assert link.directory is not None
    killed = DiskTransport(replace(link, group="killed"))
    killed.connect(infos(engines))
    deliver(killed, 7)
    transport = DiskTransport(replace(link, group="broken"))
    transport.connect(infos(engines))
    transport.begin(8, BUCKETS)
    engines[1].set_mode("refuse")
    with pytest.raises(WeightSyncError, match="no weights today"):
        transport.start(BUCKETS[0], transport_contract._filled(BUCKETS[0], 8)).wait()
    transport.disconnect()
    assert versions(link) == ["version_000007"]
    engines[1].set_mode("obey")
    (link.directory / "notes").write_text("a file of somebody's")
    transport = DiskTransport(replace(link, group="next"))
    transport.connect(infos(engines))
    deliver(transport, 8)
    transport.complete()
    assert versions(link) == ["version_000008"]
    assert sorted(path.name for path in link.directory.iterdir()) == ["next", "notes"]


def test_each_of_several_senders_writes_its_part_and_the_first_one_the_index(
    engines: list[StandInEngine], link: Link
) -> None:
    assert link.directory is not None
    buckets = [replace(bucket, sender=bucket.index % 2) for bucket in BUCKETS]
    senders = [DiskTransport(replace(link, group="both", rank=rank)) for rank in (0, 1)]
    for sender in senders:
        sender.connect(infos(engines))
        sender.begin(1, buckets)
    for bucket in buckets:
        senders[bucket.sender].start(bucket, transport_contract._filled(bucket, 1)).wait()
    senders[1].complete()
    assert not list(link.directory.rglob(INDEX_NAME))
    senders[0].complete()
    assert len(set(json.loads(next(link.directory.rglob(INDEX_NAME)).read_text())["weight_map"].values())) == 3
    expect(engines, 1)


def test_a_directory_that_cannot_be_written_to_or_is_too_small_is_named(link: Link, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightSyncError, match=r"weights\.directory = .*file.*cannot be written.*\n.*all hosts"):
        DiskTransport(replace(link, directory=tmp_path / "file")).open_directory()
    entry = BucketEntry("huge", (1 << 20, 1 << 20, 1 << 10), 0)
    transport = DiskTransport(link)
    transport.open_directory()
    with pytest.raises(WeightSyncError, match=r"weights\.directory = .*4,294,967,296"):
        transport.begin(1, [Bucket(0, 0, 0, (0,), "float32", (), (entry,), (entry,), in_order=True)])


def saved(path: Path, names: list[str]) -> Path:
    """Two tensors of two elements, as they are sent."""
    from mslime.convert.safetensors_files import TensorPlan, safetensors_header

    path.write_bytes(safetensors_header([TensorPlan(name, "F32", (2,)) for name in names]) + bytes(range(16)))
    return path


def test_a_file_with_other_tensors_or_another_length_is_refused(tmp_path: Path) -> None:
    named = [("a", torch.empty(2)), ("b", torch.empty(2))]
    flat, files = torch.empty(16, dtype=torch.uint8), SenderFiles()
    files.read("safetensors", saved(tmp_path / "right", ["a", "b"]), named, flat)
    assert flat.tolist() == list(range(16))
    with pytest.raises(ValueError, match="contains other tensors"):
        files.read("safetensors", saved(tmp_path / "order", ["b", "a"]), named, flat)
    whole = (tmp_path / "right").read_bytes()
    for wrong in (whole[:-1], whole + b"x"):
        (tmp_path / "right").write_bytes(wrong)
        with pytest.raises(ValueError, match="is truncated, or longer than"):
            files.read("safetensors", tmp_path / "right", named, flat)
    (tmp_path / "right").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="does not begin with a safetensors header"):
        files.read("safetensors", tmp_path / "right", named, flat)


@pytest.mark.parametrize("kind", ["mapped", "safetensors"])
def test_a_buffer_that_was_read_into_can_be_given_back(kind: Any, shared_memory: Path) -> None:
    """An engine's buffer lives as long as a sync; torch never resizes what was once shown to numpy."""
    buckets, file = SyncBuckets("cpu"), saved(shared_memory / "x", ["a", "b"])
    bucket = buckets.of(["a", "b"], ["float32"] * 2, [[2], [2]])
    SenderFiles().read(kind, file, bucket.named, bucket.flat)
    assert bucket.flat.tolist() == list(file.read_bytes()[:16] if kind == "mapped" else range(16))
    buckets.release()
    file.unlink()


# ------------------------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize("make", [MemoryTransport, DiskTransport])
def test_a_server_without_the_plug_in_is_refused_when_it_is_met(
    make: type[MemoryTransport | DiskTransport], engines: list[StandInEngine], link: Link, shared_memory: Path
) -> None:
    engines[1].set_mode("no plug-in")
    transport = make(link)
    with pytest.raises(WeightSyncError, match=r"weights\.transport.*without mslime's plug-in") as caught:
        transport.connect(infos(engines))
    assert engines[1].url in str(caught.value) and "weights.transport: broadcast" in caught.value.hint
    transport.disconnect()


@pytest.mark.parametrize("make", [MemoryTransport, DiskTransport])
def test_an_engine_on_another_machine_is_refused_when_it_is_met(
    make: type[MemoryTransport | DiskTransport], engines: list[StandInEngine], link: Link, shared_memory: Path
) -> None:
    class Elsewhere(make):  # type: ignore[misc, valid-type]
        def open_directory(self) -> Path:
            return super().open_directory() / "not there"

    transport = Elsewhere(link)
    with pytest.raises(WeightSyncError, match=r"(?s)weights\.transport.*this server, on .*cannot read it") as caught:
        transport.connect(infos(engines))
    assert "broadcast" in caught.value.hint
    transport.disconnect()


def test_a_directory_that_is_there_can_be_read() -> None:
    assert SenderFiles().see(Path("/")) == Answer()
