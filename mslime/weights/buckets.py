"""Filling a bucket: every member packs its shards, one gather brings them to the sender, which converts them.

The result is one flat buffer in the order of the bucket's entries, in which tensors follow each other without gaps (the
flattened bucket of engines). Data already in this layout is not moved. Shards that are adjacent in Megatron's parameter
buffer are packed as a view of it, and shards in flat order are gathered directly into the flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from mslime.config.errors import sync_error
from mslime.convert.encoding import Encoded
from mslime.convert.safetensors_files import SAFETENSORS_DTYPES, torch_dtype
from mslime.convert.table import RuleTable
from mslime.weights.weight_plan import Bucket, BucketEntry, BufferSlot


def pack(bucket: Bucket, params: Mapping[str, torch.Tensor], rank: int) -> torch.Tensor:
    """A member's shards of a bucket in one buffer; a view of the parameters if they are adjacent in memory.

    Args:
        params: local parameters by canonical name, any dtype (cast to the bucket's while copying).
        rank: this global rank, a member of the bucket.

    Returns:
        [bucket.local_numel], the bucket's dtype, on the parameters' device. Read-only.

    Raises:
        WeightSyncError: a parameter is missing or its shape differs from the plan.
    """
    shards = [
        _shard(bucket, slot, name, params) for slot, name in zip(bucket.slots, bucket.packed_by(rank), strict=True)
    ]
    dtype = torch_dtype(bucket.gathered_dtype)
    if (whole := _as_they_lie(shards, dtype)) is not None:
        return whole
    flat = torch.empty(bucket.local_numel, dtype=dtype, device=shards[0].device)
    copy_each(
        list(flat.split_with_sizes([slot.numel for slot in bucket.slots])),
        [shard.detach().reshape(-1) for shard in shards],
    )
    return flat


def _shard(bucket: Bucket, slot: BufferSlot, name: str, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
    param = params.get(name)
    if param is None or param.shape != slot.shape:
        found = None if param is None else tuple(param.shape)
        raise sync_error(
            "gather", f"{bucket.describe()}: {name}", f"the plan expects shape {slot.shape}, found {found}",
            "build the rules with the config.json and the layout of the model",
        )  # fmt: skip
    return param


def _as_they_lie(shards: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
    """One view of all shards if they are adjacent in memory, else None."""
    first = shards[0].detach()
    begin = end = first.data_ptr()
    for shard in shards:
        if shard.data_ptr() != end or shard.dtype != dtype or not shard.is_contiguous():
            return None
        end += shard.nbytes
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():  # different storages that happen to be adjacent
        return None
    return first.as_strided(((end - begin) // first.itemsize,), (1,))


def in_memory_order(params: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of parameters in memory order; in the given order if each has its own storage.

    megatron-core lays a data-parallel buffer out from the last parameter to the first.
    """
    storages: dict[int, int] = {}
    for param in params.values():
        storages.setdefault(param.untyped_storage().data_ptr(), len(storages))
    return sorted(params, key=lambda n: (storages[params[n].untyped_storage().data_ptr()], params[n].storage_offset()))


def gather(
    bucket: Bucket, flat: torch.Tensor, group: dist.ProcessGroup | None, rank: int
) -> tuple[torch.Tensor, ...] | None:
    """The bucket's one collective: all members' buffers, in order, on the sender; None on the others.

    The buffers are adjacent: [members, bucket.local_numel] of one tensor.

    Args:
        flat: from `pack`, the same size on every member.
        group: of the bucket's members; None for one member.
        rank: this global rank.

    Raises:
        WeightSyncError: a rank of the group died or missed the group's timeout.
    """
    if group is None:
        return (flat,)
    gathered = None
    if rank == bucket.sender:
        gathered = list(flat.new_empty(len(bucket.members), len(flat)).unbind())
    gather_on = dist.gather if flat.is_cuda else _gather_in_place
    try:
        gather_on(flat, gathered, group=group, group_dst=bucket.members.index(bucket.sender))
    except RuntimeError as error:
        raise sync_error("gather", bucket.describe(), f"a trainer rank is gone or late: {error}") from error
    return None if gathered is None else tuple(gathered)


def _gather_in_place(
    flat: torch.Tensor, gathered: Sequence[torch.Tensor] | None, *, group: dist.ProcessGroup, group_dst: int
) -> None:
    """`dist.gather` over gloo without torch's intermediate tensor and extra copy."""
    if gathered is None:
        dist.send(flat, group=group, group_dst=group_dst)
        return
    others = [(index, part) for index, part in enumerate(gathered) if index != group_dst]
    arriving = [dist.irecv(part, group=group, group_src=index) for index, part in others]
    gathered[group_dst].copy_(flat)
    for work in arriving:
        assert work is not None, "this rank is in the group"
        work.wait()


def convert(bucket: Bucket, gathered: Sequence[torch.Tensor], table: RuleTable) -> torch.Tensor:
    """The flat buffer of Hugging Face tensors, [bucket.converted_numel]; without a copy if the bucket is in order.

    Args:
        gathered: the members' buffers, adjacent in memory as returned by `gather`.
    """
    if bucket.in_order:
        return gathered[0].as_strided((bucket.converted_numel,), (1,))
    sharing = bucket.sharing

    def shards_of(slot: BufferSlot, index: int) -> list[torch.Tensor]:
        ranks = gathered[index * sharing : (index + 1) * sharing]
        return [rank[slot.offset : slot.offset + slot.numel].view(slot.shape) for rank in ranks]

    return _converted(bucket, shards_of, gathered[0].device, table)


def convert_alone(bucket: Bucket, params: Mapping[str, torch.Tensor], table: RuleTable) -> torch.Tensor:
    """Like `convert`, for a bucket with one member: directly from its parameters, without packing.

    Raises:
        WeightSyncError: a parameter is missing or its shape differs from the plan.
    """
    shards = {slot: _shard(bucket, slot, slot.names[0], params).detach() for slot in bucket.slots}
    return _converted(bucket, lambda slot, _: [shards[slot]], shards[bucket.slots[0]].device, table)


def _converted(
    bucket: Bucket, shards_of: Callable[[BufferSlot, int], list[torch.Tensor]], device: torch.device, table: RuleTable
) -> torch.Tensor:
    """A new flat buffer; every tensor is written into it once."""
    flat = torch.empty(bucket.converted_numel, dtype=torch_dtype(bucket.gathered_dtype), device=device)
    pieces, copies = iter(bucket.pieces), list[tuple[torch.Tensor, torch.Tensor]]()
    for slot in bucket.slots:
        for index, name in enumerate(slot.names):
            rule = table.bind(name)
            made = [next(pieces) for _ in rule.hf_names]
            assert [piece.name for piece in made] == list(rule.hf_names), (made, rule.hf_names)
            copies += rule.kind.placed(shards_of(slot, index), [_view(flat, piece) for piece in made])
    copy_each([place for place, _ in copies], [part for _, part in copies])
    return flat


def copy_each(into: list[torch.Tensor], out_of: list[torch.Tensor]) -> None:
    """Copy each tensor to its place, cast to its dtype, in one call for all."""
    torch._foreach_copy_(into, out_of)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]


