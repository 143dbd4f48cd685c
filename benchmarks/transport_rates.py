"""What parts of a weight sync take, each measured alone by all ranks at the same time, for `predict_transports.py`."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mslime.planner.ways import Changing
from mslime.remote_memory import End, RemoteMemory
from mslime.tensor_sums import word_sum
from mslime.threads import in_thread
from mslime.weights.differences import Differences, find_changes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.fixtures.stand_in_engine import paced

REPEATS = 4


@dataclass(frozen=True)
class Files:
    """Files in memory: there is no bandwidth that senders share, each writes as fast as it can.

    Attributes:
        write, remove: seconds a byte.
        reading: bytes a second.
    """

    write: float
    reading: float
    remove: float


class Changer:
    """Flips the lowest bit of the same elements again and again: for each share of each parameter, the same on every
    rank that holds it."""

    def __init__(self, params: dict[str, torch.Tensor]) -> None:
        self._params, self._chosen = params, dict[tuple[float, str], torch.Tensor]()

    def change(self, share: float) -> None:
        """So many of all elements."""
        for name, param in self._params.items():
            bits = param.view(-1).view(torch.int16)
            if share == 1:
                bits ^= 1
            else:
                bits[self._places(share, name, len(bits))] ^= 1

    def _places(self, share: float, name: str, size: int) -> torch.Tensor:
        if (share, name) not in self._chosen:
            random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            self._chosen[share, name] = torch.randint(size, (max(1, int(share * size)),), generator=random).unique()
        return self._chosen[share, name]


def in_pace(call: Callable[..., Any], pace: float) -> Callable[..., Any]:
    """The call, at this pace (`paced`)."""

    def slowly(*args: Any, **kwargs: Any) -> Any:
        with paced(pace):
            return call(*args, **kwargs)

    return slowly


def mean_of(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of one call, after one that does not count. A mean, because a sync is a sum of many."""
    call()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


class Primitives:
    """Calls of one thing alone.

    Args:
        pace: of each (`paced`).
        directory: for files.
    """

    def __init__(self, pace: float, directory: Path) -> None:
        self._pace, self._directory, self._rank = pace, directory, dist.get_rank()

    def at_once(self, call: Callable[[], object], repeats: int = REPEATS) -> float:
        """Seconds of one call while all ranks make theirs; the mean of the ranks."""
        dist.barrier()
        took = mean_of(in_pace(call, self._pace), repeats)
        dist.barrier()
        return statistics.mean(self.everyone(took))

    def everyone(self, mine: float) -> list[float]:
        """What each rank found."""
        found = [0.0] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        return found

    def copying(self, size: int) -> Callable[[], object]:
        """A copy of so many bytes into new memory."""
        source = torch.zeros(size, dtype=torch.uint8)
        return lambda: torch.empty_like(source).copy_(source)

    def files(self, size: int, lasting: bool) -> Files:
        """Of files of this size, which all ranks write, read and remove at the same time."""
        data, numbers = bytes(size), iter(range(10**6))
        into = memoryview(bytearray(size))
        place = self._directory / f"primitive-{self._rank}"
        place.mkdir(parents=True, exist_ok=True)

        def write() -> None:
            with (place / f"{next(numbers)}").open("wb") as file:
                file.write(data)
                if lasting:
                    file.flush()
                    os.fsync(file.fileno())

        def read() -> None:
            with (place / "0").open("rb") as file:
                file.readinto(into)

        written, taken = self.at_once(write), self.at_once(read)
        left = list(place.iterdir())
        removed = self.at_once(lambda: left.pop().unlink())
        place.rmdir()
        return Files(written / size, size / taken, removed / size)

    def index_s(self, tensors: Iterable[str]) -> float:
        """Seconds of a JSON file that names them all."""
        names = dict.fromkeys(tensors, "file")
        path = self._directory / f"index-{self._rank}"
        took = self.at_once(lambda: path.write_text(json.dumps({"weight_map": dict(sorted(names.items()))}, indent=2)))
        path.unlink()
        return took

    def sharing(self, size: int) -> tuple[float, float]:
        """Seconds more than a copy that making memory which is shared takes, and opening it, both with a copy."""
        source = torch.zeros(size, dtype=torch.uint8)
        plain = self.at_once(self.copying(size))
        made, opened = list[Any](), list[torch.Tensor]()

        def make() -> None:
            new = torch.empty(size, dtype=torch.uint8)
            storage: Any = new.untyped_storage()
            handle = storage._share_filename_cpu_()
            new.copy_(source)
            made.append((new, handle))

        def open_and_read() -> None:
            _, handle = made[len(opened)]
            storages: Any = torch.UntypedStorage
            opened.append(torch.empty(0, dtype=torch.uint8).set_(storages._new_shared_filename_cpu(*handle)))
            source.copy_(opened[-1])

        making = self.at_once(make)
        return max(making - plain, 0.0), max(self.at_once(open_and_read) - plain, 0.0)

    def reading_memory(self, size: int, readers: int) -> float:
        """Bytes a second that so many ends get together, by Mooncake over TCP, out of the first rank's memory."""
        mine = [i for i in range(readers) if (i + 1) % dist.get_world_size() == self._rank]
        source = torch.zeros(size, dtype=torch.uint8)
        end = End("127.0.0.1", "tcp") if self._rank == 0 else None
        said: list[RemoteMemory | None] = [end.share(source.data_ptr(), size) if end is not None else None]
        dist.broadcast_object_list(said, src=0)
        (memory,) = said
        assert memory is not None
        rooms = [(End("127.0.0.1", "tcp"), torch.zeros(size, dtype=torch.uint8)) for _ in mine]
        for reader, room in rooms:
            reader.register(room.data_ptr(), size)

        def read(reader: End, room: torch.Tensor) -> float:
            return mean_of(lambda: reader.read(memory, 0, room.data_ptr(), size))

        dist.barrier()
        took = [each.result() for each in [in_thread(read, *room) for room in rooms]]
        slowest = max(self.everyone(max(took, default=0.0)))
        for reader, room in rooms:
            reader.unregister(room.data_ptr())
        if end is not None:
            end.unregister(source.data_ptr())
        return readers * size / slowest

    def changing(self, changed: float, size: int) -> Changing:
        """What comparing and its counterparts take for a bucket, made of single calls on one in memory."""
        now = torch.randn(size // 2).to(torch.bfloat16)
        before = now.view(torch.int16).clone()
        Changer({"bucket": before}).change(changed)
        _, found = find_changes(now, before)

        def compare() -> None:
            _, places = find_changes(now, before)
            if places is not None:
                parts = places.index.to(torch.int32), places.value
                for part in (*parts, now):
                    word_sum(part)
                torch.cat([part.view(torch.uint8) for part in parts])

        def keep() -> None:
            if found is None:
                before.copy_(now.view(torch.int16))
            else:
                before[found.index] = found.value.view(torch.int16)

        def restore() -> None:
            word_sum(now) if found is None else self._restore(now, before, found)

        sent = 1.0 if found is None else len(found.index) * 6 / size
        comparing = self.at_once(compare)
        restoring = self.at_once(restore)
        return Changing(sent, comparing / size, self.at_once(keep) / size, restoring / size)

    def _restore(self, now: torch.Tensor, before: torch.Tensor, found: Differences) -> None:
        now.view(torch.int16).copy_(before)
        word_sum(now)
        index = found.index.to(torch.int32)
        assert int(index.min()) <= int(index.max())
        now.view(torch.int16)[index.to(torch.int64)] = found.value.view(torch.int16)
        word_sum(now)
