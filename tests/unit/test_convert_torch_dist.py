"""`torch_dist` files: torch's own reader reads what we write, we read what torch writes, damage is named."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mslime.config.errors import CheckpointError
from mslime.convert.safetensors_files import OutputFile, write_record
from mslime.convert.torch_dist import METADATA, DistCheckpoint

STATE = {
    "plain": torch.arange(12.0).view(3, 4),
    "half": torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "number": torch.tensor(3, dtype=torch.int64), "empty": torch.zeros(0, 3),
    "part of a larger one": torch.arange(20.0).view(4, 5)[1:3, 2:], "transposed": torch.arange(6.0).view(2, 3).T,
}  # fmt: skip


def with_backend(directory: Path, backend: str = "torch_dist") -> Path:
    (directory / "metadata.json").write_text(json.dumps({"sharded_backend": backend, "sharded_backend_version": 1}))
    return directory


@pytest.fixture
def written_by_torch(tmp_path: Path) -> Path:
    dcp.save(dict(STATE), checkpoint_id=tmp_path / "torch", no_dist=True)
    return with_backend(tmp_path / "torch")


def test_what_torch_wrote_is_read_bit_for_bit(written_by_torch: Path) -> None:
    checkpoint = DistCheckpoint(written_by_torch)
    assert checkpoint.tensors.keys() == STATE.keys()
    for key, tensor in STATE.items():
        read = checkpoint.view(key).box((0,) * tensor.ndim, tuple(tensor.shape))
        assert torch.equal(read, tensor) and read.dtype == tensor.dtype, key


@pytest.mark.parametrize("tensor", STATE.values(), ids=STATE.keys())
@pytest.mark.parametrize("zip64", [False, True])
def test_torch_loads_our_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor, zip64: bool
) -> None:
    monkeypatch.setattr("mslime.convert.safetensors_files._ZIP64_BYTES", 0 if zip64 else 1 << 31)
    with OutputFile(tmp_path / "file") as file:
        file.write(b"something before")
        write_record(file, "x", tensor.contiguous())
        written = file.complete()
    start, length = written.records["x"]
    data = (tmp_path / "file").read_bytes()
    loaded = torch.load(io.BytesIO(data[start : start + length]), weights_only=True)
    assert torch.equal(loaded, tensor) and loaded.dtype == tensor.dtype
    span = written.spans["x"]
    assert data[span.start : span.start + span.length] == bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def write_chunks(directory: Path, boxes: dict[tuple[int, ...], torch.Tensor], size: tuple[int, ...]) -> Path:
    """A checkpoint with one tensor `t`, in the given chunks, as several ranks would leave it."""
    directory.mkdir()
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(size), [])
    storage: dict[MetadataIndex, Any] = {}
    for number, (offsets, chunk) in enumerate(boxes.items()):
        with OutputFile(directory / f"__{number}_0.distcp") as file:
            write_record(file, "t", chunk.contiguous())
            written = file.complete()
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), chunk.shape))
        storage[MetadataIndex("t", torch.Size(offsets), number)] = _StorageInfo(written.file, *written.records["t"])
    tensors: dict[str, Any] = {"t": entry, "object": BytesStorageMetadata()}
    (directory / METADATA).write_bytes(pickle.dumps(Metadata(tensors, storage_data=storage)))
    return with_backend(directory)


WHOLE = torch.arange(60.0).view(6, 10)
GRID = {(i, j): WHOLE[i : i + 2, j : j + 5] for i in (0, 2, 4) for j in (0, 5)}


@pytest.mark.parametrize(
    "box", [((0, 0), (6, 10)), ((1, 3), (4, 5)), ((2, 5), (2, 5)), ((3, 6), (1, 2)), ((0, 0), (0, 10))], ids=str
)
def test_any_box_is_assembled_from_the_chunks_of_all_ranks(tmp_path: Path, box: tuple[Any, Any]) -> None:
    checkpoint = DistCheckpoint(write_chunks(tmp_path / "c", GRID, (6, 10)))
    (top, left), (rows, columns) = box
    assert torch.equal(checkpoint.view("t").box(*box), WHOLE[top : top + rows, left : left + columns])
    assert checkpoint.objects == ["object"]


def test_a_box_outside_the_tensor_is_another_model(tmp_path: Path) -> None:
    view = DistCheckpoint(write_chunks(tmp_path / "c", GRID, (6, 10))).view("t")
    with pytest.raises(CheckpointError, match="config.json"):
        view.box((4, 0), (3, 10))


def test_chunks_that_leave_a_hole_are_noticed(tmp_path: Path) -> None:
    holed = {offsets: chunk for offsets, chunk in GRID.items() if offsets != (2, 5)}
    with pytest.raises(CheckpointError, match="do not fill the shape"):
        DistCheckpoint(write_chunks(tmp_path / "hole", holed, (6, 10)))
    doubled = {**holed, (2, 4): WHOLE[2:4, 4:9]}
    checkpoint = DistCheckpoint(write_chunks(tmp_path / "twice", doubled, (6, 10)))
    with pytest.raises(CheckpointError, match="exactly once"):
        checkpoint.view("t").box((2, 4), (2, 6))


@pytest.mark.parametrize("damage", [
    Path.unlink, lambda path: os.truncate(path, path.stat().st_size - 1),
    lambda path: path.write_bytes(b"\0" * 200 + path.read_bytes()[200:]),
    lambda path: path.write_bytes(b"\x13" * path.stat().st_size),
], ids=["gone", "cut", "another start", "another content"])  # fmt: skip
def test_a_damaged_file_is_named_with_its_tensor(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    directory = write_chunks(tmp_path / "c", GRID, (6, 10))
    damage(directory / "__3_0.distcp")
    with pytest.raises(CheckpointError) as error:
        DistCheckpoint(directory).view("t").box((0, 0), (6, 10))
    assert error.value.field == f"{directory / '__3_0.distcp'}: t"


def test_a_file_of_another_shape_is_named(tmp_path: Path) -> None:
    directory = write_chunks(tmp_path / "c", GRID, (6, 10))
    write_chunks(tmp_path / "d", {(0, 0): WHOLE[:1, :10]}, (1, 10))
    shutil.copy(tmp_path / "d" / "__0_0.distcp", directory / "__3_0.distcp")
    with pytest.raises(CheckpointError, match="__3_0.distcp: t"):
        DistCheckpoint(directory).view("t").box((0, 0), (6, 10))


class _Malicious:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch /tmp/mslime_was_here",)


def _by_a_dotted_name() -> bytes:
    """A class that lies behind what a module of the format imports: protocol 4 looks names up with their dots."""
    words = [b"torch.distributed.checkpoint.planner", b"torch.utils.collect_env.subprocess.Popen"]
    names = b"".join(b"\x8c" + bytes([len(word)]) + word for word in words)
    argument = b"touch /tmp/mslime_was_here"
    call = b"((\x8c\x02sh\x8c\x02-c\x8c" + bytes([len(argument)]) + argument + b"ltR"
    return b"\x80\x04" + names + b"\x93" + call + b"."


@pytest.mark.parametrize("content", [
    pickle.dumps(_Malicious()), _by_a_dotted_name(), pickle.dumps({"not": "metadata"}), b"rubbish", b"",
], ids=["runs code", "runs code by a dotted name", "other object", "rubbish", "empty"])  # fmt: skip
def test_metadata_that_is_none_is_refused_and_runs_nothing(written_by_torch: Path, content: bytes) -> None:
    (written_by_torch / METADATA).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        DistCheckpoint(written_by_torch)
    assert not Path("/tmp/mslime_was_here").exists()


class _EnumsByGetattr(pickle.Pickler):
    """As Python 3.11.2 pickles."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_metadata_of_a_python_that_writes_enums_as_calls_is_read(written_by_torch: Path) -> None:
    metadata = pickle.loads((written_by_torch / METADATA).read_bytes())
    file = io.BytesIO()
    _EnumsByGetattr(file).dump(metadata)
    assert b"getattr" in file.getvalue()
    (written_by_torch / METADATA).write_bytes(file.getvalue())
    test_what_torch_wrote_is_read_bit_for_bit(written_by_torch)


