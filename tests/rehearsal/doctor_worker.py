"""`python -m mslime_plugins.doctor.measure`, on a GPU that is not there: real numbers, of small matrices."""

from __future__ import annotations

import sys

import torch

import tests.rehearsal.on_gpu
from mslime_plugins.doctor import measure
from tests.rehearsal.on_host import OnHost

__all__ = ["tests"]

if __name__ == "__main__":
    measure.GPU_SIZE, measure.GPU_BYTES = 256, 2**20
    # torch's own attention, with which Transformer Engine's is compared, as matrix products.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    with OnHost():
        sys.exit(measure.main())
