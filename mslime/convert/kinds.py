"""How one Megatron parameter is made of Hugging Face tensors, and back: every kind of layout, written once.

A kind knows shapes and slices only: no names, no files, no process groups. Rank `r` of `n` tensor-parallel ranks holds
`shard(parts, r, n)`; `unshard` of all shards in rank order gives the parts back, bit for bit. Parts are anything that
has a shape and can be indexed, so that a lazy view of a safetensors file reads only the rows that are asked for.
Torch is imported where tensors are made, so that declaring rules does not need it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


class Sliceable(Protocol):
    """A tensor, or a view of a file that becomes one when indexed."""

    def __getitem__(self, index: Any, /) -> Tensor: ...


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Rows of the embedding that `tp_size` ranks share evenly: `vocab_size` rounded up to a multiple of `tp_size`."""
    return -(-vocab_size // tp_size) * tp_size


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat`, without a copy where there is one tensor."""
    import torch

    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim)


def rank_range(size: int, rank: int, ranks: int) -> slice:
    """The run of `size` rows that `rank` of `ranks` holds when they share evenly."""
    assert size % ranks == 0, f"{size} rows cannot be shared by {ranks} ranks"
    step = size // ranks
    return slice(rank * step, (rank + 1) * step)


def features(out: int, hidden: int | None) -> Shape:
    """Shape of a linear layer's weight, or of its bias where `hidden` is None."""
    return (out,) if hidden is None else (out, hidden)


class Kind(ABC):
    """The layout of one Megatron parameter.

    Attributes:
        tp_axis: dimension that tensor parallelism splits, None when every rank holds the whole.
    """

    tp_axis: int | None

    @property
    @abstractmethod
    def hf_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the Hugging Face tensors, in the order of the rule's names."""

    @property
    @abstractmethod
    def full_shape(self) -> Shape:
        """Shape of the whole Megatron parameter (one tensor-parallel rank, no padding)."""

    @abstractmethod
    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        """What rank `tp_rank` of `tp_size` holds, dtype of the parts."""

    @abstractmethod
    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The Hugging Face tensors, from the shards of all ranks in rank order."""

    def shared_out(self, tp_size: int) -> dict[str, int]:
        """What `tp_size` ranks must share evenly, by name in plain words; for the check before anything is built."""
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

    @property
    def full_shape(self) -> Shape:
        return self.shape

    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        return parts[0][...]

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Sharded(Kind):
    """One tensor whose dimension `axis` is shared out evenly; `Column` and `Row` name the two usual ones."""

    shape: Shape
    axis: int
    tp_axis: int | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tp_axis", self.axis)

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return (self.shape,)

    @property
    def full_shape(self) -> Shape:
        return self.shape

    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        mine = rank_range(self.shape[self.axis], tp_rank, tp_size)
        return parts[0][(*[slice(None)] * self.axis, mine)]

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [cat(shards, self.axis)]


def Column(shape: Shape) -> Sharded:
    """A linear layer [out, in] (or its bias [out]) whose output features are shared out."""
    return Sharded(shape, 0)


def Row(shape: Shape) -> Sharded:
    """A linear layer [out, in] whose input features are shared out; its bias [out] is `Replicated`."""
    return Sharded(shape, 1)


@dataclass(frozen=True)
class Vocabulary(Kind):
    """Embedding or output layer [vocabulary, hidden]: rows are shared out, padded with zero rows to divide evenly."""

    vocab_size: int
    hidden: int
    tp_axis: int | None = 0

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return ((self.vocab_size, self.hidden),)

    @property
    def full_shape(self) -> Shape:
        return (self.vocab_size, self.hidden)

    def shared_out(self, tp_size: int) -> dict[str, int]:
        return {}

    def local_shape(self, tp_size: int) -> Shape:
        return (padded_vocab_size(self.vocab_size, tp_size) // tp_size, self.hidden)

    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        rows = rank_range(padded_vocab_size(self.vocab_size, tp_size), tp_rank, tp_size)
        real = parts[0][min(rows.start, self.vocab_size) : min(rows.stop, self.vocab_size)]
        missing = rows.stop - rows.start - real.shape[0]
        return cat([real, real.new_zeros(missing, self.hidden)]) if missing else real

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [cat(shards, 0)[: self.vocab_size]]


@dataclass(frozen=True)
class GatedMLP(Kind):
    """SwiGLU's first layer: gate and up projections [ffn, hidden]; every rank holds [its gate rows; its up rows].

    With `hidden` None, the biases [ffn] of the two.
    """

    ffn: int
    hidden: int | None
    tp_axis: int | None = 0

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return (features(self.ffn, self.hidden), features(self.ffn, self.hidden))

    @property
    def full_shape(self) -> Shape:
        return features(2 * self.ffn, self.hidden)

    def shared_out(self, tp_size: int) -> dict[str, int]:
        return {"MLP features": self.ffn}

    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        rows = rank_range(self.ffn, tp_rank, tp_size)
        return cat([parts[0][rows], parts[1][rows]])

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        halves = [shard.chunk(2, 0) for shard in shards]
        return [cat([gate for gate, _ in halves]), cat([up for _, up in halves])]


@dataclass(frozen=True)
class FusedGatedMLP(Kind):
    """`GatedMLP` where the checkpoint holds gate and up projections as one tensor [2 * ffn, hidden], gate first."""

    ffn: int
    hidden: int
    tp_axis: int | None = 0

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return (self.full_shape,)

    @property
    def full_shape(self) -> Shape:
        return (2 * self.ffn, self.hidden)

    def shared_out(self, tp_size: int) -> dict[str, int]:
        return {"MLP features": self.ffn}

    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        rows = rank_range(self.ffn, tp_rank, tp_size)
        return cat([parts[0][rows], parts[0][self.ffn + rows.start : self.ffn + rows.stop]])

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        halves = [shard.chunk(2, 0) for shard in shards]
        return [cat([gate for gate, _ in halves] + [up for _, up in halves])]


@dataclass(frozen=True)
class Heads(Kind):
    """A vector [heads * head_dim] that goes with attention heads, shared out by whole heads."""

    heads: int
    head_dim: int
    tp_axis: int | None = 0

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return (self.full_shape,)

    @property
    def full_shape(self) -> Shape:
        return (self.heads * self.head_dim,)

    def shared_out(self, tp_size: int) -> dict[str, int]:
        return {"heads with a joint norm": self.heads}

    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        return parts[0][rank_range(self.heads * self.head_dim, tp_rank, tp_size)]

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [cat(shards)]


@dataclass(frozen=True)
class FusedQKV(Kind):
    """Query, key and value projections, interleaved by key-value group: [q of group 0, k 0, v 0, q of group 1, ...].

    With `hidden` None, the three biases. Ranks take equal runs of rows. With more ranks than groups a run ends inside a
    group, and megatron-core gathers the activations back (`SelfAttention.get_query_key_value_tensors`), so the row runs
    are the same rule.
    """

    heads: int
    groups: int
    head_dim: int
    hidden: int | None
    tp_axis: int | None = 0

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        kv = features(self.groups * self.head_dim, self.hidden)
        return (features(self.heads * self.head_dim, self.hidden), kv, kv)

    @property
    def full_shape(self) -> Shape:
        return features((self.heads + 2 * self.groups) * self.head_dim, self.hidden)

    def shared_out(self, tp_size: int) -> dict[str, int]:
        whole_groups = self.groups % tp_size == 0 or tp_size % self.groups == 0
        return {"attention heads": self.heads} | ({} if whole_groups else {"key-value groups": self.groups})

    def _pieces(self) -> Iterator[tuple[int, slice]]:
        """(part, rows of that part) in fused order; parts are 0 query, 1 key, 2 value."""
        sizes = (self.heads // self.groups * self.head_dim, self.head_dim, self.head_dim)
        for group in range(self.groups):
            for part, size in enumerate(sizes):
                yield part, slice(group * size, (group + 1) * size)

    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        wanted = rank_range(self.full_shape[0], tp_rank, tp_size)
        taken: list[Tensor] = []
        at = 0
        for part, rows in self._pieces():
            size = rows.stop - rows.start
            low, high = max(wanted.start - at, 0), min(wanted.stop - at, size)
            if low < high:
                taken.append(parts[part][rows.start + low : rows.start + high])
            at += size
        return cat(taken)

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        fused = cat(shards, 0)
        parts: list[list[Tensor]] = [[], [], []]
        at = 0
        for part, rows in self._pieces():
            size = rows.stop - rows.start
            parts[part].append(fused[at : at + size])
            at += size
        return [cat(pieces) for pieces in parts]
