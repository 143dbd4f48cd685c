"""Requests and replies of an engine's plug-in: typed records, sent as JSON. Free of torch and SGLang.

SGLang 0.5.23 has no routes for plug-ins, so records travel in text fields of two of its own routes:

- a `Request` is the `action` of `/weights_checker`, and its `Reply` the `message` of the answer. Every rank of an
  engine gets the request between two batches, whether the engine is paused or not; rank 0 replies.
- a `Load` is the `load_format` of `/update_weights_from_distributed`: how the bucket comes, if not by a plain
  broadcast. The `message` is how it was loaded, for `RelaySync` a `Loaded`.

A server without the plug-in rejects unknown actions (`UNKNOWN`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, get_args

import numpy as np
import orjson
import tenacity
from pydantic import TypeAdapter

from mslime.config.base import ENGINE_TAGS, EngineTag, FileKind
from mslime.config.keys import AnnouncedBucket, BucketVersion

# Which elements of a bucket each host of an engine keeps: reported by engines and packed by senders (`relay`).


@dataclass(frozen=True)
class Slice:
    """Elements of a bucket: runs of consecutive elements at equal distances. Packed, the runs follow each other.

    Attributes:
        start: the first element.
        width: elements in a run.
        sizes, strides: numbers of runs and their distances in elements, outermost first; empty: one run.
    """

    start: int
    width: int
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return self.width * math.prod(self.sizes)


HostSlice = tuple[Slice, ...]
"""One host's part of a bucket, in packing order; empty: nothing."""


@dataclass(frozen=True)
class HostSlices:
    """The slices of a plan's buckets that each host of an engine keeps.

    Attributes:
        name: unique to these slices.
        buckets: for each bucket, the slice of each host; None if it goes whole to all hosts.
    """

    name: str
    buckets: tuple[tuple[HostSlice, ...] | None, ...]

    @classmethod
    def of(cls, buckets: Sequence[tuple[HostSlice, ...] | None]) -> HostSlices:
        rows = [
            None if cuts is None else [[[p.start, p.width, p.sizes, p.strides] for p in cut] for cut in cuts]
            for cuts in buckets
        ]
        encoded = json.dumps(rows, separators=(",", ":"))
        return cls(hashlib.sha256(encoded.encode()).hexdigest()[:16], tuple(buckets))


def machine_lane(lane: str, machine: int) -> str:
    """Name of the process group by which a sender sends to one host of each engine.

    Args:
        lane: name of the group by which it sends to all of them.
    """
    return f"{lane}-machine{machine}"


PATH_ENTRY = Path(__file__).with_name("path_entry")
"""Directory for the `PYTHONPATH` of a server: SGLang finds the plug-in there like an installed package."""
LOADER_VARIABLE = "MSLIME_ENGINE_LOADER"
"""Environment variable of a server; `model`: buckets are loaded by the model's own loader (`weights.loader`)."""
FLAT = "flattened_bucket"
"""SGLang's `load_format` of a bucket that comes by a plain broadcast."""
UNKNOWN = "Unsupported action"
"""Text in the answer of a server without the plug-in to any `Request`."""
RECORDED, OWN_LOADER = "loaded by recorded copies", "loaded by the model's own loader: "
"""Prefix of the message about a loaded bucket."""
REFUSED = "changes are rejected"
"""Text in the message of an engine that has rejected changes and loaded none of them."""
CANNOT = ""
"""Key in `Sums`, instead of a tensor's name, for the reason why a rank cannot report some or all tensors."""
NARROW = {"u1:": np.uint8, "u2:": np.uint16}
"""Dtype of the base64 in a text of routes, by the tag at its beginning. Without a tag it is int32."""

_MARK = "mslime:"

# ------------------------------------------------------------------------------------------------------------- loads


@dataclass(frozen=True)
class FromFile:
    """A bucket in a file, or in the memory that `path` names."""

    kind: FileKind
    path: Path


@dataclass(frozen=True)
class FromBroadcast:
    """A bucket, or changes of it, broadcast in the request's process group."""

    version: BucketVersion


