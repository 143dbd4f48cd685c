"""A `torch_dist` checkpoint, converted or of a training run, seen as the Hugging Face tensors that it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mslime.config.errors import CheckpointError
from mslime.convert.files import torch_dtype
from mslime.convert.table import BoundRule, RuleTable
from mslime.convert.tensor_layouts import Shape, Vocabulary
from mslime.convert.torch_dist import DistCheckpoint, ModelPlacement, ParameterBox

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Unit:
    """Hugging Face tensors that are made together: those of one parameter, or of all experts that share a stack.

    Attributes:
        rules: of the parameters, in expert order.
        shapes: of the tensors, by name.
    """

    rules: tuple[BoundRule, ...]
    shapes: Mapping[str, Shape]

    @property
    def key(self) -> str:
        """Unique in the model: the first tensor's name."""
        return next(iter(self.shapes))


def units_of(table: RuleTable) -> list[Unit]:
    """All that an export writes, multi-token prediction included, in model order."""
    grouped: dict[str, list[BoundRule]] = {}
    for rule in table.all_bound.values():
        if rule.exported:
            grouped.setdefault(rule.hf_names[0], []).append(rule)
    return [
        Unit(tuple(rules), dict(zip(rules[0].hf_names, rules[0].hf_shapes, strict=True))) for rules in grouped.values()
    ]


class MegatronSource:
    """Reads Hugging Face tensors out of a Megatron checkpoint.

    Attributes:
        checkpoint: the files.
        units: what it holds; without multi-token prediction when nobody stored that.

    Raises:
        CheckpointError: the checkpoint is damaged, or lacks a tensor of the model, or is of another model.
    """

    def __init__(self, directory: Path, table: RuleTable, placement: ModelPlacement) -> None:
        self.checkpoint = DistCheckpoint(directory)
        self._placement = placement
        self.units = [unit for unit in units_of(table) if not self._left_out(unit)]
        for unit in self.units:
            for rule in unit.rules:
                self._check(rule)

    def _left_out(self, unit: Unit) -> bool:
        return bool(unit.rules[0].untrained) and self._pieces(unit.rules[0])[0].key not in self.checkpoint.tensors

    def _pieces(self, rule: BoundRule) -> Sequence[ParameterBox]:
        return self._placement.pieces[rule.name]

    def _check(self, rule: BoundRule) -> None:
        for piece in self._pieces(rule):
            stored = self.checkpoint.view(piece.key).shape
            # A training run pads the vocabulary to a multiple of its tensor-parallel size.
            padded = isinstance(rule.kind, Vocabulary) and stored[1:] == piece.shape[1:] and stored[0] > piece.shape[0]
            if stored != piece.shape and not padded:
                raise CheckpointError(
                    f"{self.checkpoint.directory}: {piece.key}", stored, f"config.json promises {piece.shape}",
                    "name the Hugging Face checkpoint of the model that was trained",
                )  # fmt: skip

    def dtype(self, unit: Unit) -> str:
        """In which a unit is stored, as torch names it."""
        return self.checkpoint.tensors[self._pieces(unit.rules[0])[0].key].dtype

    def read(self, unit: Unit) -> dict[str, Tensor]:
        """The tensors of a unit by name, in the dtype in which they are stored. Raises CheckpointError."""
        import torch

        if not unit.rules[0].stack:
            (rule,) = unit.rules
            return dict(rule.to_hf([self._parameter(rule)]))
        dtype = torch_dtype(self.dtype(unit))
        stacks = {name: torch.empty(shape, dtype=dtype) for name, shape in unit.shapes.items()}
        for rule in unit.rules:
            for name, tensor in rule.to_hf([self._parameter(rule)]):
                stacks[name][rule.expert] = tensor
        return stacks

    def _parameter(self, rule: BoundRule) -> Tensor:
        import torch

        pieces = self._pieces(rule)
        boxes = [self.checkpoint.view(piece.key).box(piece.offsets, piece.sizes) for piece in pieces]
        if len(pieces) == 1:
            return boxes[0].reshape(rule.full_shape)
        parameter = torch.empty(rule.full_shape, dtype=boxes[0].dtype)
        for piece, box in zip(pieces, boxes, strict=True):
            piece.paste(parameter, box)
        return parameter
