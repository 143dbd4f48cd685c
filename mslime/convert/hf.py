"""Hugging Face checkpoints on disk: a streaming safetensors reader and a sharded writer.

Names, shapes and dtypes come from the file headers, without reading a weight; tensors are read row by row through a few
open files. Quantised weights appear, and are read, as plain tensors. Missing, truncated or contradictory data raises a
`CheckpointError` that names the file and the tensor.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import stat
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mslime.config.errors import CheckpointError, reading
from mslime.config.model_facts import language_model, plain_dtype
from mslime.convert.quantised import (
    Box,
    JoinedWeight,
    check_quantisation,
    refuse_plain_fp8,
    without_quantisation,
)
from mslime.convert.safetensors_files import (
    RESTORE,
    SAFETENSORS_DTYPES,
    TensorInfo,
    kept_open,
    read_header,
    tensor_bytes,
    torch_dtype,
)
from mslime.convert.tensor_layouts import Shape

if TYPE_CHECKING:
    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TIED = ("lm_head.weight", "model.embed_tokens.weight")
_COMPARED = 1 << 24  # elements at once
_OPEN_FILES = 4
_SIDE_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
_SIDE_NAMES = ("LICENSE", "LICENSE.md", "NOTICE")
_TEMPLATES = "additional_chat_templates"  # directory in which transformers 5 saves all but the first
_NOT_COPIED = (INDEX_NAME, "checksums.json", "config.json")


@dataclass(frozen=True)
class LazyTensor:
    """A tensor on disk; indexing it reads only the indexed part.

    Attributes:
        checkpoint: that holds it.
        name: of the stored tensor.
    """

    checkpoint: HFCheckpoint
    name: str

    @property
    def shape(self) -> Shape:
        """Shape, from the file's header."""
        return self.checkpoint.stored[self.name].shape

    def __getitem__(self, index: Any, /) -> Tensor:
        info = self.checkpoint.stored[self.name]
        box = _box(index, info.shape)
        if box is None or not _is_run(box, info.shape):
            return self.checkpoint.slicer(info.file).get_slice(self.name)[index]
        sizes = tuple(end - first for first, end in box)
        at = sum(first * math.prod(info.shape[dim + 1 :]) for dim, (first, _) in enumerate(box))
        tensor = self.checkpoint.read(self.name, at, math.prod(sizes)).view(sizes)
        return tensor if index is Ellipsis else _without_integers(tensor, index)


@dataclass(frozen=True)
class LazyJoined:
    """A quantised weight; indexing it reads and dequantises only the indexed part."""

    checkpoint: HFCheckpoint
    name: str
    joined: JoinedWeight

    @property
    def shape(self) -> Shape:
        """Shape of the weight."""
        return self.joined.shape

    def __getitem__(self, index: Any, /) -> Tensor:
        box = _box(index, self.shape)
        assert box is not None, index
        dtype = torch_dtype(self.checkpoint.info[self.name].dtype)
        tensor = self.joined.scheme.read([LazyTensor(self.checkpoint, name) for name in self.joined.stored], box, dtype)
        return tensor if index is Ellipsis else _without_integers(tensor, index)


