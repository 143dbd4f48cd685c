"""Inside an SGLang server: a bucket of weights is loaded by copies that were recorded once, not by the model's loader.

A model's own `load_weights` finds for every tensor, in Python, where its parts belong: some 30 us a tensor, at each
sync the same. Here it does so the first time that a bucket comes, and every copy out of the bucket into a parameter is
noted. From then on one call makes them all.

Only copies can be repeated, also of tensors that the loader joins first (DeepSeek's attention). Where a loader does
anything else with the weights, it goes on loading, and the answer to the sender says why. What a model derives from its
weights after loading (`post_load_weights`: DeepSeek's attention) it derives once, at the end of the sync.
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
"""Padding is cleared, and stays so. But a parameter of one value may be filled with what was sent, also with 0."""
Named = list[tuple[str, torch.Tensor]]
_BUCKETS: dict[int, tuple[Any, Buckets]] = {}
"""By the `id` of SGLang's updater, which has no room for an attribute and cannot be referred to weakly. It is kept
beside them, so that no other one gets its `id`."""


class Received(list[tuple[str, torch.Tensor]]):
    """Named tensors of a bucket, as its model's loader takes them.

    Args:
        then: called when the model has loaded them.
        packed: what the bucket's recorded copies read, where only that has come; they then lie elsewhere.

    Attributes:
        bucket: that they are views of.
    """

    def __init__(
        self, bucket: RecordedBucket, then: Callable[[], None] | None = None, packed: list[torch.Tensor] | None = None
    ) -> None:
        super().__init__(bucket.named)
        self.bucket, self.then, self.packed = bucket, then, packed


class Recorder(TorchDispatchMode):
    """Notes each copy from a buffer into a model's parameters, and whatever else is written into those.

    Args:
        buffer: that a bucket lies in.
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
            self._joined.pop(_address(into), None)  # it holds something else now
        elif func is torch.ops.aten.copy_.default and (copies := self._copies(into, source)):
            self.copies += copies
        elif into.numel() == 1 or (func, source) not in _CLEARED:
            self.other = self.other or f"{func} writes a parameter of shape {list(into.shape)}"

    def _copies(self, into: torch.Tensor, source: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What copying `source` comes to, in copies out of the buffer; none where it is something else."""
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
    """Tensors out of the buffer that were joined before they are copied.

    Attributes:
        whole: of them. Kept, so that no other tensor gets its address as long as this is known.
    """

    whole: torch.Tensor
    parts: Sequence[torch.Tensor]
    dim: int

    def copies(self, into: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """That fill `into` with `source`, which lies in the memory of the whole; none where it is not all of it."""
        if (source.shape, source.stride()) != (self.whole.shape, self.whole.stride()):
            return []
        shares = into.split([part.shape[self.dim] for part in self.parts], self.dim)
        return [(share, part.detach()) for share, part in zip(shares, self.parts, strict=True)]


@dataclass(frozen=True)
class _Cloned:
    """A tensor out of the buffer that was copied before a part of it is: SGLang turns packed INT4 weights round.

    Attributes:
        whole: the copy, in an order of its own. Kept, see `_Joined`.
        sent: what it is a copy of.
    """

    whole: torch.Tensor
    sent: torch.Tensor

    def copies(self, into: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """That fills `into` with `source`, a part of the whole; none where it is another view of its memory."""
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


class Homes:
    """Where those parameters lie that some copies fill. An engine asks at every bucket, so no others are looked at.

    Args:
        into: views of parameters and buffers of the model.
    """

    def __init__(self, model: torch.nn.Module, into: Iterable[torch.Tensor]) -> None:
        filled = {_address(view) for view in into}
        self._model = weakref.ref(model)  # another one may get its `id`
        self._known = [
            (module, name, tensor.data_ptr())
            for module in model.modules()
            for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
            if _address(tensor) in filled
        ]

    def are_in(self, model: torch.nn.Module) -> bool:
        """Whether it is the same model, and they are still where they were."""
        return self._model() is model and all(getattr(home, name).data_ptr() == at for home, name, at in self._known)


@dataclass
class Copies:
    """What loading one bucket into one model comes to.

    Attributes:
        into, out_of: views of the parameters and of the buffer, pairwise.
        homes: of the parameters when they were recorded.
        why_not: why they cannot be repeated; empty where they can.
        places, apart: see `checksums`; None until it was asked.
    """

    into: list[torch.Tensor]
    out_of: list[torch.Tensor]
    homes: Homes
    why_not: str = ""
    places: list[int] | None = None
    apart: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list[tuple[torch.Tensor, torch.Tensor]])

    def fit(self, model: torch.nn.Module) -> bool:
        """Whether the model's parameters are still where they were."""
        return not self.why_not and self.homes.are_in(model)

    def make(self, packed: list[torch.Tensor] | None = None) -> None:
        """Make them all.

        Args:
            packed: where to copy from, in place of `out_of`.
        """
        _copy_all(self.into, self.out_of if packed is None else packed)

    def make_backwards(self, flat: torch.Tensor) -> None:
        """Fill a bucket's buffer with what the parameters hold of it, and zeros for the rest."""
        if not self.are_all_of(flat):
            flat.zero_()
        _copy_all(self.out_of, self.into)

    def are_all_of(self, flat: torch.Tensor) -> bool:
        """Whether all of a buffer is copied: an engine of several ranks gives each of them a part."""
        return sum(view.numel() * view.itemsize for view in self.out_of) == flat.numel()

    def keep_bits(self) -> bool:
        """Whether parameters hold what is sent as it is, in its dtype."""
        return all(into.dtype == out_of.dtype for into, out_of in zip(self.into, self.out_of, strict=True))


@dataclass(frozen=True)
class Held:
    """What a model holds of a bucket.

    Attributes:
        version: the directory that it came from; by a broadcast, the version's name below that of the connection.
        total: word sum of the bucket as the model's parameters give it back.
    """

    version: Path
    total: int


@dataclass
class RecordedBucket:
    """A bucket that came before.

    Attributes:
        flat: [bytes] uint8, the head of the buffer that all buckets share.
        named: its tensors, views of it.
        copies: by the model's `id`, once it was loaded.
        held: what the model is known to hold, where changes of that may come.
    """

    flat: torch.Tensor
    named: Named
    copies: dict[int, Copies] = field(default_factory=dict[int, Copies])
    held: Held | None = None


class Buffer:
    """Memory on `device` that comes and goes, while views of it stay."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()

    def head(self, size: int) -> torch.Tensor:
        """[size] uint8: its first bytes, for which there is room until it is released."""
        self.make_room(size)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(self._storage, 0, (size,), (1,))

    def make_room(self, size: int) -> None:
        """For so many bytes. Views follow it when it is made larger."""
        if self.bytes < size:
            self._storage.resize_(size)

    def release(self) -> None:
        """Give the memory back."""
        self._storage.resize_(0)

    @property
    def bytes(self) -> int:
        """That it has now."""
        return self._storage.nbytes()


class Buckets:
    """The buckets of a sync, in one buffer on `device` that is as large as the largest and lives as long as a sync.

    Attributes:
        buffer: that all buckets are heads of.
        behind: the model whose loader was not used, so that what it derives from its weights is that of older ones.
        loaded: in this update.
    """

    def __init__(self, device: Any) -> None:
        self.behind, self.loaded = cast("Any", None), list[RecordedBucket]()
        self.buffer = Buffer(device)
        self._known: dict[tuple[Any, ...], RecordedBucket] = {}

    def of(self, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]]) -> RecordedBucket:
        """The bucket with these tensors, and room for it."""
        key = (tuple(names), tuple(map(str, dtypes)), tuple(map(tuple, shapes)))
        if key not in self._known:
            self._known[key] = self._new(names, dtypes, shapes)
        bucket = self._known[key]
        self.buffer.make_room(bucket.flat.numel())
        return bucket

    def release(self) -> None:
        """The end of a sync: let the model catch up, and give the buffer's memory back. What is known of the buckets
        stays."""
        model, self.behind, self.loaded = self.behind, None, []
        if model is not None:
            with torch.no_grad():
                model.post_load_weights()
        self.buffer.release()

    def _new(self, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]]) -> RecordedBucket:
        """Tensors lie one after the other, as SGLang's `FlattenedTensorBucket` has them."""
        kinds = [dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype) for dtype in dtypes]
        sizes = [math.prod(shape) * kind.itemsize for kind, shape in zip(kinds, shapes, strict=True)]
        flat = self.buffer.head(sum(sizes))
        parts = zip(names, flat.split(sizes), kinds, shapes, strict=True)
        return RecordedBucket(flat, [(name, part.view(kind).view(*shape)) for name, part, kind, shape in parts])


