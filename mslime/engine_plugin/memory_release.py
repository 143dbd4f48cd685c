"""Inside an SGLang server: safe release of memory while a trainer uses the same GPU.

For engines that share GPUs with the trainer. Stock servers crash on a release while a request runs, and on a resume
without a release, and cannot report their released parts. Here such a call does nothing, and `wire.ReleasedMemory`
returns the released parts. The client queries them instead of tracking them, so the answer is correct even after a
broken connection.

Resumed weights are zeros until a sync, including padding rows that no checkpoint tensor covers and recorded copies
skip. A teacher's weights, which are never sent, are restored (SGLang's `enable_weights_cpu_backup`). On a GPU SGLang's
memory saver releases the memory. A CPU has none: this module drops pages of parameters and cache, and keeps needed
contents in a file.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

import torch

from mslime.config.base import ENGINE_TAGS
from mslime.engine_plugin.wire import Released

_refused = ""
_BACKUP: list[IO[bytes]] = []
"""Weights of a server on a CPU that restores them: an unnamed file, written once, since they never change."""
_log = logging.getLogger(__name__)


def to_release(requested: Sequence[str] | None, released: set[str], idle: bool) -> tuple[list[str], str]:
    """Tags to release, and the reason if none are.

    Args:
        requested: tags; empty or None: all.
        released: tags that are already released.
        idle: whether no request runs.
    """
    tags = [tag for tag in requested or ENGINE_TAGS if tag not in released]
    return ([], "requests are running") if tags and not idle else (tags, "")


def to_resume(requested: Sequence[str] | None, released: set[str]) -> list[str]:
    """Tags that a resume reallocates."""
    return [tag for tag in requested or ENGINE_TAGS if tag in released]


def release(original: Callable[[Any, Any], Any], self: Any, recv_req: Any) -> Any:
    """Wrapper of `release_memory_occupation`."""
    global _refused
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

    scheduler = self.scheduler
    idle = self.is_fully_idle(ignore_waiting=scheduler is not None and scheduler._engine_paused)
    tags, _refused = to_release(recv_req.tags, self.offload_tags, idle)
    if not tags:
        return ReleaseMemoryOccupationReqOutput()
    recv_req.tags = tags
    answer = original(self, recv_req)
    runner = self.tp_worker.model_runner
    if runner.device == "cpu":
        held = [*(runner.model.parameters() if "weights" in tags else ())]
        if runner.server_args.enable_weights_cpu_backup and held and not _BACKUP:
            _BACKUP.append(backup_of(held))
        held += cache_tensors(runner.token_to_kv_pool) if "kv_cache" in tags else ()
        _log.info("released %d bytes: %s", drop_pages(held), ", ".join(tags))
    return answer


def resume(original: Callable[[Any, Any], Any], self: Any, recv_req: Any) -> Any:
    """Wrapper of `resume_memory_occupation`."""
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    tags = to_resume(recv_req.tags, self.offload_tags)
    if not tags:
        return ResumeMemoryOccupationReqOutput()
    recv_req.tags = tags
    answer = original(self, recv_req)
    runner = self.tp_worker.model_runner
    if "weights" in tags and not runner.server_args.enable_weights_cpu_backup:
        with torch.no_grad():
            for parameter in runner.model.parameters():
                parameter.zero_()
    elif "weights" in tags and runner.device == "cpu":
        restore(runner.model.parameters(), _BACKUP[0])
    return answer


def backup_of(parameters: Iterable[torch.nn.Parameter]) -> IO[bytes]:
    """Write parameters to an unnamed file, which disappears with this process."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the server lives
    torch.save([parameter.data for parameter in parameters], file)
    return file


def restore(parameters: Iterable[torch.nn.Parameter], backup: IO[bytes]) -> None:
    """Restore the same parameters, in the same order, from the file of `backup_of`."""
    backup.seek(0)
    for parameter, kept in zip(parameters, torch.load(backup), strict=True):
        parameter.data.copy_(kept)


def drop_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Return the whole pages within each tensor's storage to the system of a CPU; returns their bytes.

    Addresses and views stay valid. The pages read as zeros and are mapped again when touched.

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


def released(manager: Any) -> Released:
    """Released parts of a server. Args: SGLang's `SchedulerWeightUpdaterManager`."""
    return Released(frozenset(manager.offload_tags), _refused)


def cache_tensors(pool: Any) -> Iterator[torch.Tensor]:
    """Tensors of a pool of keys and values, or of its sub-pools (sliding windows, delta-nets)."""
    for name, value in vars(pool).items():
        if name.endswith("buffer"):
            several = value if isinstance(value, (list, tuple)) else (value,)
            yield from (each for each in several if isinstance(each, torch.Tensor))
        elif name.endswith("kv_pool"):
            yield from cache_tensors(value)
