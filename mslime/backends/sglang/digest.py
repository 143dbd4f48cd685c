"""The digests that SGLang's `/weights_checker` computes over a parameter, recomputed on our side.

SGLang 0.5.23 hashes bytes on the CPU with SHA-256 (first 8 bytes) and on a GPU with a tiled 32-bit mixing hash
(`sglang/srt/managers/mm_utils.py: tensor_hash`, `sglang/kernels/ops/memory/gpu_tensor_hash.py`). The second is written
here in plain torch operations, so that the trainer needs neither SGLang nor Triton.
"""

from __future__ import annotations

import hashlib
from typing import cast

import torch

_M32 = 0xFFFFFFFF
_M64 = 0xFFFFFFFFFFFFFFFF
_TILE_WORDS = 8192
_SEED = 0x243F6A88
_SEED2 = ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _M32
_CHUNK_TILES = 512  # tiles hashed at once: 4 Mi words, 32 MiB for each int64 temporary


def engine_digest(tensor: torch.Tensor) -> str:
    """What an engine on the same kind of device reports for this tensor: 16 hexadecimal digits."""
    value = tiled_hash(tensor) if tensor.is_cuda else sha_hash(tensor)
    return f"{value:016x}"


def sha_hash(tensor: torch.Tensor) -> int:
    """First 64 bits (big-endian) of SHA-256 over the bytes of a CPU tensor."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return int.from_bytes(hashlib.sha256(cast("bytes", flat.numpy())).digest()[:8], "big")


def tiled_hash(tensor: torch.Tensor) -> int:
    """SGLang's GPU hash of a tensor, on any device.

    Each tile of 8192 32-bit words gives two sums of position-mixed words, finalised and packed into 64 bits; tiles are
    added up modulo 2^64 and finalised with splitmix64.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    padding = -raw.numel() % 4
    if padding:
        raw = torch.cat([raw, raw.new_zeros(padding)])
    words = raw.view(torch.int32)
    if words.numel() == 0:
        return 0
    total = 0
    step = _CHUNK_TILES * _TILE_WORDS
    nbytes = words.numel() * 4 & _M32
    for start in range(0, words.numel(), step):
        chunk = words[start : start + step].to(torch.int64) & _M32
        position = (torch.arange(start, start + chunk.numel(), device=chunk.device)) & _M32
        first = _mix(chunk ^ (((position * 0x27D4EB2D + _SEED) & _M32) ^ _rotate(position, 15)))
        second = _mix(chunk ^ (((position * 0x165667B1 + _SEED2) & _M32) ^ _rotate(position, 13)))
        high = _mix((_tile_sums(first) & _M32) ^ nbytes)
        low = _mix((_tile_sums(second) & _M32) ^ nbytes)
        # Python integers: a sum of 64-bit values does not fit int64.
        total += sum((h << 32) | w for h, w in zip(_integers(high), _integers(low), strict=True))
    return _splitmix64(total & _M64)


def word_sum(tensor: torch.Tensor) -> int:
    """Sum of a tensor's bytes as 64-bit words, modulo 2^64 and signed; a tail of less than a word byte by byte.

    One pass at the speed of memory. It differs where one word does; it does not tell two words that changed places.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.data_ptr() % 8:
        raw = raw.clone()
    words = raw.numel() // 8 * 8
    return _signed(_integer(raw[:words].view(torch.int64).sum()) + _integer(raw[words:].sum()))


def _signed(value: int) -> int:
    return (value + (1 << 63) & _M64) - (1 << 63)


def _integer(value: torch.Tensor) -> int:
    return cast("int", value.item())


def _integers(values: torch.Tensor) -> list[int]:
    return cast("list[int]", values.tolist())  # pyright: ignore[reportUnknownMemberType]


def _tile_sums(values: torch.Tensor) -> torch.Tensor:
    tail = -values.numel() % _TILE_WORDS
    padded = torch.cat([values, values.new_zeros(tail)]) if tail else values
    return padded.view(-1, _TILE_WORDS).sum(1)


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _M32


def _mix(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finaliser on int64 tensors that hold 32-bit values."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _M32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _M32
    return x ^ (x >> 16)


def _splitmix64(x: int) -> int:
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & _M64
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)
