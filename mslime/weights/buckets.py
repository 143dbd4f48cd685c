"""Filling a bucket: every rank packs its shards, one gather brings them to the stage leader, which converts them.

The result is one flat buffer in the order of the bucket's entries, in which tensors follow each other without gaps:
engines call it a flattened bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from mslime.config.errors import sync_error
from mslime.convert.table import RuleTable
from mslime.weights.plan import Bucket

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pack(bucket: Bucket, params: Mapping[str, torch.Tensor], ep_rank: int) -> torch.Tensor:
    """This rank's shards of a bucket in one buffer.

    Args:
        bucket: of this rank's stage.
        params: local parameters by canonical name, any dtype (cast to the bucket's while copying).
        ep_rank: this rank's expert-parallel index.

    Returns:
        [bucket.local_numel], the bucket's dtype, on the parameters' device.

    Raises:
        WeightSyncError: a parameter is missing or has another shape than the plan says.
    """
    flat: torch.Tensor | None = None
    for slot in bucket.slots:
        name = slot.names[ep_rank] if bucket.expert else slot.names[0]
        param = params.get(name)
        if param is None or tuple(param.shape) != slot.shape:
            found = None if param is None else tuple(param.shape)
            raise sync_error(
                "gather", f"{bucket.describe()}: {name}", f"the plan expects shape {slot.shape}, found {found}",
                "build the rules from the config.json and the layout that the model was built from",
            )  # fmt: skip
        if flat is None:
            flat = torch.empty(bucket.local_numel, dtype=wire_dtype(bucket), device=param.device)
        flat[slot.offset : slot.offset + slot.numel].copy_(param.detach().reshape(-1))
    assert flat is not None, "a bucket is never empty"
    return flat


def gather(bucket: Bucket, flat: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor] | None:
    """The bucket's one collective: all ranks' buffers, in rank order, on the group's first rank; None on the others.

    Args:
        flat: from `pack`, the same size on every rank.
        group: the bucket's gather group; None when this rank is alone.

    Raises:
        WeightSyncError: a rank of the group died or missed the group's timeout.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [flat]
    leader = dist.get_rank(group) == 0
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))] if leader else None
    try:
        dist.gather(flat, gathered, group=group, group_dst=0)
    except RuntimeError as error:
        raise sync_error("gather", bucket.describe(), f"a trainer rank is gone or late: {error}") from error
    return gathered


def convert(bucket: Bucket, gathered: Sequence[torch.Tensor], table: RuleTable) -> torch.Tensor:
    """The flat buffer that is sent, [bucket.hf_numel], from the gathered buffers.

    The expert grid counts expert-tensor parallelism fastest: rank i of the group is (etp i % etp, ep i // etp).
    """
    flat = torch.empty(bucket.hf_numel, dtype=gathered[0].dtype, device=gathered[0].device)
    ep = len(bucket.slots[0].names)
    tp_size = len(gathered) // ep
    pieces = iter(bucket.pieces)
    for slot in bucket.slots:
        for index, name in enumerate(slot.names):
            ranks = gathered[index * tp_size : (index + 1) * tp_size]
            shards = [rank[slot.offset : slot.offset + slot.numel].view(slot.shape) for rank in ranks]
            for hf_name, tensor in table.bind(name).to_hf(shards):
                piece = next(pieces)
                assert (piece.name, piece.shape) == (hf_name, tuple(tensor.shape)), (piece, hf_name, tensor.shape)
                flat[piece.offset : piece.offset + piece.numel].view(piece.shape).copy_(tensor)
    return flat


def named_tensors(bucket: Bucket, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Views of the flat buffer, one for each entry."""
    return [(e.name, flat[e.offset : e.offset + e.numel].view(e.shape)) for e in bucket.entries]


def wire_dtype(bucket: Bucket) -> torch.dtype:
    """The bucket's torch dtype."""
    return TORCH_DTYPES[bucket.dtype]