class HFCheckpoint:
    """A checkpoint directory, opened by its headers alone.

    Attributes:
        directory: its path.
        stored: every tensor of the files by name.
        joined: quantised weights by name.
        info: every tensor by name, a quantised weight as one tensor in the model's dtype.
        quantisation: method of quantised weights, for people; None for plain weights.

    Raises:
        CheckpointError: no weights, a missing or truncated shard, an index that does not match its files, weights in an
            unsupported quantisation.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open = kept_open(lambda path: path.open("rb", buffering=0), directory, _OPEN_FILES)
        self.slicer = kept_open(_open_slicer, directory, _OPEN_FILES)
        index = directory / INDEX_NAME
        if index.exists():
            self.stored = self._read_indexed(index)
        elif (directory / SINGLE_NAME).exists():
            self.stored = read_header(directory / SINGLE_NAME)
        else:
            raise CheckpointError(
                str(directory), None,
                f"has neither {SINGLE_NAME} nor {INDEX_NAME}" if directory.is_dir() else "no such directory",
                "name a Hugging Face checkpoint with safetensors weights",
            )  # fmt: skip
        self.quantisation: str | None = None
        self.joined: dict[str, JoinedWeight] = {}
        if (quantisation := check_quantisation(_config(directory))) is not None:
            stored = {name: (info.dtype, info.shape) for name, info in self.stored.items()}
            self.quantisation, self.joined = quantisation.method, quantisation.join(stored, str(directory))
        else:
            for name, info in self.stored.items():
                refuse_plain_fp8(name, info.dtype, str(directory))
        hidden = {name for joined in self.joined.values() for name in joined.stored}
        self.info = {name: info for name, info in self.stored.items() if name not in hidden}
        dtype = SAFETENSORS_DTYPES[plain_dtype(_config(directory))] if self.joined else ""
        for name, joined in self.joined.items():
            self.info[name] = TensorInfo(self.stored[joined.stored[0]].file, dtype, joined.shape)
        self._refuse_other_head()

    def _refuse_other_head(self) -> None:
        """Check that a tied output layer in the files equals the embedding. Raises CheckpointError."""
        head, embedding = (self.stored.get(name) for name in TIED)
        config = _config(self.directory)
        tied = config.get("tie_word_embeddings") or language_model(config).get("tie_word_embeddings")
        if not tied or head is None or embedding is None:
            return
        total = math.prod(head.shape)
        same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and all(
            self.read(TIED[0], at, min(_COMPARED, total - at)).equal(self.read(TIED[1], at, min(_COMPARED, total - at)))
            for at in range(0, total, _COMPARED)
        )
        if not same:
            raise CheckpointError(
                f"{self.directory / head.file}: {TIED[0]}", None,
                f"config.json has tie_word_embeddings: true, but this tensor differs from {TIED[1]}; transformers uses "
                "both, and mslime would drop it",
                "set tie_word_embeddings to false in config.json, or delete the tensor",
            )  # fmt: skip

    def _read_indexed(self, index: Path) -> dict[str, TensorInfo]:
        with reading(
            CheckpointError, str(index), "the index is not JSON with a weight_map from names to files", RESTORE
        ):
            weight_map = cast("dict[str, str]", dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"]))
            for file in weight_map.values():
                if Path(file).name != file or file in ("", ".", ".."):
                    raise CheckpointError(str(index), file, "files of an index must be in its own directory", RESTORE)
        found: dict[str, TensorInfo] = {}
        headers: dict[str, dict[str, TensorInfo]] = {}
        for name, file in weight_map.items():
            if file not in headers:
                headers[file] = read_header(self.directory / file)
            if name not in headers[file]:
                raise CheckpointError(
                    f"{self.directory / file}: {name}", None, f"{INDEX_NAME} lists the tensor in this file", RESTORE
                )
            found[name] = headers[file][name]
        return found

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of every tensor."""
        return {name: info.shape for name, info in self.info.items()}

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Elements `first` to `first + count` of a stored tensor, [count].

        Raises:
            CheckpointError: the file is shorter than its header requires.
        """
        import torch

        info = self.stored[name]
        tensor = torch.empty(count, dtype=torch_dtype(info.dtype))
        file, target = self._open(info.file), tensor_bytes(tensor)
        file.seek(info.start + first * tensor.itemsize)
        done = 0
        while done < len(target):
            read = file.readinto(target[done:])
            if not read:
                raise CheckpointError(
                    f"{self.directory / info.file}: {name}", f"{done} bytes", f"must have {len(target)}", RESTORE
                )
            done += read
        return tensor

    def view(self, name: str) -> LazyTensor | LazyJoined:
        """A tensor by name, read when indexed.

        Raises:
            CheckpointError: the checkpoint has no such tensor.
        """
        if name not in self.info:
            raise CheckpointError(f"{self.directory}: {name}", None, "the tensor is missing", RESTORE)
        joined = self.joined.get(name)
        return LazyTensor(self, name) if joined is None else LazyJoined(self, name, joined)

    def files(self, name: str) -> set[str]:
        """Files that hold a tensor by name: several may, if it is quantised."""
        parts = self.joined[name].stored if name in self.joined else (name,)
        return {self.stored[part].file for part in parts}

    def tensor(self, name: str) -> Tensor:
        """A whole tensor by name, in the dtype of `info`. Raises like `view`."""
        return self.view(name)[...]


def _open_slicer(path: Path) -> Any:
    """An open safetensors file, for slices that are not contiguous."""
    from safetensors import safe_open

    return safe_open(path, framework="pt")


def _config(directory: Path) -> dict[str, object]:
    """config.json, if it exists; families validate it."""
    path = directory / "config.json"
    try:
        parsed: object = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (ValueError, OSError, RecursionError):
        return {}
    return cast("dict[str, object]", parsed) if isinstance(parsed, dict) else {}


def _box(index: Any, shape: Shape) -> Box | None:
    """First and end in every dimension; None for an index with other parts than plain slices and integers."""
    given = () if index is Ellipsis else _as_tuple(index)
    if len(given) > len(shape):
        return None
    box: list[tuple[int, int]] = []
    padded: list[Any] = [*given, *[slice(None)] * (len(shape) - len(given))]
    for entry, size in zip(padded, shape, strict=True):
        if isinstance(entry, int) and 0 <= entry < size:
            box.append((entry, entry + 1))
        elif isinstance(entry, slice):
            first, end, step = cast("slice[int | None, int | None, int | None]", entry).indices(size)
            if step != 1:
                return None
            box.append((first, max(first, end)))
        else:
            return None
    return tuple(box)


def _as_tuple(index: Any) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)


def _without_integers(tensor: Tensor, index: Any) -> Tensor:
    """Remove dimensions that were indexed by an integer, as torch does."""
    given = _as_tuple(index)
    if not any(isinstance(entry, int) for entry in given):
        return tensor
    return tensor[tuple(0 if isinstance(entry, int) else slice(None) for entry in given)]


def _is_run(box: Box, shape: Shape) -> bool:
    """Whether the elements of a box are contiguous in memory."""
    partial = [dim for dim, ((first, end), size) in enumerate(zip(box, shape, strict=True)) if end - first != size]
    return not partial or all(box[dim][1] - box[dim][0] == 1 for dim in range(partial[-1]))


class ShardWriter:
    """Writes tensors into numbered safetensors files of a directory, one shard in memory at a time.

    Args:
        directory: an existing directory, usually from `atomic_directory`.
        part: tag that keeps the files of several writers (one per pipeline stage) apart.
        max_shard_bytes: a shard is closed if it would grow beyond this.
    """

    def __init__(self, directory: Path, part: str = "0", max_shard_bytes: int = 5 << 30) -> None:
        self._directory, self._part, self._limit = directory, part, max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._weight_map: dict[str, str] = {}
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor (any device; copied to the CPU)."""
        assert name not in self._weight_map and name not in self._pending, f"{name} written twice"
        if self._pending and self._pending_bytes + tensor.nbytes > self._limit:
            self._flush()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += tensor.nbytes

    def _flush(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

        file = f"model-{self._part}-{len(set(self._weight_map.values())):05d}.safetensors"
        try:
            (self._directory / file).touch()
            mode = (self._directory / file).stat().st_mode  # mode by the umask: the library makes its files private
            save_file(self._pending, self._directory / file, {"format": "pt"})
            (self._directory / file).chmod(stat.S_IMODE(mode))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                str(self._directory / file), str(error), "the checkpoint shard could not be written",
                "free disk space or choose another output directory; existing files are untouched",
            ) from error  # fmt: skip
        self._weight_map.update(dict.fromkeys(self._pending, file))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def close(self) -> tuple[dict[str, str], int]:
        """Write pending tensors; returns (file of every tensor, bytes of all tensors) for `write_index`."""
        if self._pending:
            self._flush()
        return self._weight_map, self._total_bytes


