"""Inside an SGLang server: load a bucket of weights by copies recorded once, instead of the model's loader.

A model's own `load_weights` locates the parts of every tensor in Python: some 30 us a tensor, the same at each sync.
Here it runs only at the first load of a bucket, while every copy from the bucket into a parameter is recorded. Later
loads make all copies in one call.

Only copies can be repeated, including those of tensors that the loader joins first (DeepSeek's attention). If a loader
does anything else with the weights, it stays in use, and the answer to the sender has the reason. Weights derived after
loading (`post_load_weights`: DeepSeek's attention) are derived once, at the end of the sync.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mslime.engine_plugin.wire import OWN_LOADER, RECORDED

_CLEARED = ((torch.ops.aten.zero_.default, None), (torch.ops.aten.fill_.Scalar, 0))
"""Operations that clear padding, which stays cleared. But a parameter of one value may be filled with a sent value,
even 0."""
Named = list[tuple[str, torch.Tensor]]
BUCKETS: dict[int, tuple[Any, SyncBuckets]] = {}
"""Buckets by the `id` of SGLang's updater, which allows no new attribute and no weak reference. The updater is kept
beside them, so that no other object gets its `id`."""


class ReceivedBucket(list[tuple[str, torch.Tensor]]):
    """Named tensors of a bucket, in the form of its model's loader.

    Args:
        then: called when the model has loaded them.
        packed: sources of the bucket's recorded copies, if only these arrived, in other memory.

    Attributes:
        bucket: the tensors are views of it.
    """

    def __init__(
        self, bucket: RecordedBucket, then: Callable[[], None] | None = None, packed: list[torch.Tensor] | None = None
    ) -> None:
        super().__init__(bucket.named)
        self.bucket, self.then, self.packed = bucket, then, packed


class Recorder(TorchDispatchMode):
    """Records each copy from a buffer into a model's parameters, and any other write into these.

    Args:
        buffer: memory of the bucket.
        written: storages of the model's parameters and buffers, by address.
    """

    def __init__(self, buffer: torch.UntypedStorage, written: set[int]) -> None:
        super().__init__()
        self._buffer, self._written = buffer.data_ptr(), written
        self._joined: dict[int, _Joined | _Cloned] = {}
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.other = ""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and args:
            self._note(func, args)
        elif func is torch.ops.aten.cat.default and all(map(self._is_sent, args[0])):
            self._joined[_address(result)] = _Joined(result, args[0], args[1] if len(args) > 1 else 0)
        elif func is torch.ops.aten.clone.default and self._is_sent(args[0]):
            self._joined[_address(result)] = _Cloned(result, args[0])
        return result

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        into = args[0]
        source: Any = args[1] if len(args) > 1 else None
        if not isinstance(into, torch.Tensor) or not into.numel():
            return
        if _address(into) not in self._written:
            self._joined.pop(_address(into), None)  # its contents have changed
        elif func is torch.ops.aten.copy_.default and (copies := self._copies(into, source)):
            self.copies += copies
        elif into.numel() == 1 or (func, source) not in _CLEARED:
            self.other = self.other or f"{func} writes a parameter of shape {list(into.shape)}"

    def _copies(self, into: torch.Tensor, source: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The copies from the buffer that copying `source` is equivalent to; empty if there is no equivalent."""
        if not isinstance(source, torch.Tensor) or source.shape != into.shape:
            return []
        if self._is_sent(source):
            return [(into.detach(), source.detach())]
        joined = self._joined.get(_address(source))
        return joined.copies(into.detach(), source) if joined is not None else []

    def _is_sent(self, found: Any) -> bool:
        return isinstance(found, torch.Tensor) and _address(found) == self._buffer


