"""Layouts of experts whose gate and up projections lie in one tensor, or whose weights are stored transposed.

Shapes are those of one expert: the stack over experts is the rule's business (`Rule.stacked`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mslime.convert.kinds import Kind, Shape, Sliceable, cat, features, rank_range

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class JoinedGatedMLP(Kind):
    """SwiGLU's first layer in one tensor [2 * ffn, hidden]: all gate rows, then all up rows (Qwen3.5)."""

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
        if tp_size == 1:
            return parts[0][...]
        rows = rank_range(self.ffn, tp_rank, tp_size)
        return cat([parts[0][rows], parts[0][rows.start + self.ffn : rows.stop + self.ffn]])

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        halves = [shard.chunk(2, 0) for shard in shards]
        return [cat([half[side] for side in (0, 1) for half in halves])]


@dataclass(frozen=True)
class InterleavedGatedMLP(Kind):
    """A gated first layer in one tensor [hidden, 2 * ffn], gate and up features taking turns (GPT-OSS).

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

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        import torch

        turns = [torch.stack(shard.chunk(2, 0), 1).flatten(0, 1) for shard in shards]
        return [cat(turns).mT.contiguous() if self.hidden is not None else cat(turns)]


@dataclass(frozen=True)
class TransposedRow(Kind):
    """A linear layer [out, in] whose input features are shared out, stored as [in, out] (GPT-OSS)."""

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

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [cat([shard.mT for shard in shards]).contiguous()]
