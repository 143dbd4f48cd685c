"""Return memory to the system on a CPU: pages of tensors, and unused heap.

On a GPU, the memory saver and the caching allocator do this. Addresses and views stay valid. The pages' contents are
lost: they read as zeros and are mapped again when touched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable

import torch


def drop_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Return the whole pages within each tensor's storage to the system; returns their bytes.

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
    """Return free memory that the C library keeps."""
    ctypes.CDLL(None).malloc_trim(0)
