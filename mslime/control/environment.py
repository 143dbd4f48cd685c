"""`mslime env`: what is installed and which devices are seen, for a bug report."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil

PACKAGES = (
    "mslime",
    "torch",
    "megatron-core",
    "sglang",
    "ray",
    "transformers",
    "tokenizers",
    "safetensors",
    "transformer-engine",
    "flash-attn",
    "numpy",
    "pydantic",
)


def describe_environment() -> str:
    """Versions of what mslime stands on, cores, memory, disk and GPUs, one `name: value` a line."""
    import psutil
    import torch

    lines = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        lines[package] = _version(package)
    lines["cores"] = str(psutil.cpu_count())
    lines["memory"] = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    lines["free disk here"] = f"{shutil.disk_usage('.').free / 2**30:.0f} GiB"
    count = torch.cuda.device_count()
    lines["GPUs"] = ", ".join(torch.cuda.get_device_name(i) for i in range(count)) or "none"
    return "\n".join(f"{name}: {value}" for name, value in lines.items())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
