"""What GPUs are sold for: dense bfloat16 without sparsity, memory bandwidth, NVLink in one direction, from NVIDIA's
data sheets of each product; and which share of it a healthy machine reaches in these measurements."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Nominal:
    """Of one GPU.

    Attributes:
        tflops: 10^12 floating-point operations a second of dense bfloat16 matrix products.
        memory: GB/s of its memory.
        nvlink: GB/s to other GPUs, in one direction; 0 without NVLink.
        links: NVLinks.
    """

    tflops: float
    memory: float
    nvlink: float
    links: int


GPUS = {
    "NVIDIA B300": Nominal(2250, 8000, 900, 18),
    "NVIDIA B200": Nominal(2250, 8000, 900, 18),
    "NVIDIA GH200": Nominal(989.4, 4000, 450, 18),
    "NVIDIA H200 NVL": Nominal(835.5, 4800, 450, 18),
    "NVIDIA H200": Nominal(989.4, 4800, 450, 18),
    "NVIDIA H100 NVL": Nominal(835.5, 3938, 300, 12),
    "NVIDIA H100 PCIe": Nominal(756.5, 2039, 300, 12),
    "NVIDIA H100": Nominal(989.4, 3352, 450, 18),
    "NVIDIA H800": Nominal(989.4, 3352, 200, 8),
    "NVIDIA H20": Nominal(148, 4000, 450, 18),
    "NVIDIA A100-SXM4-80GB": Nominal(312, 2039, 300, 12),
    "NVIDIA A100-SXM4-40GB": Nominal(312, 1555, 300, 12),
    "NVIDIA A100 80GB PCIe": Nominal(312, 1935, 300, 12),
    "NVIDIA A100-PCIE-40GB": Nominal(312, 1555, 300, 12),
    "NVIDIA L40S": Nominal(362, 864, 0, 0),
}
"""By the beginning of the name that the driver gives; the longest that fits."""


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


def nominal(name: str) -> Nominal | None:
    """Of the GPU that a driver calls `name`; None: not in the table."""
    fitting = [known for known in GPUS if name.startswith(known) and not name[len(known) : len(known) + 1].isdigit()]
    return GPUS[max(fitting, key=len)] if fitting else None
