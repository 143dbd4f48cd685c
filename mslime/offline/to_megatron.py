"""Hugging Face -> Megatron `torch_dist`, one parameter at a time."""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mslime.config.errors import CheckpointError
from mslime.convert.families import get_family
from mslime.convert.families.family import refuse_unread
from mslime.convert.hf import HFCheckpoint, copy_side_files
from mslime.convert.safetensors_files import (
    TORCH_DTYPES,
    Advance,
    OutputFile,
    WrittenFile,
    batches,
    torch_dtype,
    write_record,
)
from mslime.convert.table import BoundRule, RuleTable
from mslime.convert.torch_dist import CONFIG, METADATA, ModelPlacement, ParameterBox
from mslime.offline.jobs import ConversionJob, FileTask, source_identity

if TYPE_CHECKING:
    pass

HF_FILES = "hf"
"""Directory of config.json and tokenizer in a converted checkpoint."""
DESCRIPTION = "conversion.json"
_COMMON = "common.pt"
_ROWS = 4096


class ToMegatron(ConversionJob):
    """Job that converts a Hugging Face checkpoint.

    Args:
        source: Hugging Face checkpoint, plain or quantised.
        hf_config: its config.json.
        placement: places of the model's parameters in megatron-core checkpoints.
        dtype: of the weights, as torch names it; None keeps each tensor's own. Rules may fix theirs.
        ignored: settings of config.json that the user has declared harmless.
        max_file_bytes: a file is closed if it would grow beyond this.

    Raises:
        CheckpointError: the source does not fit its config.json.
    """

    def __init__(
        self,
        source: Path,
        hf_config: Mapping[str, object],
        placement: ModelPlacement,
        *,
        dtype: str | None = None,
        ignored: Collection[str] = (),
        max_file_bytes: int = 5 << 30,
    ) -> None:
        refuse_unread(get_family(hf_config), hf_config, ignored)
        self._source, self._hf_config, self._placement, self._dtype = source, dict(hf_config), placement, dtype
        checkpoint, table = self._opened
        table.check_hf(checkpoint.shapes, str(source))
        self.sources = [source / file for file in {info.file for info in checkpoint.stored.values()}]
        self._identity = source_identity(self.sources)
        aliases = {name: original for name, original in table.aliases.items() if name in checkpoint.info}
        _check_aliases(checkpoint, aliases)
        self._aliases = list(aliases)
        self._quantised = checkpoint.quantisation
        stored = [
            rule
            for rule in table.all_bound.values()
            if rule.name in placement.pieces and rule.hf_names[0] in checkpoint.info
        ]
        self._dtypes = {rule.name: self._dtype_of(rule, checkpoint) for rule in stored}
        sizes = [
            (rule.name, math.prod(rule.kind.full_shape) * torch_dtype(self._dtypes[rule.name]).itemsize)
            for rule in stored
        ]
        files = batches(((size, size[1]) for size in sizes), max_file_bytes)
        self.tasks = [
            FileTask(f"__{i}_0.distcp", sum(nbytes for _, nbytes in file), tuple(name for name, _ in file))
            for i, file in enumerate(files)
        ]

    def identity(self) -> Mapping[str, object]:
        return {
            "job": "to-megatron",
            "source": [str(self._source.resolve()), self._identity],
            "config": self._hf_config,
            "dtype": self._dtype,
        }

    @cached_property
    def _opened(self) -> tuple[HFCheckpoint, RuleTable]:
        return HFCheckpoint(self._source), get_family(self._hf_config).rules(self._hf_config)

    def _dtype_of(self, rule: BoundRule, checkpoint: HFCheckpoint) -> str:
        wanted = rule.dtype or self._dtype
        found = {checkpoint.info[name].dtype for name in rule.hf_names}
        if wanted is None and len(found) > 1:
            raise CheckpointError(
                f"{self._source}: {rule.hf_names[0]}", sorted(found), f"{len(rule.hf_names)} tensors with different "
                f"dtypes would be fused into {rule.name}", "choose the dtype with --dtype",
            )  # fmt: skip
        return wanted or TORCH_DTYPES[found.pop()]

    def write(self, task: FileTask, path: Path, advance: Advance) -> WrittenFile:
        checkpoint, table = self._opened
        with OutputFile(path) as file:
            for name in task.names:
                parameter = table.bind(name).to_megatron(checkpoint.view, 0, 1).to(torch_dtype(self._dtypes[name]))
                for piece in self._placement.pieces[name]:
                    write_record(file, _record(piece), piece.cut(parameter))
                advance(parameter.nbytes)
            return file.complete()

    def finish(self, directory: Path, written: Sequence[WrittenFile]) -> None:
        """Write the metadata of megatron-core, and the files for converting back."""
        objects = _write_objects(directory / f"__{len(self.tasks)}_0.distcp")
        _write_metadata(directory, self._entries(written), self._placement.objects, objects)
        _write_common(directory / _COMMON)
        config = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        (directory / HF_FILES).mkdir()
        copy_side_files(self._source, directory / HF_FILES)
        about = {"format": 1, "aliases": self._aliases, "quantised source": self._quantised, "dtype": self._dtype}
        (directory / DESCRIPTION).write_text(json.dumps(about, indent=1), encoding="utf-8")
        (directory / CONFIG).write_text(json.dumps(config), encoding="utf-8")

    def _entries(self, written: Sequence[WrittenFile]) -> Iterable[tuple[ParameterBox, str, WrittenFile]]:
        for task, done in zip(self.tasks, written, strict=True):
            for name in task.names:
                for piece in self._placement.pieces[name]:
                    yield piece, self._dtypes[name], done


