"""`mslime env`: installed software and visible devices for a bug report, and obstacles for runs on GPUs."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from mslime.config.cluster import ClusterConfig
from mslime.config.errors import ConfigError
from mslime.config.passthrough import installed_version

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
    "transformer-engine-torch",
    "flash-linear-attention",
    "flash-attn",
    "flash-attn-4",
    "nvidia-cudnn-cu13",
    "numpy",
    "pydantic",
)
NEEDED_DRIVER = 580
"""First NVIDIA driver for CUDA 13, for which torch 2.14.1, pinned by SGLang, is built."""
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_INSTALL = "bash scripts/install.sh --gpu"


def describe_environment() -> str:
    """Versions of mslime's dependencies, cores, memory, disk and GPUs, one `name: value` a line."""
    import psutil
    import torch
    from torch.cuda import nccl

    lines = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        lines[package] = installed_version(package) or "not installed"
    lines["apex (NVIDIA's)"] = "importable" if importlib.util.find_spec("amp_C") is not None else "not installed"
    lines["NVIDIA driver"] = driver_version() or "none"
    lines["CUDA of torch"] = torch.version.cuda or "none (a build for CPU)"
    lines["NCCL"] = ".".join(map(str, nccl.version())) if torch.version.cuda else "none"
    lines["cuDNN"] = str(torch.backends.cudnn.version()) if torch.version.cuda else "none"
    lines["cores"] = str(psutil.cpu_count())
    lines["memory"] = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    lines["free disk here"] = f"{shutil.disk_usage('.').free / 2**30:.0f} GiB"
    count = torch.cuda.device_count()
    lines["GPUs"] = ", ".join(torch.cuda.get_device_name(i) for i in range(count)) or "none"
    return "\n".join(f"{name}: {value}" for name, value in lines.items())


def driver_version() -> str | None:
    """The NVIDIA driver's version; None without a driver."""
    try:
        found = re.search(r"Module\s+(?:for\s+\S+\s+)?(\d[\d.]+)", _DRIVER_FILE.read_text())
    except OSError:
        return _queried_version()
    return found[1] if found else _queried_version()


def _queried_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"\d[\d.]*", done.stdout)
    return found[0] if found and done.returncode == 0 else None


@cache
def gpu_problems() -> tuple[str, ...]:
    """Reasons why this machine cannot run trainer ranks on a GPU, each with a remedy after `;`. Empty: none."""
    driver = driver_version()
    if driver is None:
        return ("this machine has no NVIDIA driver; use a machine with GPUs, or set cluster.device: cpu",)
    if int(driver.split(".")[0]) < NEEDED_DRIVER:
        return (f"the NVIDIA driver is {driver}, but CUDA 13 needs {NEEDED_DRIVER} or newer; update it",)
    if failure("import torch; assert torch.cuda.is_available()"):
        return (f"torch sees no GPU; check nvidia-smi, CUDA_VISIBLE_DEVICES and `{_INSTALL}`",)
    # Transformer Engine finds its libraries once torch has loaded its own.
    broken = failure("import torch, transformer_engine.pytorch")
    return (f"transformer_engine.pytorch cannot be imported: {broken}; `{_INSTALL}` compiles it",) if broken else ()


def failure(code: str) -> str | None:
    """Last words of a Python process that runs `code`; None if it succeeds.

    A separate process, because this one must not touch a GPU that a rank will use.
    """
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200]


def gpu_warnings(cluster: ClusterConfig) -> list[str]:
    """GPU requirements that this machine lacks, as warnings: `mslime check` may run on another machine than the run."""
    return (
        [f"this machine cannot run GPU processes: {text}" for text in gpu_problems()]
        if cluster.device == "cuda"
        else []
    )


def refuse_without_gpu(cluster: ClusterConfig) -> None:
    """Reject a run on GPUs of this machine before anything is started, if they are unusable. Raises ConfigError."""
    if cluster.device != "cuda" or cluster.ray_address is not None:
        return
    problems = gpu_problems()
    if problems:
        problem, _, hint = problems[0].rpartition("; ")
        raise ConfigError("cluster.device", "cuda", problem, hint)
