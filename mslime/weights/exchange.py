"""What every rank says, on every rank: in one collective, where that is little.

`torch.distributed.all_gather_object` needs two, the first for sizes alone. Exchanges end a sync, when nothing else is
under way, and on CPUs whose cores are busy a collective waits for a core more than once.
"""

from __future__ import annotations

import pickle
from typing import TypeVar

import torch
import torch.distributed as dist

_T = TypeVar("_T")
AT_ONCE = 2048
"""Bytes of each rank in the first collective: what a sender says of a sync of about 90 buckets."""
LENGTH = 8
"""Bytes, little-endian, that say how long what follows is."""


def exchange(mine: _T, group: dist.ProcessGroup) -> list[_T]:
    """Every rank's value, in rank order. Collective, over gloo.

    Args:
        mine: anything that pickles.

    Raises:
        RuntimeError: a rank of the group is gone, or missed the group's timeout.
    """
    said = pickle.dumps(mine, pickle.HIGHEST_PROTOCOL)
    framed = len(said).to_bytes(LENGTH, "little") + said
    everyone = _gathered(framed[:AT_ONCE], AT_ONCE, group)
    ends = [LENGTH + int.from_bytes(one[:LENGTH], "little") for one in everyone]
    if max(ends) > AT_ONCE:
        rests = _gathered(framed[AT_ONCE:], max(ends) - AT_ONCE, group)
        everyone = [one + rest for one, rest in zip(everyone, rests, strict=True)]
    return [pickle.loads(one[LENGTH:end]) for one, end in zip(everyone, ends, strict=True)]


def _gathered(mine: bytes, size: int, group: dist.ProcessGroup) -> list[bytes]:
    """Every rank's bytes, filled up to `size` with zeros."""
    everyone = torch.empty(dist.get_world_size(group) * size, dtype=torch.uint8)
    own = torch.frombuffer(bytearray(mine.ljust(size, b"\0")), dtype=torch.uint8)
    dist.all_gather_single(everyone, own, group=group)  # pyright: ignore[reportUnknownMemberType]
    whole = everyone.numpy().tobytes()
    return [whole[at : at + size] for at in range(0, len(whole), size)]
