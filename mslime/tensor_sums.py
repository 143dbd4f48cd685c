"""Checksums of tensors that compare an engine's weights with the trainer's, the same on every device.

They are linear: parts of a tensor, each with zeros in place of the others, have sums that add up to the whole's. So
each rank of an engine can sum its part of a tensor. All arithmetic is modulo 2^64, on signed numbers.
"""

from __future__ import annotations

from functools import cache
from typing import cast

import numpy as np
import torch

BLOCK = 1 << 20
"""Elements that are summed at once, in 16 MiB. Part of the sums' definition."""

_M64 = 0xFFFFFFFFFFFFFFFF
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as integers of their size: a view."""
    return tensor.view(BITS[tensor.itemsize])


def place_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over a tensor's elements, as integers of their size, each times an odd number that depends on its place.

    It differs if one element does; if several do, it is the same once in 2^64 cases.

    Returns:
        [] int64, on the tensor's device.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, part in enumerate(bits_of(tensor.detach().contiguous().reshape(-1)).split(BLOCK)):
        total += (part * _places(tensor.device)[: len(part)]).sum() * _of_block(number)
    return total


def whole_sum(tensor: torch.Tensor) -> tuple[int, int]:
    """The sum of a tensor, and that of its places."""
    return _integer(place_sum(tensor)), all_places(tensor.numel())


@cache
def all_places(numel: int) -> int:
    """Sum for `numel` elements whose bits are each 1, which reveals missing elements."""
    ends = torch.cumsum(_places(torch.device("cpu")), 0)
    blocks = [min(BLOCK, numel - start) for start in range(0, numel, BLOCK)]
    return signed(sum(_integer(ends[size - 1]) * _of_block(number) for number, size in enumerate(blocks)))


def word_sum(tensor: torch.Tensor) -> int:
    """Sum of a tensor's bytes as 64-bit words; a tail of less than a word byte by byte.

    One pass at the speed of memory. It differs if one word does; it does not detect that two words changed places.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.data_ptr() % 8:
        raw = raw.clone()
    words = raw.numel() // 8 * 8
    return signed(_integer(raw[:words].view(torch.int64).sum()) + _integer(raw[words:].sum()))


def signed(value: int) -> int:
    """A number modulo 2^64 as a signed int64."""
    return (value + (1 << 63) & _M64) - (1 << 63)


@cache
def _places(device: torch.device) -> torch.Tensor:
    """[BLOCK] int64: odd factors of a block's places, splitmix64 of their indices."""
    x = np.arange(BLOCK, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64)).to(device)


def _of_block(number: int) -> int:
    """Odd factor of a block."""
    x = (number + 1) * 0xD1342543DE82EF95 & _M64
    return signed((x ^ (x >> 32)) * 0xDABA0B6EB09322E3 | 1)


def _integer(value: torch.Tensor) -> int:
    return cast("int", value.item())
