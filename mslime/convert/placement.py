"""Where megatron-core keeps the elements of each parameter in a checkpoint: pure data, made by a built model
(`backends.megatron.model.placement`) and used without one. Layers and experts may be stacked in one stored tensor,
and a parameter may be stored in pieces (the halves of a gated MLP).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mslime.convert.kinds import Shape
from mslime.convert.table import BoundRule, RuleTable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ParameterBox:
    """A view of one parameter, and the box of a stored tensor that holds it.

    Attributes:
        key: of the stored tensor.
        shape: of the stored tensor.
        offsets, sizes: of the box; as many dimensions as `shape`.
        start, size, stride: the view of the contiguous parameter: first element, shape and strides in elements.
    """

    key: str
    shape: Shape
    offsets: Shape
    sizes: Shape
    start: int
    size: Shape
    stride: Shape

    def cut(self, parameter: Tensor) -> Tensor:
        """This piece of a parameter, in the box's shape; contiguous."""
        return parameter.contiguous().as_strided(self.size, self.stride, self.start).reshape(self.sizes).contiguous()

    def paste(self, parameter: Tensor, box: Tensor) -> None:
        """Write what the box holds into its place in a contiguous parameter."""
        parameter.as_strided(self.size, self.stride, self.start).copy_(box.reshape(self.size))


@dataclass(frozen=True)
class ModelPlacement:
    """Where a whole model lies.

    Attributes:
        pieces: of every parameter, by canonical name.
        objects: keys of what megatron-core stores beside tensors (modules' extra state, `None` in a fresh model).
    """

    pieces: Mapping[str, tuple[ParameterBox, ...]]
    objects: Sequence[str]

    def check(self, table: RuleTable) -> None:
        """Every rule that is exported has its parameter, and pieces fill parameters; raises AssertionError."""
        absent = [name for name, rule in table.all_bound.items() if rule.exported and name not in self.pieces]
        assert not absent, f"no place for {absent[:3]}"
        for name, pieces in self.pieces.items():
            covered = sum(math.prod(piece.size) for piece in pieces)
            expected = math.prod(table.bind(name).full_shape)
            assert covered == expected, f"{name}: pieces of {covered} elements, the rule says {expected}"


def whole(rule: BoundRule) -> ParameterBox:
    """The place of a parameter that megatron-core does not build: under its own name."""
    shape = rule.full_shape
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return ParameterBox(rule.name, shape, (0,) * len(shape), shape, 0, shape, stride)
