"""What an engine's plug-in is asked and answers: names and texts that both sides read. Free of torch and SGLang."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import orjson

from mslime.config.choices import FileKind
from mslime.config.keys import AnnouncedBucket, BucketVersion

RECORDED, OWN_LOADER = "loaded by recorded copies", "loaded by the model's own loader: "
"""What begins the answer to a bucket."""
NO_SUCH_GROUP, UNSEEN = "The group to be destroyed does not exist", "cannot read it"
"""What `group_to_see` is answered by a server without the plug-in, and by one that has it and sees no such directory.
"""
UNREACHED = "cannot read the sender's memory"
"""In what `group_to_reach` is answered by a server with the plug-in."""
REFUSED = "changes are refused"
"""What begins the answer of an engine that loads nothing of the changes that it was sent."""
PROBE = "mslime-relay?"
"""What an engine is asked to leave to say whether its ranks pass buckets on."""
PROBE_CHANGES = "mslime-changes?"
"""What an engine is asked to leave to say that it can take changes by a broadcast."""
GROUP = "mslime-handed"
"""What a request for a bucket that is handed to a rank names as its group."""
MARK = "mslime"
"""Beside the GPUs, in what SGLang is asked with: these are buckets."""
QUESTION = "mslime-handed?"
"""What an engine is asked to leave to say whether it can take them."""
UNABLE = "cannot take buckets from the trainer's rank on its GPU"
HELD = "mslime-held"
"""Action of `/weights_checker` that asks for sums (`checksums`)."""
HELD_ADAPTER = "mslime-held-adapter "
"""The same of an adapter, whose name follows (`adapter_checksums`)."""
UNKNOWN = "Unsupported action"
"""What a server without the plug-in answers."""
CANNOT = ""
"""In the place of a tensor's name, why a rank cannot report what it holds of some tensors, or of all."""
RELEASED = "mslime-released"
"""Action of `/weights_checker` that asks what is released."""
RELEASE_REFUSED = "refused"
"""Beside that, why the last release did nothing."""
NARROW = {"u1:": np.uint8, "u2:": np.uint16}
"""By the tag with which a text of routes begins: what its base64 is of. Without a tag it is of int32."""

_FILE, _SEE, _FORGET, _REACH = "mslime-file-", "mslime-see:", "mslime-forget:", "mslime-reach:"
_LANE, _SYNC, _SENT, PEER = "mslime-lane:", "mslime-relay:", "mslime-sent:", "mslime-peer:"


def as_text(total: int, places: int) -> str:
    """What is reported of a tensor. Args: the sum, and that of the places (`tensor_sums`)."""
    return f"{total} {places}"


def group_of(kind: FileKind, path: Path) -> str:
    """What an update names as its group to be given a bucket in a file."""
    return f"{_FILE}{kind}:{path}"


def parse_group(group: str) -> tuple[FileKind, Path] | None:
    """The kind and path of the file that an update names; None for a process group."""
    for kind in get_args(FileKind):
        if group.startswith(start := f"{_FILE}{kind}:"):
            return kind, Path(group.removeprefix(start))
    return None


def group_to_see(directory: Path) -> str:
    """What an engine is asked to leave to say whether it can read files of a directory."""
    return f"{_SEE}{directory}"


def group_to_forget(directory: Path) -> str:
    """What an engine is asked to leave to unmap the files of a directory."""
    return f"{_FORGET}{directory}"


def group_to_reach(place: Path, said: bytes) -> str:
    """What an engine is asked to leave to say whether it reads these bytes in a sender's memory."""
    return f"{_REACH}{said.hex()}:{place}"


def group_of_version(version: BucketVersion, group: str) -> str:
    """What an update names as its group to be given a bucket, or changes of it, by a broadcast in `group`."""
    return f"{_SENT}{json.dumps(asdict(version), separators=(',', ':'))}:{group}"


def parse_version(group: str) -> tuple[BucketVersion, str] | None:
    """What is broadcast, and in which process group; None for a group that names no version."""
    if not group.startswith(_SENT):
        return None
    said, end = json.JSONDecoder().raw_decode(group, len(_SENT))
    return BucketVersion(said["number"], said["base"], said["changed"], tuple(said["sums"])), group[end + 1 :]


@dataclass(frozen=True)
class Order:
    """What a sender asks for: all buckets of a sync.

    Attributes:
        sync: names this sync among all; the same from every sender.
        plan: names the buckets: their tensors come with the first request, and are known from then on.
        lanes: names of the process groups of senders, by sender.
        senders: of each bucket, who sends it: equal parts of it, in this order; empty where the plan is known.
        tensors: of each bucket, how many; likewise.
        cuts: names what the machines of each engine keep, where senders send each no more (`config.slices`); empty:
            they send whole buckets.
    """

    sync: str
    plan: str
    lanes: tuple[str, ...]
    senders: tuple[tuple[int, ...], ...] = ()
    tensors: tuple[int, ...] = ()
    cuts: str = ""

    def as_group(self) -> str:
        """What an update names as its group."""
        return _SYNC + json.dumps(asdict(self), separators=(",", ":"))


def parse_order(group: str) -> Order | None:
    """What an update's group asks for; None where it is another group."""
    if not group.startswith(_SYNC):
        return None
    said = json.loads(group.removeprefix(_SYNC))
    lanes, tensors = tuple(said["lanes"]), tuple(said["tensors"])
    return Order(said["sync"], said["plan"], lanes, tuple(map(tuple, said["senders"])), tensors, said["cuts"])


def lane_to_join(sender: int, name: str, machine: int | None = None) -> str:
    """What an engine is asked to join so that one of its ranks on each machine joins the process group `name`.

    Args:
        machine: only that of this machine joins.
    """
    return f"{_LANE}{sender}:{'' if machine is None else machine}:{name}"


def parse_lane(group: str) -> tuple[int, int | None, str] | None:
    """The sender, the machine (None: all) and the name of a lane; None where it is another group."""
    if not group.startswith(_LANE):
        return None
    sender, machine, name = group.removeprefix(_LANE).split(":", 2)
    return int(sender), int(machine) if machine else None, name


@dataclass(frozen=True)
class Transfer:
    """What one of the two engines is asked to do.

    Attributes:
        part: `offer` a place to meet at, `give` what it holds, `take` that.
        name: of this transfer among all.
        host, port: where they meet; the giver listens there. With `offer`, the port is not known yet.
        limit_s: for which one waits for the other.
    """

    part: Literal["offer", "give", "take"]
    name: str
    host: str
    limit_s: float
    port: int = 0

    def as_group(self) -> str:
        """What an engine is asked to leave."""
        return PEER + json.dumps(asdict(self), separators=(",", ":"))


def parse_transfer(group: str) -> Transfer | None:
    """What leaving this group means; None for a process group."""
    return Transfer(**json.loads(group.removeprefix(PEER))) if group.startswith(PEER) else None


def update_request(buckets: Sequence[AnnouncedBucket], group: str) -> bytes:
    """The body of `/update_weights_from_distributed`: tensors, one after the other in flat buffers, one a bucket."""
    return orjson.dumps(
        {
            "names": [name for bucket in buckets for name in bucket.names],
            "dtypes": [dtype for bucket in buckets for dtype in bucket.dtypes],
            "shapes": [list(shape) for bucket in buckets for shape in bucket.shapes],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,  # once for the whole sync, by whoever holds the engines' pause
        }
    )
