"""Packing, gathering and converting give back the Hugging Face tensors bit for bit, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from mslime.config.errors import WeightSyncError
from mslime.weights.buckets import convert, in_memory_order, named_tensors, pack
from mslime.weights.weight_plan import Bucket, Senders, build_plan
from tests.unit.weights_world import LAYOUTS, gathered, local_params, moe_table, plan_of, stages, whole_tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [1, 900, 1 << 30])
@pytest.mark.parametrize("senders", [1, 8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_sent_is_what_the_ranks_hold_bit_for_bit(
    name: str, senders: int, bucket_bytes: int, dtype: str
) -> None:
    layout, table = LAYOUTS[name], moe_table()
    whole = whole_tensors(table, {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])
    ranks = [local_params(table, layout, rank, whole) for rank in range(layout.stage_size)]
    sent: dict[str, torch.Tensor] = {}
    for bucket in plan_of(layout, bucket_bytes, dtype, senders).buckets:
        found = gathered(bucket, lambda rank: ranks[rank % layout.stage_size])
        assert {len(buffer) for buffer in found} == {bucket.local_numel}
        sent.update(named_tensors(bucket, convert(bucket, found, table)))
    assert sent.keys() == whole.keys()
    different = [n for n, t in whole.items() if not torch.equal(sent[n].view(torch.uint8), t.view(torch.uint8))]
    assert not different


def test_the_wire_dtype_rounds_as_torch_does() -> None:
    layout, table = LAYOUTS["one rank"], moe_table()
    whole = whole_tensors(table)
    for bucket in plan_of(layout, dtype="bfloat16").buckets:
        flat = convert(bucket, [pack(bucket, local_params(table, layout, 0, whole), 0)], table)
        assert all(torch.equal(tensor, whole[name].bfloat16()) for name, tensor in named_tensors(bucket, flat))


def test_a_parameter_that_is_not_what_the_plan_says_is_named() -> None:
    layout, table = LAYOUTS["one rank"], moe_table()
    params = local_params(table, layout, 0, whole_tensors(table))
    bucket = plan_of(layout).buckets[0]
    name = bucket.slots[1].names[0]
    with pytest.raises(WeightSyncError, match=rf"{name}.*found \(3,\)"):
        pack(bucket, params | {name: torch.zeros(3)}, 0)
    del params[name]
    with pytest.raises(WeightSyncError, match=rf"{name}.*found None"):
        pack(bucket, params, 0)


def test_our_flat_buffer_is_sglangs_flattened_bucket() -> None:
    """Same bytes and same metadata as the engine's own class makes of the same tensors."""
    bucket_class = sglang_bucket_class()
    layout, table = LAYOUTS["one rank"], moe_table()
    whole = whole_tensors(table, torch.bfloat16)
    for bucket in plan_of(layout, 900, "bfloat16").buckets:
        flat = convert(bucket, [pack(bucket, local_params(table, layout, 0, whole), 0)], table)
        theirs = bucket_class(named_tensors=[(entry.name, whole[entry.name]) for entry in bucket.entries])
        assert torch.equal(theirs.get_flattened_tensor(), flat.view(torch.uint8))
        size = flat.element_size()
        for meta, entry in zip(theirs.get_metadata(), bucket.entries, strict=True):
            assert (meta.name, meta.start_idx, tuple(meta.shape)) == (entry.name, entry.offset * size, entry.shape)


