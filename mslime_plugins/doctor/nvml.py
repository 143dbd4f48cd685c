"""GPUs as reported by NVIDIA's management library (NVML, through nvidia-ml-py), without a CUDA context."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from mslime_plugins.doctor.findings import Gpu

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
        return (), f"no NVIDIA driver answers ({error})"
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