@dataclass(frozen=True)
class RelaySync:
    """All buckets of a sync, received by the engine's ranks and passed on to each other.

    Attributes:
        sync: unique name of this sync; the same from every sender.
        plan: name of the buckets: their tensors come only with the first request.
        lanes: names of the process groups of senders, by sender.
        senders: for each bucket, the senders of its equal parts, in order; empty if the plan is known.
        tensors: for each bucket, their number; likewise.
        cuts: name of the hosts' slices, if senders send only these (`HostSlices`); empty: they send whole buckets.
    """

    sync: str
    plan: str
    lanes: tuple[str, ...]
    senders: tuple[tuple[int, ...], ...] = ()
    tensors: tuple[int, ...] = ()
    cuts: str = ""


Load = FromFile | FromBroadcast | RelaySync

# ---------------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True)
class Ping:
    """Test whether the plug-in is there. Reply: `Answer`."""


@dataclass(frozen=True)
class ReadDirectory:
    """Test whether files of this directory can be read. Reply: `Answer`."""

    directory: Path


@dataclass(frozen=True)
class ForgetDirectory:
    """Unmap the files of this directory. Reply: `Answer`."""

    directory: Path


@dataclass(frozen=True)
class ReadMemory:
    """Test whether these bytes can be read in a sender's memory. Reply: `Answer`.

    Attributes:
        memory: their address (`mslime.remote_memory`).
        expected: the bytes, as hexadecimal digits.
    """

    memory: Path
    expected: str


@dataclass(frozen=True)
class CheckIpc:
    """Test whether the package for buckets from a rank on the same GPU is there. Reply: `Answer`."""


@dataclass(frozen=True)
class TakeIpc:
    """Take buckets from the trainer's ranks on the same GPUs, each named by its `IpcBucket`. Reply: `Loaded`.

    Attributes:
        addresses: of the trainer's ranks, by GPU.
    """

    addresses: dict[str, str]


@dataclass(frozen=True)
class JoinGroup:
    """All ranks of the engine join a process group. SGLang's own request, for a server without the plug-in too.

    Attributes:
        name: of the process group.
        host, port: of the group's store.
        rank: of the engine's first member.
    """

    name: str
    host: str
    port: int
    rank: int
    world_size: int
    backend: str


@dataclass(frozen=True)
class JoinRelayGroup:
    """On each host of the engine, the rank that receives from a sender joins that sender's group. Reply: `Answer`.

    Attributes:
        sender: its number.
        machine: only the rank on this host joins; None: one on each.
    """

    sender: int
    group: JoinGroup
    machine: int | None = None


@dataclass(frozen=True)
class LeaveGroup:
    """The engine's ranks leave a process group. SGLang's own request, as `JoinGroup`."""

    name: str


@dataclass(frozen=True)
class WeightChecksums:
    """Checksums of each rank for the tensors sent in this update. Reply: `Sums`."""


@dataclass(frozen=True)
class AdapterChecksums:
    """Checksums of each rank for the tensors of the named adapter. Reply: `Sums`."""

    name: str


@dataclass(frozen=True)
class ReleasedMemory:
    """The parts that the engine has released. Reply: `Released`."""


Request = (
    Ping
    | ReadDirectory
    | ForgetDirectory
    | ReadMemory
    | CheckIpc
    | TakeIpc
    | JoinRelayGroup
    | WeightChecksums
    | AdapterChecksums
    | ReleasedMemory
)

OwnRequest = JoinGroup | LeaveGroup
"""Requests with a route of SGLang's own. Reply: `Answer`."""

# ----------------------------------------------------------------------------------------------------------- replies


@dataclass(frozen=True)
class Answer:
    """Success or failure of a request.

    Attributes:
        why_not: the reason of a failure; else empty.
    """

    why_not: str = ""


@dataclass(frozen=True)
class Loaded:
    """Weights were loaded.

    Attributes:
        how: begins with `RECORDED` or `OWN_LOADER`.
        cuts: the slices that each host keeps, if new to the senders.
    """

    how: str
    cuts: HostSlices | None = None


@dataclass(frozen=True)
class Sums:
    """Checksums of an engine's ranks.

    Attributes:
        ranks: for each rank, sum and places (`format_sum`) by name of the tensor; see `CANNOT`.
    """

    ranks: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Released:
    """Released parts of an engine.

    Attributes:
        tags: SGLang's names.
        refused: why its last release did nothing; empty if it succeeded.
    """

    tags: frozenset[EngineTag] = field(default_factory=frozenset)
    refused: str = ""

    def to_release(self, held: Collection[EngineTag]) -> list[EngineTag]:
        """Tags to release, so that only `held` remains."""
        return [tag for tag in ENGINE_TAGS if tag not in held and tag not in self.tags]

    def to_resume(self, held: Collection[EngineTag]) -> list[EngineTag]:
        """Tags to resume, so that all of `held` is held."""
        return [tag for tag in ENGINE_TAGS if tag in held and tag in self.tags]


