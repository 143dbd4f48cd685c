"""Driver, CUDA, GPUs and their links, as reported by the driver; launches nothing."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mslime.checks.environment import NEEDED_DRIVER, driver_version, failure
from mslime.config.cluster import nominal
from mslime_plugins.doctor.findings import Finding, Gpu, Node, fail, ok, unseen, warn

GIB = 2**30
HOT_C = 80
"""Temperature in degrees Celsius of an idle GPU above which its cooling is suspect."""
BUSY_BYTES = 2 * GIB
_NVIDIA, _DISPLAYS = "0x10de", "0x03"


def check_driver(node: Node) -> Iterator[Finding]:
    """The driver, and the CUDA that torch was built for."""
    version, cards = driver_version(), _cards(node)
    if version is None and cards:
        yield fail(
            f"the machine has {cards} NVIDIA GPUs, but no driver is loaded",
            f"install NVIDIA's driver {NEEDED_DRIVER} or newer; in a container, start it with the GPUs (--gpus all)",
        )
        return
    if version is None:
        yield unseen("no NVIDIA driver and no NVIDIA GPU here: a CPU machine", "run this on a machine with GPUs")
        return
    if int(version.split(".")[0]) < NEEDED_DRIVER:
        yield fail(f"driver {version}; CUDA 13 needs {NEEDED_DRIVER}", "update NVIDIA's driver", driver=version)
    else:
        yield ok(f"driver {version}", driver=version)
    yield from _cuda(node)


def _cuda(node: Node) -> Iterator[Finding]:
    newest, built = cuda_of_driver(), _torch_build()
    if newest is None or built is None:
        problem = "torch is a CPU build" if built is None else "the driver does not report its CUDA version"
        yield fail(problem, "bash scripts/install.sh --gpu")
        return
    runs = f"{newest // 1000}.{newest % 1000 // 10}"
    wanted = int(built.split(".")[0])
    if newest // 1000 < wanted:
        yield fail(f"torch is built for CUDA {built}, the driver supports at most {runs}", "update NVIDIA's driver")
        return
    if broken := failure("import torch; torch.zeros(1, device='cuda').item()"):
        visible = node.environ.get("CUDA_VISIBLE_DEVICES")
        setting = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
        yield fail(f"torch (CUDA {built}) cannot use a GPU: {broken}{setting}",
                   "see nvidia-smi; if dmesg shows Xid, a GPU has failed: restart the machine")  # fmt: skip
        return
    yield ok(
        f"torch is built for CUDA {built}, the driver supports up to {runs}", cuda_of_torch=built, cuda_of_driver=runs
    )


def _torch_build() -> str | None:
    """The CUDA version that torch was built for, as torch reports it; None: for CPU."""
    if importlib.metadata.version("torch").endswith("+cpu"):
        return None
    import torch

    return torch.version.cuda


def _cards(node: Node) -> int:
    """NVIDIA's display and 3D controllers on the PCI bus."""
    devices = [f"/sys/bus/pci/devices/{name}" for name in node.listed("/sys/bus/pci/devices")]
    return sum(
        node.read(f"{device}/vendor") == _NVIDIA and (node.read(f"{device}/class") or "").startswith(_DISPLAYS)
        for device in devices
    )


def check_gpus(node: Node) -> Iterator[Finding]:
    """Models, memory, errors, and other processes."""
    if not node.gpus:
        yield unseen(node.blind)
        return
    kinds = Counter((gpu.name, round(gpu.memory / GIB)) for gpu in node.gpus)
    named = ", ".join(f"{count} x {name} ({size} GiB)" for (name, size), count in kinds.items())
    if len(kinds) > 1:
        yield warn(f"GPUs differ: {named}", "the plan counts the smallest; every collective waits for the slowest")
    else:
        yield ok(named, count=len(node.gpus), memory_gib=round(node.gpus[0].memory / GIB, 1))
    if unknown := [gpu.name for gpu in node.gpus if nominal(gpu.name) is None]:
        yield warn(f"{unknown[0]} has no nominal speeds in the table",
                   "speeds are measured without a reference; add it to mslime/config/cluster.py")  # fmt: skip
    if any(gpu.mig for gpu in node.gpus):
        yield fail(f"MIG is on for {_ids(gpu for gpu in node.gpus if gpu.mig)}",
                   "request whole GPUs, or nvidia-smi -mig 0: NCCL does not support parts of GPUs")  # fmt: skip
    yield from _memory_errors(node.gpus)
    yield from _others(node.gpus)


