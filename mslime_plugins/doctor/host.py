"""The host without its GPUs: cores, memory, shared memory, limits, disk, clock."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from mslime_plugins.doctor.findings import Finding, Node, fail, ok, unseen, warn

GIB, MIB = 2**30, 2**20
GIB_A_GPU = 100
"""Host memory per GPU; `mslime plan` has the sizes of offloaded trainers, optimizers and references."""
CORES_A_GPU = 8
LITTLE_MEMORY_GIB = 8
SHM_GIB = (1, 16)
"""Thresholds of /dev/shm: below the first, engines and Ray fail; below the second, Ray's store and weights in shm are
short of space."""
FILES = (4096, 65536)
"""Likewise for open files of a process: hundreds of connections for each engine, and mapped checkpoints."""
FREE_GIB = (5, 100)
"""Likewise for free space on the checkpoints' disk, on a host with GPUs."""
DISK_MB_PER_S = 500
CLOCK_US = 100_000
_UNSYNCHRONISED = 0x0040  # STA_UNSYNC of linux/timex.h


def check_host(node: Node) -> Iterator[Finding]:
    """Cores and memory."""
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory()
    total, free, gpus = memory.total / GIB, memory.available / GIB, len(node.gpus)
    if limit := _container_limit(node):
        total, free = min(total, limit / GIB), min(free, limit / GIB)
    text = f"{total:.0f} GiB of memory, {free:.0f} free; {cores} cores"
    values = {"memory_gib": round(total, 1), "free_gib": round(free, 1), "cores": cores}
    if free < LITTLE_MEMORY_GIB:
        yield fail(text, f"less than {LITTLE_MEMORY_GIB} GiB are free, too little even for a small run", **values)
    elif gpus and total < GIB_A_GPU * gpus:
        yield warn(text, f"less than {GIB_A_GPU} GiB per GPU: set cluster.host_memory_gb and run mslime plan; a "
                   "trainer can be offloaded to disk (cluster.offload_to)", **values)  # fmt: skip
    elif gpus and cores < CORES_A_GPU * gpus:
        yield warn(
            text, f"fewer than {CORES_A_GPU} cores per GPU: engines' schedulers and rewards share them", **values
        )
    else:
        yield ok(text, **values)
    swap = psutil.swap_memory()
    if swap.used > GIB:
        yield warn(f"{swap.used / GIB:.1f} GiB are swapped out", "find the processes that use the memory; swapoff -a")