Reply = Answer | Loaded | Sums | Released


@dataclass(frozen=True)
class IpcBucket:
    """Tensors that follow each other in a buffer: the name of a bucket that a trainer's rank provides."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, bucket: AnnouncedBucket) -> IpcBucket:
        return cls(tuple(bucket.names), tuple(bucket.dtypes), tuple(map(tuple, bucket.shapes)))


Record = Load | Request | Reply | IpcBucket
_RECORDS: dict[str, type[Record]] = {kind.__name__: kind for kind in get_args(Record)}

# ------------------------------------------------------------------------------------------------------------- codec


def encode(record: Record) -> str:
    kind = type(record)
    return f"{_MARK}{kind.__name__} {_adapter(kind).dump_json(record).decode()}"


def decode(text: str | None) -> Record | None:
    """Parse a record; None if the text is not one of ours. Raises ValueError if it cannot be read."""
    if text is None or not text.startswith(_MARK):
        return None
    name, _, body = text.removeprefix(_MARK).partition(" ")
    if name not in _RECORDS:
        raise ValueError(f"unknown record {name!r}: the versions of mslime on both sides differ")
    return _adapter(_RECORDS[name]).validate_json(body)


@cache
def _adapter(kind: type[Record]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def format_sum(total: int, places: int) -> str:
    """Text of a tensor's sum and of its place sum (`tensor_sums`), as used in `Sums`."""
    return f"{total} {places}"


def parse_sum(text: str) -> tuple[int, int] | None:
    """Parse the text of `format_sum`; None for any other text."""
    match text.split():
        case [total, places] if total.lstrip("-").isdecimal() and places.lstrip("-").isdecimal():
            return int(total), int(places)
        case _:
            return None


def update_request(buckets: Sequence[AnnouncedBucket], group: str = "", load: Load | None = None) -> bytes:
    """The body of `/update_weights_from_distributed`: tensors, one after the other in one flat buffer per bucket.

    Args:
        group: the process group in which they are broadcast; empty if they come otherwise.
        load: how they come; None: by a plain broadcast.
    """
    return orjson.dumps(
        {
            "names": [name for bucket in buckets for name in bucket.names],
            "dtypes": [dtype for bucket in buckets for dtype in bucket.dtypes],
            "shapes": [list(shape) for bucket in buckets for shape in bucket.shapes],
            "group_name": group,
            "load_format": FLAT if load is None else encode(load),
            "flush_cache": False,  # once per sync, by the owner of the engines' pause
        }
    )


# Handles of memory shared with other processes on the host, as files: each is for one process to open.

HandleFields = tuple[bytes | int, ...]
"""Fields that torch needs to open memory; the first is the kind of device: 0 a CPU, 1 CUDA."""
MANAGER_ATTEMPTS = 20
with_manager = tenacity.Retrying(
    retry=tenacity.retry_if_exception_message(match="(?s).*timed out"),
    stop=tenacity.stop_after_attempt(MANAGER_ATTEMPTS), reraise=True,
)  # fmt: skip
"""Calls a function that needs torch's shared memory manager, for whose reply torch waits one second (libshm/socket.h):
too short on a busy machine, so a time-out is repeated."""


def write_handle(path: Path, number: int, fields: HandleFields) -> None:
    """Write one of several handles of the memory that `path` names. Raises OSError."""
    value = [field.hex() if isinstance(field, bytes) else field for field in fields]
    path.with_name(f"{path.name}.{number}").write_text(json.dumps(value))


def take_handle(path: Path) -> HandleFields:
    """Take one of the handles, so that no other process can.

    Raises:
        OSError: no handle is left, or none was written.
    """
    for number in count():
        own = path.with_name(f"{path.name}.{number}")
        taken = own.with_name(f"{own.name}.taken")
        try:
            own.rename(taken)
        except FileNotFoundError:
            if not taken.exists():
                raise
            continue
        return tuple(
            bytes.fromhex(value) if isinstance(value, str) else int(value) for value in json.loads(taken.read_text())
        )
    raise AssertionError("numbers do not end")
