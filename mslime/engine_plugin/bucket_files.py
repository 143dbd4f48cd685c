"""Inside an SGLang server: read a bucket of weights from a file instead of a broadcast.

The request contains a `wire.FromFile`; session, loading and comparison are as with a broadcast. Kinds of files:

- `mapped`: shared memory that a sender writes each of its buckets into, mapped once and kept until the sender leaves;
- `handle`: likewise, for memory that torch opens by a handle: a GPU's own, if the engine runs on one;
- `remote`: no file, but a sender's memory, read over the network (`rdma`);
- `safetensors`: one bucket, read and closed again; `base`: the same, for a bucket whose changes may follow;
- `changes`: differences to an earlier bucket (`delta`).

With `wire.FromBroadcast` a broadcast follows, of a bucket or of changes.

Every rank of an engine reads the file. Rank 0 answers after all ranks have read, because the sender may then overwrite
this bucket with the next one.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from mslime.config.base import FileKind
from mslime.engine_plugin import delta
from mslime.engine_plugin.copy_plan import Named, Received, RecordedBucket, buckets_of
from mslime.engine_plugin.engine_ranks import EngineRankGroup, all_ranks
from mslime.engine_plugin.rdma import RdmaReader
from mslime.engine_plugin.wire import (
    REFUSED,
    Answer,
    ForgetDirectory,
    FromBroadcast,
    FromFile,
    HandleFields,
    ReadDirectory,
    ReadMemory,
    take_handle,
)

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


class Files:
    """Readable files of senders, in one process of an engine."""

    def __init__(self) -> None:
        self._mapped: dict[Path, _Mapped] = {}
        self.remote = RdmaReader()

    def see(self, directory: Path) -> None:
        """Return if files of this directory can be read. Raises OSError if not.

        This also unmaps files of killed senders, which could not request it.
        """
        os.listdir(directory)
        for path in [path for path, mapped in self._mapped.items() if mapped.sender_is_gone()]:
            self._drop(path)

    def forget(self, directory: Path) -> None:
        """Unmap the files of this directory."""
        for path in [path for path in self._mapped if path.parent == directory]:
            self._drop(path)

    def read(self, kind: FileKind, path: Path, named: Named, flat: torch.Tensor, near: EngineRankGroup = ALONE) -> None:
        """Fill `flat` [bytes] uint8 from a file; returns when the file is no longer needed.

        Args:
            named: the tensors in it, one after the other.
            near: the engine's ranks.

        Raises:
            OSError: the file cannot be read.
            ValueError: it has other contents.
            RuntimeError: another rank could not read its part.
        """
        if kind == "remote":
            self.remote.read(path, flat, near)
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
                _check_owner(path, file)
                opened = _mapping(file) if kind == "mapped" else open_handle(take_handle(path), flat.device)
                self._mapped[path] = _Mapped(opened, file)
            except BaseException:
                os.close(file)
                raise
        if self._mapped[path].flat.numel() < size:
            raise ValueError(f"{path} has {self._mapped[path].flat.numel()} bytes, and the bucket {size}")
        return self._mapped[path].flat

    def _drop(self, path: Path) -> None:
        os.close(self._mapped.pop(path).file)


def _check_owner(path: Path, file: int) -> None:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise ValueError(f"{path} is not a file of user {os.geteuid()}, as which the engine runs")


def _mapping(file: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)


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
    storage = made._new_shared_cuda(device.index, *rest) if on_gpu else made._new_shared_filename_cpu(*rest)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _read_safetensors(path: Path, named: Named, flat: torch.Tensor) -> None:
    """Read the data of a file whose tensors are in the order of `named`."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_LIMIT:
            raise ValueError(f"{path} begins with no safetensors header")
        header = {name: found for name, found in json.loads(file.read(length)).items() if name != "__metadata__"}
        ends = list(accumulate(tensor.nbytes for _, tensor in named))
        places = {
            name: (list(tensor.shape), [end - tensor.nbytes, end])
            for (name, tensor), end in zip(named, ends, strict=True)
        }
        if {name: (found["shape"], found["data_offsets"]) for name, found in header.items()} != places:
            raise ValueError(f"{path} holds other tensors than those of the bucket")
        host = flat if flat.device.type == "cpu" else torch.empty_like(flat, device="cpu")
        # Not `numpy()`: after that torch refuses to free the buffer's memory.
        read = file.readinto((ctypes.c_char * host.numel()).from_address(host.data_ptr()))
        if read != flat.numel() or file.read(1):
            raise ValueError(f"{path} does not end where its tensors do")
    if host is not flat:
        flat.copy_(host)


FILES = Files()
"""Files of this process."""


def read_directory(files: Files, request: ReadDirectory) -> Answer:
    """Check whether files of a directory can be read."""
    try:
        files.see(request.directory)
    except OSError as error:
        return Answer(f"{request.directory}: {_here()} cannot read it: {error}")
    return Answer()


def forget_directory(files: Files, request: ForgetDirectory) -> Answer:
    """Unmap the files of a directory."""
    files.forget(request.directory)
    return Answer()


def read_memory(files: Files, request: ReadMemory) -> Answer:
    """Check whether a sender's memory can be read."""
    try:
        files.remote.reach(request.memory, bytes.fromhex(request.expected))
    except (ImportError, OSError, ValueError) as error:
        return Answer(f"{_here()} cannot read the sender's memory: {error}")
    return Answer()


def _here() -> str:
    return f"this server, on {os.uname().nodename},"


def receive(updater: Any, load: FromFile | FromBroadcast, tensors: Tensors, group: str) -> Received:
    """Receive the tensors of a bucket, on every rank of the engine.

    Args:
        updater: SGLang's updater of this rank.
        group: name of the process group of a broadcast.

    Raises:
        RuntimeError: on every rank; one of them did not receive it.
    """
    failed, received = "", None
    try:
        bucket, model = buckets_of(updater).of(*tensors), updater.get_model()
        if isinstance(load, FromBroadcast):
            received = delta.receive(load.version, group, updater._model_update_group[group], bucket, model)
        else:
            received = take(FILES, load, bucket, model, all_ranks())
    except Exception as error:  # the other ranks wait for this report
        failed = f"{REFUSED + ': ' if is_refusal(load, error) else ''}{type(error).__name__}: {error}"
    all_ranks().heard(failed, None)
    assert received is not None
    return received


def is_refusal(load: FromFile | FromBroadcast, error: Exception) -> bool:
    """Whether the whole bucket may be sent after this error: not if the broadcast itself broke."""
    if isinstance(load, FromBroadcast):
        return load.version.base is not None and isinstance(error, ValueError)
    return load.kind == "changes"


def take(
    files: Files, load: FromFile, bucket: RecordedBucket, model: torch.nn.Module, near: EngineRankGroup = ALONE
) -> Received:
    """Read a bucket from a file, to be loaded into a model. Raises OSError, ValueError and RuntimeError."""
    if load.kind == "changes":
        return delta.changed(delta.read_delta(load.path), load.path.parent, bucket, model)
    files.read(load.kind, load.path, bucket.named, bucket.flat, near)
    return Received(bucket, partial(delta.hold, bucket, model, load.path.parent) if load.kind == "base" else None)
