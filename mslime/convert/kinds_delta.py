"""Layouts of gated attention and of gated delta-net layers (https://arxiv.org/abs/2412.06464): reordered row runs.

megatron-core gives every tensor-parallel rank its heads' rows of each part in turn; the files keep whole parts, or
parts grouped by key head. All kinds here are lists of row runs, from which both directions follow (`RowRuns`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mslime.convert.kinds import Kind, Shape, Sliceable, cat

if TYPE_CHECKING:
    from torch import Tensor

Run = tuple[int, int, int]
"""Part, first row in it, number of rows."""


class RowRuns(Kind):
    """A parameter whose rows are runs of rows of its Hugging Face tensors, in another order on every rank."""

    tp_axis: int | None = 0

    @abstractmethod
    def runs(self, tp_rank: int, tp_size: int) -> Iterator[Run]:
        """The runs that make the shard of rank `tp_rank`, in order; over all ranks every row comes once."""

    @property
    def full_shape(self) -> Shape:
        shapes = self.hf_shapes
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        return cat([parts[part][first : first + rows] for part, first, rows in _joined(self.runs(tp_rank, tp_size))])

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        found: list[list[tuple[int, Tensor]]] = [[] for _ in self.hf_shapes]
        for rank, shard in enumerate(shards):
            at = 0
            for part, first, rows in self.runs(rank, len(shards)):
                found[part].append((first, shard[at : at + rows]))
                at += rows
            assert at == shard.shape[0], f"{shard.shape[0]} rows, {at} expected"
        return [cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]) for pieces in found]


def _joined(runs: Iterator[Run]) -> Iterator[Run]:
    """Runs that continue each other become one: fewer reads."""
    last: Run | None = None
    for part, first, rows in runs:
        if last is not None and last[0] == part and last[1] + last[2] == first:
            last = (part, last[1], last[2] + rows)
            continue
        if last is not None:
            yield last
        last = (part, first, rows)
    if last is not None:
        yield last


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
        whole_groups = self.groups % tp_size == 0 or tp_size % self.groups == 0
        return {"attention heads": self.heads} | ({} if whole_groups else {"key-value groups": self.groups})

    def runs(self, tp_rank: int, tp_size: int) -> Iterator[Run]:
        size, at = self.full_shape[0] // tp_size, 0
        low, high = tp_rank * size, (tp_rank + 1) * size
        for part, first, rows in self._whole():
            start, stop = max(low, at), min(high, at + rows)
            if start < stop:
                yield part, first + start - at, stop - start
            at += rows

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
        yield from _rank_runs(places, tp_rank, tp_size)


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
        yield from _rank_runs(places, tp_rank, tp_size)


def _rank_runs(places: Sequence[Run], tp_rank: int, tp_size: int) -> Iterator[Run]:
    """One rank's equal share of each of the places, in order."""
    for part, first, rows in places:
        assert rows % tp_size == 0, f"{rows} rows cannot be shared by {tp_size} ranks"
        share = rows // tp_size
        yield part, first + tp_rank * share, share
