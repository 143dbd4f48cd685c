"""Pages of tensors on a CPU are given back to the system, and heap that nobody uses: what a GPU's memory saver and
caching allocator do elsewhere.

Addresses and views stay valid. What was in the pages is gone: they read as zeros, and are there again when touched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable

import torch


def drop_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Give back the whole pages within the storage of each tensor; how many bytes those were.

    Raises:
        OSError: the system refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    page, dropped = mmap.PAGESIZE, 0
    for start, size in storages.items():
        first, end = -(-start // page) * page, (start + size) // page * page
        if end <= first:
            continue
        if libc.madvise(first, end - first, mmap.MADV_DONTNEED):
            error = ctypes.get_errno()
            raise OSError(error, f"madvise: {os.strerror(error)}")
        dropped += end - first
    return dropped


def trim_heap() -> None:
    """Give back what the C library keeps of freed memory."""
    ctypes.CDLL(None).malloc_trim(0)