def _check_aliases(checkpoint: HFCheckpoint, aliases: Mapping[str, str]) -> None:
    """Check that tensors declared as repetitions are equal to the original: they are not stored."""
    import torch

    for name, original in aliases.items():
        copy, kept = checkpoint.view(name), checkpoint.view(original)
        for row in range(0, kept.shape[0], _ROWS):
            if not torch.equal(copy[row : row + _ROWS], kept[row : row + _ROWS]):
                raise CheckpointError(
                    f"{checkpoint.directory}: {name}", f"other values from row {row} on",
                    f"must equal {original}: engines share the two", "use a checkpoint with equal tensors",
                )  # fmt: skip


def _record(piece: ParameterBox) -> str:
    return f"{piece.key} at {list(piece.offsets)}"


def _write_objects(path: Path) -> WrittenFile:
    """Write the one record shared by all of megatron-core's non-tensor objects: modules without extra state."""
    import torch

    with OutputFile(path) as file:
        buffer = io.BytesIO()
        torch.save([None], buffer)
        file.write(buffer.getvalue())
        return file.complete()


def _write_metadata(
    directory: Path, entries: Iterable[tuple[ParameterBox, str, WrittenFile]], keys: Sequence[str], objects: WrittenFile
) -> None:
    """Write `.metadata` in the format of torch's FileSystemWriter."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for piece, dtype, written in entries:
        start, length = written.records[_record(piece)]
        entry = tensors.get(piece.key)
        if entry is None:
            properties = TensorProperties(dtype=torch_dtype(dtype))
            entry = tensors[piece.key] = TensorStorageMetadata(properties, torch.Size(piece.shape), [])
        assert entry.properties.dtype == torch_dtype(dtype), f"{piece.key} in two dtypes"
        index = MetadataIndex(piece.key, torch.Size(piece.offsets), len(entry.chunks))
        entry.chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)))
        storage[index] = _StorageInfo(written.file, start, length)
    for key in keys:
        tensors[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _StorageInfo(objects.file, 0, objects.size)
    metadata = Metadata(tensors, storage_data=storage, storage_meta=StorageMeta())
    with (directory / METADATA).open("wb") as file:
        pickle.dump(metadata, file)


def _write_common(path: Path) -> None:
    """Write megatron-core's common file for all ranks, which its loader requires."""
    import torch

    torch.save({"checkpoint_version": 3.0, "iteration": 0, "content_metadata": {"singleton_local_shards": False}}, path)
