"""What the plug-in of an engine is asked and what it replies: typed records, JSON on the way. Free of torch and SGLang.

SGLang 0.5.23 has no route of ours, so records travel in text fields of two of its own, and nowhere else:

- a `Request` is the `action` of `/weights_checker`, and its `Reply` the `message` of the answer. Every rank of an
  engine gets the request between two batches, whether the engine is paused or not; rank 0 replies.
- a `Load` is the `load_format` of `/update_weights_from_distributed`: it says how the bucket comes, if not by a plain
  broadcast. The `message` is how it was loaded, for `RelaySync` a `Loaded`.

A server without the plug-in refuses an action that it does not know (`UNKNOWN`).
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
from pydantic import TypeAdapter

from mslime.config.base import ENGINE_TAGS, EngineTag, FileKind
from mslime.config.keys import AnnouncedBucket, BucketVersion

# Which elements of a bucket each machine of an engine keeps: what engines say, and what senders pack (`relay`).


@dataclass(frozen=True)
class Slice:
    """Elements of a bucket: runs of neighbours that lie at equal distances. Packed they lie one after the other.

    Attributes:
        start: the first element.
        width: neighbours in a run.
        sizes, strides: how many runs there are, and their distances in elements, outermost first; empty: one run.
    """

    start: int
    width: int
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.width * math.prod(self.sizes)


HostSlice = tuple[Slice, ...]
"""What one machine keeps of a bucket, in the order in which it is packed; empty: nothing."""


@dataclass(frozen=True)
class HostSlices:
    """What each machine of an engine keeps of the buckets of a plan.

    Attributes:
        name: the same for the same cuts, and for no others.
        buckets: of each bucket, the cut of each machine; None where it goes to all machines as a whole.
    """

    name: str
    buckets: tuple[tuple[HostSlice, ...] | None, ...]

    @classmethod
    def of(cls, buckets: Sequence[tuple[HostSlice, ...] | None]) -> HostSlices:
        """With their name."""
        return cls(hashlib.sha256(_encoded(buckets).encode()).hexdigest()[:16], tuple(buckets))


def machine_lane(lane: str, machine: int) -> str:
    """The process group by which a sender sends to one machine of each engine.

    Args:
        lane: the group by which it sends to all of them.
    """
    return f"{lane}-machine{machine}"


def _encoded(buckets: Sequence[tuple[HostSlice, ...] | None]) -> str:
    rows = [
        None if cuts is None else [[[p.start, p.width, p.sizes, p.strides] for p in cut] for cut in cuts]
        for cuts in buckets
    ]
    return json.dumps(rows, separators=(",", ":"))


PATH_ENTRY = Path(__file__).with_name("path_entry")
"""Directory for the `PYTHONPATH` of a server: SGLang finds the plug-in there as if it were an installed package."""
LOADER_VARIABLE = "MSLIME_ENGINE_LOADER"
"""Environment variable of a server; `model`: buckets are loaded by the model's own loader (`weights.loader`)."""
FLAT = "flattened_bucket"
"""SGLang's `load_format` of a bucket that comes by a plain broadcast."""
UNKNOWN = "Unsupported action"
"""In the answer of a server without the plug-in to any `Request`."""
RECORDED, OWN_LOADER = "loaded by recorded copies", "loaded by the model's own loader: "
"""What begins the message about a bucket that was loaded."""
REFUSED = "changes are refused"
"""In the message of an engine that has loaded nothing of the changes that it was sent."""
CANNOT = ""
"""In the place of a tensor's name in `Sums`: why a rank cannot report some tensors, or all."""
NARROW = {"u1:": np.uint8, "u2:": np.uint16}
"""By the tag with which a text of routes begins: what its base64 is of. Without a tag it is of int32."""

_MARK = "mslime:"

# ------------------------------------------------------------------------------------------------------------- loads


@dataclass(frozen=True)
class FromFile:
    """A bucket that lies in a file, or in memory that `path` names."""

    kind: FileKind
    path: Path


@dataclass(frozen=True)
class FromBroadcast:
    """A bucket, or changes of it, that is broadcast in the request's process group."""

    version: BucketVersion


