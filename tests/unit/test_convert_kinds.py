"""Every layout kind against a slow, obvious NumPy reference or the models' own slicing, and there and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.convert.tensor_layouts import (
    Column,
    DeltaByKeyHead,
    DeltaConv,
    DeltaHeads,
    DeltaParts,
    FusedGatedMLP,
    FusedQKV,
    GatedMLP,
    GatedQKV,
    InterleavedGatedMLP,
    Kind,
    Replicated,
    Row,
    TransposedRow,
    Vocabulary,
    padded_vocab_size,
)

HEADS = DeltaHeads(keys=4, values=12, key_dim=3, value_dim=2, hidden=5)
HYBRID: list[Kind] = [
    GatedQKV(heads=8, groups=2, head_dim=3, hidden=5),
    DeltaParts(HEADS),
    DeltaByKeyHead(HEADS),
    DeltaConv(HEADS, width=4),
    FusedGatedMLP(ffn=8, hidden=5),
    InterleavedGatedMLP(ffn=8, hidden=5),
    InterleavedGatedMLP(ffn=8, hidden=None),
    TransposedRow((5, 8)),
]  # fmt: skip
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
    *HYBRID,
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
    assert kind not in HYBRID or all(tensor.is_contiguous() for tensor in (*shards, *back))
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


# ------------------------------------------------------------ gated attention, delta-nets, stacked experts


def numbered_parts(kind: Kind) -> list[torch.Tensor]:
    """Tensors of the kind's Hugging Face shapes in which every number is another."""
    found, at = [], 0
    for shape in kind.hf_shapes:
        numel = torch.Size(shape).numel()
        found.append(torch.arange(at, at + numel, dtype=torch.float32).reshape(shape))
        at += numel
    return found


def whole_numbers(*shape: int) -> torch.Tensor:
    """Small whole numbers in float32, whose products and sums are exact in any order."""
    return torch.arange(torch.Size(shape).numel()).mul(7).remainder(19).sub(9).float().reshape(shape)


def shards_of(kind: Kind, parts: Sequence[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    return [kind.shard(parts, rank, ranks) for rank in range(ranks)]


def test_gated_attention_sees_each_groups_queries_gates_key_and_value() -> None:
    """megatron-core splits the fused rows like this; transformers chunks the query projection head by head."""
    kind = GatedQKV(heads=4, groups=2, head_dim=3, hidden=5)
    query, key, value = numbered_parts(kind)
    by_head = query.view(4, 2, 3, 5)
    expected = [
        torch.cat([by_head[2 * g : 2 * g + 2, 0].flatten(0, 1), by_head[2 * g : 2 * g + 2, 1].flatten(0, 1),
                   key.view(2, 3, 5)[g], value.view(2, 3, 5)[g]])
        for g in range(2)
    ]  # fmt: skip
    assert torch.equal(kind.shard([query, key, value], 0, 1), torch.cat(expected))
    assert torch.equal(kind.shard([query, key, value], 1, 2), expected[1])
    # More ranks than groups: equal runs of rows.
    assert torch.equal(torch.cat(shards_of(kind, [query, key, value], 4)), torch.cat(expected))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_both_layouts_of_the_delta_projection_give_a_rank_its_heads_in_turn(ranks: int) -> None:
    """What transformers' `fix_query_key_value_ordering` cuts out of Qwen3-Next's projections is what a rank holds."""
    h = HEADS
    qkvz, ba = numbered_parts(DeltaByKeyHead(h))
    grouped = qkvz.view(h.keys, -1, h.hidden).split([3, 3, 6, 6], 1)
    query, key, value, z = (part.flatten(0, 1) for part in grouped)
    b, a = (part.flatten(0, 1) for part in ba.view(h.keys, -1, h.hidden).split([3, 3], 1))
    whole = [torch.cat([query, key, value]), z, b, a]
    for rank in range(ranks):
        expected = torch.cat([part.chunk(ranks)[rank] for part in (query, key, value, z, b, a)])
        assert torch.equal(DeltaByKeyHead(h).shard([qkvz, ba], rank, ranks), expected)
        assert torch.equal(DeltaParts(h).shard(whole, rank, ranks), expected)


def test_the_convolution_follows_the_projections_channels() -> None:
    (weight,) = numbered_parts(DeltaConv(HEADS, width=4))
    query, key, value = weight.split([12, 12, 24])
    expected = torch.cat([query[6:], key[6:], value[12:]])
    assert torch.equal(DeltaConv(HEADS, width=4).shard([weight], 1, 2), expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_projections_compute_the_same_as_in_the_file(ranks: int) -> None:
    """GPT-OSS: x @ W with gate and up features in turn; Qwen3.5: W x with all gates before all ups."""
    x = whole_numbers(7, 5)
    (turns,), (bias,) = numbered_parts(InterleavedGatedMLP(8, 5)), numbered_parts(InterleavedGatedMLP(8, None))
    (joined,), (down,) = numbered_parts(FusedGatedMLP(8, 5)), numbered_parts(TransposedRow((5, 8)))
    hidden = whole_numbers(7, 8)
    summed = torch.zeros(7, 5)
    for rank in range(ranks):
        ours = x @ InterleavedGatedMLP(8, 5).shard([turns], rank, ranks).T
        ours += InterleavedGatedMLP(8, None).shard([bias], rank, ranks)
        both = (x @ turns + bias).view(7, 8, 2).chunk(ranks, 1)[rank]
        assert torch.equal(ours, torch.cat([both[..., 0], both[..., 1]], -1))
        gates, ups = (x @ joined.T).chunk(2, -1)
        expected = torch.cat([gates.chunk(ranks, -1)[rank], ups.chunk(ranks, -1)[rank]], -1)
        assert torch.equal(x @ FusedGatedMLP(8, 5).shard([joined], rank, ranks).T, expected)
        summed += hidden.chunk(ranks, -1)[rank] @ TransposedRow((5, 8)).shard([down], rank, ranks).T
    assert torch.equal(summed, hidden @ down)


def test_a_layout_that_does_not_divide_is_named_before_anything_is_read() -> None:
    assert DeltaByKeyHead(HEADS).shared_out(8) == {"linear-attention key heads": 4}
    assert GatedQKV(8, 3, 4, 5).shared_out(2) == {"attention heads": 8, "key-value groups": 3}
    assert InterleavedGatedMLP(8, 5).shared_out(3) == FusedGatedMLP(8, 5).shared_out(3) == {"MLP features": 8}
