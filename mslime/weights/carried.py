"""What a checkpoint holds beside the tensors that are trained: multi-token-prediction layers, and copies inside them.

An export writes them all again, so that an engine can go on predicting several tokens at a time. The layers are copied
from the checkpoint that training started from. Their copies of the embedding and of the output layer are not: those
repeat the trained ones, as every engine that shares them assumes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mslime.convert.hf import HFCheckpoint
from mslime.convert.table import RuleTable

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CarriedTensors:
    """The part of one checkpoint.

    Attributes:
        table: rules of the model.
        source: the checkpoint; None when the model has nothing of the kind.
        names: tensors of the layers that nobody trains.
        copies: names under which the checkpoint repeats a trained tensor, by that tensor's name.
    """

    table: RuleTable
    source: HFCheckpoint | None
    names: tuple[str, ...]
    copies: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, table: RuleTable, directory: Path) -> CarriedTensors:
        """Read the names from the checkpoint's headers. Raises CheckpointError when it cannot be read."""
        if not table.untrained_names and not table.aliases:
            return cls(table, None, (), {})
        source = HFCheckpoint(directory)
        copies: dict[str, tuple[str, ...]] = {}
        for name, original in table.aliases.items():
            if name in source.info:
                copies[original] = (*copies.get(original, ()), name)
        return cls(table, source, tuple(name for name in source.info if name in table.untrained_names), copies)

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the layers that nobody trains, in `dtype` or one of its own, read when it is its turn."""
        import torch

        own = {name for rule in self.table.all_bound.values() if rule.dtype for name in rule.hf_names}
        for name in self.names:
            assert self.source is not None
            yield name, self.source.tensor(name).to(torch.float32 if name in own else dtype)
