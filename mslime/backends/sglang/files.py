"""Inside an SGLang server: a bucket of weights comes in a file instead of a broadcast.

A plug-in of SGLang 0.5.23 (entry point group `sglang.srt.plugins`), for the engines that mslime starts. A request names
a file where it otherwise names a process group (`group_of`); all else about it, and all that follows, is as with a
broadcast: the same session, the same loading, the same comparison. A file is of one of these kinds:

- `mapped`: shared memory that a sender writes each of its buckets into, mapped once and kept until the sender leaves;
- `safetensors`: one bucket, read and closed again; `base`: the same, and changes of it may follow;
- `changes`: what is different in a bucket that came before (`changes`).

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
from typing import Any, get_args

import torch

from mslime.backends.sglang.changes import changed, hold
from mslime.backends.sglang.recorded import Bucket, Named, Received, buckets_of, release
from mslime.backends.sglang.siblings import siblings
from mslime.config.choices import FileKind

NO_SUCH_GROUP, UNSEEN = "The group to be destroyed does not exist", "cannot read it"
"""What `group_to_see` is answered by a server without this plug-in, and by one that has it and sees no such directory.
"""
REFUSED = "changes are refused"
"""What begins the answer of an engine that loads nothing of the changes that it was sent."""

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_PREFIX, _SEE, _FORGET = "mslime-file-", "mslime-see:", "mslime-forget:"
_HEADER_LIMIT = 1 << 30


def group_of(kind: FileKind, path: Path) -> str:
    """What an update names as its group to be given a bucket in a file."""
    return f"{_PREFIX}{kind}:{path}"


def group_to_see(directory: Path) -> str:
    """What an engine is asked to leave to say whether it can read files of a directory."""
    return f"{_SEE}{directory}"


def group_to_forget(directory: Path) -> str:
    """What an engine is asked to leave to unmap the files of a directory."""
    return f"{_FORGET}{directory}"


def install() -> None:
    """Called by SGLang in each of its processes. Where it fails, SGLang logs it, and a sender is told by `see`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_UPDATER}.receive_weights_from_distributed", _receive, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.destroy_weights_update_group", _leave, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.end_weight_update", release, HookType.AROUND)


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

    def read(self, kind: FileKind, path: Path, named: Named, flat: torch.Tensor) -> None:
        """Fill `flat` [bytes] uint8 from a file; returns when the file is not needed any more.

        Args:
            named: the tensors that lie in it, one after the other.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds something else.
        """
        if kind == "mapped":
            flat.copy_(self._map(path, flat.numel())[: flat.numel()])
        else:
            _read_safetensors(path, named, flat)

    def _map(self, path: Path, size: int) -> torch.Tensor:
        if path not in self._mapped:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                self._mapped[path] = _Mapped(_mapping(path, file), file)
            except BaseException:
                os.close(file)
                raise
        if self._mapped[path].flat.numel() < size:
            raise ValueError(f"{path} has {self._mapped[path].flat.numel()} bytes, and the bucket {size}")
        return self._mapped[path].flat

    def _drop(self, path: Path) -> None:
        os.close(self._mapped.pop(path).file)


def _mapping(path: Path, file: int) -> torch.Tensor:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise ValueError(f"{path} is not a file of user {os.geteuid()}, as which the engine runs")
    return torch.frombuffer(mmap.mmap(file, found.st_size), dtype=torch.uint8)


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


def parse_group(group: str) -> tuple[FileKind, Path] | None:
    """The kind and path of the file that an update names; None for a process group."""
    for kind in get_args(FileKind):
        if group.startswith(start := f"{_PREFIX}{kind}:"):
            return kind, Path(group.removeprefix(start))
    return None


def answer_leave(files: Files, group: str) -> tuple[bool, str] | None:
    """Do what leaving this group means, and what is answered; None for a process group."""
    for start, call in ((_SEE, files.see), (_FORGET, files.forget)):
        if group.startswith(start):
            try:
                call(Path(group.removeprefix(start)))
            except OSError as error:
                return False, f"this server, on {os.uname().nodename}, {UNSEEN}: {error}"
            return True, "done"
    return None


def _receive(
    original: Callable[..., Named], self: Any, *, names: Any, dtypes: Any, shapes: Any, group_name: str,
    load_format: str | None = None,
) -> Named:  # fmt: skip
    place = parse_group(group_name)
    if place is None:
        return original(self, names=names, dtypes=dtypes, shapes=shapes, group_name=group_name, load_format=load_format)
    failed, received = "", None
    try:
        received = take(_FILES, *place, buckets_of(self).of(names, dtypes, shapes), self.get_model())
    except Exception as error:  # the other ranks wait to hear of it
        failed = f"{f'{REFUSED}: ' if place[0] == 'changes' else ''}{type(error).__name__}: {error}"
    if failed := siblings().first_failure(failed):
        raise RuntimeError(failed)
    assert received is not None
    return received


def take(files: Files, kind: FileKind, path: Path, bucket: Bucket, model: torch.nn.Module) -> Received:
    """A bucket that comes in a file, to be loaded into a model. Raises OSError and ValueError."""
    if kind == "changes":
        return changed(path, bucket, model)
    files.read(kind, path, bucket.named, bucket.flat)
    return Received(bucket, partial(hold, bucket, model, path.parent) if kind == "base" else None)


def _leave(original: Callable[..., tuple[bool, str]], self: Any, group_name: str) -> tuple[bool, str]:
    answer = answer_leave(_FILES, group_name)
    return original(self, group_name) if answer is None else answer