@dataclass(frozen=True)
class RelaySync:
    """All buckets of a sync, which the engine's ranks receive and pass on to each other.

    Attributes:
        sync: names this sync among all; the same from every sender.
        plan: names the buckets: their tensors come with the first request, and are known from then on.
        lanes: names of the process groups of senders, by sender.
        senders: of each bucket, who sends it: equal parts of it, in this order; empty where the plan is known.
        tensors: of each bucket, how many; likewise.
        cuts: names what the machines of each engine keep, if senders send each no more (`engine_plugin.wire`); empty:
            they send whole buckets.
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
    """Is the plug-in there? Reply: `Answer`."""


@dataclass(frozen=True)
class ReadDirectory:
    """Can files of this directory be read? Reply: `Answer`."""

    directory: Path


@dataclass(frozen=True)
class ForgetDirectory:
    """Unmap the files of this directory. Reply: `Answer`."""

    directory: Path


@dataclass(frozen=True)
class ReadMemory:
    """Can these bytes be read in a sender's memory? Reply: `Answer`.

    Attributes:
        memory: where they lie (`mslime.remote_memory`).
        expected: the bytes, as hexadecimal digits.
    """

    memory: Path
    expected: str


@dataclass(frozen=True)
class CheckIpc:
    """Is the package there that takes buckets from a rank on the same GPU? Reply: `Answer`."""


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
    """On each machine of the engine, the rank that receives from a sender joins that sender's group. Reply: `Answer`.

    Attributes:
        sender: its number.
        machine: only the rank on this machine joins; None: one on each.
    """

    sender: int
    group: JoinGroup
    machine: int | None = None


@dataclass(frozen=True)
class LeaveGroup:
    """The engine's ranks leave a process group. SGLang's own request, as `JoinGroup`."""

    name: str


@dataclass(frozen=True)
class HeldWeights:
    """What does each rank hold of the tensors that this update has sent? Reply: `Sums`."""


@dataclass(frozen=True)
class HeldAdapter:
    """What does each rank hold of the tensors of the adapter of this name? Reply: `Sums`."""

    name: str


@dataclass(frozen=True)
class ReleasedMemory:
    """What has the engine released? Reply: `Released`."""


Request = (
    Ping
    | ReadDirectory
    | ForgetDirectory
    | ReadMemory
    | CheckIpc
    | TakeIpc
    | JoinRelayGroup
    | HeldWeights
    | HeldAdapter
    | ReleasedMemory
)

OwnRequest = JoinGroup | LeaveGroup
"""What SGLang has a route for. Reply: `Answer`."""

# ----------------------------------------------------------------------------------------------------------- replies


@dataclass(frozen=True)
class Answer:
    """Yes, or done.

    Attributes:
        why_not: the reason if the answer is no; else empty.
    """

    why_not: str = ""


@dataclass(frozen=True)
class Loaded:
    """Weights were loaded.

    Attributes:
        how: begins with `RECORDED` or `OWN_LOADER`.
        cuts: what each machine keeps, if that is news.
    """

    how: str
    cuts: HostSlices | None = None


@dataclass(frozen=True)
class Sums:
    """What an engine's ranks hold.

    Attributes:
        ranks: of each, sum and places (`format_sum`) by name of the tensor; see `CANNOT`.
    """

    ranks: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Released:
    """What an engine does not hold.

    Attributes:
        tags: in SGLang's words.
        refused: why its last release did nothing; empty if it did what it was asked.
    """

    tags: frozenset[EngineTag] = field(default_factory=frozenset)
    refused: str = ""

    def to_release(self, held: Collection[EngineTag]) -> list[EngineTag]:
        """What to release so that nothing but `held` is held."""
        return [tag for tag in ENGINE_TAGS if tag not in held and tag not in self.tags]

    def to_resume(self, held: Collection[EngineTag]) -> list[EngineTag]:
        """What to resume so that all of `held` is held."""
        return [tag for tag in ENGINE_TAGS if tag in held and tag in self.tags]


Reply = Answer | Loaded | Sums | Released


@dataclass(frozen=True)
class IpcBucket:
    """Tensors that lie one after the other in a buffer: the name of a bucket that a trainer's rank hands out."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, bucket: AnnouncedBucket) -> IpcBucket:
        """The name of a bucket."""
        return cls(tuple(bucket.names), tuple(bucket.dtypes), tuple(map(tuple, bucket.shapes)))


Record = Load | Request | Reply | IpcBucket
_RECORDS: dict[str, type[Record]] = {kind.__name__: kind for kind in get_args(Record)}

# ------------------------------------------------------------------------------------------------------------- codec


def encode(record: Record) -> str:
    """A record as text."""
    kind = type(record)
    return f"{_MARK}{kind.__name__} {_adapter(kind).dump_json(record).decode()}"


def decode(text: str | None) -> Record | None:
    """The record that a text is; None if it is none of ours. Raises ValueError if it cannot be read."""
    if text is None or not text.startswith(_MARK):
        return None
    name, _, body = text.removeprefix(_MARK).partition(" ")
    if name not in _RECORDS:
        raise ValueError(f"there is no record {name!r}: the versions of mslime on both sides differ")
    return _adapter(_RECORDS[name]).validate_json(body)


@cache
def _adapter(kind: type[Record]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def format_sum(total: int, places: int) -> str:
    """The sum of a tensor, and that of its places (`tensor_sums`), as they stand in `Sums`."""
    return f"{total} {places}"


def parse_sum(text: str) -> tuple[int, int] | None:
    """What `format_sum` wrote; None for anything else."""
    match text.split():
        case [total, places] if total.lstrip("-").isdecimal() and places.lstrip("-").isdecimal():
            return int(total), int(places)
        case _:
            return None


def update_request(buckets: Sequence[AnnouncedBucket], group: str = "", load: Load | None = None) -> bytes:
    """The body of `/update_weights_from_distributed`: tensors, one after the other in flat buffers, one a bucket.

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
            "flush_cache": False,  # once for the whole sync, by whoever holds the engines' pause
        }
    )


# Handles of memory that a process shares with others on its machine, as files: each is for one process to open.

HandleFields = tuple[bytes | int, ...]
"""What torch needs to open memory; the first says on which kind of device: 0 a CPU, 1 CUDA."""


def write_handle(path: Path, number: int, fields: HandleFields) -> None:
    """Write one of several handles of the memory that `path` names. Raises OSError."""
    said = [field.hex() if isinstance(field, bytes) else field for field in fields]
    path.with_name(f"{path.name}.{number}").write_text(json.dumps(said))


def take_handle(path: Path) -> HandleFields:
    """A handle that no other process has taken, nor will.

    Raises:
        OSError: there is none left, or none was written.
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
            bytes.fromhex(said) if isinstance(said, str) else int(said) for said in json.loads(taken.read_text())
        )
    raise AssertionError("numbers do not end")