@dataclass(frozen=True)
class _Joined:
    """Tensors from the buffer that the loader joined before copying.

    Attributes:
        whole: the joined tensor. It is kept, so that no other tensor gets its address.
    """

    whole: torch.Tensor
    parts: Sequence[torch.Tensor]
    dim: int

    def copies(self, into: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies that fill `into` with `source`, a view of the joined tensor; empty if it is not all of it."""
        if (source.shape, source.stride()) != (self.whole.shape, self.whole.stride()):
            return []
        shares = into.split([part.shape[self.dim] for part in self.parts], self.dim)
        return [(share, part.detach()) for share, part in zip(shares, self.parts, strict=True)]


@dataclass(frozen=True)
class _Cloned:
    """A tensor cloned from the buffer before a part of it is copied: SGLang transposes packed INT4 weights.

    Attributes:
        whole: the clone, in its own order. It is kept, see `_Joined`.
        sent: the tensor that it clones.
    """

    whole: torch.Tensor
    sent: torch.Tensor

    def copies(self, into: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The copy that fills `into` with `source`, a part of the clone; empty if it is another view of its memory."""
        strides = self.whole.stride()
        if source.stride() != strides or source.dtype != self.whole.dtype:
            return []
        begin, rest = int(self.sent.storage_offset()), int(source.storage_offset() - self.whole.storage_offset())
        for dim in sorted(range(self.whole.dim()), key=lambda dim: -strides[dim]):
            at, rest = divmod(rest, strides[dim])
            if at + source.shape[dim] > self.whole.shape[dim]:
                return []
            begin += at * self.sent.stride(dim)
        return [(into, self.sent.detach().as_strided(source.shape, self.sent.stride(), begin))]


class BucketCopies:
    """The recorded copies that load one bucket into one model.

    They remember the addresses of the filled parameters, which are checked at every bucket: so others are ignored.

    Attributes:
        into, out_of: views of the model's parameters and buffers, and of the bucket's buffer, pairwise.
        why_not: why they cannot be repeated; empty if they can.
        places, apart: see `checksums`; None before the first checksum.
    """

    def __init__(
        self, model: torch.nn.Module, into: list[torch.Tensor], out_of: list[torch.Tensor], why_not: str = ""
    ) -> None:
        self.into, self.out_of, self.why_not = into, out_of, why_not
        self.places: list[int] | None = None
        self.apart = list[tuple[torch.Tensor, torch.Tensor]]()
        filled = {_address(view) for view in into}
        self._model = weakref.ref(model)  # another model may get its `id`
        self._homes = [
            (module, name, tensor.data_ptr())
            for module in model.modules()
            for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
            if _address(tensor) in filled
        ]

    def fit(self, model: torch.nn.Module) -> bool:
        """Whether it is the same model, with the parameters at the same addresses."""
        if self.why_not or self._model() is not model:
            return False
        return all(getattr(home, name).data_ptr() == at for home, name, at in self._homes)

    def make(self, packed: list[torch.Tensor] | None = None) -> None:
        """Make all copies, from `out_of` or from the given sources."""
        _copy_all(self.into, self.out_of if packed is None else packed)

    def make_backwards(self, flat: torch.Tensor) -> None:
        """Fill a bucket's buffer from the parameters, with zeros elsewhere."""
        if not self.are_all_of(flat):
            flat.zero_()
        _copy_all(self.out_of, self.into)

    def are_all_of(self, flat: torch.Tensor) -> bool:
        """Whether the whole buffer is copied: with several ranks, an engine gives each of them a part."""
        return sum(view.numel() * view.itemsize for view in self.out_of) == flat.numel()


@dataclass(frozen=True)
class LoadedVersion:
    """The version of a bucket that a model has loaded.

    Attributes:
        version: the directory that it came from; for a broadcast, the version's name below the connection's.
        total: word sum of the bucket restored from the model's parameters.
    """

    version: Path
    total: int


@dataclass
class RecordedBucket:
    """A known bucket.

    Attributes:
        flat: [bytes] uint8, the head of the buffer that all buckets share.
        named: its tensors, views of it.
        copies: by the model's `id`, after the first load.
        loaded_version: the version that the model holds, if changes may follow.
    """

    flat: torch.Tensor
    named: Named
    copies: dict[int, BucketCopies] = field(default_factory=dict[int, BucketCopies])
    loaded_version: LoadedVersion | None = None


class ReleasableBuffer:
    """Memory on `device` that can be released and reallocated, while views of it stay valid."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()

    def head(self, size: int) -> torch.Tensor:
        """[size] uint8: its first bytes, allocated until the release."""
        self.reserve(size)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(self._storage, 0, (size,), (1,))

    def reserve(self, size: int) -> None:
        """Allocate this many bytes. Views follow if the memory is enlarged."""
        if self.bytes < size:
            self._storage.resize_(size)

    def release(self) -> None:
        self._storage.resize_(0)

    @property
    def bytes(self) -> int:
        return self._storage.nbytes()


class SyncBuckets:
    """The buckets of a sync, in one buffer on `device` that is as large as the largest and lives as long as a sync.

    Attributes:
        buffer: memory that all buckets share, each from its start.
        behind: the model loaded without its own loader, whose derived weights are therefore out of date.
        loaded: buckets loaded in this update.
    """

    def __init__(self, device: Any) -> None:
        self.behind, self.loaded = cast("Any", None), list[RecordedBucket]()
        self.buffer = ReleasableBuffer(device)
        self._known: dict[tuple[Any, ...], RecordedBucket] = {}

    def of(self, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]]) -> RecordedBucket:
        """The bucket with these tensors, with memory allocated."""
        key = (tuple(names), tuple(map(str, dtypes)), tuple(map(tuple, shapes)))
        if key not in self._known:
            self._known[key] = self._new(names, dtypes, shapes)
        bucket = self._known[key]
        self.buffer.reserve(bucket.flat.numel())
        return bucket

    def release(self) -> None:
        """End a sync: update the model's derived weights, and free the buffer's memory. Records of the buckets are
        kept."""
        model, self.behind, self.loaded = self.behind, None, []
        if model is not None:
            with torch.no_grad():
                model.post_load_weights()
        self.buffer.release()

    def _new(self, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]]) -> RecordedBucket:
        """Tensors follow each other, as in SGLang's `FlattenedTensorBucket`."""
        kinds = [dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype) for dtype in dtypes]
        sizes = [math.prod(shape) * kind.itemsize for kind, shape in zip(kinds, shapes, strict=True)]
        flat = self.buffer.head(sum(sizes))
        parts = zip(names, flat.split(sizes), kinds, shapes, strict=True)
        return RecordedBucket(flat, [(name, part.view(kind).view(*shape)) for name, part, kind, shape in parts])


