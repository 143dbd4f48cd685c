"""Tensors of full size that nobody writes: torch allocates what it would on a GPU, and computes whole numbers alone.

The fake runtime's device memory takes no host memory until it is written. Under `Unwritten` a large tensor of floats is
never written, on the device or on the host: what makes one allocates it, and what fills one does nothing. Launched
operators run as they are, so that what they allocate in between counts; their kernels do nothing. Whole numbers (token
ids, routes, lengths, splits) and small tensors are computed on the host, as `OnHost` does: all sizes are the real ones.

Where a size or an index would come from floats, something else says it, by a function of its own here:
`balanced_top_k` for routers that choose by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._pytree import tree_leaves, tree_map

from tests.rehearsal.absent_ranks import AbsentRanks
from tests.rehearsal.on_host import COMPOSITE, NATIVE, OnHost, host

SMALL = 1 << 16
"""Elements of a tensor of floats on the device that is still computed."""
SMALL_ON_HOST = 1 << 20
FILLED = {"zero_", "fill_", "copy_", "normal_", "uniform_", "trunc_normal_"}
"""Operators that write one tensor, given first, and need no memory."""
MADE = {
    "zeros", "ones", "full", "rand", "randn", "zeros_like", "ones_like", "full_like", "rand_like", "new_zeros",
    "new_ones", "new_full", "_to_copy", "clone",
}  # fmt: skip
"""Operators that make one tensor and need no further memory; on a GPU some would write it past torch's dispatcher."""

EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


def is_large(x: Any) -> bool:
    """Whether a tensor is of floats, and not computed."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return False
    return x.numel() > (SMALL if x.is_cuda else SMALL_ON_HOST)


def makes_large(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that is given a size makes a large tensor of floats."""
    at = 1 if name.startswith("new_") else 0
    if name not in MADE or len(args) <= at or not isinstance(args[at], list | tuple):
        return False
    dtype = kwargs.get("dtype") or (args[0].dtype if at else torch.get_default_dtype())
    return dtype.is_floating_point and math.prod(args[at]) > SMALL


def allocate(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> Any:
    """What an operator returns, allocated on the device and not written; small ones are 0."""
    known: dict[int, torch.Tensor] = {}

    def shape_of(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("meta")
        if not isinstance(x, torch.Tensor):
            return x
        meta = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
        known[id(meta)] = x
        return meta

    def made(meta: Any) -> Any:
        if not isinstance(meta, torch.Tensor):
            return meta
        if id(meta) in known:
            return known[id(meta)]
        return blank(torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=device))

    metas = tree_map(shape_of, args)
    return tree_map(made, func(*metas, **tree_map(shape_of, dict(kwargs))))


def blank(x: Any) -> Any:
    """A tensor that an operator on unwritten ones has made: 0 where it will be computed with."""
    if isinstance(x, torch.Tensor) and not is_large(x) and x.device.type != "meta" and x.numel():
        (host(x) if x.is_cuda else x).zero_()
    return x


def balanced_top_k(scores: torch.Tensor, k: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row i chooses i k, i k + 1, ... modulo what there is: all are chosen equally often."""
    assert dim in (-1, scores.ndim - 1), dim
    shape = (*scores.shape[:-1], k)
    rows = torch.arange(math.prod(shape)).reshape(shape) % scores.shape[-1]
    return blank(torch.empty(shape, dtype=scores.dtype, device=scores.device)), rows.to(scores.device)


def rows_of_masks(indices: list[Any]) -> list[Any]:
    """Masks among the indices of a tensor by the positions that they let through, on the device."""
    found: list[Any] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            found += [at.to(index.device) for at in (host(index) if index.is_cuda else index).nonzero(as_tuple=True)]
        else:
            found.append(index)
    return found


class Unwritten(OnHost):
    """Computes what is whole or small, and allocates the rest.

    Attributes:
        ranks: what the ranks that are not there send.
    """

    def __init__(self, ranks: AbsentRanks) -> None:
        super().__init__()
        self.ranks = ranks

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d":
            return self.ranks.collective(func, args, given)
        if name in EMPTY:
            return _with_ones(func(*args, **given))
        taken_apart = f"{namespace}::{name}" in OPDEFS or func.has_kernel_for_dispatch_key(COMPOSITE)
        if taken_apart or namespace not in ("aten", "prims") or name in NATIVE or func.is_view:
            return super().__torch_dispatch__(func, types, args, given)
        tensors = [x for x in tree_leaves((args, given)) if isinstance(x, torch.Tensor)]
        if not any(map(is_large, tensors)) and not makes_large(name, args, given):
            return super().__torch_dispatch__(func, types, args, given)
        if (special := SPECIAL.get(name)) is not None:
            return special(func, args, given)
        if name in FILLED:
            return args[0]
        asked = given.get("device")
        device = torch.device(asked) if asked is not None else _device_of(tensors)
        if name in MADE or device.type == "cpu":
            return allocate(func, args, given, device)
        out = func(*args, **given)
        before = {id(x) for x in tensors}
        return tree_map(lambda x: x if id(x) in before else blank(x), out)


def _with_ones(x: torch.Tensor) -> torch.Tensor:
    """What a kernel will write that does nothing: 1, of which a logarithm and a quotient are finite."""
    if x.is_cuda and x.is_floating_point() and 0 < x.numel() <= SMALL:
        host(x).fill_(1)
    return x


def _device_of(tensors: list[torch.Tensor]) -> torch.device:
    return next((x.device for x in tensors if x.is_cuda), torch.device("cpu"))


def _top_k(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    scores, k, dim = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("dim", -1)
    return balanced_top_k(scores, k, dim)


def _masked_select(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    x, mask = args
    count = int((host(mask) if mask.is_cuda else mask).expand(x.shape).sum())
    return blank(torch.empty(count, dtype=x.dtype, device=x.device))


def _indexed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return func(args[0], rows_of_masks(list(args[1])), *args[2:], **kwargs)


def _equal(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return args[0].shape == args[1].shape


SPECIAL: Mapping[str, Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]] = {
    "topk": _top_k, "masked_select": _masked_select, "index": _indexed, "index_put_": _indexed, "equal": _equal,
}  # fmt: skip
"""Operators on large tensors whose result's size, or what is read of it, depends on values."""