def number_shards(directory: Path, weight_map: Mapping[str, str]) -> dict[str, str]:
    """Rename the shards of all writers to the usual `model-00001-of-0000N.safetensors`; returns the new map."""
    files = sorted(set(weight_map.values()))
    names = {file: f"model-{i:05d}-of-{len(files):05d}.safetensors" for i, file in enumerate(files, start=1)}
    for file, name in names.items():
        (directory / file).rename(directory / name)
    return {tensor: names[file] for tensor, file in weight_map.items()}


def write_index(directory: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write the index of the shards of all writers; must be written last."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")


def copy_side_files(source: Path, target: Path, changes: Mapping[str, object] | None = None) -> None:
    """Copy config.json, tokenizer and generation settings of `source`: every small file except weights.

    Args:
        changes: settings of the new config.json. Quantisation settings are removed: weights are plain unless `changes`
            sets them.
    """
    for path in source.iterdir():
        beside = path.suffix in _SIDE_SUFFIXES or path.name in _SIDE_NAMES
        if path.is_file() and beside and path.name not in _NOT_COPIED:
            shutil.copyfile(path, target / path.name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, target / _TEMPLATES, dirs_exist_ok=True)
    config = without_quantisation(_config(source)) | dict(changes or {})
    if (source / "config.json").exists():
        (target / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def staging_directory(target: Path) -> Path:
    """Directory in which `target` is built before it is published: beside it, on the same file system."""
    return target.with_name(f".{target.name}.partial")


def publish(target: Path) -> None:
    """Replace `target` by the finished staging directory, as a whole or not at all."""
    staging, old = staging_directory(target), target.with_name(f".{target.name}.old")
    for path in [*staging.rglob("*"), staging]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    staging.rename(target)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def atomic_directory(target: Path) -> Generator[Path]:
    """Fresh staging directory; renamed to the target when the block ends, removed if it raises."""
    staging = staging_directory(target)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        publish(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
