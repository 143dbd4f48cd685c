"""Layouts of one Megatron parameter in Hugging Face tensors, for both directions.

A kind uses shapes and slices only: no names, no files, no process groups. Rank `r` of `n` tensor-parallel ranks holds
`shard(parts, r, n)`; `unshard` of all shards in rank order returns the parts, bit for bit. Parts are any objects with a
shape that can be indexed: a lazy view of a safetensors file reads only the requested rows. Torch is imported only where
tensors are made; rules are declared without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


Shape = tuple[int, ...]
Run = tuple[int, int, int]
"""Part, first row in it, number of rows."""


class Sliceable(Protocol):
    """A tensor, or a view of a file that becomes one when indexed."""

    def __getitem__(self, index: Any, /) -> Tensor: ...


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Rows of the embedding that `tp_size` ranks share evenly: `vocab_size` rounded up to a multiple of `tp_size`."""
    return -(-vocab_size // tp_size) * tp_size


Joined = tuple[Sequence["Tensor"], int]
"""Parts of a tensor, and the dimension along which they are joined."""


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat`, without a copy for a single tensor."""
    import torch

    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim)


def rank_range(size: int, rank: int, ranks: int) -> slice:
    """Rows of `rank` if `ranks` ranks share `size` rows evenly."""
    assert size % ranks == 0, f"{size} rows cannot be shared by {ranks} ranks"
    step = size // ranks
    return slice(rank * step, (rank + 1) * step)


def features(out: int, hidden: int | None) -> Shape:
    """Shape of a linear layer's weight, or of its bias if `hidden` is None."""
    return (out,) if hidden is None else (out, hidden)


class Kind(ABC):
    """Layout of one Megatron parameter.

    Attributes:
        tp_axis: dimension that tensor parallelism splits, None if every rank holds the whole.
    """

    tp_axis: int | None

    @property
    @abstractmethod
    def hf_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the Hugging Face tensors, in the order of the rule's names."""

    @property
    def full_shape(self) -> Shape:
        """Shape of the whole Megatron parameter (one tensor-parallel rank, no padding); by default the one tensor's."""
        return self.hf_shapes[0]

    @abstractmethod
    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        """Shard of rank `tp_rank` of `tp_size`, in the dtype of the parts."""

    @abstractmethod
    def joined(self, shards: Sequence[Tensor]) -> list[Joined]:
        """Parts of each Hugging Face tensor: views of the shards of all ranks in rank order, where possible."""

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The Hugging Face tensors, from the shards of all ranks in rank order."""
        return [cat(parts, dim).contiguous() for parts, dim in self.joined(shards)]

    def placed(self, shards: Sequence[Tensor], into: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The copies of `unshard` into existing tensors: (target, part), views of the same shape."""
        for (parts, dim), whole in zip(self.joined(shards), into, strict=True):
            sizes = [part.shape[dim] for part in parts]
            assert sum(sizes) == whole.shape[dim], f"{sizes} along {dim} of shards, {tuple(whole.shape)} expected"
            yield from zip(whole.split_with_sizes(sizes, dim) if len(parts) > 1 else [whole], parts, strict=True)

    def in_order(self, tp_size: int) -> bool:
        """Whether the shards of `tp_size` ranks in order are the Hugging Face tensors in order."""
        return False

    def shared_out(self, tp_size: int) -> dict[str, int]:
        """Quantities that `tp_size` ranks must share evenly, by name; for checks before anything is built."""
        return {} if self.tp_axis is None else {"features": self.full_shape[self.tp_axis]}

    def local_shape(self, tp_size: int) -> Shape:
        """Shape of one rank's shard."""
        if self.tp_axis is None:
            return self.full_shape
        sizes = list(self.full_shape)
        assert sizes[self.tp_axis] % tp_size == 0, f"{sizes} cannot be shared by {tp_size} ranks"
        sizes[self.tp_axis] //= tp_size
        return tuple(sizes)


@dataclass(frozen=True)
class Replicated(Kind):
    """The same tensor on every rank: norms, the router."""

    shape: Shape
    tp_axis: int | None = None

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return (self.shape,)

    def in_order(self, tp_size: int) -> bool:
        return tp_size == 1

    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        return parts[0][...]

    def joined(self, shards: Sequence[Tensor]) -> list[Joined]:
        return [(shards[:1], 0)]


@dataclass(frozen=True)
class OneForAll(Kind):
    """A tensor shared by all experts, whole on every rank; files hold it as a stack of one, [1, ...]."""

    one: Kind
    tp_axis: int | None = None

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return tuple((1, *shape) for shape in self.one.hf_shapes)

    @property
    def full_shape(self) -> Shape:
        return self.one.full_shape

    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        return self.one.shard([part[...][0] for part in parts], tp_rank, tp_size)

    def joined(self, shards: Sequence[Tensor]) -> list[Joined]:
        return [([part[None] for part in parts], dim + 1) for parts, dim in self.one.joined(shards)]


@dataclass(frozen=True)
class Sharded(Kind):
    """One tensor whose dimension `axis` is split evenly; `Column` and `Row` name the two usual ones."""

    shape: Shape
    axis: int
    tp_axis: int | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tp_axis", self.axis)

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return (self.shape,)

    def in_order(self, tp_size: int) -> bool:
        return tp_size == 1 or self.axis == 0

    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        mine = rank_range(self.shape[self.axis], tp_rank, tp_size)
        return parts[0][(*[slice(None)] * self.axis, mine)]

    def joined(self, shards: Sequence[Tensor]) -> list[Joined]:
        return [(shards, self.axis)]


def Column(shape: Shape) -> Sharded:
    """A linear layer [out, in] (or its bias [out]) whose output features are split."""
    return Sharded(shape, 0)


def Row(shape: Shape) -> Sharded:
    """A linear layer [out, in] whose input features are split; its bias [out] is `Replicated`."""
    return Sharded(shape, 1)


@dataclass(frozen=True)
class Vocabulary(Kind):
    """Embedding or output layer [vocabulary, hidden]: rows are split, padded with zero rows to divide evenly."""

    vocab_size: int
    hidden: int
    tp_axis: int | None = 0

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return ((self.vocab_size, self.hidden),)

    def shared_out(self, tp_size: int) -> dict[str, int]:
        return {}

    def in_order(self, tp_size: int) -> bool:
        return padded_vocab_size(self.vocab_size, tp_size) == self.vocab_size

    def local_shape(self, tp_size: int) -> Shape:
        return (padded_vocab_size(self.vocab_size, tp_size) // tp_size, self.hidden)

    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        rows = rank_range(padded_vocab_size(self.vocab_size, tp_size), tp_rank, tp_size)
        real = parts[0][min(rows.start, self.vocab_size) : min(rows.stop, self.vocab_size)]
        missing = rows.stop - rows.start - real.shape[0]
        return cat([real, real.new_zeros(missing, self.hidden)]) if missing else real

    def joined(self, shards: Sequence[Tensor]) -> list[Joined]:
        firsts = range(0, len(shards) * shards[0].shape[0], shards[0].shape[0])
        return [([shard[: max(0, self.vocab_size - at)] for at, shard in zip(firsts, shards, strict=True)], 0)]


# Rows in another order


class RowRuns(Kind):
    """A parameter whose rows are runs of rows of its Hugging Face tensors, in another order on every rank.

    A kind defines only `runs`: both directions follow from it.
    """

    tp_axis: int | None = 0

    @abstractmethod
    def runs(self, tp_rank: int, tp_size: int) -> Iterator[Run]:
        """The runs of the shard of rank `tp_rank`, in order; each row belongs to exactly one rank."""

    @property
    def full_shape(self) -> Shape:
        shapes = self.hf_shapes
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def in_order(self, tp_size: int) -> bool:
        runs = _joined(run for rank in range(tp_size) for run in self.runs(rank, tp_size))
        return list(runs) == [(part, 0, shape[0]) for part, shape in enumerate(self.hf_shapes)]

    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        return cat([parts[part][first : first + rows] for part, first, rows in _joined(self.runs(tp_rank, tp_size))])

    def joined(self, shards: Sequence[Tensor]) -> list[Joined]:
        found: list[list[tuple[int, Tensor]]] = [[] for _ in self.hf_shapes]
        for rank, shard in enumerate(shards):
            at = 0
            for part, first, rows in self.runs(rank, len(shards)):
                found[part].append((first, shard[at : at + rows]))
                at += rows
            assert at == shard.shape[0], f"{shard.shape[0]} rows, {at} expected"
        return [([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], 0) for pieces in found]


def _joined(runs: Iterator[Run]) -> Iterator[Run]:
    """Join adjacent runs, which saves reads."""
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


def equal_shares(places: Sequence[Run], tp_rank: int, tp_size: int) -> Iterator[Run]:
    """One rank's equal share of each of the places, in order."""
    for part, first, rows in places:
        assert rows % tp_size == 0, f"{rows} rows cannot be shared by {tp_size} ranks"
        share = rows // tp_size
        yield part, first + tp_rank * share, share


def equal_cut(whole: Iterable[Run], rows: int, tp_rank: int, tp_size: int) -> Iterator[Run]:
    """One rank's equal share of the `rows` rows in `whole`, in order; a run may be cut."""
    mine, at = rank_range(rows, tp_rank, tp_size), 0
    for part, first, size in whole:
        start, stop = max(mine.start, at), min(mine.stop, at + size)
        if start < stop:
            yield part, first + start - at, stop - start
        at += size


def shared_groups(heads: int, groups: int, tp_size: int) -> dict[str, int]:
    """Quantities of grouped-query attention that `tp_size` ranks must share evenly (`Kind.shared_out`)."""
    whole_groups = groups % tp_size == 0 or tp_size % groups == 0
    return {"attention heads": heads} | ({} if whole_groups else {"key-value groups": groups})


@dataclass(frozen=True)
class GatedMLP(RowRuns):
    """SwiGLU's first layer: gate and up projections [ffn, hidden]; every rank holds [its gate rows; its up rows].

    With `hidden` None, the biases [ffn] of the two.
    """

    ffn: int
    hidden: int | None

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return (features(self.ffn, self.hidden), features(self.ffn, self.hidden))

    def shared_out(self, tp_size: int) -> dict[str, int]:
        return {"MLP features": self.ffn}

    def runs(self, tp_rank: int, tp_size: int) -> Iterator[Run]:
        yield from equal_shares(((0, 0, self.ffn), (1, 0, self.ffn)), tp_rank, tp_size)


@dataclass(frozen=True)
class FusedGatedMLP(GatedMLP):
    """`GatedMLP` for a checkpoint with gate and up projections in one tensor [2 * ffn, hidden], gate first."""

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return (features(2 * self.ffn, self.hidden),)

    def runs(self, tp_rank: int, tp_size: int) -> Iterator[Run]:
        yield from equal_shares(((0, 0, self.ffn), (0, self.ffn, self.ffn)), tp_rank, tp_size)


@dataclass(frozen=True)
class Heads(RowRuns):
    """A vector [heads * head_dim] that is split by whole attention heads."""

    heads: int
    head_dim: int

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return ((self.heads * self.head_dim,),)

    def shared_out(self, tp_size: int) -> dict[str, int]:
        return {"heads with a joint norm": self.heads}

    def runs(self, tp_rank: int, tp_size: int) -> Iterator[Run]:
        yield from equal_shares(((0, 0, self.heads * self.head_dim),), tp_rank, tp_size)


@dataclass(frozen=True)
class FusedQKV(RowRuns):
    """Query, key and value projections, interleaved by key-value group: [q of group 0, k 0, v 0, q of group 1, ...].

    With `hidden` None, the three biases. Ranks take equal runs of rows. With more ranks than groups a run ends inside a
    group, and megatron-core gathers the activations back (`SelfAttention.get_query_key_value_tensors`), so the row runs
    are the same rule.
    """

    heads: int
    groups: int
    head_dim: int
    hidden: int | None

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        kv = features(self.groups * self.head_dim, self.hidden)
        return (features(self.heads * self.head_dim, self.hidden), kv, kv)

    def shared_out(self, tp_size: int) -> dict[str, int]:
        return shared_groups(self.heads, self.groups, tp_size)

    def runs(self, tp_rank: int, tp_size: int) -> Iterator[Run]:
        sizes = (self.heads // self.groups * self.head_dim, self.head_dim, self.head_dim)
        whole = ((part, group * size, size) for group in range(self.groups) for part, size in enumerate(sizes))
        yield from equal_cut(whole, self.full_shape[0], tp_rank, tp_size)


@dataclass(frozen=True)
class InterleavedGatedMLP(Kind):
    """A gated first layer in one tensor [hidden, 2 * ffn], with alternating gate and up features (GPT-OSS).

    With `hidden` None, its bias [2 * ffn]. Every rank holds [its gate rows; its up rows].
    """

    ffn: int
    hidden: int | None
    tp_axis: int | None = 0

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return (tuple(reversed(self.full_shape)),)

    @property
    def full_shape(self) -> Shape:
        return features(2 * self.ffn, self.hidden)

    def shared_out(self, tp_size: int) -> dict[str, int]:
        return {"MLP features": self.ffn}

    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        mine = rank_range(2 * self.ffn, tp_rank, tp_size)
        both = parts[0][mine if self.hidden is None else (slice(None), mine)]
        return cat([both[..., 0::2].mT, both[..., 1::2].mT] if both.ndim == 2 else [both[0::2], both[1::2]])

    def joined(self, shards: Sequence[Tensor]) -> list[Joined]:
        import torch

        turns = [torch.stack(shard.chunk(2, 0), 1).flatten(0, 1) for shard in shards]
        return [([turn.mT for turn in turns], 1) if self.hidden is not None else (turns, 0)]


@dataclass(frozen=True)
class TransposedRow(Kind):
    """A linear layer [out, in] whose input features are split, stored as [in, out] (GPT-OSS)."""

    shape: Shape
    tp_axis: int | None = 1

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return (tuple(reversed(self.shape)),)

    @property
    def full_shape(self) -> Shape:
        return self.shape

    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        return parts[0][rank_range(self.shape[1], tp_rank, tp_size)].mT.contiguous()

    def joined(self, shards: Sequence[Tensor]) -> list[Joined]:
        return [([shard.mT for shard in shards], 0)]


# Layouts of gated attention and of gated delta-net layers (https://arxiv.org/abs/2412.06464): reordered row runs.
#
# megatron-core gives every tensor-parallel rank its heads' rows of each part in turn; the files keep whole parts, or
# parts grouped by key head. All kinds here are lists of row runs, from which both directions follow (`RowRuns`).


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


@dataclass(frozen=True)
class DeltaKind(RowRuns):
    """A parameter of a gated delta-net layer; tensor parallelism divides its key heads, and the value heads follow."""

    heads: DeltaHeads

    def shared_out(self, tp_size: int) -> dict[str, int]:
        return {"linear-attention key heads": self.heads.keys}


@dataclass(frozen=True)
class DeltaParts(DeltaKind):
    """Fused input projection from whole parts: query with key and value, output gate, beta, alpha (Qwen3.5).

    megatron-core: every rank holds its heads' rows of query, key, value, gate, beta and alpha in turn
    (`GatedDeltaNet.forward`).
    """

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        h = self.heads
        return tuple((rows, h.hidden) for rows in (2 * h.all_keys + h.all_values, h.all_values, h.values, h.values))

    def runs(self, tp_rank: int, tp_size: int) -> Iterator[Run]:
        h = self.heads
        places = (
            (0, 0, h.all_keys), (0, h.all_keys, h.all_keys), (0, 2 * h.all_keys, h.all_values),
            (1, 0, h.all_values), (2, 0, h.values), (3, 0, h.values),
        )  # fmt: skip
        yield from equal_shares(places, tp_rank, tp_size)


@dataclass(frozen=True)
class DeltaByKeyHead(DeltaKind):
    """The same projection from parts that are grouped by key head: [query, key, values, gates], [betas, alphas].

    That is Qwen3-Next's `in_proj_qkvz` and `in_proj_ba` (transformers `fix_query_key_value_ordering`).
    """

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        h = self.heads
        return ((2 * h.all_keys + 2 * h.all_values, h.hidden), (2 * h.values, h.hidden))

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
class DeltaConv(DeltaKind):
    """The causal convolution's weights [features, 1, width]: every rank holds its query, key and value channels."""

    width: int

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return ((2 * self.heads.all_keys + self.heads.all_values, 1, self.width),)

    def runs(self, tp_rank: int, tp_size: int) -> Iterator[Run]:
        h = self.heads
        places = ((0, 0, h.all_keys), (0, h.all_keys, h.all_keys), (0, 2 * h.all_keys, h.all_values))
        yield from equal_shares(places, tp_rank, tp_size)
