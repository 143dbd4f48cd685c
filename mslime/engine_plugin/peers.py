"""Inside an SGLang server: all that a model holds goes to another server that was started alike.

For engines that come back between two weight syncs (`sglang.rejoin: peer`). Each rank of the giver sends to the rank of
the same number, in a process group of the two, what lies in its model as it lies there: fused, cut and quantised, and
with what was derived from the parameters, so that nothing is loaded or finished anew. Both say beforehand what they
hold, and nothing is sent where that differs.

SGLang 0.5.23 has `/send_weights_to_remote_instance` for the giver's half. It is not used: it runs on CUDA alone, sends
parameters only, tells the other side nothing about them, and its receiver is a server that starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from mslime.engine_plugin.engine_ranks import all_ranks
from mslime.engine_plugin.wire import Offered, Transfer, Transferred
from mslime.network import listen
from mslime.tensor_sums import place_sum, signed

UNLIKE = "holds other tensors than its peer"


_STORES: dict[str, TCPStore] = {}
"""Where a transfer that was offered meets, in the giver's first process."""


def transfer(request: Transfer, model: torch.nn.Module) -> Offered | Transferred:
    """Do this rank's part of a transfer. Raises RuntimeError, on every rank of the engine, if one of them cannot."""
    if request.part == "offer":
        return Offered(max(all_ranks().heard(*_offer(request))))
    return _run(request, model)


def _offer(transfer: Transfer) -> tuple[str, int]:
    """Listen for the transfer, in the first process; what failed, and the port."""
    _STORES.clear()  # of a transfer that never came about
    if all_ranks().rank:
        return "", 0
    try:
        _STORES[transfer.name] = store = listening(transfer.host, transfer.limit_s)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", 0
    return "", store.port


def listening(host: str, limit_s: float) -> TCPStore:
    """A store on a free port of this address alone. Raises OSError."""
    server = listen(host)
    port = server.getsockname()[1]
    return TCPStore(
        host, port, None, True, timedelta(seconds=limit_s), False, master_listen_fd=server.detach(),
    )  # fmt: skip


def _run(transfer: Transfer, model: torch.nn.Module) -> Transferred:
    """Give or take; the sums of what each rank holds then."""
    mine = all_ranks()
    failed, store, tensors = "", None, list[tuple[str, torch.Tensor]]()
    try:
        store = _STORES.pop(transfer.name, None) or TCPStore(
            transfer.host, transfer.port, None, False, timedelta(seconds=transfer.limit_s), False
        )
        tensors = list(all_tensors(model))
        failed = _unlike(store, transfer, mine.rank, signature(tensors, mine.count))
    except Exception as error:  # the other ranks wait to hear of it
        failed = f"{type(error).__name__}: {error}"
    mine.heard(failed, None)
    assert store is not None
    total = 0
    try:
        with torch.inference_mode():
            total = _pass(store, transfer, mine.rank, [tensor for _, tensor in tensors])
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    return Transferred(tuple(mine.heard(failed, total)))


def all_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All that a model computes with, each place once: parameters, buffers, and tensors that its modules have as plain
    attributes, as those that DeepSeek's attention derives from its projections."""
    seen = set[tuple[Any, ...]]()
    for prefix, module in model.named_modules():
        own = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in own.items():
            if not isinstance(value, torch.Tensor) or value.is_meta or not value.numel():
                continue
            place = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
            if place not in seen:
                seen.add(place)
                yield f"{prefix}.{name}", value.detach()


def signature(tensors: list[tuple[str, torch.Tensor]], ranks: int) -> str:
    """Tells engines apart that hold other tensors, or share them out among more or fewer ranks."""
    told = [[ranks], *([name, str(t.dtype), list(t.shape), list(t.stride())] for name, t in tensors)]
    return sha256(json.dumps(told).encode()).hexdigest()


def _unlike(store: Store, transfer: Transfer, rank: int, own: str) -> str:
    """What the two of this number hold that is not the same; empty where all is."""
    other = "take" if transfer.part == "give" else "give"
    store.set(f"{transfer.part}/{rank}", own)
    return "" if store.get(f"{other}/{rank}").decode() == own else UNLIKE


def _pass(store: Store, transfer: Transfer, rank: int, tensors: list[torch.Tensor]) -> int:
    """Send or receive them all; the sum of what lies here then."""
    from sglang.srt.utils import init_custom_process_group

    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    limit = timedelta(seconds=transfer.limit_s)
    gives = transfer.part == "give"
    group = init_custom_process_group(
        backend="gloo" if device.type == "cpu" else "nccl",
        store=PrefixStore(f"{transfer.name}/{rank}", store), timeout=limit, world_size=2,
        rank=0 if gives else 1, group_name=f"mslime-peer-{transfer.name}/{rank}",
        **({} if device.type == "cpu" else {"device_id": device}),
    )  # fmt: skip
    try:
        for tensor in tensors:
            flat = tensor.to(device).contiguous()
            if not gives and flat.data_ptr() == tensor.data_ptr():
                flat = tensor
            work = dist.broadcast(_words(flat), group=group, group_src=0, async_op=True)
            assert work is not None, "this rank is of the group"
            work.wait(limit)
            if not gives and flat is not tensor:
                tensor.copy_(flat)
    finally:
        dist.destroy_process_group(group)
    return sum_of(tensors)


def sum_of(tensors: list[torch.Tensor]) -> int:
    """Of all bits in all places of them all."""
    total = 0
    for number, tensor in enumerate(tensors):
        total += (2 * number + 1) * int(place_sum(tensor).item())
    return signed(total)


def _words(flat: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, a view: gloo does not know every dtype."""
    return flat.reshape(-1).view(torch.uint8)