def _copy_all(into: list[torch.Tensor], out_of: list[torch.Tensor]) -> None:
    if into:  # a rank may hold nothing of a bucket, for example of another one's experts
        with torch.no_grad():
            torch._foreach_copy_(into, out_of)  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def in_one_thread() -> Generator[None]:
    """What this thread hands to a pool of threads it does itself: a dispatch mode sees no other thread, and SGLang's
    loader for DeepSeek uses some."""
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


def fitting(model: torch.nn.Module, buckets: Iterable[RecordedBucket]) -> list[Copies | None]:
    """Of each bucket, the recorded copies that can be repeated; None where there are none."""
    known = (bucket.copies.get(id(model)) for bucket in buckets)
    return [each if each is not None and each.fit(model) else None for each in known]


def _addresses(model: torch.nn.Module) -> dict[str, int]:
    """Where each parameter lies, by name."""
    return {name: param.data_ptr() for name, param in model.named_parameters()}


def record(
    model: torch.nn.Module, buffer: torch.Tensor, load: Callable[[], tuple[bool, str]]
) -> tuple[Copies, bool, str]:
    """Let a model load a bucket, and note how.

    Args:
        buffer: of the bucket.
        load: makes the model load it; whether it did, and what is said of it.

    Returns:
        The copies, and what `load` returned.
    """
    before = _addresses(model)
    tensors = (*model.parameters(), *model.buffers())
    with in_one_thread(), Recorder(buffer.untyped_storage(), {_address(tensor) for tensor in tensors}) as recorder:
        loaded, message = load()
    why_not = recorder.other
    if _addresses(model) != before:
        why_not = f"{type(model).__name__} replaces parameters when it loads"
    into, out_of = ([pair[i] for pair in recorder.copies] for i in (0, 1))
    return Copies(into, out_of, Homes(model, into), why_not), loaded, message


