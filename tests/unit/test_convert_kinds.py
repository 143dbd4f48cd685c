"""Every layout kind against a slow, obvious NumPy reference, and there and back bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.convert.tensor_layouts import (
    Column,
    FusedQKV,
    GatedMLP,
    Kind,
    Replicated,
    Row,
    Vocabulary,
    padded_vocab_size,
)

KINDS: list[Kind] = [
    Replicated((12,)),
    Column((8, 6)),
    Row((6, 8)),
    Vocabulary(18, 4),
    Vocabulary(16, 4),
    GatedMLP(8, 6),
    FusedQKV(8, 4, 2, 6),
    FusedQKV(8, 2, 2, 6),  # fewer key-value groups than the widest tensor parallelism below
    FusedQKV(4, 4, 2, 6),  # no grouping
]


def parts_of(kind: Kind, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Parts whose elements are all different, so that any misplaced row shows."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in kind.hf_shapes]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_shards_put_together_are_the_parts_bit_for_bit(kind: Kind, tp_size: int, dtype: torch.dtype) -> None:
    parts = parts_of(kind, dtype)
    shards = [kind.shard(parts, rank, tp_size) for rank in range(tp_size)]
    assert {tuple(shard.shape) for shard in shards} == {kind.local_shape(tp_size)}
    back = kind.unshard(shards)
    assert [tuple(tensor.shape) for tensor in back] == list(kind.hf_shapes)
    assert [bits(tensor) for tensor in back] == [bits(part) for part in parts]
    into = [torch.full(shape, torch.nan) for shape in kind.hf_shapes]
    for place, part in kind.placed(shards, into):
        place.copy_(part)
    assert [bits(tensor) for tensor in into] == [bits(part.float()) for part in parts]


@pytest.mark.parametrize("rows", [5, 7])
def test_shards_of_another_size_than_their_place_are_an_invariant_violation(rows: int) -> None:
    place = torch.zeros(100)[:36].view(6, 6)
    with pytest.raises(AssertionError, match=f"{rows}.* along 0 of shards, .*6, 6.* expected"):
        list(Column((6, 6)).placed([torch.ones(rows, 6)], [place]))


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_one_rank_holds_the_full_shape(kind: Kind) -> None:
    assert tuple(kind.shard(parts_of(kind), 0, 1).shape) == kind.full_shape == kind.local_shape(1)


@given(
    groups=st.sampled_from([1, 2, 4]),
    per_group=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([2, 4]),
    tp_size=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=30, deadline=None)
def test_fused_qkv_interleaves_by_group(groups: int, per_group: int, head_dim: int, tp_size: int) -> None:
    kind = FusedQKV(groups * per_group, groups, head_dim, 3)
    q, k, v = (part.numpy() for part in parts_of(kind))
    rows: list[np.ndarray] = []
    for group in range(groups):
        for head in range(per_group):
            start = (group * per_group + head) * head_dim
            rows.extend(q[start + i] for i in range(head_dim))
        for part in (k, v):
            rows.extend(part[group * head_dim + i] for i in range(head_dim))
    if len(rows) % tp_size:
        return
    shards = [kind.shard(parts_of(kind), rank, tp_size) for rank in range(tp_size)]
    assert np.array_equal(np.stack(rows), torch.cat(shards).numpy())


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_gated_mlp_keeps_gate_above_up_on_every_rank(tp_size: int) -> None:
    kind = GatedMLP(8, 6)
    gate, up = (part.numpy() for part in parts_of(kind))
    for rank in range(tp_size):
        rows = range(rank * 8 // tp_size, (rank + 1) * 8 // tp_size)
        expected = np.stack([gate[row] for row in rows] + [up[row] for row in rows])
        assert np.array_equal(kind.shard(parts_of(kind), rank, tp_size).numpy(), expected)


def test_row_splits_columns_and_column_splits_rows() -> None:
    weight = torch.arange(24.0).view(4, 6)
    assert torch.equal(Row((4, 6)).shard([weight], 1, 2), weight[:, 3:])
    assert torch.equal(Column((4, 6)).shard([weight], 1, 2), weight[2:])


def test_vocabulary_is_padded_with_zero_rows_that_are_never_exported() -> None:
    kind = Vocabulary(5, 2)
    weight = torch.ones(5, 2)
    shards = [kind.shard([weight], rank, 4) for rank in range(4)]
    assert padded_vocab_size(5, 4) == 8 and [len(shard) for shard in shards] == [2, 2, 2, 2]
    assert torch.equal(torch.cat(shards), torch.cat([weight, torch.zeros(3, 2)]))
    assert torch.equal(kind.unshard(shards)[0], weight)


def test_rows_that_do_not_divide_are_an_invariant_violation() -> None:
    with pytest.raises(AssertionError, match="cannot be shared"):
        Column((6, 2)).shard([torch.zeros(6, 2)], 0, 4)
