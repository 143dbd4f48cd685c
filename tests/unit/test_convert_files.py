"""One output file: whole or not at all, whatever the sizes of what is written into it."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
import torch

from mslime.config.errors import CheckpointError
from mslime.convert.safetensors_files import OutputFile, verify


def test_bytes_arrive_in_order_whatever_the_sizes_of_the_pieces(tmp_path: Path) -> None:
    sizes = [1] * 3000 + [5_000_000, 3, 0, 20_000_000, 7] + [70_000] * 300
    pieces = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    with OutputFile(tmp_path / "file") as file:
        for piece in pieces:
            file.write(piece)
        assert not (tmp_path / "file").exists()
        written = file.complete()
    assert (tmp_path / "file").read_bytes() == b"".join(pieces) and written.size == sum(sizes)


def test_a_call_of_the_system_that_writes_less_than_asked_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, buffers: real(fd, [memoryview(buffers[0])[:1000]]))
    pieces = [bytes([i]) * 2500 for i in range(40)]
    with OutputFile(tmp_path / "file") as file:
        for piece in pieces:
            file.write(piece)
        file.complete()
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)


def test_a_file_that_is_left_by_an_error_vanishes(tmp_path: Path) -> None:
    with pytest.raises(KeyError), OutputFile(tmp_path / "file") as file:
        file.write(b"x" * 5_000_000)
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_disk_names_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, buffers: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with (
        pytest.raises(CheckpointError, match=r"file: model\.norm = 'No space left on device'"),
        OutputFile(tmp_path / "file") as file,
    ):
        file.write_tensor("model.norm", torch.ones(3))
        file.complete()
    assert not list(tmp_path.iterdir())


def test_checksums_are_of_the_tensors_own_bytes(tmp_path: Path) -> None:
    tensor = torch.randn(5, 7).to(torch.float8_e4m3fn)
    with OutputFile(tmp_path / "file") as file:
        file.write(b"header")
        span = file.write_tensor("a", tensor)
        written = file.complete()
    content = (tmp_path / "file").read_bytes()
    assert (span.start, span.length) == (6, 35) and span.crc == zlib.crc32(content[6:])
    done: list[int] = []
    verify(tmp_path, written, done.append)
    assert sum(done) == 35


@pytest.mark.parametrize("at", [6, 20, 40])
def test_verification_finds_any_changed_byte_of_a_tensor(tmp_path: Path, at: int) -> None:
    with OutputFile(tmp_path / "file") as file:
        file.write(b"header")
        file.write_tensor("a", torch.arange(35, dtype=torch.uint8))
        written = file.complete()
    content = bytearray((tmp_path / "file").read_bytes())
    content[at] ^= 1
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match="file: a"):
        verify(tmp_path, written, lambda n: None)
    os.truncate(tmp_path / "file", 30)
    with pytest.raises(CheckpointError, match="30 bytes"):
        verify(tmp_path, written, lambda n: None)