def _copy_all(into: list[torch.Tensor], out_of: list[torch.Tensor]) -> None:
    if into:  # a rank may have no part of a bucket, for example of another rank's experts
        with torch.no_grad():
            torch._foreach_copy_(into, out_of)  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def in_one_thread() -> Generator[None]:
    """Run this thread's thread-pool tasks in the thread itself: a dispatch mode is local to a thread, and SGLang's
    loader for DeepSeek uses a pool."""
    own, submit = threading.get_ident(), ThreadPoolExecutor.submit

    def at_once(self: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if threading.get_ident() != own:
            return submit(self, work, *args, **kwargs)
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    pools: Any = ThreadPoolExecutor
    pools.submit = at_once
    try:
        yield
    finally:
        pools.submit = submit


def fitting(model: torch.nn.Module, buckets: Iterable[RecordedBucket]) -> list[BucketCopies | None]:
    """The repeatable recorded copies of each bucket; None for buckets without."""
    known = (bucket.copies.get(id(model)) for bucket in buckets)
    return [each if each is not None and each.fit(model) else None for each in known]


def _addresses(model: torch.nn.Module) -> dict[str, int]:
    return {name: param.data_ptr() for name, param in model.named_parameters()}


def record(
    model: torch.nn.Module, buffer: torch.Tensor, load: Callable[[], tuple[bool, str]]
) -> tuple[BucketCopies, bool, str]:
    """Let a model load a bucket, and record the copies.

    Args:
        buffer: of the bucket.
        load: makes the model load it; returns success and a message.

    Returns:
        The copies, and the return value of `load`.
    """
    before = _addresses(model)
    tensors = (*model.parameters(), *model.buffers())
    with in_one_thread(), Recorder(buffer.untyped_storage(), {_address(tensor) for tensor in tensors}) as recorder:
        loaded, message = load()
    why_not = recorder.other
    if _addresses(model) != before:
        why_not = f"{type(model).__name__} replaces parameters when it loads"
    into, out_of = ([pair[i] for pair in recorder.copies] for i in (0, 1))
    return BucketCopies(model, into, out_of, why_not), loaded, message


def load(
    original: Callable[[Any, Named], tuple[bool, str]], self: Any, named_tensors: ReceivedBucket
) -> tuple[bool, str]:
    """Load a bucket by its recorded copies, or record them from the model's loader; returns success and a message.

    Args:
        original: SGLang's method of the updater `self`, which calls the model's loader.
    """
    model, bucket = self.get_model(), named_tensors.bucket
    known = bucket.copies.get(id(model))
    try:
        if known is not None and known.fit(model):
            self._assert_weight_cache_inactive("update_weights_from_distributed")
            known.make(named_tensors.packed)
            buckets_of(self).behind = model if callable(getattr(model, "post_load_weights", None)) else None
            loaded, message = True, RECORDED
        elif named_tensors.packed is not None:
            return False, "the model's parameters were moved during the sync"
        else:
            if known is not None and known.why_not:
                loaded, message = original(self, list(named_tensors))
            else:
                known, loaded, message = record(model, bucket.flat, lambda: original(self, list(named_tensors)))
            if loaded:
                bucket.copies[id(model)] = known
                message = f"{OWN_LOADER}{known.why_not or 'first load'}"
        if loaded:
            buckets_of(self).loaded.append(bucket)
            if named_tensors.then is not None:
                named_tensors.then()
    except Exception as error:  # an exception in a hook would end the server
        return False, f"recorded copies failed: {type(error).__name__}: {error}"
    return loaded, message


def buckets_of(updater: Any) -> SyncBuckets:
    """The updater's buckets. There is one updater for each model of the process, as long as the model lives."""
    if id(updater) not in BUCKETS:
        BUCKETS[id(updater)] = updater, SyncBuckets(updater.device)
    return BUCKETS[id(updater)][1]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