def _memory_errors(gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    if all(gpu.ecc is None for gpu in gpus):
        yield unseen("the driver does not report ECC")
        return
    off = [gpu for gpu in gpus if gpu.ecc is False]
    bad = [gpu for gpu in gpus if gpu.uncorrected or gpu.remap_failed]
    waiting = [gpu for gpu in gpus if gpu.remap_pending]
    if off:
        yield warn(f"ECC is off on {_ids(off)}: bit errors are not detected", "nvidia-smi -e 1, and a reset of the GPU")
    if bad:
        yield fail(f"uncorrected memory errors, or rows that could not be replaced, on {_ids(bad)}",
                   "drain the machine and reset the GPU; if the errors return, replace the GPU")  # fmt: skip
    if waiting:
        yield warn(f"memory rows need a reset to be replaced on {_ids(waiting)}", "reset these GPUs (nvidia-smi -r)")
    if not (off or bad or waiting):
        yield ok("ECC on, no uncorrected errors, no memory rows to be replaced")


def _others(gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    busy = [gpu for gpu in gpus if gpu.used > BUSY_BYTES or gpu.processes]
    if busy:
        most = max(gpu.used for gpu in busy) / GIB
        processes = sorted({pid for gpu in busy for pid in gpu.processes})
        who = f"processes {', '.join(map(str, processes))}" if processes else "processes that are not visible here"
        yield warn(f"memory is in use on {_ids(busy)}, up to {most:.1f} GiB, by {who}",
                   "wait for them or stop them: they affect the speeds below")  # fmt: skip
    else:
        yield ok("no other process is on the GPUs")


def check_clocks(node: Node) -> Iterator[Finding]:
    """Persistence, power limit, heat, and why clocks are low."""
    if not node.gpus:
        yield unseen(node.blind)
        return
    gpus = node.gpus
    if careless := [gpu for gpu in gpus if gpu.persistence is False]:
        yield warn(f"persistence mode is off on {_ids(careless)}: each first CUDA call takes seconds",
                   "nvidia-smi -pm 1, or start nvidia-persistenced")  # fmt: skip
    else:
        yield ok("persistence mode is on")
    if low := [gpu for gpu in gpus if (gpu.power_limit or 0) < (gpu.power_default or 0) * 0.98]:
        yield warn(
            f"power limit {low[0].power_limit:.0f} W on {_ids(low)}, the default is {low[0].power_default:.0f} W",
            f"nvidia-smi -pl {low[0].power_default:.0f}, if the machine's cooling and power allow it",
        )
    elif gpus[0].power_limit is not None:
        yield ok(f"power limit {gpus[0].power_limit:.0f} W, the default", power_limit_w=gpus[0].power_limit)
    slowed = [gpu for gpu in gpus if gpu.slowed_by]
    for why in dict.fromkeys(why for gpu in slowed for why in gpu.slowed_by):
        those = _ids(gpu for gpu in slowed if why in gpu.slowed_by)
        yield warn(f"clocks are reduced by {why} on {those}", _COOLING if why == "heat" else _SLOWED)
    if hot := [gpu for gpu in gpus if (gpu.temperature or 0) >= HOT_C]:
        yield warn(f"{_ids(hot)} at {max(gpu.temperature or 0 for gpu in hot)} C before any work", _COOLING)
    if not slowed and not hot:
        degrees = [gpu.temperature for gpu in gpus if gpu.temperature is not None]
        yield ok(f"no clock is reduced{f', {max(degrees)} C at most' if degrees else ''}")


_COOLING = "check the machine's cooling: fans, air flow, exhaust of neighbouring machines"
_SLOWED = "nvidia-smi -q -d PERFORMANCE shows details; a power brake indicates a weak power supply"


def check_links(node: Node) -> Iterator[Finding]:
    """NVLink and PCIe."""
    if not node.gpus:
        yield unseen(node.blind)
        return
    for name in dict.fromkeys(gpu.name for gpu in node.gpus):
        yield _nvlink(name, [gpu for gpu in node.gpus if gpu.name == name])
    if narrow := [gpu for gpu in node.gpus if (gpu.pcie_width or 0) < (gpu.pcie_width_most or 0)]:
        yield warn(f"PCIe has {narrow[0].pcie_width} of {narrow[0].pcie_width_most} lanes on {_ids(narrow)}",
                   "reseat the GPU or its riser: copies to the host (offloading, saves) take longer")  # fmt: skip
    elif node.gpus[0].pcie_width:
        yield ok(f"PCIe with {node.gpus[0].pcie_width} lanes")


def _nvlink(name: str, gpus: list[Gpu]) -> Finding:
    known, up = nominal(name), sorted({gpu.links for gpu in gpus})
    wanted = known.links if known else up[-1]
    if not wanted:
        return ok(f"{name} has no NVLink: GPUs communicate over PCIe")
    if short := [gpu for gpu in gpus if gpu.links < wanted]:
        least = min(gpu.links for gpu in short)
        text = f"{least} of {wanted} NVLinks are up on {_ids(short)}"
        todo = "nvidia-smi nvlink --status; with NVSwitch, nvidia-fabricmanager of the driver's version must run"
        if len(gpus) == 1:
            return warn(text, f"{todo}. A single GPU does not use them")
        return fail(text, todo, links=least)
    return ok(f"{wanted} NVLinks are up on each GPU", links=wanted)


def _ids(gpus: Iterable[Gpu]) -> str:
    return "GPU " + ", ".join(str(gpu.index) for gpu in gpus)


# GPUs as reported by NVIDIA's management library (NVML, through nvidia-ml-py), without a CUDA context.

REASONS = {
    "nvmlClocksEventReasonSwPowerCap": "power limit",
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "heat",
    "nvmlClocksEventReasonSwThermalSlowdown": "heat",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake of the machine",
    "nvmlClocksEventReasonApplicationsClocksSetting": "clocks set by hand",
}
"""NVML's bits, with descriptions. An idle GPU, or one that follows another's clock, does not count as slowed."""


def see_gpus(load: Callable[[], Any] | None = None) -> tuple[tuple[Gpu, ...], str]:
    """All GPUs of the host, and a reason if there are none.

    Args:
        load: returns the module `pynvml`; None: the installed one.
    """
    try:
        nvml = load() if load is not None else importlib.import_module("pynvml")
    except ImportError:
        return (), "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), f"no NVIDIA driver responds ({error})"
    try:
        gpus = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    finally:
        nvml.nvmlShutdown()
    return gpus, "" if gpus else "the NVIDIA driver shows no GPU"


def cuda_of_driver() -> int | None:
    """The newest CUDA version that the driver supports, as 1000 x major + 10 x minor; None without a driver."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not installed, or no driver; NVML's own errors need the module
        return None
    try:
        return int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        """Call an NVML function; None if this GPU lacks or does not report the value."""
        try:
            return function(handle, *arguments)
        except nvml.NVMLError:
            return None

    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    ecc, mig = ask(nvml.nvmlDeviceGetEccMode), ask(nvml.nvmlDeviceGetMigMode)
    remapped = ask(nvml.nvmlDeviceGetRemappedRows)
    limit, default = ask(nvml.nvmlDeviceGetPowerManagementLimit), ask(nvml.nvmlDeviceGetPowerManagementDefaultLimit)
    slowed = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
    persistence = ask(nvml.nvmlDeviceGetPersistenceMode)
    links = [ask(nvml.nvmlDeviceGetNvLinkState, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    return Gpu(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        memory=int(memory.total),
        used=int(memory.used),
        ecc=None if ecc is None else bool(ecc[0]),
        uncorrected=ask(
            nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        persistence=None if persistence is None else bool(persistence),
        power_limit=None if limit is None else limit / 1000,
        power_default=None if default is None else default / 1000,
        temperature=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        slowed_by=tuple(dict.fromkeys(why for bit, why in REASONS.items() if slowed & getattr(nvml, bit))),
        pcie_width=ask(nvml.nvmlDeviceGetCurrPcieLinkWidth),
        pcie_width_most=ask(nvml.nvmlDeviceGetMaxPcieLinkWidth),
        links=sum(state == nvml.NVML_FEATURE_ENABLED for state in links),
        mig=bool(mig and mig[0]),
        processes=tuple(each.pid for each in ask(nvml.nvmlDeviceGetComputeRunningProcesses) or ()),
    )
