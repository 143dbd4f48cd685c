"""Inside an SGLang server: a bucket of weights comes in a file instead of a broadcast.

A plug-in of SGLang 0.5.23 (entry point group `sglang.srt.plugins`), for the engines that mslime starts. A request names
a file where it otherwise names a process group (`group_of`); all else about it, and all that follows, is as with a
broadcast: the same session, the same loading, the same comparison. A file is of one of these kinds:

- `mapped`: shared memory that a sender writes each of its buckets into, mapped once and kept until the sender leaves;
- `handle`: likewise, of memory that torch opens by a handle: a GPU's own, where the engine runs on one;
- `remote`: in no file, but in a sender's memory, which is read over the network (`rdma`);
- `safetensors`: one bucket, read and closed again; `base`: the same, and changes of it may follow;
- `changes`: what is different in a bucket that came before (`delta`).

A request that names a version beside its process group is followed by a broadcast, of a bucket or of changes.

Every rank of an engine reads for itself. An answer is rank 0's, so each rank hears first whether all have read: the
sender may then write the next bucket over this one.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from mslime.config.choices import FileKind
from mslime.config.handles import HandleFields, take_handle
from mslime.config.keys import BucketVersion
from mslime.engine_plugin.copy_plan import Bucket, Named, Received, buckets_of, release
from mslime.engine_plugin.delta import changed, hold, read_changes, receive
from mslime.engine_plugin.engine_ranks import Siblings, siblings
from mslime.engine_plugin.ipc import can_take_handed, take_handed
from mslime.engine_plugin.rdma import Remote
from mslime.engine_plugin.wire import (
    _FORGET,
    _REACH,
    _SEE,
    PROBE_CHANGES,
    QUESTION,
    REFUSED,
    UNREACHED,
    UNSEEN,
    parse_group,
    parse_version,
)

ALONE = Siblings()
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_HEADER_LIMIT = 1 << 30


def install() -> None:
    """Called by SGLang in each of its processes. Where it fails, SGLang logs it, and a sender is told by `see`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_UPDATER}.receive_weights_from_distributed", _receive, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.destroy_weights_update_group", _leave, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.update_weights_from_ipc", take_handed, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.end_weight_update", _end, HookType.AROUND)


@dataclass
class _Mapped:
    """A file of shared memory, which stays mapped when its name is gone.

    Attributes:
        flat: [bytes of the file] uint8.
        file: open as long as it is mapped; its sender holds a lock on it.
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
    """The files of senders, as one process of an engine reads them."""

    def __init__(self) -> None:
        self._mapped: dict[Path, _Mapped] = {}
        self.remote = Remote()

    def see(self, directory: Path) -> None:
        """Return when files of this directory can be read. Raises OSError when not.

        A sender that was killed told nobody to forget what it had: that is forgotten now.
        """
        os.listdir(directory)
        for path in [path for path, mapped in self._mapped.items() if mapped.sender_is_gone()]:
            self._drop(path)

    def forget(self, directory: Path) -> None:
        """Unmap what came from this directory."""
        for path in [path for path in self._mapped if path.parent == directory]:
            self._drop(path)

    def read(self, kind: FileKind, path: Path, named: Named, flat: torch.Tensor, near: Siblings = ALONE) -> None:
        """Fill `flat` [bytes] uint8 from a file; returns when the file is not needed any more.

        Args:
            named: the tensors that lie in it, one after the other.
            near: the engine's ranks.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds something else.
            RuntimeError: another rank could not read its part.
        """
        if kind == "remote":
            self.remote.read(path, flat, near)
        elif kind in ("mapped", "handle"):
            flat.copy_(self._map(kind, path, flat)[: flat.numel()])
            if flat.is_cuda:
                torch.cuda.current_stream(flat.device).synchronize()  # the sender writes the next bucket over it
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
    """[bytes] uint8: the memory that a handle is of, as long as the tensor lives.

    Args:
        device: of this process. Memory of any GPU of the machine is expected to be mapped into it, also of one that
            this process does not see (decision 0045; not tried).

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
    """The data of a file whose tensors lie in the order of `named`."""
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
        # Not `numpy()`: after that torch refuses to give the buffer's memory back.
        read = file.readinto((ctypes.c_char * host.numel()).from_address(host.data_ptr()))
        if read != flat.numel() or file.read(1):
            raise ValueError(f"{path} does not end where its tensors do")
    if host is not flat:
        flat.copy_(host)


_FILES = Files()


def answer_leave(files: Files, group: str) -> tuple[bool, str] | None:
    """Do what leaving this group means, and what is answered; None for a process group."""
    if group == PROBE_CHANGES:
        return True, "done"
    if group == QUESTION:
        return can_take_handed()
    for start, call in ((_SEE, files.see), (_FORGET, files.forget)):
        if group.startswith(start):
            try:
                call(Path(group.removeprefix(start)))
            except OSError as error:
                return False, f"this server, on {os.uname().nodename}, {UNSEEN}: {error}"
            return True, "done"
    if group.startswith(_REACH):
        said, _, place = group.removeprefix(_REACH).partition(":")
        try:
            files.remote.reach(Path(place), bytes.fromhex(said))
        except (ImportError, OSError, ValueError) as error:
            return False, f"this server, on {os.uname().nodename}, {UNREACHED}: {error}"
        return True, "done"
    return None


def _receive(
    original: Callable[..., Named], self: Any, *, names: Any, dtypes: Any, shapes: Any, group_name: str,
    load_format: str | None = None,
) -> Named:  # fmt: skip
    place, sent = parse_group(group_name), parse_version(group_name)
    if place is None and sent is None:
        return original(self, names=names, dtypes=dtypes, shapes=shapes, group_name=group_name, load_format=load_format)
    failed, received = "", None
    try:
        bucket, model = buckets_of(self).of(names, dtypes, shapes), self.get_model()
        if sent is not None:
            received = receive(*sent, self._model_update_group[sent[1]], bucket, model)
        elif place is not None:
            received = take(_FILES, *place, bucket, model, siblings())
    except Exception as error:  # the other ranks wait to hear of it
        failed = f"{REFUSED + ': ' if is_refusal(place, sent, error) else ''}{type(error).__name__}: {error}"
    if failed := siblings().first_failure(failed):
        raise RuntimeError(failed)
    assert received is not None
    return received


def is_refusal(place: tuple[FileKind, Path] | None, sent: tuple[BucketVersion, str] | None, error: Exception) -> bool:
    """Whether all of the bucket may be sent after what went wrong: not where the broadcast itself broke."""
    if sent is not None:
        return sent[0].base is not None and isinstance(error, ValueError)
    return place is not None and place[0] == "changes"


def take(
    files: Files, kind: FileKind, path: Path, bucket: Bucket, model: torch.nn.Module, near: Siblings = ALONE
) -> Received:
    """A bucket that comes in a file, to be loaded into a model. Raises OSError, ValueError and RuntimeError."""
    if kind == "changes":
        return changed(read_changes(path), path.parent, bucket, model)
    files.read(kind, path, bucket.named, bucket.flat, near)
    return Received(bucket, partial(hold, bucket, model, path.parent) if kind == "base" else None)


def _end(original: Callable[..., None], self: Any, **how: Any) -> None:
    """Around the end of an update, after which buckets have no memory."""
    _FILES.remote.forget()
    release(original, self, **how)


def _leave(original: Callable[..., tuple[bool, str]], self: Any, group_name: str) -> tuple[bool, str]:
    answer = answer_leave(_FILES, group_name)
    return original(self, group_name) if answer is None else answer
