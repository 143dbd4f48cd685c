"""Which share of what a GPU is sold for (`config/gpus.py`) a healthy machine reaches in these measurements."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Of the nominal figure: below `warn` something is amiss, below `fail` it is not the machine that was paid for.

    Assumptions: an H100 that runs into its power limit reaches two thirds to three quarters in large matrix products, a
    copy nine tenths of its memory, NCCL four fifths of NVLink in all-reduce and somewhat less in all-to-all.
    """

    warn: float
    fail: float


MATMUL, MEMORY = Share(0.55, 0.4), Share(0.75, 0.6)
ALL_REDUCE, ALL_TO_ALL = Share(0.6, 0.3), Share(0.5, 0.25)
STRAGGLER = 0.92
"""Of the median GPU: one that is slower holds up all others in every collective."""
