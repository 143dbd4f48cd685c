"""Which elements of a bucket have other bits than those of an earlier version: compared in memory, nothing is sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By bytes of an element. A bucket of several dtypes is one of bytes."""
_CHUNK = 1 << 24
"""Elements compared at once: their places take eight bytes each."""
_SPARSE = 8
"""One word in so many may differ for their elements to be looked at one by one."""
_LARGEST_INDEX = 2**31 - 1
"""What a file of changes can name."""


@dataclass(frozen=True)
class Differences:
    """What is different in a bucket: places [n] int64 and values [n], on the bucket's device."""

    index: torch.Tensor
    value: torch.Tensor


def find_changes(flat: torch.Tensor, before: torch.Tensor) -> tuple[int, Differences | None]:
    """How many elements of a bucket have other bits than before, and which; None where sending all of it is less.

    Args:
        flat: [n] of 1, 2 or 4 bytes each, on any device.
        before: [n] its bits, as integers in host memory.
    """
    bits, limit = flat.view(before.dtype), len(flat) * flat.itemsize // (4 + flat.itemsize)
    count, places = 0, list[torch.Tensor]()
    for begin in range(0, len(flat), _CHUNK):
        old = before[begin : begin + _CHUNK].to(flat.device, non_blocking=True)
        more, found = _differing(bits[begin : begin + _CHUNK], old, limit)
        count += more
        if found is not None:
            places.append(found + begin)
    if count > limit or len(flat) > _LARGEST_INDEX + 1:
        return count, None
    index = torch.cat(places)
    return count, Differences(index, flat[index])


def _differing(now: torch.Tensor, before: torch.Tensor, limit: int) -> tuple[int, torch.Tensor | None]:
    """Where two tensors of integers differ: how often, and [n] int64 places, unless there are more than `limit`.

    Words of 8 bytes are compared first: most are equal, and that is found out at the speed of memory.
    """
    each = 8 // now.itemsize
    words = 0 if now.data_ptr() % 8 or before.data_ptr() % 8 else len(now) // each * each
    unequal = now[:words].view(torch.int64) != before[:words].view(torch.int64) if words else None
    if unequal is None or int(unequal.count_nonzero()) > words // each // _SPARSE:
        differs = now != before
        count = int(differs.count_nonzero())
        return count, differs.nonzero().view(-1) if count <= limit else None
    inside = unequal.nonzero() * each + torch.arange(each, device=now.device)
    candidates = torch.cat([inside.view(-1), torch.arange(words, len(now), device=now.device)])
    found = candidates[now[candidates] != before[candidates]]
    return len(found), found if len(found) <= limit else None
