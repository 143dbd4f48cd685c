"""Inside an SGLang server: read a bucket of weights from a file, or from another process's memory.

The request contains a `wire.FromFile`; session, loading and comparison are as with a broadcast. Kinds of files:

- `mapped`: shared memory that a sender writes each of its buckets into, mapped once and kept until the sender leaves;
- `handle`: likewise, for memory that torch opens by a handle: a GPU's own, if the engine runs on one;
- `remote`: no file, but a sender's memory, read over the network (`RdmaReader`);
- `safetensors`: one bucket, read and closed again; `base`: the same, for a bucket whose changes may follow;
- `changes`: differences to an earlier bucket (`delta`).

With `wire.FromBroadcast` a broadcast follows, of a bucket or of changes.

Every rank of an engine reads the file, or of remote memory a part that it passes on to the others. Rank 0 answers after
all ranks have read, because the sender may then overwrite this bucket with the next one.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import mmap
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from mslime.config.base import FileKind
from mslime.config.transports import MooncakeOver
from mslime.engine_plugin import delta
from mslime.engine_plugin.copy_plan import Named, ReceivedBucket, RecordedBucket, buckets_of
from mslime.engine_plugin.engine_ranks import EngineRankGroup, all_ranks
from mslime.engine_plugin.wire import (
    REFUSED,
    Answer,
    FromBroadcast,
    FromFile,
    HandleFields,
    IpcBucket,
    Loaded,
    ReadMemory,
    TakeIpc,
    decode,
    take_handle,
    with_manager,
)
from mslime.network import own_address
from mslime.remote_memory import MemoryEndpoint, RemoteMemory


def _here() -> str:
    return f"this server, on {os.uname().nodename},"


class RdmaReader:
    """Reads buckets from senders' memory with Mooncake's transfer engine, in one process of an engine.

    Each rank of an engine reads a part. So every byte crosses the network once per engine, spread over all network
    adapters.
    """

    def __init__(self) -> None:
        self._ends: dict[MooncakeOver, MemoryEndpoint] = {}
        self._registered: tuple[MemoryEndpoint, int, int] | None = None

    def reach(self, request: ReadMemory) -> Answer:
        """Check whether a sender's memory can be read, and has these bytes."""
        try:
            message = bytes.fromhex(request.expected)
            memory, into = RemoteMemory.of_path(request.memory), torch.zeros(len(message), dtype=torch.uint8)
            end = self._end(memory)
            end.register(into.data_ptr(), len(message))
            try:
                end.read(memory, 0, into.data_ptr(), len(message))
            finally:
                end.unregister(into.data_ptr())
            if bytes(into.tolist()) != message:
                raise ValueError(f"the memory of {memory.session} has other contents than expected")
        except (ImportError, OSError, ValueError) as error:
            return Answer(f"{_here()} cannot read the sender's memory: {error}")
        return Answer()

    def read(self, place: Path, flat: torch.Tensor, part: torch.Tensor) -> None:
        """Fill `part` of `flat` [bytes] uint8; returns when the sender's memory is no longer needed.

        Raises:
            OSError: it cannot be read.
            ValueError: the path names no memory.
        """
        memory = RemoteMemory.of_path(place)
        if part.numel():
            self._read(memory, flat, part)

    def forget(self) -> None:
        """Unregister the receiving memory, so that it can be freed."""
        if self._registered is not None:
            end, address, _ = self._registered
            end.unregister(address)
            self._registered = None

    def _read(self, memory: RemoteMemory, flat: torch.Tensor, part: torch.Tensor) -> None:
        end, storage = self._end(memory), flat.untyped_storage()
        wanted = end, storage.data_ptr(), storage.nbytes()
        if self._registered != wanted:  # once per sync: all buckets share one buffer, unless it was enlarged
            self.forget()
            end.register(wanted[1], wanted[2])
            self._registered = wanted
        if part.is_cuda:
            # wait for copies from the previous bucket: RDMA ignores streams
            torch.cuda.current_stream(part.device).synchronize()
        end.read(memory, part.data_ptr() - flat.data_ptr(), part.data_ptr(), part.numel())

    def _end(self, memory: RemoteMemory) -> MemoryEndpoint:
        if memory.over not in self._ends:
            self._ends[memory.over] = MemoryEndpoint(own_address(f"//{memory.session}"), memory.over)
        return self._ends[memory.over]


Tensors = tuple[Sequence[str], Sequence[Any], Sequence[Sequence[int]]]
"""Names, dtypes and shapes of a bucket's tensors."""
ALONE = EngineRankGroup()
_HEADER_LIMIT = 1 << 30


