"""Layouts of gated attention and of gated delta-net layers (https://arxiv.org/abs/2412.06464): reordered row runs.

megatron-core gives every tensor-parallel rank its heads' rows of each part in turn; the files keep whole parts, or
parts grouped by key head. All kinds here are lists of row runs, from which both directions follow (`RowRuns`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mslime.convert.kinds import RowRuns, Run, Shape, equal_cut, equal_shares, shared_groups


@dataclass(frozen=True)
class GatedQKV(RowRuns):
    """Fused query, gate, key and value projections of attention with an output gate.

    megatron-core: for every key-value group its queries, their gates, its key, its value
    (`SelfAttention.get_query_key_value_tensors` with `output_gate`); ranks take equal runs of these rows. Files: the
    query projection holds, head by head, the query's rows and then the gate's.
    """

    heads: int
    groups: int
    head_dim: int
    hidden: int

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        kv = (self.groups * self.head_dim, self.hidden)
        return ((2 * self.heads * self.head_dim, self.hidden), kv, kv)

    def shared_out(self, tp_size: int) -> dict[str, int]:
        return shared_groups(self.heads, self.groups, tp_size)

    def runs(self, tp_rank: int, tp_size: int) -> Iterator[Run]:
        yield from equal_cut(self._whole(), self.full_shape[0], tp_rank, tp_size)

    def _whole(self) -> Iterator[Run]:
        d, per_group = self.head_dim, self.heads // self.groups
        for group in range(self.groups):
            heads = range(group * per_group, (group + 1) * per_group)
            yield from ((0, 2 * head * d, d) for head in heads)
            yield from ((0, (2 * head + 1) * d, d) for head in heads)
            yield from ((part, group * d, d) for part in (1, 2))


@dataclass(frozen=True)
class DeltaHeads:
    """Sizes of a gated delta-net layer.

    Attributes:
        keys, values: number of key heads and of value heads, a multiple of it.
        key_dim, value_dim: features of one.
        hidden: features of the layer's input.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    hidden: int

    @property
    def all_keys(self) -> int:
        """Features of all key heads."""
        return self.keys * self.key_dim

    @property
    def all_values(self) -> int:
        """Features of all value heads."""
        return self.values * self.value_dim

    def shared_out(self) -> dict[str, int]:
        """What tensor parallelism divides; the value heads follow."""
        return {"linear-attention key heads": self.keys}


@dataclass(frozen=True)
class DeltaParts(RowRuns):
    """Fused input projection from whole parts: query with key and value, output gate, beta, alpha (Qwen3.5).

    megatron-core: every rank holds its heads' rows of query, key, value, gate, beta and alpha in turn
    (`GatedDeltaNet.forward`).
    """

    heads: DeltaHeads

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        h = self.heads
        return tuple((rows, h.hidden) for rows in (2 * h.all_keys + h.all_values, h.all_values, h.values, h.values))

    def shared_out(self, tp_size: int) -> dict[str, int]:
        return self.heads.shared_out()

    def runs(self, tp_rank: int, tp_size: int) -> Iterator[Run]:
        h = self.heads
        places = (
            (0, 0, h.all_keys), (0, h.all_keys, h.all_keys), (0, 2 * h.all_keys, h.all_values),
            (1, 0, h.all_values), (2, 0, h.values), (3, 0, h.values),
        )  # fmt: skip
        yield from equal_shares(places, tp_rank, tp_size)


@dataclass(frozen=True)
class DeltaByKeyHead(RowRuns):
    """The same projection from parts that are grouped by key head: [query, key, values, gates], [betas, alphas].

    That is Qwen3-Next's `in_proj_qkvz` and `in_proj_ba` (transformers `fix_query_key_value_ordering`).
    """

    heads: DeltaHeads

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        h = self.heads
        return ((2 * h.all_keys + 2 * h.all_values, h.hidden), (2 * h.values, h.hidden))

    def shared_out(self, tp_size: int) -> dict[str, int]:
        return self.heads.shared_out()

    def runs(self, tp_rank: int, tp_size: int) -> Iterator[Run]:
        h = self.heads
        values, per_key = h.all_values // h.keys, h.values // h.keys
        group = 2 * h.key_dim + 2 * values
        keys = range(tp_rank * (h.keys // tp_size), (tp_rank + 1) * (h.keys // tp_size))
        sizes, at = (h.key_dim, h.key_dim, values, values), 0
        for size in sizes:
            yield from ((0, key * group + at, size) for key in keys)
            at += size
        for first in (0, per_key):
            yield from ((1, key * 2 * per_key + first, per_key) for key in keys)


@dataclass(frozen=True)
class DeltaConv(RowRuns):
    """The causal convolution's weights [features, 1, width]: every rank holds its query, key and value channels."""

    heads: DeltaHeads
    width: int

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return ((2 * self.heads.all_keys + self.heads.all_values, 1, self.width),)

    def shared_out(self, tp_size: int) -> dict[str, int]:
        return self.heads.shared_out()

    def runs(self, tp_rank: int, tp_size: int) -> Iterator[Run]:
        h = self.heads
        places = ((0, 0, h.all_keys), (0, h.all_keys, h.all_keys), (0, 2 * h.all_keys, h.all_values))
        yield from equal_shares(places, tp_rank, tp_size)