def sglang_bucket_class() -> type:
    """`FlattenedTensorBucket` from its file alone: importing the package would need the engine's CPU platform."""
    import importlib.metadata
    import importlib.util
    import sys

    path = importlib.metadata.distribution("sglang").locate_file("sglang/srt/weight_sync/tensor_bucket.py")
    spec = importlib.util.spec_from_file_location("sglang_tensor_bucket", str(path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.FlattenedTensorBucket


def in_one_buffer(bucket: Bucket, rank: int, gap: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Parameters of a bucket as views of one buffer, with so many elements between the first two."""
    numbers = torch.arange(bucket.local_numel + gap, dtype=dtype)
    held: dict[str, torch.Tensor] = {}
    at = 0
    for slot, name in zip(bucket.slots, bucket.packed_by(rank), strict=True):
        held[name] = numbers[at : at + slot.numel].view(slot.shape)
        at += slot.numel + (gap if not held.keys() - {name} else 0)
    return held


@pytest.mark.parametrize(
    ("gap", "dtype", "moved"), [(0, "float32", False), (3, "float32", True), (0, "bfloat16", True)]
)
def test_parameters_that_lie_right_are_sent_as_they_lie(gap: int, dtype: str, moved: bool) -> None:
    bucket = next(b for b in plan_of(LAYOUTS["dp4 ep4"], senders=4).buckets if b.sender == 2 and b.in_order)
    assert len(bucket.slots) > 3
    params = in_one_buffer(bucket, 2, gap, getattr(torch, dtype))
    sent = convert(bucket, [pack(bucket, params, 2)], moe_table())
    first = next(iter(params.values()))
    assert (sent.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()) == moved
    assert torch.equal(sent, torch.cat([p.reshape(-1) for p in params.values()]).to(torch.float32))


def test_parameters_of_several_storages_that_are_neighbours_are_copied() -> None:
    """A view of the first one's memory may not reach into the others'."""
    bucket = next(b for b in plan_of(LAYOUTS["dp4 ep4"], senders=4).buckets if b.sender == 2 and b.in_order)
    params = in_one_buffer(bucket, 2, 0, torch.float32)
    apart = {name: torch.from_numpy(param.numpy()) for name, param in params.items()}
    ends = [param.data_ptr() + param.nbytes for param in apart.values()]
    assert ends[:-1] == [param.data_ptr() for param in apart.values()][1:]
    assert len({param.untyped_storage().data_ptr() for param in apart.values()}) == len(apart)
    packed = pack(bucket, apart, 2)
    assert packed.data_ptr() != next(iter(apart.values())).data_ptr()
    assert torch.equal(packed, torch.cat([p.reshape(-1) for p in params.values()]))


@pytest.mark.parametrize("senders", [1, 4])
@pytest.mark.parametrize("name", ["dp4 ep4", "tp2 ep2", "tp2 etp2", "tp2 dp2 ep2 etp2"])
def test_parameters_that_lie_backwards_are_sent_backwards(name: str, senders: int) -> None:
    """As in megatron-core's buffers, of the experts and of all else: from the last parameter to the first. Nobody packs
    them, whether they are gathered or not."""
    layout, table = LAYOUTS[name], moe_table()
    whole = whole_tensors(table)
    lying = [backwards(local_params(table, layout, rank, whole)) for rank in range(layout.stage_size)]
    positions = {name: at for held in lying for at, name in enumerate(in_memory_order(held))}
    chosen = Senders.at_most(layout, senders)
    plan = build_plan(table, chosen, stages(layout), "float32", 3000, positions)
    sent: dict[str, torch.Tensor] = {}
    packed = [b for b in plan.buckets if len(b.members) > 1 or "local_experts" in b.slots[0].names[0]]
    assert sum(len(bucket.slots) > 1 for bucket in packed) > 3
    for bucket in plan.buckets:
        for rank in bucket.members if bucket in packed else ():
            first = lying[rank][bucket.packed_by(rank)[0]]
            assert pack(bucket, lying[rank], rank).data_ptr() == first.data_ptr(), "a view"
        found = gathered(bucket, lambda rank: lying[rank])
        sent |= named_tensors(bucket, convert(bucket, found, table))
    assert sent.keys() == whole.keys() and all(torch.equal(sent[n], tensor) for n, tensor in whole.items())


def backwards(params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same parameters as views of two buffers."""
    lying: dict[str, torch.Tensor] = {}
    for experts in (True, False):
        held = {name: param for name, param in params.items() if ("local_experts" in name) == experts}
        buffer = torch.cat([param.reshape(-1) for param in reversed(held.values())])
        at = len(buffer)
        for name, param in held.items():
            at -= param.numel()
            lying[name] = buffer[at : at + param.numel()].view(param.shape)
        order = in_memory_order({name: lying[name] for name in held})
        assert order == list(reversed(held)) and in_memory_order(held) == list(held)
    return lying


def test_a_turned_parameter_is_copied() -> None:
    bucket = next(b for b in plan_of(LAYOUTS["one rank"], 1).buckets if b.slots[0].shape == (21, 8))
    turned = torch.randn(8, 21).T
    assert torch.equal(pack(bucket, {bucket.slots[0].names[0]: turned}, 0), turned.reshape(-1))
