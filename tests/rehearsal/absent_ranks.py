"""A world of which this process is one rank and the others are not there: torch's `fake` process groups, called NCCL's.

Groups, their sizes and every argument of a collective are real; nothing is moved. Where this rank goes on by what the
others send, they say what this rank would in their place: whole numbers and small tensors that are gathered are its
own, of every rank (with balanced routes each expert-parallel rank gets equally many tokens from each), and a pipeline
stage is sent activations of the micro-batches' one shape. Import this before `on_gpu`, which lets gloo stand in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map

from tests.rehearsal.on_host import host_or_same

_INIT, _NEW_GROUP, _BATCH = dist.init_process_group, dist.new_group, dist.batch_isend_irecv
SMALL = 1 << 16
"""Elements of a tensor of floats that is moved."""


@dataclass
class AbsentRanks:
    """What comes from the others.

    Attributes:
        activations: shape of what pipeline stages send each other.
        bytes: that this rank has given to collectives of large tensors, by their names.
    """

    activations: tuple[int, int, int]

    def collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A collective's results: its own tensors, of which the small ones are filled."""
        name = func._schema.name.split("::")[1].strip("_")
        if name in ("allgather", "gather"):
            for outs, sent in zip(args[0], args[1], strict=False):  # who is not the root of a gather gets nothing
                for out in outs:
                    _put(out, sent)
        elif name == "allgather_base":
            for out in args[0].chunk(args[0].numel() // max(args[1].numel(), 1)):
                _put(out.view(args[1].shape), args[1])
        elif name == "alltoall_base" and args[0].numel() == args[1].numel():
            _put(args[0], args[1])
        elif name == "recv" and args[0][0].dtype == torch.int64:
            (received,) = args[0]
            _put(received, torch.tensor(self.activations))
        return _finished(func, args, kwargs)


def _put(out: torch.Tensor, sent: torch.Tensor) -> None:
    if out.numel() == sent.numel() and (not out.is_floating_point() or out.numel() <= SMALL):
        host_or_same(out).copy_(host_or_same(sent))


def _finished(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch returns of a collective of the fake group, with the given tensors."""
    given: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []

    def nothing(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        empty = torch.empty(0, dtype=x.dtype)
        given[id(empty)] = x
        kept.append(empty)  # an identity belongs to one object while it lives
        return empty

    without_splits = tuple([] if isinstance(x, list) and all(isinstance(n, int) for n in x) else x for x in args)
    out = func(*tree_map(nothing, without_splits), **tree_map(nothing, kwargs))
    return tree_map(lambda x: given.get(id(x), x) if isinstance(x, torch.Tensor) else x, out)


def be_alone() -> None:
    """Groups are torch's fake ones from now on, and everybody who asks hears that they are NCCL's."""

    def init_process_group(name: str | None = None, *, rank: int, world_size: int, **options: Any) -> None:
        _INIT("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def new_group(ranks: Any = None, *args: Any, **options: Any) -> Any:
        options = {key: value for key, value in options.items() if key in ("group_desc", "use_local_synchronization")}
        return _NEW_GROUP(ranks, backend="fake", **options)

    dist.init_process_group = init_process_group
    dist.new_group = torch.distributed.distributed_c10d.new_group = new_group
    dist.get_backend = lambda group=None: "nccl"
    dist.batch_isend_irecv = _BATCH