class _Asks:
    """For an attribute of a class of the format that is not a member of an enum."""

    def __init__(self, of: type, name: str) -> None:
        self._of, self._name = of, name

    def __reduce__(self) -> tuple[Any, tuple[type, str]]:
        return getattr, (self._of, self._name)


@pytest.mark.parametrize(
    ("of", "name"), [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__init__"), (set, "__subclasses__")]
)
def test_getattr_in_metadata_reaches_members_of_enums_alone(written_by_torch: Path, of: type, name: str) -> None:
    (written_by_torch / METADATA).write_bytes(pickle.dumps(_Asks(of, name)))
    with pytest.raises(CheckpointError, match=f"asks for '{name}'.*not a member of an enum"):
        DistCheckpoint(written_by_torch)


def test_a_chunk_that_names_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    directory = write_chunks(tmp_path / "c", {(0, 0): WHOLE}, (6, 10))
    bad = io.BytesIO()
    torch.save(_Malicious(), bad)
    content = bad.getvalue()
    path = directory / "__0_0.distcp"
    path.write_bytes(content + b"\0" * (path.stat().st_size - len(content)))
    metadata = pickle.loads((directory / METADATA).read_bytes())
    for index in metadata.storage_data:
        metadata.storage_data[index] = _StorageInfo(path.name, 0, len(content))
    (directory / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="it names posix.system"):
        DistCheckpoint(directory).view("t").box((0, 0), (6, 10))
    assert not Path("/tmp/mslime_was_here").exists()


def _told(**changes: Any) -> Callable[[Any], None]:
    """Damage: every chunk is told to lie elsewhere."""

    def damage(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = replace(info, **changes)

    return damage


def _without_storage(metadata: Any) -> None:
    metadata.storage_data = dict.fromkeys(metadata.storage_data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_told(relative_path="x" * 300), "File name too long"), (_told(relative_path="../secret"), "outside"),
        (_told(relative_path="/etc/hostname"), "outside"), (_told(offset=None), "AttributeError"),
        (_told(length="x"), "TypeError"), (_without_storage, "no location on disk"),
    ],
)  # fmt: skip
def test_metadata_that_sends_readers_elsewhere_is_refused(
    tmp_path: Path, damage: Callable[[Any], None], said: str
) -> None:
    directory = write_chunks(tmp_path / "c", GRID, (6, 10))
    (tmp_path / "secret").write_bytes(b"\0" * 10_000)
    metadata = pickle.loads((directory / METADATA).read_bytes())
    damage(metadata)
    (directory / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=said) as error:
        DistCheckpoint(directory)
    assert METADATA in error.value.field


def test_metadata_that_asks_for_more_memory_than_there_is_is_refused(written_by_torch: Path) -> None:
    """By the length that a text of it claims to have."""
    (written_by_torch / METADATA).write_bytes(b"\x80\x04\x8e" + (2**62).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        DistCheckpoint(written_by_torch)


def test_another_backend_and_an_unfinished_checkpoint_are_refused(written_by_torch: Path) -> None:
    with_backend(written_by_torch, "zarr")
    with pytest.raises(CheckpointError, match="zarr"):
        DistCheckpoint(written_by_torch)
    (written_by_torch / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="complete checkpoint"):
        DistCheckpoint(written_by_torch)