def _container_limit(node: Node) -> int | None:
    """Bytes that a control group (version 2 or 1) allows; None: no limit."""
    found = node.read("/sys/fs/cgroup/memory.max") or node.read("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    return int(found) if found and found.isdigit() else None


def check_shared_memory(node: Node) -> Iterator[Finding]:
    """/dev/shm."""
    place = node.root / "dev/shm"
    if not place.is_dir():
        yield unseen("there is no /dev/shm", "mount it as tmpfs")
        return
    space = shutil.disk_usage(place)
    text = f"/dev/shm has {space.total / GIB:.1f} GiB, {space.free / GIB:.1f} free"
    values = {"total_gib": round(space.total / GIB, 2), "free_gib": round(space.free / GIB, 2)}
    least, wanted = SHM_GIB
    todo = "start the container with --shm-size 64g or --ipc=host; or mount -o remount,size=64g /dev/shm"
    if space.free < least * GIB:
        yield fail(text, f"{todo}. Ray's store, NCCL and weights.transport shm use it", **values)
    elif space.free < wanted * GIB and node.gpus:
        yield warn(text, f"{todo}. Ray's store and weights.transport shm share it", **values)
    else:
        yield ok(text, **values)


def check_limits(node: Node) -> Iterator[Finding]:
    """Open files, processes, locked memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = 2**31 if hard == resource.RLIM_INFINITY else hard
    text = f"{_amount(soft)} open files for a process ({_amount(hard)} at most)"
    if many < FILES[0] or (0 <= soft < FILES[0]):
        yield fail(text, f"ulimit -n {FILES[1]}; in a container --ulimit nofile={FILES[1]}:{FILES[1]}", files=soft)
    elif 0 <= soft < FILES[1]:
        yield warn(text, f"ulimit -n {FILES[1]} before the run: each engine's requests are connections", files=soft)
    else:
        yield ok(text, files=soft)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if 0 <= processes < FILES[0]:
        yield warn(f"{processes} processes and threads for this user", "ulimit -u unlimited: Ray and torch start many")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if node.listed("/sys/class/infiniband") and 0 <= locked < GIB:
        yield fail(f"{locked / MIB:.1f} MiB of memory may be locked, but RDMA locks its buffers",
                   "ulimit -l unlimited; in a container --ulimit memlock=-1")  # fmt: skip


def _amount(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def check_disk(node: Node) -> Iterator[Finding]:
    """Space and speed of the directory for checkpoints."""
    place = existing(node.options.directory)
    if not os.access(place, os.W_OK):
        yield fail(f"{place} is not writable for this user", "set another --directory (a run's output_dir)")
        return
    free = shutil.disk_usage(place).free
    least, wanted = FREE_GIB
    text = f"{free / GIB:.0f} GiB are free in {place}"
    if free < least * GIB:
        yield fail(text, "free space, or set another --directory", free_gib=round(free / GIB, 1))
        return
    if free < wanted * GIB and node.gpus:
        yield warn(text, "a checkpoint takes 14 bytes per parameter, an export 2: see mslime plan",
                   free_gib=round(free / GIB, 1))  # fmt: skip
    else:
        yield ok(text, free_gib=round(free / GIB, 1))
    size = (2 * GIB if node.options.full else 256 * MIB) if free > 8 * GIB else 64 * MIB
    speed = write_speed(place, size)
    text = f"{size // MIB} MiB were written there and synced at {speed:,.0f} MB/s"
    if speed < DISK_MB_PER_S and node.gpus:
        yield warn(text, f"below {DISK_MB_PER_S} MB/s saving takes minutes: use a faster disk, or save less often "
                   "(checkpoint.save_every)", mb_per_s=round(speed))  # fmt: skip
    else:
        yield ok(text, mb_per_s=round(speed))


def existing(path: Path) -> Path:
    """The directory, or its nearest existing parent."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def write_speed(directory: Path, size: int) -> float:
    """MB/s of one file of `size` bytes, including fsync. The file is then removed."""
    block = os.urandom(8 * MIB)  # not compressible by a file system
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        began = time.perf_counter()
        for _ in range(size // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        return size / 1e6 / (time.perf_counter() - began)


class _Timex(ctypes.Structure):
    """The beginning of `struct timex` of linux/timex.h, with padding for the rest."""

    _fields_ = [
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("rest", ctypes.c_char * 512),
    ]  # fmt: skip


def check_clock(node: Node) -> Iterator[Finding]:
    """Whether the kernel's clock is synchronised; `collectives` measures differences between hosts."""
    found = _Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(found)) < 0:
        yield unseen(f"the kernel does not report its clock ({os.strerror(ctypes.get_errno())})")
        return
    yield clock_finding(bool(found.status & _UNSYNCHRONISED), found.maxerror)


def clock_finding(unsynchronised: bool, error_us: int) -> Finding:
    """Finding about the kernel's clock.

    Args:
        error_us: largest error, in microseconds.
    """
    if unsynchronised:
        return warn("the clock is not synchronised", "start chrony or systemd-timesyncd, to compare timelines and logs "
                    "of several machines; in a container, on its host")  # fmt: skip
    if error_us > CLOCK_US:
        return warn(f"the clock may be off by {error_us / 1000:.0f} ms", "check chrony's sources")
    return ok(f"the clock is synchronised, to {error_us / 1000:.1f} ms", error_ms=error_us / 1000)