def encode(bucket: Bucket, flat: torch.Tensor, encoded: Encoded) -> torch.Tensor:
    """The flat buffer that is sent, [bucket.hf_bytes] uint8.

    Args:
        bucket: of the encoded plan, with at least one tensor to quantise.
        flat: of the plain bucket, from `convert`.
    """
    sent = torch.empty(bucket.hf_bytes, dtype=torch.uint8, device=flat.device)
    targets = dict(named_tensors(bucket, sent))
    for name, weight in named_tensors(replace(bucket, entries=bucket.pieces), flat):
        if name in encoded.names:
            plans = encoded.encoding.plans(name, SAFETENSORS_DTYPES[bucket.packed_dtype], tuple(weight.shape))
            for plan, tensor in zip(plans, encoded.encoding.encode(weight), strict=True):
                targets[plan.name].copy_(tensor)
        else:
            targets[name].copy_(weight)
    return sent


def named_tensors(bucket: Bucket, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Views of the flat buffer, one for each entry."""
    return [(entry.name, _view(flat, entry)) for entry in bucket.entries]


def _view(flat: torch.Tensor, entry: BucketEntry) -> torch.Tensor:
    part = flat[entry.offset : entry.offset + entry.size]
    return (part.view(torch_dtype(entry.dtype)) if entry.dtype else part).view(entry.shape)
