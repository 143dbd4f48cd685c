"""Ranks of an engine that read a part each of a bucket and pass it on, over real process groups.

They do so with Mooncake's memory, whose reader a fake replaces that reads a file and can fail. The ranks run the
function called by SGLang's hooks.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mslime.engine_plugin import bucket_files
from mslime.engine_plugin.engine_ranks import EngineRankGroup
from mslime.engine_plugin.wire import FromFile
from tests.engines.megatron_ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

RANKS = 3
SIZES = (1, 10, 4_001, 9)
"""Bytes of each bucket; the first has fewer than there are ranks."""


def value(bucket: int) -> list[int]:
    return [(7 * at + bucket + 1) % 251 for at in range(SIZES[bucket])]


class FakeRdmaReader:
    """Reads a part of a bucket from a file."""

    def read(self, place: Path, flat: torch.Tensor, part: torch.Tensor) -> None:
        begin = part.storage_offset() - flat.storage_offset()
        whole = torch.frombuffer(bytearray(place.read_bytes()), dtype=torch.uint8)
        part.copy_(whole[begin : begin + part.numel()])


class Rank:
    """One rank of an engine. Its file differs from the bucket outside of its part, which must come from the others."""

    def __init__(self, rank: int, directory: Path) -> None:
        self.rank, self.file = rank, directory / f"rank{rank}"
        self.model: Any = torch.nn.Module()
        self.updater: Any = SimpleNamespace(device="cpu", get_model=lambda: self.model)
        self.file.touch(0o600)
        self.file.write_bytes(bytes(max(SIZES)))
        self.memory = torch.from_file(str(self.file), shared=True, size=max(SIZES), dtype=torch.uint8)

    def receive(self, bucket: int) -> list[int] | str:
        """The bytes of a bucket, or an error."""
        size, each = SIZES[bucket], -(-SIZES[bucket] // RANKS)
        own = slice(min(self.rank * each, size), min((self.rank + 1) * each, size))
        self.memory.fill_(255)
        self.memory[own] = torch.tensor(value(bucket)[own], dtype=torch.uint8)
        tensors = [f"t{bucket}"], ["uint8"], [[size]]
        try:
            received = bucket_files.receive(self.updater, FromFile("remote", self.file), tensors, "")
        except RuntimeError as error:
            return str(error)
        return received.bucket.flat.tolist()


def work(rank: int, world_size: int, init_method: str, directory: str) -> list[Any]:
    timeout = timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
    tensors, words = (dist.new_group(timeout=timeout) for _ in range(2))
    assert isinstance(tensors, dist.ProcessGroup) and isinstance(words, dist.ProcessGroup)
    everyone = EngineRankGroup(rank, world_size, tensors, words)
    bucket_files.all_ranks = lambda: everyone
    files: Any = bucket_files.FILES
    files.remote = FakeRdmaReader()
    own = Rank(rank, Path(directory))
    found: list[Any] = [own.receive(bucket) for bucket in (0, 1, 2)]
    if rank == 1:  # it fails before it reads
        model, own.updater.get_model = own.updater.get_model, lambda: 1 // 0
    found.append(own.receive(1))
    if rank == 1:
        own.updater.get_model = model
    found.append(own.receive(2))
    if rank == 2:  # it cannot read its part
        own.file.unlink()
    found += [own.receive(3), dist.barrier()]
    return found


def test_each_rank_reads_a_part_and_gets_the_others_and_no_rank_waits_for_a_failed_one(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(work, RANKS, str(tmp_path), deadline_s=90)):
        assert found[:3] == [value(0), value(1), value(2)], rank
        assert found[3] == "rank 1: ZeroDivisionError: integer division or modulo by zero"
        assert found[4] == value(2), rank
        assert found[5].startswith("rank 2: FileNotFoundError"), found[5]


def test_ranks_read_all_of_shared_memory() -> None:
    flat, near = torch.zeros(9, dtype=torch.uint8), EngineRankGroup(1, RANKS)
    assert not bucket_files.parts_of("mapped", flat, near)
    assert [len(part) for part in bucket_files.parts_of("remote", flat, near)] == [3, 3, 3]