@dataclass
class _Mapped:
    """A file of shared memory, which stays mapped after it is unlinked.

    Attributes:
        flat: [bytes of the file] uint8.
        file: open while it is mapped; its sender holds a lock on it.
    """

    flat: torch.Tensor
    file: int

    def sender_is_gone(self) -> bool:
        try:
            fcntl.flock(self.file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class SenderFiles:
    """Readable files of senders, in one process of an engine."""

    def __init__(self) -> None:
        self._mapped: dict[Path, _Mapped] = {}
        self.remote = RdmaReader()

    def see(self, directory: Path) -> Answer:
        """Check whether files of this directory can be read.

        This also unmaps files of killed senders, which could not request it.
        """
        try:
            os.listdir(directory)
            for path in [path for path, mapped in self._mapped.items() if mapped.sender_is_gone()]:
                self._drop(path)
        except OSError as error:
            return Answer(f"{directory}: {_here()} cannot read it: {error}")
        return Answer()

    def forget(self, directory: Path) -> Answer:
        """Unmap the files of this directory."""
        for path in [path for path in self._mapped if path.parent == directory]:
            self._drop(path)
        return Answer()

    def read(self, kind: FileKind, path: Path, named: Named, flat: torch.Tensor, near: EngineRankGroup = ALONE) -> None:
        """Fill `flat` [bytes] uint8, or this rank's part of it, from a file; returns when the file is no longer needed.

        Args:
            named: the tensors in it, one after the other.
            near: the engine's ranks.

        Raises:
            OSError: the file cannot be read.
            ValueError: it has other contents.
        """
        if kind == "remote":
            parts = parts_of(kind, flat, near) or (flat,)  # a small bucket has fewer parts than ranks
            self.remote.read(path, flat, parts[near.rank] if near.rank < len(parts) else flat[:0])
        elif kind in ("mapped", "handle"):
            flat.copy_(self._map(kind, path, flat)[: flat.numel()])
            if flat.is_cuda:
                torch.cuda.current_stream(flat.device).synchronize()  # the sender overwrites it with the next bucket
        else:
            _read_safetensors(path, named, flat)

    def _map(self, kind: FileKind, path: Path, flat: torch.Tensor) -> torch.Tensor:
        size = flat.numel()
        if path not in self._mapped:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                    raise ValueError(f"{path} does not belong to user {os.geteuid()}, as which the engine runs")
                if kind == "mapped":
                    opened = torch.frombuffer(mmap.mmap(file, found.st_size), dtype=torch.uint8)
                else:
                    opened = open_handle(take_handle(path), flat.device)
                self._mapped[path] = _Mapped(opened, file)
            except BaseException:
                os.close(file)
                raise
        if self._mapped[path].flat.numel() < size:
            raise ValueError(f"{path} has {self._mapped[path].flat.numel()} bytes, and the bucket has {size}")
        return self._mapped[path].flat

    def _drop(self, path: Path) -> None:
        os.close(self._mapped.pop(path).file)


def parts_of(kind: FileKind, flat: torch.Tensor, near: EngineRankGroup) -> Sequence[torch.Tensor]:
    """Views of a bucket by the rank that reads each from a file and passes it on; empty if every rank reads all."""
    if near.count == 1 or not flat.numel() or kind != "remote":
        return ()
    return flat.split(-(-flat.numel() // near.count))


def open_handle(fields: HandleFields, device: torch.device) -> torch.Tensor:
    """[bytes] uint8: the memory of a handle, valid while the tensor lives.

    Args:
        device: of this process. Memory of any GPU of the machine can be mapped into it, even of one that is not visible
            to this process (not tested).

    Raises:
        ValueError: the memory is on another kind of device.
        RuntimeError: it cannot be opened.
    """
    on_gpu, *rest = fields
    if bool(on_gpu) != (device.type == "cuda"):
        raise ValueError(f"the handle is of memory on a {'GPU' if on_gpu else 'CPU'}, and this engine runs on {device}")
    made: Any = torch.UntypedStorage
    if on_gpu:
        storage = made._new_shared_cuda(device.index, *rest)
    else:
        storage = with_manager(made._new_shared_filename_cpu, *rest)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _read_safetensors(path: Path, named: Named, flat: torch.Tensor) -> None:
    """Read the data of a file whose tensors are in the order of `named`."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_LIMIT:
            raise ValueError(f"{path} does not begin with a safetensors header")
        header = {name: found for name, found in json.loads(file.read(length)).items() if name != "__metadata__"}
        ends = list(accumulate(tensor.nbytes for _, tensor in named))
        places = {
            name: (list(tensor.shape), [end - tensor.nbytes, end])
            for (name, tensor), end in zip(named, ends, strict=True)
        }
        if {name: (found["shape"], found["data_offsets"]) for name, found in header.items()} != places:
            raise ValueError(f"{path} contains other tensors than the bucket")
        host = flat if flat.device.type == "cpu" else torch.empty_like(flat, device="cpu")
        # Not `numpy()`: after that torch refuses to free the buffer's memory.
        read = file.readinto((ctypes.c_char * host.numel()).from_address(host.data_ptr()))
        if read != flat.numel() or file.read(1):
            raise ValueError(f"{path} is truncated, or longer than its tensors")
    if host is not flat:
        flat.copy_(host)


FILES = SenderFiles()
"""Files of this process."""


def receive(updater: Any, load: FromFile | FromBroadcast, tensors: Tensors, group: str) -> ReceivedBucket:
    """Receive the tensors of a bucket, on every rank of the engine.

    Args:
        updater: SGLang's updater of this rank.
        group: name of the process group of a broadcast.

    Raises:
        RuntimeError: on every rank; one of them did not receive it.
    """
    near, failed, received = all_ranks(), "", None
    try:
        bucket, model = buckets_of(updater).of(*tensors), updater.get_model()
        if isinstance(load, FromBroadcast):
            received = delta.receive(load.version, group, updater._model_update_group[group], bucket, model)
        else:
            received = take(FILES, load, bucket, model, near)
    except Exception as error:  # the other ranks wait for this report
        failed = f"{REFUSED + ': ' if is_refusal(load, error) else ''}{type(error).__name__}: {error}"
    near.gather_or_raise(failed, None)
    assert received is not None
    if isinstance(load, FromFile):  # after the report, so that no rank waits for a part that was not read
        for source, part in enumerate(parts_of(load.kind, received.bucket.flat, near)):
            near.pass_on(part, source)
    return received


def is_refusal(load: FromFile | FromBroadcast, error: Exception) -> bool:
    """Whether the whole bucket may be sent after this error: not if the broadcast itself broke."""
    if isinstance(load, FromBroadcast):
        return load.version.base is not None and isinstance(error, ValueError)
    return load.kind == "changes"


def take(
    files: SenderFiles, load: FromFile, bucket: RecordedBucket, model: torch.nn.Module, near: EngineRankGroup = ALONE
) -> ReceivedBucket:
    """Read a bucket, or this rank's part of it, from a file, to be loaded into a model. Raises OSError, ValueError and
    RuntimeError."""
    if load.kind == "changes":
        return delta.changed(delta.read_delta(load.path), load.path.parent, bucket, model)
    files.read(load.kind, load.path, bucket.named, bucket.flat, near)
    return ReceivedBucket(
        bucket, partial(delta.record_loaded, bucket, model, load.path.parent) if load.kind == "base" else None
    )


# Buckets from the trainer rank on the same GPU, by checkpoint-engine's handles.
#
# SGLang 0.5.23 supports checkpoint-engine (`/update_weights_from_ipc`). But it gives everything to the model's own
# loader, finishes the weights within an update's session and before its end, and only logs errors of that.
#
# Here SGLang's code still finds the handle and its GPU. But it receives buckets, each one tensor named by its
# `wire.IpcBucket`. They are loaded, recorded and compared like all others, and the end of the session finishes the
# weights once.


UNABLE = "cannot receive buckets from the trainer rank on its GPU"
_ENDS_MODULE = "sglang.srt.checkpoint_engine.checkpoint_engine_worker"


def check_ipc() -> Answer:
    """Check whether checkpoint-engine is installed."""
    try:
        importlib.import_module(_ENDS_MODULE)
    except ImportError as error:
        return Answer(f"this server {UNABLE}: {error}")
    return Answer()


def take_ipc(updater: Any, runner: Any, request: TakeIpc) -> Loaded:
    """Load the buckets that the trainer's ranks provide.

    Args:
        updater, runner: SGLang's objects of this rank.

    Raises:
        RuntimeError: on every rank of the engine; one of them did not load all of them.
    """
    how, failed = "no bucket arrived", ""

    def load(named: Iterable[tuple[str, torch.Tensor]]) -> None:
        nonlocal how
        for name, flat in named:
            how = load_bucket(updater, name, flat)

    try:
        worker = _worker(runner, request.addresses)
        worker.get_model_loader, worker.get_post_hook = lambda: load, lambda: None
        worker.update_weights_from_ipc(request.addresses)
    except Exception as error:  # the other ranks wait for this report
        failed = f"{type(error).__name__}: {error}"
    all_ranks().gather_or_raise(failed, None)
    return Loaded(how)


def _worker(runner: Any, addresses: Mapping[str, str]) -> Any:
    """SGLang's checkpoint-engine worker on this rank.

    Raises:
        RuntimeError: on every rank of the engine, if one has no trainer rank on its GPU: the others would wait for it.
    """
    worker, failed = None, ""
    try:
        worker = importlib.import_module(_ENDS_MODULE).SGLangCheckpointEngineWorkerExtensionImpl(runner)
        if (gpu := worker.get_device_uuid()) not in addresses:
            failed = f"{UNABLE}: none of {len(addresses)} trainer ranks is on {gpu}"
    except Exception as error:  # the other ranks wait for this report
        failed = f"{UNABLE}: {type(error).__name__}: {error}"
    all_ranks().gather_or_raise(failed, None)
    return worker


def load_bucket(updater: Any, name: str, handle: torch.Tensor) -> str:
    """Load one bucket; returns a message on how it was loaded.

    Args:
        name: its `wire.IpcBucket`.
        handle: [bytes] uint8, in the memory of its sender.

    Raises:
        RuntimeError: the model could not load it.
    """
    described = decode(name)
    assert isinstance(described, IpcBucket)
    bucket = buckets_of(updater).of(described.names, described.dtypes, described.shapes)
    bucket.flat.copy_(handle)
    loaded, message = updater.load_weights_from_distributed(ReceivedBucket(bucket))
    if not loaded:
        raise RuntimeError(message)
    return message
