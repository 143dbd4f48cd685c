"""Kinds of gated attention, gated delta-nets and stacked experts: against the models' own slicing, and back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from mslime.convert.kinds import FusedGatedMLP, InterleavedGatedMLP, Kind, TransposedRow
from mslime.convert.kinds_delta import DeltaByKeyHead, DeltaConv, DeltaHeads, DeltaParts, GatedQKV

HEADS = DeltaHeads(keys=4, values=12, key_dim=3, value_dim=2, hidden=5)
KINDS: list[Kind] = [
    GatedQKV(heads=8, groups=2, head_dim=3, hidden=5), DeltaParts(HEADS), DeltaByKeyHead(HEADS),
    DeltaConv(HEADS, width=4), FusedGatedMLP(ffn=8, hidden=5), InterleavedGatedMLP(ffn=8, hidden=5),
    InterleavedGatedMLP(ffn=8, hidden=None), TransposedRow((5, 8)),
]  # fmt: skip


def parts_of(kind: Kind) -> list[torch.Tensor]:
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


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_shards_have_their_shape_and_give_the_tensors_back(kind: Kind, ranks: int) -> None:
    parts = parts_of(kind)
    shards = shards_of(kind, parts, ranks)
    assert {tuple(shard.shape) for shard in shards} == {kind.local_shape(ranks)}
    assert all(shard.is_contiguous() for shard in shards)
    back = kind.unshard(shards)
    assert all(torch.equal(mine, yours) for mine, yours in zip(back, parts, strict=True))
    assert all(tensor.is_contiguous() for tensor in back)
    into = [torch.full_like(part, torch.nan) for part in parts]
    for place, part in kind.placed(shards, into):
        assert place.shape == part.shape
        place.copy_(part)
    assert all(torch.equal(mine, yours) for mine, yours in zip(into, parts, strict=True))


def test_gated_attention_sees_each_groups_queries_gates_key_and_value() -> None:
    """megatron-core splits the fused rows like this; transformers chunks the query projection head by head."""
    kind = GatedQKV(heads=4, groups=2, head_dim=3, hidden=5)
    query, key, value = parts_of(kind)
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
    qkvz, ba = parts_of(DeltaByKeyHead(h))
    grouped = qkvz.view(h.keys, -1, h.hidden).split([3, 3, 6, 6], 1)
    query, key, value, z = (part.flatten(0, 1) for part in grouped)
    b, a = (part.flatten(0, 1) for part in ba.view(h.keys, -1, h.hidden).split([3, 3], 1))
    whole = [torch.cat([query, key, value]), z, b, a]
    for rank in range(ranks):
        expected = torch.cat([part.chunk(ranks)[rank] for part in (query, key, value, z, b, a)])
        assert torch.equal(DeltaByKeyHead(h).shard([qkvz, ba], rank, ranks), expected)
        assert torch.equal(DeltaParts(h).shard(whole, rank, ranks), expected)


def test_the_convolution_follows_the_projections_channels() -> None:
    (weight,) = parts_of(DeltaConv(HEADS, width=4))
    query, key, value = weight.split([12, 12, 24])
    expected = torch.cat([query[6:], key[6:], value[12:]])
    assert torch.equal(DeltaConv(HEADS, width=4).shard([weight], 1, 2), expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_projections_compute_the_same_as_in_the_file(ranks: int) -> None:
    """GPT-OSS: x @ W with gate and up features in turn; Qwen3.5: W x with all gates before all ups."""
    x = whole_numbers(7, 5)
    (turns,), (bias,) = parts_of(InterleavedGatedMLP(8, 5)), parts_of(InterleavedGatedMLP(8, None))
    (joined,), (down,) = parts_of(FusedGatedMLP(8, 5)), parts_of(TransposedRow((5, 8)))
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
