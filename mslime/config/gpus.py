"""What GPUs are sold for, from NVIDIA's data sheets of each product: dense bfloat16 without sparsity, memory bandwidth,
NVLink in one direction."""

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
        memory_gb: as it is sold.
    """

    tflops: float
    memory: float
    nvlink: float
    links: int
    memory_gb: int


GPUS = {
    "NVIDIA B300": Nominal(2250, 8000, 900, 18, 288),
    "NVIDIA B200": Nominal(2250, 8000, 900, 18, 180),
    "NVIDIA GH200": Nominal(989.4, 4000, 450, 18, 96),
    "NVIDIA H200 NVL": Nominal(835.5, 4800, 450, 18, 141),
    "NVIDIA H200": Nominal(989.4, 4800, 450, 18, 141),
    "NVIDIA H100 NVL": Nominal(835.5, 3938, 300, 12, 94),
    "NVIDIA H100 PCIe": Nominal(756.5, 2039, 300, 12, 80),
    "NVIDIA H100": Nominal(989.4, 3352, 450, 18, 80),
    "NVIDIA H800": Nominal(989.4, 3352, 200, 8, 80),
    "NVIDIA H20": Nominal(148, 4000, 450, 18, 96),
    "NVIDIA A100-SXM4-80GB": Nominal(312, 2039, 300, 12, 80),
    "NVIDIA A100-SXM4-40GB": Nominal(312, 1555, 300, 12, 40),
    "NVIDIA A100 80GB PCIe": Nominal(312, 1935, 300, 12, 80),
    "NVIDIA A100-PCIE-40GB": Nominal(312, 1555, 300, 12, 40),
    "NVIDIA L40S": Nominal(362, 864, 0, 0, 48),
}
"""By the beginning of the name that the driver gives; the longest that fits."""


def nominal(name: str) -> Nominal | None:
    """Of the GPU that a driver calls `name`; None: not in the table."""
    fitting = [known for known in GPUS if name.startswith(known) and not name[len(known) : len(known) + 1].isdigit()]
    return GPUS[max(fitting, key=len)] if fitting else None


def usual_gpu(memory_gb: float) -> str:
    """The usual GPU whose memory, as it is sold, is nearest: A100 of 40 GB, H100, H200, B200, B300."""
    usual = ("NVIDIA A100-SXM4-40GB", "NVIDIA H100", "NVIDIA H200", "NVIDIA B200", "NVIDIA B300")
    return min(usual, key=lambda name: abs(GPUS[name].memory_gb - memory_gb))
