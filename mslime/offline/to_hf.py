"""Megatron `torch_dist` -> Hugging Face, in one process or several, without building a model."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mslime.config.errors import CheckpointError
from mslime.config.model_facts import checkpoint_dtype, declared_dtype
from mslime.convert.families import get_family
from mslime.convert.hf import HFCheckpoint, copy_side_files, write_index
from mslime.convert.safetensors_files import (
    SAFETENSORS_DTYPES,
    Advance,
    TensorPlan,
    WrittenFile,
    batches,
    torch_dtype,
    write_safetensors,
)
from mslime.convert.table import BoundRule, RuleTable
from mslime.convert.tensor_layouts import Shape, Vocabulary
from mslime.convert.torch_dist import METADATA, DistCheckpoint, ModelPlacement
from mslime.offline.jobs import ConversionJob, FileTask, source_identity
from mslime.offline.to_megatron import DESCRIPTION, HF_FILES

if TYPE_CHECKING:
    from torch import Tensor


# View of a `torch_dist` checkpoint, converted or from a training run, as Hugging Face tensors.


@dataclass(frozen=True)
class Unit:
    """Hugging Face tensors that are made together: those of one parameter, or of all experts that share a stack.

    Attributes:
        rules: of the parameters, in expert order.
        shapes: of the tensors, by name.
    """

    rules: tuple[BoundRule, ...]
    shapes: Mapping[str, Shape]


class MegatronSource:
    """Reads Hugging Face tensors out of a Megatron checkpoint.

    Attributes:
        checkpoint: the files.
        units: its content by the name of each unit's first tensor, in model order; with multi-token prediction if that
            is stored.

    Raises:
        CheckpointError: the checkpoint is damaged, or lacks a tensor of the model, or is of another model.
    """

    def __init__(self, directory: Path, table: RuleTable, placement: ModelPlacement) -> None:
        self.checkpoint = DistCheckpoint(directory)
        self._pieces = placement.pieces
        grouped: dict[str, list[BoundRule]] = {}
        for rule in table.all_bound.values():
            if rule.exported:
                grouped.setdefault(rule.hf_names[0], []).append(rule)
        self.units = dict[str, Unit]()
        for key, rules in grouped.items():
            first = rules[0]
            if first.untrained and self._pieces[first.name][0].key not in self.checkpoint.tensors:
                continue
            self.units[key] = Unit(tuple(rules), dict(zip(first.hf_names, first.hf_shapes, strict=True)))
            for rule in rules:
                self._check(rule)

    def _check(self, rule: BoundRule) -> None:
        for piece in self._pieces[rule.name]:
            stored = self.checkpoint.view(piece.key).shape
            # A training run pads the vocabulary to a multiple of its tensor-parallel size.
            padded = isinstance(rule.kind, Vocabulary) and stored[1:] == piece.shape[1:] and stored[0] > piece.shape[0]
            if stored != piece.shape and not padded:
                raise CheckpointError(
                    f"{self.checkpoint.directory}: {piece.key}", stored, f"config.json requires {piece.shape}",
                    "name the Hugging Face checkpoint of the model that was trained",
                )  # fmt: skip

    def dtype(self, unit: Unit) -> str:
        """Stored dtype of a unit, as torch names it."""
        return self.checkpoint.tensors[self._pieces[unit.rules[0].name][0].key].dtype

    def read(self, unit: Unit) -> dict[str, Tensor]:
        """Tensors of a unit by name, in their stored dtype. Raises CheckpointError."""
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

        pieces = self._pieces[rule.name]
        boxes = [self.checkpoint.view(piece.key).box(piece.offsets, piece.sizes) for piece in pieces]
        if len(pieces) == 1:
            return boxes[0].reshape(rule.kind.full_shape)
        parameter = torch.empty(rule.kind.full_shape, dtype=boxes[0].dtype)
        for piece, box in zip(pieces, boxes, strict=True):
            piece.paste(parameter, box)
        return parameter


# Writing of Hugging Face checkpoints: assignment of tensors to files, index, side files.


@dataclass(frozen=True)
class Output:
    """Tensors that are made together and written to one file.

    Attributes:
        key: of the job for them.
        plans: of the tensors.
    """

    key: str
    plans: tuple[TensorPlan, ...]

    @property
    def nbytes(self) -> int:
        """Total bytes."""
        return sum(plan.nbytes for plan in self.plans)


class HFJob(ConversionJob):
    """A job whose output is a Hugging Face checkpoint.

    Args:
        outputs: everything to write, in order.
        side_files: directory whose config.json and tokenizer are copied.
        changes: settings of the new config.json.
        max_shard_bytes: a shard is closed if it would grow beyond this.
    """

    def __init__(
        self, outputs: Sequence[Output], side_files: Path, changes: Mapping[str, object], max_shard_bytes: int
    ) -> None:
        self._side_files, self._changes = side_files, dict(changes)
        self._outputs = {output.key: output for output in outputs}
        shards = list(batches(((output, output.nbytes) for output in outputs), max_shard_bytes))
        self.tasks = [
            FileTask(
                f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors",  # the usual names of Hugging Face libraries
                sum(output.nbytes for output in shard),
                tuple(output.key for output in shard),
            )
            for i, shard in enumerate(shards)
        ]

    @abstractmethod
    def make(self, output: Output) -> Sequence[Tensor]:
        """Tensors of one output, in the order of its plans, in any process."""

    def write(self, task: FileTask, path: Path, advance: Advance) -> WrittenFile:
        outputs = [self._outputs[key] for key in task.names]
        plans = [plan for output in outputs for plan in output.plans]
        return write_safetensors(path, plans, (tensor for output in outputs for tensor in self.make(output)), advance)

    def finish(self, directory: Path, written: Sequence[WrittenFile]) -> None:
        """Write index, config.json, tokenizer."""
        weight_map = {name: done.file for done in written for name in done.spans}
        write_index(directory, weight_map, sum(task.nbytes for task in self.tasks))
        copy_side_files(self._side_files, directory, self._changes)


class ToHf(HFJob):
    """Job that exports a Megatron checkpoint.

    Args:
        checkpoint: a converted checkpoint, or one of a training run.
        source: Hugging Face directory with config.json and tokenizer; untrained tensors (multi-token prediction,
            vision) are read from its weights.
        hf_config: its config.json.
        placement: places of the model's parameters in megatron-core checkpoints.
        dtype: of the weights, as torch names it; default: from config.json. Rules may fix theirs.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
    """

    def __init__(
        self,
        checkpoint: Path,
        source: Path,
        hf_config: Mapping[str, object],
        placement: ModelPlacement,
        *,
        dtype: str | None = None,
        max_shard_bytes: int = 5 << 30,
    ) -> None:
        self._checkpoint, self._source, self._hf_config = checkpoint, source, dict(hf_config)
        self._placement = placement
        self._dtype = dtype or checkpoint_dtype(hf_config)
        megatron, table, untrained = self._opened
        description = checkpoint / DESCRIPTION
        if untrained is not None:
            repeated = [name for name in table.aliases if name in untrained.info]
        else:
            repeated = json.loads(description.read_text(encoding="utf-8"))["aliases"] if description.exists() else []
        self._aliases = {name: table.aliases[name] for name in repeated}  # as the original checkpoint repeated them
        changes = declared_dtype(hf_config, self._dtype) if self._dtype else {}
        outputs = list(self._plan(megatron, table, untrained))
        super().__init__(outputs, source, changes, max_shard_bytes)
        copied = [output.key for output in outputs if output.key not in megatron.units]
        files = {source / file for name in copied if untrained is not None for file in untrained.files(name)}
        self.sources = [*checkpoint.glob("*.distcp"), checkpoint / METADATA, source / "config.json", *files]
        self._identity = source_identity(self.sources)

    def identity(self) -> Mapping[str, object]:
        return {
            "job": "to-hf",
            "source": [str(self._checkpoint.resolve()), self._identity],
            "config": self._hf_config,
            "dtype": self._dtype,
        }

    @cached_property
    def _opened(self) -> tuple[MegatronSource, RuleTable, HFCheckpoint | None]:
        """The checkpoint, the rules, and the Hugging Face weights if they are needed and available."""
        table = get_family(self._hf_config).rules(self._hf_config)
        megatron = MegatronSource(self._checkpoint, table, self._placement)
        wanted = bool(table.untrained_names or table.aliases) and any(self._source.glob("*.safetensors"))
        return megatron, table, HFCheckpoint(self._source) if wanted else None

    def _plan(self, megatron: MegatronSource, table: RuleTable, untrained: HFCheckpoint | None) -> Iterator[Output]:
        stored: set[str] = set()
        for key, unit in megatron.units.items():
            dtype = unit.rules[0].dtype or self._dtype or megatron.dtype(unit)
            plans = [TensorPlan(name, SAFETENSORS_DTYPES[dtype], shape) for name, shape in unit.shapes.items()]
            aliases = [
                TensorPlan(alias, SAFETENSORS_DTYPES[dtype], unit.shapes[original])
                for alias, original in self._aliases.items()
                if original in unit.shapes
            ]
            stored.update(unit.shapes)
            yield Output(key, (*plans, *aliases))
        own = {name: rule.dtype for rule in table.all_bound.values() if rule.dtype for name in rule.hf_names}
        for name in table.untrained_names if untrained is not None else ():
            assert untrained is not None
            if name in untrained.info and name not in stored:
                dtype = own.get(name) or self._dtype
                short = SAFETENSORS_DTYPES[dtype] if dtype else untrained.info[name].dtype
                yield Output(name, (TensorPlan(name, short, untrained.info[name].shape),))

    def make(self, output: Output) -> Sequence[Tensor]:
        megatron, _, untrained = self._opened
        if output.key in megatron.units:
            tensors = megatron.read(megatron.units[output.key])
        else:
            assert untrained is not None
            tensors = {output.key: untrained.tensor(output.key)}
        return [tensors[self._aliases.get(plan.name, plan.name)].to(torch_dtype(plan.dtype)) for plan in output.plans]


def side_files(checkpoint: Path, source: Path | None) -> Path:
    """Hugging Face directory that belongs to a Megatron checkpoint.

    Args:
        source: named by the user, if any.

    Raises:
        CheckpointError: there is no such checkpoint, or its model is unknown.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(str(checkpoint), None, "no such directory", "name a Megatron checkpoint")
    if source is not None:
        return source
    if (checkpoint / HF_FILES / "config.json").exists():
        return checkpoint / HF_FILES
    raise CheckpointError(
        str(checkpoint), None, "a training checkpoint does not name its Hugging Face model",
        "name that model's directory with --source",
    )  # fmt: skip
