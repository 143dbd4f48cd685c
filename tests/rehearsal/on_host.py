"""Real numbers on a GPU that is not there: every aten operator on a "cuda" tensor is computed by its CPU kernel, on the
same bytes, because the fake runtime's device memory is host memory. Use as `with OnHost(): ...`; autograd carries the
mode into its backward threads. Kernels that are launched past torch's dispatcher still do nothing.

`gloo_as_nccl` lets gloo do what NCCL is asked for, likewise on the same bytes.
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
NATIVE = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "lift_fresh", "record_stream",
    "set_", "resize_", "is_pinned", "pin_memory", "_pin_memory", "_local_scalar_dense", "alias", "is_same_size",
    "sym_size", "_resize_output_", "_efficientzerotensor", "squeeze_", "unsqueeze_", "transpose_", "t_", "as_strided_",
}  # fmt: skip
"""Operators that launch no kernel, or only copy: they run as they are."""


STAND_INS = ("tests/rehearsal/extension", "tests/fixtures/delta_rule", "triton/runtime/interpreter")
"""Files that do what kernels do, with copies that no kernel makes."""
PAGEABLE: list[str] = []
"""Where more than one number was copied to the device out of memory that is not pinned: a GPU would have been waited
for, until it had done everything before."""


def host(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as a CPU tensor."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0 or tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    raw = (ctypes.c_char * size).from_address(storage.data_ptr())
    bytes_ = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(bytes_, tensor.storage_offset(), tensor.size(), tensor.stride())


def put(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a CPU tensor on the device."""
    out = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        host(out).copy_(tensor)
    return out


class Borrowed:
    """The arguments of one call with CPU tensors in the place of "cuda" ones, and the way back."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self._originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def to_host(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.device.type == "cuda":
            self.device = x.device
            found = host(x)
            self._originals[id(found)] = (found, x)
            return found
        if isinstance(x, torch.device) and x.type == "cuda":
            self.device = torch.device("cuda", x.index or 0)
            return torch.device("cpu")
        if isinstance(x, torch.Generator) and x.device.type == "cuda":
            return None
        return x

    def back(self, y: Any) -> Any:
        """The original of what was borrowed and written in place; else a copy on the device."""
        if not isinstance(y, torch.Tensor) or y.device.type != "cpu":
            return y
        assert self.device is not None
        return self.original(y) if id(y) in self._originals else put(y, self.device)

    def original(self, y: Any) -> Any:
        return self._originals[id(y)][1] if id(y) in self._originals else y


class OnHost(TorchDispatchMode):
    """Computes on the CPU what torch is asked to compute on the GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        namespace, name = func._schema.name.split("::")
        borrowed = Borrowed()
        if namespace == "c10d":  # gloo writes into "device" memory
            out = func(*tree_map(borrowed.to_host, args), **tree_map(borrowed.to_host, kwargs))
            return tree_map(borrowed.original, out)
        if (custom := OPDEFS.get(f"{namespace}::{name}")) is not None:  # whose own operators are to be seen too
            with self:
                return custom._init_fn(*args, **kwargs)
        if namespace == "aten" and func.has_kernel_for_dispatch_key(COMPOSITE):
            with self:  # below autograd, where these have not been taken apart yet: `to` and `reshape` may copy
                return func.decompose(*args, **kwargs)
        if namespace not in ("aten", "prims") or name in NATIVE or func.is_view:
            return func(*args, **kwargs)
        if name == "copy_":
            _note_pageable(args[1], args[0].device)
            host_or_same(args[0]).copy_(host_or_same(args[1]))
            return args[0]
        if name == "_to_copy":
            return _to_copy(func, args, kwargs)
        on_host, options = tree_map(borrowed.to_host, args), tree_map(borrowed.to_host, kwargs)
        if borrowed.device is None:
            return func(*args, **kwargs)
        options.pop("pin_memory", None)
        return tree_map(borrowed.back, func(*on_host, **options))


def _note_pageable(source: torch.Tensor, target: torch.device) -> None:
    if target.type == "cuda" and source.device.type == "cpu" and source.numel() > 1 and not source.is_pinned():
        frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()]
        if not any(stand_in in frame for frame in frames for stand_in in STAND_INS):
            PAGEABLE.append(" ".join([frame for frame in frames if "/torch/" not in frame][-6:]))


def host_or_same(x: Any) -> Any:
    """A "cuda" tensor's bytes on the host; anything else as it is."""
    return host(x) if isinstance(x, torch.Tensor) and x.device.type == "cuda" else x


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    target = torch.device(kwargs.get("device") or args[0].device)
    source = host_or_same(args[0])
    _note_pageable(args[0], target)
    if target.type == "meta" or source.device.type == "meta":
        return func(*args, **kwargs)
    kept = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format", "layout") and v is not None}
    copied = torch.ops.aten._to_copy.default(source, **kept)
    return copied if target.type == "cpu" else put(copied, torch.device("cuda", target.index or 0))


class WaitedOnce:
    """A transfer whose `wait` may be called again, as NCCL allows and Transformer Engine does; gloo's would hang."""

    def __init__(self, work: Any) -> None:
        self._work, self._done = work, False

    def wait(self, *args: Any) -> bool:
        if not self._done:
            self._work.wait(*args)
        self._done = True
        return True

    def is_completed(self) -> bool:
        return self._done or self._work.is_completed()


def gloo_as_nccl() -> None:
    """Process groups are gloo's where NCCL is asked for, and everybody who asks hears that they are NCCL's."""
    init, new, backend_of, batch = dist.init_process_group, dist.new_group, dist.get_backend, dist.batch_isend_irecv

    def swapped(name: str | None) -> str | None:
        return "gloo" if name == "nccl" else name

    def init_process_group(name: str | None = None, *args: Any, **options: Any) -> None:
        init(swapped(name), *args, **options)

    def new_group(*args: Any, backend: str | None = None, pg_options: object = None, **options: Any) -> Any:
        return new(*args, backend=swapped(backend), **options)

    def get_backend(group: Any = None) -> str:
        found = backend_of(group)
        return "nccl" if found == "gloo" else found

    def batch_isend_irecv(operations: Any) -> list[WaitedOnce]:
        return [WaitedOnce(work) for work in batch(operations)]

    dist.init_process_group, dist.get_backend = init_process_group, get_backend
    dist.batch_isend_irecv = batch_isend_irecv
    dist.new_group = torch.distributed.distributed_c10d.new_group = new_group
    _engine_groups_too()


def _engine_groups_too() -> None:
    """Groups with engines are made by torch's helper, past `new_group`."""
    c10d: Any = torch.distributed.distributed_c10d
    make: Callable[..., Any] = c10d._new_process_group_helper

    def helper(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **options: Any) -> Any:
        return make(size, rank, ranks, c10d.Backend("gloo") if str(backend) == "nccl" else backend, *args, **options)

    c10d._new_process_group_helper = helper