def receive(
    updater: Any, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]], group: str
) -> Received:
    """The tensors of a bucket that is broadcast in the updater's process group of this name."""
    bucket = buckets_of(updater).of(names, dtypes, shapes)
    torch.distributed.broadcast(bucket.flat, src=0, group=updater._model_update_group[group])
    return Received(bucket)


def load(original: Callable[[Any, Named], tuple[bool, str]], self: Any, named_tensors: Received) -> tuple[bool, str]:
    """Load a bucket by its recorded copies, or by the model's loader, of which they are recorded; whether it was, and
    how.

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
                message = f"{OWN_LOADER}{known.why_not or 'the first time'}"
        if loaded:
            buckets_of(self).loaded.append(bucket)
            if named_tensors.then is not None:
                named_tensors.then()
    except Exception as error:  # what a hook raises ends the server
        return False, f"recorded copies failed: {type(error).__name__}: {error}"
    return loaded, message


def release(original: Any, self: Any, **how: Any) -> None:
    """Around the end of an update. What the model derives comes before its weights are packed."""
    buckets_of(self).release()
    original(self, **how)


def buckets_of(updater: Any) -> Buckets:
    """An updater's own. There is one for each model of the process, as long as that lives."""
    if id(updater) not in _BUCKETS:
        _BUCKETS[id(updater)] = updater, Buckets(updater.device)
    return _BUCKETS[id(updater)][1]


def all_buckets() -> Iterable[Buckets]:
    """Of every updater of this process."""
    return (buckets for _, buckets in _BUCKETS.values())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
